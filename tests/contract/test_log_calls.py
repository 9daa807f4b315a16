"""strategy="log" and unusual calls of step(): hooks, closures, arguments, errors. What cannot be
recorded is saved whole, and that is told."""

import functools
import random
import types
from functools import partial

import numpy as np
import pytest
import torch
from logs import Plain, backward, build, check_run, durable, train, train_in_closure, write
from runs import check_same, check_steps, checkpointer, freeze, kinds, logged, run_logged, snapshot
from torch import nn

import everstep
from everstep import Corrupt, Store, Unsupported

# ---- hooks -----------------------------------------------------------------------------------


def halve(optimizer, args, kwargs):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.mul_(0.5)


def replace_gradients(optimizer, args, kwargs):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = parameter.grad * 0.5


def hooked(hook, at):
    """Training with a pre-hook from step `at` on."""

    def step(state, number):
        if number == at:
            state["optimizer"].register_step_pre_hook(hook)
        train(state)

    return step


@pytest.mark.parametrize("hook", [halve, replace_gradients])
def test_a_users_pre_hook_is_in_the_record(store, hook):
    check_run(store, build, hooked(hook, 1), "brrrrrrr")


@pytest.mark.parametrize(
    ("hook", "at"), [(halve, 3), (replace_gradients, 3), (replace_gradients, 6)]
)
def test_a_users_pre_hook_that_comes_between(store, hook, at):
    check_run(store, build, hooked(hook, at))


def test_a_users_post_hook_that_changes_weights(store, caplog):
    def shrink(optimizer, args, kwargs):
        with torch.no_grad():
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.mul_(0.9)

    state, frozen = build(1), {}
    state["optimizer"].register_step_post_hook(shrink)
    with logged(store, state) as saver:
        for step in range(1, 4):
            train(state)
            saver.save(step)
            frozen[step] = snapshot(state)
        train(state)
        with pytest.raises(Unsupported, match=r"'model\.0\.weight'.*changes them outside of step"):
            saver.save(4)
    check_steps(store, build(2), frozen)
    assert kinds(store) == "bbb"
    assert caplog.text.count("'model.0.weight'") == 2


class Nested(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


def test_a_subclass_that_calls_the_step_of_its_base(store):
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])  # from now on that one runs hooks as well
    check_run(store, partial(build, kind=Nested), train, "brrrrrrr")


def test_hooks_that_run_twice_in_a_step(store, caplog):
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    check_run(store, partial(build, kind=Nested), hooked(halve, 1), "bbbbbbbb")
    assert "hooks of 'optimizer' run twice in each step" in caplog.text


def test_a_function_around_step(store):
    """As schedulers put one there; this one changes gradients, in the restored state as well."""

    def make(seed):
        state = build(seed)
        step = state["optimizer"].step

        def around(closure=None):
            halve(state["optimizer"], (), {})
            return step(closure)

        state["optimizer"].step = around
        return state

    check_run(store, make, lambda state, _: train(state), "brrrrrrr")


def test_an_update_that_is_not_the_classes(store, caplog):
    """It stands on the object, and torch's hooks are around it."""

    def make(seed):
        state = build(seed)
        optimizer = state["optimizer"]

        def update(optimizer, closure=None):
            with torch.no_grad():
                for parameter in optimizer.param_groups[0]["params"]:
                    parameter.sub_(parameter.grad.sign(), alpha=0.1)

        hooked = torch.optim.Optimizer.profile_hook_step(update)
        optimizer.step = types.MethodType(hooked, optimizer)
        return state

    check_run(store, make, lambda state, _: train(state), "bbbbbbbb")
    assert "has a step() of its own" in caplog.text


def test_optimizers_in_backward(store):
    def make(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 40), nn.Linear(40, 6))
        optimizers = [torch.optim.AdamW([parameter]) for parameter in model.parameters()]
        for parameter, optimizer in zip(model.parameters(), optimizers, strict=True):

            def update(_, optimizer=optimizer):
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(update)
        return {"model": model, "optimizers": optimizers}

    check_run(store, make, lambda state, _: backward(state), "brrrrrrr")


# ---- closures and what else comes with a step ------------------------------------------------


@pytest.mark.parametrize("kind", [Plain, torch.optim.AdamW])
def test_a_closure_that_runs_once(store, kind):
    check_run(store, partial(build, kind=kind), train_in_closure, "brrrrrrr")


def test_a_closure_after_a_torn_copy(store):
    state, frozen = build(1), {}
    with logged(store, state) as saver:
        for step in range(1, 9):
            if step == 2:
                write(state, "in place")
            train_in_closure(state)
            with torch.no_grad():
                saver.save(step)
            frozen[step] = snapshot(state)
    check_steps(store, build(2), frozen)


