"""strategy="log" and what it does not expect: it may save more than it has to, and must tell, but
no step that the store offers is ever restored to anything else than what the run had."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from runs import (
    check_same,
    check_steps,
    checkpointer,
    freeze,
    kinds,
    logged,
    restore,
    run_logged,
    snapshot,
)
from torch import nn

import everstep
from everstep import Conflict, EverstepError, Mismatch, Store, Unavailable, Unsupported


def build(seed, kind=torch.optim.AdamW, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Linear(40, 6))
    return {"model": model, "optimizer": kind(model.parameters(), lr=0.01, **options)}


def backward(state):
    loss = state["model"](torch.randn(8, 6)).square().mean()
    loss.backward()
    return loss.item()


def train(state, step=0):
    state["optimizer"].zero_grad()
    backward(state)
    state["optimizer"].step()


def durable(handle):
    handle.wait("local")


class Plain(torch.optim.Optimizer):
    """SGD, to be changed in subclasses."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad():
                closure()
        self.update()

    @torch.no_grad()
    def update(self, scale=1.0):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"] * scale)


# ---- weights that somebody else writes to ------------------------------------------------------

WRITES = {
    "in place": lambda weight: weight.mul_(0.5),
    "data": lambda weight: weight.data.mul_(0.5),
    "numpy": lambda weight: weight.detach().numpy().__imul__(0.5),
    "swap": lambda weight: setattr(weight, "data", weight.data * 0.5),
}
FEW = {
    "clamp of few elements": lambda weight: weight.data.clamp_(-0.4, 0.4),
}


def write(state, how):
    with torch.no_grad():
        ({**WRITES, **FEW})[how](state["model"][0].weight)


@pytest.mark.parametrize("how", ["in place", "data", "numpy"])
def test_weights_changed_between_update_and_save(store, caplog, how):
    def change(state, step):
        train(state)
        if step == 5:
            write(state, how)

    frozen = run_logged(store, build(1), change)
    check_steps(store, build(2), frozen)
    assert kinds(store) == "brrrbrrr"
    assert "'model.0.weight' changed" in caplog.text


def test_weights_swapped_between_update_and_save(store):
    def change(state, step):
        train(state)
        if step == 5:
            write(state, "swap")

    frozen = run_logged(store, build(1), change)
    check_steps(store, build(2), frozen)
    assert kinds(store) == "brrrbrrr"


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("at", [1, 5])
def test_weights_changed_between_save_and_update(store, caplog, how, at):
    def change(state, step):
        if step == at + 1:
            write(state, how)
        train(state)

    frozen = run_logged(store, build(1), change, each=durable)
    check_steps(store, build(2), frozen)
    assert kinds(store) == ("bbrrrrrr" if at == 1 else "brrrrbrr")
    assert how == "swap" or "'model.0.weight' changed" in caplog.text


def test_few_elements_changed_around_the_version_counter(store, caplog):
    """A sample of bytes does not see it; audit="full" does."""

    def change(state, step):
        if step == 4:
            write(state, "clamp of few elements")
        train(state)

    frozen = run_logged(store, build(1), change, each=durable, audit="full")
    assert kinds(store) == "brrbrrrr"
    check_steps(store, build(2), frozen)
    assert "changed between two calls" in caplog.text


FREED = """
import sys; sys.path[:0] = sys.argv[2:]
import torch
from runs import logged
from torch import nn
model = nn.Linear(4096, 4096)  # its weight is mapped for itself: unmapped when it is freed
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = {"model": model, "optimizer": optimizer}
with logged(sys.argv[1], state) as saver:
    for step in range(1, 7):
        optimizer.zero_grad(set_to_none=False)
        model(torch.randn(2, 4096)).square().mean().backward()
        optimizer.step()
        saver.step(step).wait("local")
        if step == 5:
            model.weight.data = model.weight.data * 0.5
"""


