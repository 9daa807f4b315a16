"""strategy="log" and unusual calls of step(): hooks, closures, arguments, errors. What cannot be
recorded is saved whole, and that is told."""

import types
from functools import partial

import pytest
import torch
from logs import Plain, backward, build, check_run, train, train_in_closure
from runs import check_steps, checkpointer, kinds, logged, run_logged, snapshot
from torch import nn

import everstep
from everstep import Corrupt, Unsupported
from examples import slow

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
    ("hook", "at"), [(replace_gradients, 3), *slow((halve, 3), (replace_gradients, 6))]
)
def test_a_users_pre_hook_that_comes_between(store, hook, at):
    check_run(store, build, hooked(hook, at))


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


def test_an_update_that_is_not_the_classes(store):
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

    with pytest.raises(Unsupported, match=r"has a step\(\) of its own"):
        logged(store, make(1))


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


class Noisy(Plain):
    @torch.no_grad()
    def update(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad + torch.randn_like(parameter), alpha=-group["lr"])


class Scaled(Plain):
    def step(self, closure=None, scale=1.0):
        self.update(scale)


def train_scaled(state, _):
    state["optimizer"].zero_grad()
    backward(state)
    state["optimizer"].step(scale=0.1)


@pytest.mark.parametrize(
    ("kind", "train"), [(Polyak, train_in_closure), (Noisy, train), (Scaled, train_scaled)]
)
def test_what_an_update_needs_besides_gradients(store, kind, train):
    """Its closure's loss, random numbers, arguments."""
    check_run(store, partial(build, kind=kind), train)


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


@pytest.mark.parametrize("clip", [everstep.clip_grad_norm_, *slow(None)])
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


def test_two_checkpointers_are_told_of_steps_in_an_update(store, other_store):
    state = build(1)
    one, other = (everstep.Checkpointer(place, state) for place in (store, other_store))
    with one, other:
        one.save(0)
        other.save(0)
        steps = iter(range(1, 4))

        def tell(optimizer, args, kwargs):
            step = next(steps)
            one.step(step)
            other.step(step)

        state["optimizer"].register_step_post_hook(tell)
        state["optimizer"].register_step_post_hook(lambda *_: None)
        for step in range(1, 4):
            train(state, step)
    assert everstep.Store(store).latest() == everstep.Store(other_store).latest() == 3


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


class LetsGo(Plain):
    """Drops the gradients that are there before it calls its closure. Its step() calls that of its
    base class, so that hooks run twice."""

    def step(self, closure):
        self.zero_grad()
        super().step(closure)


def test_an_optimizer_that_lets_go_of_gradients_before_its_closure(store):
    Plain([torch.zeros(1, requires_grad=True)], 0.1)  # from now on hooks run in its step(), too
    check_run(store, lambda seed: build(seed, LetsGo), train_in_closure, "bbbbbbbb")


class Elsewhere(Plain):
    """Takes gradients from an attribute of parameters, as Megatron's do."""

    def update(self, scale=1.0):
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(parameter.main_grad, alpha=-0.01)


def train_elsewhere(state, step):
    backward(state)
    for parameter in state["model"].parameters():
        parameter.main_grad, parameter.grad = parameter.grad, None
    state["optimizer"].step()


def test_a_replay_that_raises_goes_back_to_what_can_be_restored(store):
    """With base_every=4 steps 1, 5 and 9 are whole states."""
    make = partial(build, kind=Elsewhere)
    frozen = run_logged(store, make(1), train_elsewhere, 7, base_every=4)
    assert kinds(store) == "brrrbrr"
    state = make(2)
    with checkpointer(store, state) as saver:
        with pytest.raises(Corrupt, match=r"step 6.* raised .*main_grad"):
            saver.restore(7)
        assert saver.restore() == 5
        assert snapshot(state) == frozen[5]
