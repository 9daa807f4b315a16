"""Tensors of values that share memory with others: refused where a run begins, and saved as they
are where it comes to that later."""

import copy
import logging

import pytest
import torch
from logs import build, train
from runs import checkpointer, snapshot
from torch import nn

from everstep import Checkpointer, Unsupported

LAST = 6


def tracked(seed):
    """With the best weights so far."""
    state = build(seed)
    best = copy.deepcopy(state["model"].state_dict())
    return {**state, "track": {"best": best, "loss": 9.0}}


def test_the_weights_that_are_trained_are_no_copy(store):
    state = build(1)
    state["track"] = {"best": state["model"].state_dict()}
    with pytest.raises(Unsupported, match=r"track.best.0.bias.*memory of 'model.0.bias'.*[Cc]lone"):
        Checkpointer(store, state)


@pytest.mark.parametrize("strategy", ["full", "log", "auto"])
def test_what_comes_to_share_memory_later_is_saved_as_it_is(store, strategy, caplog):
    state, frozen = tracked(1), {}
    with caplog.at_level(logging.WARNING), checkpointer(store, state, strategy=strategy) as saver:
        for step in range(1, LAST + 1):
            train(state)
            if step == 3:
                state["track"]["best"] = state["model"].state_dict()
            saver.save(step)
            frozen[step] = snapshot(state)
    told = [each for each in caplog.messages if "lies in memory of" in each]
    assert len(told) == len(state["track"]["best"])
    assert "'track.best.0.bias' lies in memory of 'model.0.bias'" in told[0]
    for step, expected in frozen.items():
        fresh = tracked(2)
        with Checkpointer(store, fresh) as saver:
            if step == LAST:  # a state that has come to the same
                fresh["track"]["best"] = fresh["model"].state_dict()
            assert saver.restore(step) == step
        assert snapshot(fresh) == expected
        best, weight = fresh["track"]["best"]["0.weight"], fresh["model"][0].weight
        assert best.data_ptr() != weight.data_ptr()


VALUES = {
    "views": lambda x: {"a": x[:], "b": x[:]},
    "detached": lambda x: {"a": x, "b": x.detach()},
    "a part": lambda x: {"a": x, "b": x[1:3]},
    "imaginary parts": lambda x: {"a": (z := torch.complex(x, x)), "b": z.imag},
    "nan": lambda x: {"a": x, "b": [x.view(2, 2), x[:0]]},
    "beside each other": lambda x: {"a": x[:2], "b": x[2:]},
}


@pytest.mark.parametrize("strategy", ["full", "log"])
@pytest.mark.parametrize("are_apart", [True, False])
def test_values(store, strategy, are_apart):
    def make(seed):
        return {**build(seed), "values": {name: values_of(name, seed) for name in VALUES}}

    def values_of(name, seed):
        return VALUES[name](torch.full((4,), float("nan") if name == "nan" else float(seed)))

    state = make(1)
    if are_apart:
        for values in state["values"].values():
            values["b"] = copy.deepcopy(values["b"])
            values["a"].add_(5.0)
    with checkpointer(store, state, strategy=strategy) as saver:
        for step in (1, 2):
            train(state)
            saver.save(step)
        saved = snapshot(state)
    fresh = make(2)
    with Checkpointer(store, fresh) as saver:
        assert saver.restore() == 2
    assert snapshot(fresh) == saved
    for name, values in fresh["values"].items():
        if not are_apart and name != "nan":  # what is written to one is seen in the other
            one, other = values["a"], values["b"]
            assert one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr(), name


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, inputs):
        return self.head(self.embedding(inputs))


@pytest.mark.parametrize("strategy", ["full", "log"])
def test_a_copy_of_a_tied_models_weights(store, strategy):
    """Two of its tensors share memory, as those of the model do."""

    def make(seed):
        torch.manual_seed(seed)
        model = Tied()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        best = copy.deepcopy(model.state_dict())
        return {"model": model, "optimizer": optimizer, "best": best}

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
        best = fresh["best"]
        assert best["head.weight"].data_ptr() == best["embedding.weight"].data_ptr()