def test_freed_memory_is_not_looked_at(store):
    command = [sys.executable, "-c", FREED, str(store), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_optimizer_state_changed_by_hand(store, caplog):
    def change(state, step):
        if step == 5:
            for entry in state["optimizer"].state.values():
                entry["exp_avg"].zero_()
        train(state)

    frozen = run_logged(store, build(1), change, each=durable)
    check_steps(store, build(2), frozen)
    assert kinds(store) == "brrrbrrr"
    assert ".exp_avg' changed" in caplog.text


class Counting(Plain):
    """Its state is a python number."""

    @torch.no_grad()
    def update(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                entry = self.state[parameter]
                entry["count"] = entry.get("count", 0) + 1
                parameter.add_(parameter.grad, alpha=-group["lr"] / entry["count"])


def test_python_numbers_as_optimizer_state(store):
    frozen = run_logged(store, build(1, Counting), train)
    assert kinds(store) == "brrrrrrr"
    check_steps(store, build(2, Counting), frozen)


def test_python_numbers_in_optimizer_state_changed_by_hand(store):
    def change(state, step):
        if step == 5:
            for entry in state["optimizer"].state.values():
                entry["count"] = 0
        train(state)

    frozen = run_logged(store, build(1, Counting), change)
    check_steps(store, build(2, Counting), frozen)


def test_weights_that_forward_rewrites(store):
    def make(seed):
        torch.manual_seed(seed)
        model = nn.ModuleDict({"embed": nn.Embedding(9, 6, max_norm=0.5), "head": nn.Linear(6, 60)})
        optimizer = torch.optim.Adam(model.parameters(), lr=1.0, weight_decay=0.1)
        return {"model": model, "optimizer": optimizer}

    def step(state, _):
        state["optimizer"].zero_grad()
        state["model"]["head"](state["model"]["embed"](torch.arange(9))).square().mean().backward()
        state["optimizer"].step()

    state, frozen = make(1), {}
    with logged(store, state) as saver:
        for _ in range(2):  # as two torn copies do
            saver._state.suspect(["model.embed.weight"])
        for number in range(1, 9):
            step(state, number)
            saver.save(number)
            frozen[number] = snapshot(state)
    check_steps(store, make(2), frozen)


def test_three_surprises_end_the_log(store, caplog):
    def change(state, step):
        if step % 3 == 0:
            write(state, "in place")
        train(state)

    frozen = run_logged(store, build(1), change, steps=12, each=durable)
    check_steps(store, build(2), frozen)
    assert kinds(store) == "brbrrbrrbbbb"
    assert "from now on" in caplog.text


# ---- gradients that change after the update ----------------------------------------------------


def test_gan_whose_second_backward_adds_to_the_first_gradients(store):
    def make(seed):
        torch.manual_seed(seed)
        maker, judge = nn.Linear(6, 6), nn.Linear(6, 1)
        optimizers = [torch.optim.Adam(model.parameters()) for model in (maker, judge)]
        return {"maker": maker, "judge": judge, "optimizers": optimizers}

    def step(state, _):
        maker, judge = state["maker"], state["judge"]
        inputs = torch.randn(8, 6)
        state["optimizers"][1].zero_grad()
        (judge(inputs) - judge(maker(inputs).detach())).square().mean().backward()
        state["optimizers"][1].step()
        state["optimizers"][0].zero_grad()
        judge(maker(inputs)).square().mean().backward()
        state["optimizers"][0].step()

    frozen = run_logged(store, make(1), step)
    check_steps(store, make(2), frozen)


@pytest.mark.parametrize("how", ["zero_grad", "mul_", "data"])
def test_gradients_written_to_after_the_update(store, how):
    def step(state, number):
        train(state)
        if number < 5:
            return
        if how == "zero_grad":
            state["optimizer"].zero_grad(set_to_none=False)
        for parameter in state["model"].parameters():
            if how == "mul_":
                parameter.grad.mul_(0.5)
            elif how == "data":
                parameter.grad.data.mul_(0.5)

    frozen = run_logged(store, build(1), step)
    check_steps(store, build(2), frozen)


def test_gradients_written_to_after_the_save(store):
    def step(state, number):
        if number > 4:
            state["optimizer"].zero_grad(set_to_none=False)
        train(state)

    frozen = run_logged(store, build(1), step, each=durable)
    assert kinds(store) == "brrrrrrr"
    check_steps(store, build(2), frozen)


def test_two_buffers_in_turn_and_several_updates_in_a_record(store):
    state, frozen = build(1, torch.optim.SGD), {}
    buffers = [[torch.zeros_like(p) for p in state["model"].parameters()] for _ in range(2)]
    with logged(store, state) as saver:
        for step in range(1, 31):
            for parameter, buffer in zip(
                state["model"].parameters(), buffers[step % 2], strict=True
            ):
                parameter.grad = buffer.zero_()
            backward(state)
            state["optimizer"].step()
            if step % 3 == 0:
                saver.save(step).wait("local")
                frozen[step] = snapshot(state)
    check_steps(store, build(2, torch.optim.SGD), frozen)


@pytest.mark.parametrize("detached", [False, True])
def test_gradients_that_are_views_of_one_buffer(store, detached):
    """As DDP's buckets are."""

    def step(state, number):
        parameters = list(state["model"].parameters())
        if number == 1:
            state["buffer"] = torch.zeros(sum(p.numel() for p in parameters))
        state["buffer"].zero_()
        at = 0
        for parameter in parameters:
            view = state["buffer"][at : at + parameter.numel()].view_as(parameter)
            parameter.grad = view.data if detached else view
            at += parameter.numel()
        backward(state)
        state["optimizer"].step()

    state = build(1)
    saved = {name: state[name] for name in ("model", "optimizer")}
    frozen = {}
    with logged(store, saved) as saver:
        for number in range(1, 9):
            step(state, number)
            saver.save(number)
            frozen[number] = snapshot(saved)
    assert kinds(store) == "brrrrrrr"
    check_steps(store, build(2), frozen)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adafactor])
