"""The bench of codecs, from end to end, with a tiny model."""

import pytest

from benchmarks.codecs import measure, states
from examples import slow


@pytest.mark.parametrize("kind", slow("lora", "fp32", "bf16"))
def test_a_table_of_each_kind(kind, tmp_path, monkeypatch, capsys):
    shape = states.Shape(layers=1, heads=2, width=32, sequence=8, batch=2, learning_rate=1e-3)
    monkeypatch.setattr(states, "SHAPE", shape)
    monkeypatch.setattr(measure, "TRAINED_STEPS", 2)
    monkeypatch.setattr(measure, "LORA_STEPS", 2)
    monkeypatch.setattr(measure, "KEPT", tmp_path)
    monkeypatch.setattr(measure, "LEARNING", 1)
    monkeypatch.setattr(measure, "SAVES", 1)
    measure.main(["--kinds", kind, "--links", "1e9", "--modes", "raw", "auto"])
    shown = capsys.readouterr().out
    assert "1,000 MB/s" in shown
    assert "(raw)" in shown
