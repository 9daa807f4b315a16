"""save() after step() of the same step: the same checkpoint where nothing has changed since, and
told where something has."""

import pytest
import torch
from logs import build, train
from runs import checkpointer, snapshot

from everstep import Conflict, Missing

CHANGES = {
    "a buffer": lambda state: state["model"](torch.ones(4, 6)),
    "a value": lambda state: state["values"]["count"].add_(1),
    "another value": lambda state: state["values"].update(count=torch.ones(3)),
    "another dtype": lambda state: state["values"].update(count=torch.zeros(3).double()),
    "through NumPy": lambda state: state["values"]["count"].numpy().__iadd__(1),
    "a tensor": lambda state: state["ema"].add_(1),
    "a generator": lambda state: torch.rand(1),
}


@pytest.fixture
def state():
    return {**build(1), "ema": torch.zeros(4), "values": {"count": torch.zeros(3)}}


def train_to_four(saver, state):
    for step in range(1, 5):
        train(state)
        saver.step(step)
    saver.wait("captured")


@pytest.mark.parametrize("strategy", ["full", "log"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_between_is_told(store, state, strategy, change):
    with checkpointer(store, state, strategy=strategy) as saver:
        train_to_four(saver, state)
        saved = snapshot(state)
        change(state)
        with pytest.raises(Conflict):
            saver.save(4, tag="best").wait("local")
        train(state)
        saver.save(5).wait("local")
    with checkpointer(store, state) as saver:
        with pytest.raises(Missing):
            saver.restore("best")
        state["values"]["count"] = torch.zeros(3)
        assert saver.restore(4) == 4
    assert snapshot(state) == saved


@pytest.mark.parametrize("strategy", ["full", "log"])
@pytest.mark.parametrize("number", [0.0, float("nan")])
def test_nothing_between(store, state, strategy, number):
    state["values"]["count"] = torch.full((3,), number)
    with checkpointer(store, state, strategy=strategy) as saver:
        train_to_four(saver, state)
        state["values"]["count"] = torch.full((3,), number)  # another tensor, the same values
        saver.save(4, tag="best").wait("local")
        saved = snapshot(state)
    with checkpointer(store, state) as saver:
        assert saver.restore("best") == 4
    assert snapshot(state) == saved
