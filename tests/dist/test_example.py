"""examples/train_fsdp2.py, as its first lines say it is started."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from everstep import Store
from stores import end_keeper

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_fsdp2.py"
STEPS = 7


@pytest.mark.slow  # four times torchrun, 14 processes that import torch
@pytest.mark.timeout(400)
def test_four_ranks_are_killed_and_two_go_on(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ended = subprocess.run(
        [*torchrun, "--nproc-per-node=4", EXAMPLE, f"--steps={STEPS}", f"--runs={tmp_path}"],
        stdout=subprocess.PIPE,
        text=True,
        timeout=380,
    )
    assert ended.returncode == 0, ended.stdout
    killed_at = int(re.search(r"rank 1 is killed in the middle of step (\d+)", ended.stdout)[1])
    restored = int(re.search(r"restored step (\d+)", ended.stdout)[1])
    assert killed_at - 2 <= restored < killed_at < STEPS
    assert f"Losses up to step {restored}: equal to the last bit" in ended.stdout
    (folder,) = tmp_path.iterdir()
    store = Store(folder / "store")
    assert store.verify().ok
    assert store.manifest().step == STEPS
    for name in ("store", "whole"):
        end_keeper(folder / name)
