"""The public names, pinned: whoever adds, renames or drops one has to change this test."""

import subprocess
import sys

import everstep

PINNED = {
    "Checkpointer", "Full", "Spread", "Log", "Ranks", "SaveHandle", "Shard", "Store", "Tiers",
    "Keep", "OffloadedOptimizer", "clip_grad_norm_", "compress",
    "EverstepError", "Missing", "Corrupt", "Conflict", "Unavailable", "Mismatch", "Unsupported",
}  # fmt: skip


def test_they_are_these() -> None:
    assert set(everstep.__all__) == set(dir(everstep)) == PINNED
    assert {name for name in PINNED if getattr(everstep, name).__name__ == name} == PINNED
    kinds = {kind.__name__ for kind in everstep.EverstepError.__subclasses__()}
    assert kinds & PINNED == {
        "Missing", "Corrupt", "Conflict", "Unavailable", "Mismatch", "Unsupported",
    }  # fmt: skip


def test_importing_them_is_light() -> None:
    """Torch comes with the first name that needs it."""
    use = "everstep.Missing, everstep.Keep, everstep.Store"
    code = f"import everstep, sys; {use}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
