"""Derived parts that something else than their rule changes, or looks at."""

import pytest
import torch
from derived import averaged, build, by_hand, check_all, run, twice
from logs import train
from runs import check_same, check_steps, checkpointer, kinds, snapshot

from everstep import Store
from examples import slow


def zero(state):
    state["ema"].module[0].weight.data.zero_()


def swap(state):
    weight = state["ema"].module[0].weight
    weight.data = weight.data * 2


@pytest.mark.parametrize("how", [twice, zero, swap])
@pytest.mark.parametrize("at", [2, *slow(5)])
def test_a_derived_part_that_somebody_else_changes(store, caplog, how, at):
    """As a training loop does that goes on to call what is a rule now."""

    def each(state, step):
        train(state)
        if step == at:
            how(state)

    frozen = run(store, averaged, each=each)
    assert kinds(store) == ("bbrrrrrrr" if at == 2 else "brrrbrrrr")
    assert "by something else than the rule" in caplog.text or how is swap
    assert "'ema." in caplog.text or how is swap
    check_all(store, averaged, frozen)


def test_a_part_that_gets_more_tensors_by_its_rule(store):
    def make(state):
        ema = state["ema"] = {"first": torch.zeros(3)}

        def rule(step):
            ema["first"] += state["model"][1].running_mean[:3]
            if step == 5:
                ema["second"] = torch.ones(2)

        return {"ema": rule}

    frozen = run(store, make)
    assert kinds(store) == "brrrbrrrr"
    for step in Store(store).steps():
        fresh, rules = build(2, make)
        if step > 4:
            fresh["ema"]["second"] = torch.zeros(2)
        check_steps(store, fresh, frozen, [step], derive=rules)


class Holder:
    """Its state_dict names a derived tensor, and comes before its part."""

    def __init__(self):
        self.ema = self.seen = None

    def state_dict(self):
        return {"best": None if self.ema is None else self.ema["0.weight"]}

    def load_state_dict(self, state):
        self.seen = state["best"]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_derived_tensor_that_another_part_names(store, is_first):
    def make(state):
        holder = Holder()
        if is_first:
            state["holder"] = holder
        rules = by_hand(state)
        state["holder"] = holder
        holder.ema = state["ema"]
        return rules

    frozen = run(store, make)
    assert kinds(store)[:2] == "br"
    fresh, rules = build(2, make)
    with checkpointer(store, fresh, derive=rules) as restorer:
        for step in (9, 5, 2):
            assert restorer.restore(step) == step
            check_same(snapshot(fresh), frozen[step])
            assert torch.equal(fresh["holder"].seen, fresh["ema"]["0.weight"])
