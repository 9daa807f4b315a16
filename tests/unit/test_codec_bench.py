"""The bench of codecs, from end to end, with a tiny model."""

import pytest

from benchmarks.codecs import measure, states
from examples import slow


@pytest.fixture(autouse=True)
def tiny(tmp_path, monkeypatch):
    """A model that is trained in no time."""
    shape = states.Shape(layers=1, heads=2, width=32, sequence=8, batch=2, learning_rate=1e-3)
    monkeypatch.setattr(states, "SHAPE", shape)
    monkeypatch.setattr(measure, "TRAINED_STEPS", 2)
    monkeypatch.setattr(measure, "LORA_STEPS", 2)
    monkeypatch.setattr(measure, "KEPT", tmp_path / "kept")


@pytest.mark.parametrize("kind", slow("lora", "fp32", "bf16"))
def test_a_table_of_each_kind(kind, monkeypatch, capsys):
    monkeypatch.setattr(measure, "LEARNING", 1)
    monkeypatch.setattr(measure, "SAVES", 1)
    measure.main(["--kinds", kind, "--links", "1e9", "--modes", "raw", "auto"])
    shown = capsys.readouterr().out
    assert "1,000 MB/s" in shown
    assert "(raw)" in shown


def test_every_step_to_a_disk(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measure, "DISK_ROUNDS", 1)
    monkeypatch.setattr(measure, "DISK_STEPS", 2)
    measure.main(["--kinds", "fp32", "--disk", str(tmp_path)])
    shown = capsys.readouterr().out
    assert all(mode in shown for mode in ("alone", "raw", "auto"))