def test_expanded_gradients(store, kind):
    def step(state, _):
        for parameter in state["model"].parameters():
            parameter.grad = torch.randn(()).expand_as(parameter)
        state["optimizer"].step()

    frozen = run_logged(store, build(1, kind), step)
    check_steps(store, build(2, kind), frozen)


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, everstep.clip_grad_norm_])
def test_one_gradient_for_two_parameters(store, clip):
    def make(seed):
        torch.manual_seed(seed)
        parameters = [nn.Parameter(torch.randn(20)) for _ in range(2)]
        return {"parameters": parameters, "optimizer": torch.optim.AdamW(parameters)}

    def step(state, _):
        first, second = state["parameters"]
        first.grad = second.grad = torch.randn(20)
        clip([first, second], 0.1)
        state["optimizer"].step()

    frozen = run_logged(store, make(1), step)
    assert kinds(store) == "brrrrrrr"
    check_steps(store, make(2), frozen)


@pytest.mark.parametrize(
    "how",
    [
        "in place",
        "data",
    ],
)
def test_gradients_changed_after_clipping(store, how):
    def step(state, _):
        state["optimizer"].zero_grad()
        backward(state)
        everstep.clip_grad_norm_(state["model"].parameters(), 0.01)
        for parameter in state["model"].parameters():
            (parameter.grad if how == "in place" else parameter.grad.data).clamp_(-1e-4, 1e-4)
        state["optimizer"].step()

    frozen = run_logged(store, build(1), step)
    assert kinds(store) == "brrrrrrr"
    check_steps(store, build(2), frozen)


def test_complex_gradients_that_are_lazily_conjugated(store):
    def make(seed):
        torch.manual_seed(seed)
        weight = nn.Parameter(torch.randn(50, dtype=torch.complex64))
        return {"weight": weight, "optimizer": torch.optim.Adam([weight])}

    def step(state, _):
        state["optimizer"].zero_grad()
        (state["weight"].conj() * torch.randn(50, dtype=torch.complex64)).real.sum().backward()
        state["weight"].grad = state["weight"].grad.conj()
        state["optimizer"].step()

    frozen = run_logged(store, make(1), step)
    assert kinds(store) == "brrrrrrr"
    check_steps(store, make(2), frozen)


def test_gradients_of_another_dtype(store):
    def make(seed):
        torch.manual_seed(seed)
        weight = nn.Parameter(torch.randn(20, dtype=torch.bfloat16))
        weight.grad_dtype = torch.float32
        return {"weight": weight, "optimizer": torch.optim.SGD([weight], lr=0.1)}

    def step(state, _):
        state["weight"].grad = torch.randn(20)
        state["optimizer"].step()

    frozen = run_logged(store, make(1), step)
    assert kinds(store) == "brrrrrrr"
    check_steps(store, make(2), frozen)


