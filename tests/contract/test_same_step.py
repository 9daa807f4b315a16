"""save() after step() of the same step: the same checkpoint where nothing has changed since, and
told where something has."""

import pytest
import torch
from logs import build, train, write
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
    "weights": lambda state: write(state, "in place"),
}


def make(seed):
    return {**build(seed), "ema": torch.zeros(4), "values": {"count": torch.zeros(3)}}


@pytest.mark.parametrize("strategy", ["full", "log"])
def test_a_change_between_is_told(store, strategy):
    state, frozen = make(1), {}
    with checkpointer(store, state, strategy=strategy) as saver:
        for step, change in enumerate(CHANGES.values(), 1):
            for each in (10 * step, 10 * step + 1):
                train(state)
                saver.save(each).wait("captured")
                frozen[each] = snapshot(state)
            change(state)
            with pytest.raises(Conflict):
                saver.save(each, tag="best").wait("local")
            state["values"]["count"] = torch.zeros(3)
        train(state)
        saver.save(100).wait("local")
    fresh = make(2)
    with checkpointer(store, fresh) as saver:
        with pytest.raises(Missing):
            saver.restore("best")
        for step, expected in frozen.items():
            assert saver.restore(step) == step
            assert snapshot(fresh) == expected


@pytest.mark.parametrize("strategy", ["full", "log"])
def test_nothing_between(store, strategy):
    state = make(1)
    with checkpointer(store, state, strategy=strategy) as saver:
        for step, number in enumerate((0.0, float("nan")), 1):
            state["values"]["count"] = torch.full((3,), number)
            for each in (10 * step, 10 * step + 1):
                train(state)
                saver.save(each).wait("captured")
            state["values"]["count"] = torch.full((3,), number)  # another, of the same values
            saver.save(each, tag=f"best-{step}").wait("local")
        saved = snapshot(state)
    with checkpointer(store, state) as saver:
        assert saver.restore("best-2") == 21
        assert snapshot(state) == saved
        assert saver.restore("best-1") == 11