class Deaf(Plain):
    """Has a closure, and does not call it."""

    def step(self, closure=None):
        self.update()


def test_a_closure_that_is_not_called(store):
    def step(state, _):
        state["optimizer"].zero_grad()
        backward(state)
        state["optimizer"].step(lambda: 0.0)

    check_run(store, partial(build, kind=Deaf), step, each=durable)


class Averaging(Plain):
    """Calls its closure twice, and makes one update."""

    def step(self, closure=None):
        for _ in range(2 if closure else 0):
            with torch.enable_grad():
                closure()
        self.update()


def test_a_closure_that_runs_twice(store, caplog):
    def step(state, _):
        state["optimizer"].zero_grad()
        state["optimizer"].step(lambda: backward(state))

    check_run(store, partial(build, kind=Averaging), step)
    assert "closure" in caplog.text


class Polyak(Plain):
    """The loss decides how far it goes."""

    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        self.update(loss)


def test_an_optimizer_that_needs_its_closures_loss(store):
    check_run(store, partial(build, kind=Polyak), train_in_closure)


class Scaled(Plain):
    def step(self, closure=None, scale=1.0):
        self.update(scale)


def test_arguments_of_step(store):
    def step(state, _):
        state["optimizer"].zero_grad()
        backward(state)
        state["optimizer"].step(scale=0.1)

    check_run(store, partial(build, kind=Scaled), step)


class Refusing(Plain):
    refuses = False

    def step(self, closure=None):
        if self.refuses:
            raise FloatingPointError("the loss is nan")
        self.update()


def test_an_update_that_raises(store):
    def step(state, number):
        state["optimizer"].zero_grad()
        backward(state)
        state["optimizer"].refuses = number in (3, 6)
        if state["optimizer"].refuses:
            with pytest.raises(FloatingPointError):
                state["optimizer"].step()
        else:
            state["optimizer"].step()

    check_run(store, partial(build, kind=Refusing), step)


class Noisy(Plain):
    @torch.no_grad()
    def update(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad + torch.randn_like(parameter), alpha=-group["lr"])


def test_an_optimizer_that_draws_random_numbers(store):
    check_run(store, partial(build, kind=Noisy), train)


def test_lbfgs(store):
    state = build(1, torch.optim.LBFGS)
    with pytest.raises(Unsupported, match="Use strategy='full'"):
        logged(store, state)
    with checkpointer(store, state) as saver:
        train_in_closure(state)
        saver.step(1)


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


@pytest.mark.parametrize("clip", [None, everstep.clip_grad_norm_])
def test_two_checkpointers_with_logs_on_one_optimizer(store, other_store, clip):
    """Each wants its hooks at the end: that is no reason for the other to end its log."""

    def closure(state):
        state["optimizer"].zero_grad()
        loss = backward(state)
        if clip:
            clip(state["model"].parameters(), 0.1)
        return loss

    state, frozen = build(1), {}
    with logged(store, state) as one, logged(other_store, state) as two:
        for step in range(1, 13):
            if step % 2:
                state["optimizer"].step(partial(closure, state))
            else:
                closure(state)
                state["optimizer"].step()
            for saver in (one, two) if step % 3 else (two, one):
                saver.step(step)
            frozen[step] = snapshot(state)
    for path in (store, other_store):
        assert kinds(path) == "b" + "r" * 11
        check_steps(path, build(2), frozen)


def test_a_users_hook_between_two_checkpointers(store, other_store):
    """It may change gradients after one of them has noted them."""
    state, frozen = build(1), {}
    with logged(store, state) as one, logged(other_store, state) as two:
        for step in range(1, 9):
            if step == 4:
                state["optimizer"].register_step_pre_hook(halve)
            train(state)
            one.step(step)
            if step == 5:
                state["optimizer"].register_step_pre_hook(replace_gradients)
            two.step(step)
            frozen[step] = snapshot(state)
    for path in (store, other_store):
        assert kinds(path).startswith("brrb")
        check_steps(path, build(2), frozen)


def test_hooks_of_a_closed_checkpointer_are_gone(store, other_store):
    state = build(1)
    with logged(store, state) as one:
        with logged(other_store, state):
            pass
        frozen = {}
        for step in range(1, 5):
            train(state)
            one.step(step)
            frozen[step] = snapshot(state)
    assert not state["optimizer"]._optimizer_step_pre_hooks
    assert kinds(store) == "brrr"
    check_steps(store, build(2), frozen)


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