def test_sparse_gradients(store, caplog):
    def make(seed):
        torch.manual_seed(seed)
        model = nn.Embedding(9, 6, sparse=True)
        return {"model": model, "optimizer": torch.optim.SparseAdam(model.parameters())}

    def step(state, _):
        state["optimizer"].zero_grad()
        state["model"](torch.randint(9, (4,))).square().mean().backward()
        state["optimizer"].step()

    frozen = run_logged(store, make(1), step)
    assert kinds(store) == "bbbbbbbb"
    assert "sparse. Use strategy='full'" in caplog.text
    check_steps(store, make(2), frozen)


# ---- hooks -------------------------------------------------------------------------------------


def halve(optimizer, args, kwargs):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.mul_(0.5)


def replace_gradients(optimizer, args, kwargs):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = parameter.grad * 0.5


@pytest.mark.parametrize("hook", [halve, replace_gradients])
def test_a_users_pre_hook_is_in_the_record(store, hook):
    state, frozen = build(1), {}
    with logged(store, state) as saver:
        state["optimizer"].register_step_pre_hook(hook)
        for step in range(1, 9):
            train(state)
            saver.save(step)
            frozen[step] = snapshot(state)
    assert kinds(store) == "brrrrrrr"
    check_steps(store, build(2), frozen)


@pytest.mark.parametrize(
    ("hook", "at"), [(halve, 3), (replace_gradients, 3), (replace_gradients, 6)]
)
def test_a_users_pre_hook_that_comes_between(store, hook, at):
    def step(state, number):
        if number == at:
            state["optimizer"].register_step_pre_hook(hook)
        train(state)

    frozen = run_logged(store, build(1), step)
    check_steps(store, build(2), frozen)


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
    frozen = run_logged(store, build(1, Nested), train)
    check_steps(store, build(2, Nested), frozen)
    assert kinds(store) == "brrrrrrr"


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

    frozen = run_logged(store, make(1), lambda state, _: backward(state))
    assert kinds(store) == "brrrrrrr"
    check_steps(store, make(2), frozen)


# ---- closures and what else comes with a step --------------------------------------------------


def train_in_closure(state, step=0):
    def closure():
        state["optimizer"].zero_grad()
        return backward(state)

    state["optimizer"].step(closure)


@pytest.mark.parametrize("kind", [Plain, torch.optim.AdamW])
def test_a_closure_that_runs_once(store, kind):
    frozen = run_logged(store, build(1, kind), train_in_closure)
    assert kinds(store) == "brrrrrrr"
    check_steps(store, build(2, kind), frozen)


def test_a_closure_after_a_torn_copy(store):
    def step(state, number):
        if number == 2:
            write(state, "in place")
        train_in_closure(state)

    state, frozen = build(1), {}
    with logged(store, state) as saver:
        for number in range(1, 9):
            step(state, number)
            with torch.no_grad():
                saver.save(number)
            frozen[number] = snapshot(state)
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

    frozen = run_logged(store, build(1, Deaf), step, each=durable)
    check_steps(store, build(2, Deaf), frozen)


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

    frozen = run_logged(store, build(1, Averaging), step)
    check_steps(store, build(2, Averaging), frozen)
    assert "closure" in caplog.text


class Polyak(Plain):
    """The loss decides how far it goes."""

    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        self.update(loss)


def test_an_optimizer_that_needs_its_closures_loss(store):
    frozen = run_logged(store, build(1, Polyak), train_in_closure)
    check_steps(store, build(2, Polyak), frozen)


class Scaled(Plain):
    def step(self, closure=None, scale=1.0):
        self.update(scale)


def test_arguments_of_step(store):
    def step(state, _):
        state["optimizer"].zero_grad()
        backward(state)
        state["optimizer"].step(scale=0.1)

    frozen = run_logged(store, build(1, Scaled), step)
    check_steps(store, build(2, Scaled), frozen)


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

    frozen = run_logged(store, build(1, Refusing), step)
    check_steps(store, build(2, Refusing), frozen)


class Noisy(Plain):
    @torch.no_grad()
    def update(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad + torch.randn_like(parameter), alpha=-group["lr"])


def test_an_optimizer_that_draws_random_numbers(store):
    frozen = run_logged(store, build(1, Noisy), train)
    check_steps(store, build(2, Noisy), frozen)


def test_lbfgs(store):
    state = build(1, torch.optim.LBFGS)
    with pytest.raises(Unsupported, match="Use strategy='full'"):
        logged(store, state)
    with checkpointer(store, state) as saver:
        train_in_closure(state)
        saver.step(1)


