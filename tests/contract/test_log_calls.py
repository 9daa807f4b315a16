"""strategy="log" and unusual calls of step(): hooks, closures, arguments, errors. What cannot be
recorded is saved whole, and that is told."""

from functools import partial

import pytest
import torch
from logs import Plain, backward, build, check_run, durable, train, train_in_closure, write
from runs import check_steps, checkpointer, kinds, logged, run_logged, snapshot
from torch import nn

from everstep import Unsupported

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

    state = build(1)
    state["optimizer"].register_step_post_hook(shrink)
    frozen = run_logged(store, state, train)
    check_steps(store, build(2), frozen)
    assert kinds(store) == "bbbbbbbb"
    assert "'model.0.weight'" in caplog.text


class Nested(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


def test_a_subclass_that_calls_the_step_of_its_base(store):
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])  # from now on that one runs hooks as well
    check_run(store, partial(build, kind=Nested), train, "brrrrrrr")


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
