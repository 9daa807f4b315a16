"""Tensors that share memory where a run begins, and later no more, or the other way round."""

import copy

import pytest
import torch
from logs import build, train
from runs import checkpointer, kinds, snapshot
from torch import nn

from everstep import Checkpointer

LAST = 6


def tracked(seed):
    """With the best weights so far: at first those that are trained, by the usual shortcut."""
    state = build(seed)
    return {**state, "track": {"best": state["model"].state_dict(), "loss": 9.0}}


@pytest.mark.parametrize("strategy", ["full", "log", "auto"])
@pytest.mark.parametrize("copied_at", [1, 3])
def test_the_best_weights_so_far(store, strategy, copied_at):
    state, frozen = tracked(1), {}
    with checkpointer(store, state, strategy=strategy) as saver:
        for step in range(1, LAST + 1):
            train(state)
            if step == copied_at:
                state["track"]["best"] = copy.deepcopy(state["model"].state_dict())
                state["track"]["loss"] = 1.0
            saver.save(step)
            frozen[step] = snapshot(state)
    if strategy == "log":
        assert kinds(store).count("r") >= LAST - 2
    for step, expected in frozen.items():
        fresh = tracked(2)
        with Checkpointer(store, fresh) as saver:
            assert saver.restore(step) == step
        assert snapshot(fresh) == expected
        best, weight = fresh["track"]["best"]["0.weight"], fresh["model"][0].weight
        assert (best.data_ptr() == weight.data_ptr()) is (step < copied_at)


VALUES = {
    "views": lambda x: {"a": x[:], "b": x[:]},
    "a part": lambda x: {"a": x, "b": x[1:3]},
    "detached": lambda x: {"a": x, "b": x.detach()},
    "imaginary parts": lambda x: {"a": torch.complex(x, x), "b": x},
    "nan": lambda x: {"a": x, "b": [x.view(2, 2), x[:0]]},
}


@pytest.mark.parametrize("strategy", ["full", "log"])
@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("are_apart", [True, False])
def test_values(store, strategy, name, are_apart):
    def make(seed):
        values = VALUES[name](torch.full((4,), float("nan") if name == "nan" else float(seed)))
        if name == "imaginary parts":
            values["b"] = values["a"].imag
        return {**build(seed), "values": values}

    state = make(1)
    if are_apart:
        state["values"]["b"] = copy.deepcopy(state["values"]["b"])
        state["values"]["a"].add_(5.0)
    with checkpointer(store, state, strategy=strategy) as saver:
        for step in (1, 2):
            train(state)
            saver.save(step)
        saved = snapshot(state)
    fresh = make(2)
    with Checkpointer(store, fresh) as saver:
        assert saver.restore() == 2
    assert snapshot(fresh) == saved
    if not are_apart and name != "nan":  # what is written to one is seen in the other
        one, other = fresh["values"]["a"], fresh["values"]["b"]
        assert one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, inputs):
        return self.head(self.embedding(inputs))


@pytest.mark.parametrize("strategy", ["full", "log"])
def test_a_copy_whose_tensors_share_memory_with_each_other(store, strategy):
    """As a copy of a tied model's weights does: with others than at the begin."""

    def make(seed):
        torch.manual_seed(seed)
        model = Tied()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return {"model": model, "optimizer": optimizer, "best": model.state_dict()}

    state, frozen = make(1), {}
    with checkpointer(store, state, strategy=strategy) as saver:
        for step in range(1, 5):
            train(state)
            if step == 2:
                state["best"] = copy.deepcopy(state["model"].state_dict())
            saver.save(step)
            frozen[step] = snapshot(state)
    for step, expected in frozen.items():
        fresh = make(2)
        with Checkpointer(store, fresh) as saver:
            assert saver.restore(step) == step
        assert snapshot(fresh) == expected