# ---- what is in the state ----------------------------------------------------------------------


def test_no_optimizer(store):
    with pytest.raises(Unsupported, match="Use strategy='full'"):
        logged(store, {"model": nn.Linear(2, 2)})


def test_frozen_weights_that_dominate(store):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 400), nn.Linear(400, 6))
    model[0].requires_grad_(False)
    state = {"model": model, "optimizer": torch.optim.SGD([model[1].bias], lr=0.1)}
    with pytest.raises(Unsupported, match="Use strategy='full'"), logged(store, state) as saver:  # noqa: PT012
        train(state)
        saver.step(1).wait("local")
        train(state)
        saver.step(2)
    assert restore(store, state) == 1


def test_a_name_that_begins_with_the_records_prefix(store):
    def make(seed):
        state = build(seed)
        return {"@model": state["model"], "optimizer": state["optimizer"]}

    def step(state, _):
        train({"model": state["@model"], "optimizer": state["optimizer"]})

    frozen = run_logged(store, make(1), step)
    check_steps(store, make(2), frozen)


class Holder:
    """Its state_dict names a parameter of somebody else."""

    def __init__(self, model):
        self.model, self.best = model, None

    def state_dict(self):
        return {"best": self.model[0].weight}

    def load_state_dict(self, state):
        self.best = state["best"].detach().clone()


def test_a_parameter_in_a_state_dict(store):
    def make(seed):
        state = build(seed)
        return {**state, "holder": Holder(state["model"])}

    state, fresh = make(1), make(2)
    run_logged(store, state, train)
    assert restore(store, fresh) == 8
    assert torch.equal(fresh["holder"].best, state["model"][0].weight)


def test_a_parameter_that_gets_another_name(store):
    def step(state, number):
        train(state)
        if number == 4:
            state["best"]["weight"] = state["model"][0].weight

    frozen = run_logged(store, {**build(1), "best": {"weight": None}}, step)
    for step in Store(store).steps():
        fresh = {**build(2), "best": {"weight": None}}
        assert restore(store, fresh, step) == step
        check_same(snapshot(fresh), frozen[step])


class Buffer:
    def __init__(self):
        self.items = []

    def state_dict(self):
        return {"items": list(self.items)}

    def load_state_dict(self, state):
        self.items = list(state["items"])


@pytest.mark.parametrize("kind", ["value", "stateful"])
def test_a_tensor_that_goes(store, kind):
    def make(seed):
        return {**build(seed), "buffer": Buffer() if kind == "stateful" else {"items": []}}

    def step(state, number):
        train(state)
        items = [torch.full((2,), float(number))] if number < 4 else []
        if kind == "stateful":
            state["buffer"].items = items
        else:
            state["buffer"]["items"] = items

    frozen = run_logged(store, make(1), step)
    check_steps(store, make(2), frozen)


def test_a_learning_rate_that_is_a_tensor_at_first(store):
    def make(seed):
        state = build(seed)
        state["optimizer"].param_groups[0]["lr"] = torch.tensor(0.01)
        return state

    def step(state, number):
        train(state)
        if number == 4:
            state["optimizer"].param_groups[0]["lr"] = 0.02

    frozen = run_logged(store, make(1), step)
    check_steps(store, make(2), frozen)


def test_a_hyperparameter_that_goes(store):
    def step(state, number):
        train(state)
        if number == 3:
            state["optimizer"].param_groups[0]["note"] = 1
        if number == 5:
            del state["optimizer"].param_groups[0]["note"]

    frozen = run_logged(store, build(1), step)
    check_steps(store, build(2), frozen)


def test_a_hyperparameter_that_cannot_be_stored(store):
    state = build(1)
    with pytest.raises(Unsupported), logged(store, state) as saver:  # noqa: PT012
        train(state)
        saver.save(1)
        state["optimizer"].param_groups[0]["function"] = len
        try:
            train(state)
        except Unsupported:
            pytest.fail("raised in optimizer.step()")
        saver.save(2)  # as with `full`


