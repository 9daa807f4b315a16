"""strategy="log" and optimizers whose updates depend on what no checkpoint has: attributes, and
generators that are not torch's."""

import functools
import random
from functools import partial

import numpy as np
import pytest
import torch
from logs import Plain, build, check_run, train
from runs import check_same, check_steps, checkpointer, freeze, kinds, run_logged, snapshot

from everstep import Corrupt, Store


class Attribute(Plain):
    """Keeps what its next update depends on beside its state, where no checkpoint has it."""

    def __init__(self, parameters, lr, how="number"):
        super().__init__(parameters, lr)
        self.how = how
        self.number, self.rows, self.tensor = 0, {"all": []}, torch.zeros(())
        self.generators = torch.Generator(), random.Random(0)
        self.inner = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)
        self.mine, self.group = self.param_groups[0]["params"], self.param_groups[0]

    @torch.no_grad()
    def update(self):
        scale = 1.0
        if self.how == "number":
            self.number += 1
        elif self.how == "new":
            self.count = getattr(self, "count", 0) + 1
        elif self.how == "list":
            self.rows["all"].append(self.number)
        elif self.how == "tensor":
            self.tensor += 1
        elif self.how == "generator":
            scale = torch.rand((), generator=self.generators[0]).item()
        elif self.how == "Random":
            scale = self.generators[1].random()
        elif self.how == "inner":
            self.inner.step()
        elif self.how == "shared":
            self.inner.state = self.state
            self.inner.step()
            self.group["weight"] = self.group.get("weight", 0) + 1
        seen = self.number + getattr(self, "count", 0) + len(self.rows["all"]) + self.tensor.item()
        super().update(scale / (1 + seen))


def train_with_a_setting(state, step=0):
    state["optimizer"].number = step
    train(state)


class Said(Attribute):
    """The same, and its state_dict() has it."""

    def state_dict(self):
        return {**super().state_dict(), "number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


@pytest.mark.parametrize("how", ["number", "new", "list", "tensor", "generator", "Random", "inner"])
def test_an_optimizer_with_state_that_no_checkpoint_has(store, caplog, how):
    state = build(1, Attribute, how=how)
    frozen = run_logged(store, state, train, steps=6)
    assert kinds(store) == "bbbbbb"
    assert "in an attribute, which is in no checkpoint" in caplog.text
    fresh = build(2, Attribute)
    with checkpointer(store, fresh) as restorer:
        for step in range(6, 0, -1):
            assert restorer.restore(step) == step
            check_same(freeze(fresh["model"]), frozen[step]["state"]["model"])


def test_an_optimizer_that_is_set_anew_by_the_program(store):
    """As groups are, but nowhere to be read again."""
    run_logged(store, build(1, Attribute, how="none"), train_with_a_setting, steps=5)
    assert kinds(store) == "bbbbb"


def test_an_optimizer_whose_own_state_dict_has_it(store):
    check_run(store, lambda seed: build(seed, Said), train, saved="brrrrrrr")


@pytest.mark.parametrize(("how", "saved"), [("none", "brrrrrrr"), ("shared", "brrrrrrr")])
def test_an_optimizer_with_attributes_that_stay(store, how, saved):
    check_run(store, lambda seed: build(seed, Attribute, how=how), train, saved=saved)


class Settings(Plain):
    """What it does with its state depends on an attribute, which stays, or is set once."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr)
        self.scale = 1.0

    @torch.no_grad()
    def update(self, scale=1.0):
        super().update(scale)
        for parameter in self.param_groups[0]["params"]:
            mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
            mean.lerp_(parameter.grad, 0.1 * self.scale)


@pytest.mark.parametrize("at", [8, 9])  # 9: the step of a base
@pytest.mark.parametrize("strategy", ["log", "spread", "auto"])
def test_an_attribute_that_is_set_once(store, strategy, at):
    """All that comes after it depends on it."""
    state, frozen = build(1, Settings), {}
    options = {"every": 3, "window": 3} if strategy != "log" else {"base_every": 4}
    with checkpointer(store, state, strategy=strategy, **options) as saver:
        for step in range(1, 25):
            if step == at:
                state["optimizer"].scale = 0.1
            train(state)
            if handle := saver.step(step):
                handle.wait("local")
                frozen[step] = snapshot(state)
    check_steps(store, build(2, Settings), frozen)
    assert set(kinds(store)[-5:]) == {"b"}
    assert not any(Store(store).manifest(step).records for step in Store(store).steps()[-5:])


class Odd(Settings):
    """Attributes that cannot be printed, or mean nothing."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr)
        self.large = 1 << 20000
        self.kinds = {parameter for parameter in self.param_groups[0]["params"]}
        self.silent = {Silent()}
        self.draws = np.random.RandomState(0)


class Silent:
    def __repr__(self):
        raise RuntimeError


def test_attributes_that_say_nothing(store):
    check_run(store, partial(build, kind=Odd), train, "brrrrrrr")


def test_a_step_that_is_wrapped_in_its_class(store, monkeypatch):
    check_run(store / "before", partial(build, kind=Settings), train, "brrrrrrr")
    step = Settings.step

    @functools.wraps(step)
    def timed(*args, **kwargs):
        return step(*args, **kwargs)

    monkeypatch.setattr(Settings, "step", timed)
    check_run(store / "after", partial(build, kind=Settings), train, "brrrrrrr")


def test_an_attribute_that_is_another_one_at_replay(store):
    """The weights are equal all the same: a sample of the state tells."""
    state = build(1, Settings)
    state["optimizer"].scale = 0.5
    run_logged(store, state, train, steps=6)
    assert kinds(store) == "brrrrr"
    fresh = build(2, Settings)
    with checkpointer(store, fresh) as restorer:
        with pytest.raises(Corrupt, match="a sample of its parameters and state") as caught:
            restorer.restore(6)
        assert "'optimizer' has scale = 1.0 here, and had 0.5" in str(caught.value)
        fresh["optimizer"].scale = 0.5
        assert restorer.restore() == 6
        check_same(freeze(fresh), freeze(state))


class Drawing(Plain):
    """Draws from a generator that is no torch one."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr)
        self.draws = np.random.default_rng(0)

    @torch.no_grad()
    def update(self, scale=1.0):
        for parameter in self.param_groups[0]["params"]:
            noise = self.state[parameter].setdefault("noise", torch.zeros_like(parameter))
            noise.fill_(self.draws.random())
        super().update(scale)


class Python(Plain):
    """Draws from a generator of the whole process."""

    draw = random.random

    @torch.no_grad()
    def update(self, scale=1.0):
        super().update(scale * type(self).draw())


class Numpy(Python):
    draw = np.random.rand


@pytest.mark.parametrize("kind", [Python, Numpy])
def test_an_optimizer_that_draws_from_other_generators(store, kind, caplog):
    check_run(store, partial(build, kind=kind), train, "bbbbbbbb")
    assert "draws from python's or numpy's generator" in caplog.text


def test_a_generator_of_numpys(store, caplog):
    run_logged(store, build(1, Drawing), train, steps=5)
    assert kinds(store) == "bbbbb"
    assert "in an attribute, which is in no checkpoint" in caplog.text