def test_new_parameters_and_new_state_are_a_base(store):
    def step(state, number):
        if number == 3:
            extra = nn.Linear(6, 6)
            state["model"].append(extra)
            state["optimizer"].add_param_group({"params": extra.parameters(), "lr": 0.1})
        if number == 6:
            state["optimizer"].load_state_dict(state["optimizer"].state_dict())
        train(state)

    frozen = run_logged(store, build(1), step)
    assert kinds(store) == "brbrrbrr"
    fresh = build(2)
    assert restore(store, fresh, 2) == 2
    assert difference_of(fresh, frozen[2]) is None
    step(fresh, 3)
    for number in (3, 5, 6, 8):
        restore(store, fresh, number)
        assert difference_of(fresh, frozen[number]) is None


def difference_of(state, frozen):
    check_same(snapshot(state), frozen)


def test_parameters_of_two_optimizers(store):
    def make(seed):
        state = build(seed)
        second = torch.optim.SGD(state["model"].parameters(), lr=0.1, momentum=0.9)
        return {**state, "second": second}

    def step(state, _):
        train(state)
        state["second"].step()

    frozen = run_logged(store, make(1), step)
    assert kinds(store) == "brrrrrrr"
    check_steps(store, make(2), frozen)


# ---- steps that are asked for in odd ways ------------------------------------------------------


def test_several_updates_in_a_record_and_none(store):
    state, frozen = build(1), {}
    with logged(store, state) as saver:
        for step in range(1, 15):
            if step not in (8, 9):
                train(state)
            if step in (1, 2, 5, 8, 9, 14):
                saver.save(step)
                frozen[step] = snapshot(state)
    assert kinds(store) == "brrrrr"
    assert check_steps(store, build(2), frozen) == [1, 2, 5, 8, 9, 14]


def test_records_of_nothing(store):
    model = nn.Linear(3, 3)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    with logged(store, state, rng=False) as saver:
        for step in range(1, 5):
            saver.step(step).wait("local")
    assert kinds(store) == "brrr"
    fresh = {"model": nn.Linear(3, 3)}
    fresh["optimizer"] = torch.optim.SGD(fresh["model"].parameters())
    assert restore(store, fresh) == 4
    check_same(freeze(fresh), freeze(state))


def test_memory_is_bounded_while_nobody_saves(store):
    state = build(1)
    with logged(store, state) as saver:
        train(state)
        saver.save(1).wait("local")
        for _ in range(100):
            train(state)
        calls = saver._log._recorder._calls
        kept = sum(tensor.nbytes for call in calls for tensor in call.tensors.values())
        assert kept <= 4 * sum(p.nbytes for p in state["model"].parameters())
        saver.save(2)


@pytest.mark.parametrize("strategy", ["full", "log"])
@pytest.mark.parametrize("tag", [None, "best"])
def test_the_same_step_again(store, strategy, tag):
    """As after each epoch: step(100) in the loop, save(100, tag="best") after it."""
    state, frozen = build(1), {}
    with checkpointer(store, state, strategy=strategy) as saver:
        for step in range(1, 5):
            train(state)
            saver.step(step)
            frozen[step] = snapshot(state)
            if step == 3:
                saver.save(step, tag=tag).wait("local")
    if tag:
        assert Store(store).manifest(tag).step == 3
    check_steps(store, build(2), frozen)


@pytest.mark.parametrize("what", ["metrics", "value", "weights"])
def test_something_new_at_the_same_step(store, what):
    state = {**build(1), "score": 0.0}
    with logged(store, state) as saver:
        for step in (1, 2):
            train(state)
            saver.step(step).wait("local")
        metrics = {"loss": 1.0} if what == "metrics" else None
        if what == "value":
            state["score"] = 1.0
        if what == "weights":
            write(state, "in place")
        try:
            saver.save(2, tag="best", metrics=metrics).wait("local")
        except Conflict:
            train(state)
            saver.step(3).wait("local")  # or the end of `with` would raise it again
            return
    fresh = {**build(2), "score": 0.0}
    assert restore(store, fresh, "best") == 2
    check_same(freeze(fresh), freeze(state))
    assert what != "metrics" or Store(store).manifest("best").metrics == metrics


def test_another_state_as_the_same_step_after_the_log_has_ended(store):
    state = build(1)
    with logged(store, state) as saver:
        for step in range(1, 6):
            if step > 1:
                write(state, "in place")
            train(state)
            saver.step(step).wait("local")
        train(state)
        with pytest.raises(Conflict):
            saver.step(5).wait("local")
        saver.step(6).wait("local")


def test_another_state_as_the_same_step(store):
    state, frozen = build(1), {}
    with logged(store, state) as saver:
        for step in (1, 2, 3):
            train(state)
            saver.step(step).wait("local")
            frozen[step] = snapshot(state)
        train(state)
        with pytest.raises(Conflict):
            saver.step(3).wait("local")
        train(state)
        saver.step(4).wait("local")
        frozen[4] = snapshot(state)
    assert kinds(store) == "brrb"
    check_steps(store, build(2), frozen)


def test_a_tag_makes_a_base(store):
    state, frozen = build(1), {}
    with logged(store, state) as saver:
        for step in range(1, 7):
            train(state)
            saver.save(step, tag="good" if step == 4 else None)
            frozen[step] = snapshot(state)
    assert kinds(store) == "brrbrr"
    assert Store(store).manifest("good").step == 4
    assert Store(store).read("good")["model.0.weight"].shape == (40, 6)
    check_steps(store, build(2), frozen)


def test_parts_and_tensors_of_a_logged_step(store):
    state = build(1)
    run_logged(store, state, train, steps=7, base_every=5)
    assert kinds(store) == "brrrrbr"
    fresh = build(2)
    before = freeze(fresh)
    with checkpointer(store, fresh) as restorer:
        with pytest.raises(Unsupported, match="of step 1"):
            restorer.restore(3, only="model")
        check_same(freeze(fresh), before)
        assert restorer.restore(6, only="model") == 6
    with pytest.raises(Unsupported, match="nearest to it: 1 and 6"):
        Store(store).read(3)
    with pytest.raises(Unsupported, match="nearest to it: 6"):
        Store(store).read()
    assert Store(store).read(6)


def test_a_state_that_does_not_fit_is_left_alone(store):
    run_logged(store, build(1), train, steps=4)
    other = build(2, torch.optim.SGD, momentum=0.9)
    other["model"] = nn.Linear(6, 7)
    before = freeze(other)
    with checkpointer(store, other) as restorer, pytest.raises(Mismatch):
        restorer.restore()
    check_same(freeze(other), before)


def test_no_memory_for_one_record(store, monkeypatch):
    state, frozen = build(1), {}
    with logged(store, state) as saver:
        for step in range(1, 9):
            train(state)
            with monkeypatch.context() as patch:
                if step == 4:

                    def fail(*_):
                        raise Unavailable("no memory")

                    patch.setattr(saver._pool, "acquire", fail)
                saver.save(step)
            frozen[step] = snapshot(state)
    check_steps(store, build(2), frozen)
    assert kinds(store) == "brrbrrr"


def test_another_optimizer_changes_nothing(store):
    run_logged(store, build(1), train, steps=4)
    other = build(2, torch.optim.Adam)
    before = freeze(other)
    with checkpointer(store, other) as restorer, pytest.raises(Mismatch, match="AdamW"):
        restorer.restore(4)
    check_same(freeze(other), before)


def test_complex128(store):
    """Items of 16 bytes: planes are cut at 8."""

    def make(seed):
        torch.manual_seed(seed)
        weight = nn.Parameter(torch.randn(9000, dtype=torch.complex128))
        return {"weight": weight, "optimizer": torch.optim.Adam([weight])}

    def step(state, _):
        state["optimizer"].zero_grad()
        noise = torch.randn(9000, dtype=torch.complex64).to(torch.complex128)  # zeros to be dropped
        (state["weight"] * noise).real.sum().backward()
        state["optimizer"].step()

    frozen = run_logged(store, make(1), step)
    assert kinds(store) == "brrrrrrr"
    check_steps(store, make(2), frozen)


def test_steps_that_begin_again_without_a_restore(store):
    """The names are taken: nothing may be told to be saved that is not."""
    state = build(1)
    with logged(store, state, base_every=100) as saver:
        for step in (1, 2, 3):
            train(state)
            saver.step(step).wait("local")
        for step in (1, 2, 3):
            train(state)
            with pytest.raises(EverstepError):
                saver.step(step).wait("local")
        train(state)
        saver.step(4).wait("local")
        last = snapshot(state)
    fresh = build(2)
    assert restore(store, fresh) == 4
    check_same(snapshot(fresh), last)
