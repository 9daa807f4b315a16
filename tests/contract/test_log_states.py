"""strategy="log" and states that change their form: other parameters, tensors, hyperparameters and
names. What cannot be logged at all is refused with advice."""

import copy

import pytest
import torch
from logs import Plain, build, check_run, train
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

from everstep import Mismatch, Store, Unsupported


def test_no_optimizer(store):
    with pytest.raises(Unsupported, match="Use strategy='full'"):
        logged(store, {"model": nn.Linear(2, 2)})


@pytest.mark.parametrize(
    ("model", "optimizer", "saved"), [("@model", "optimizer", None), ("model", "@0", "bbbbbbbb")]
)
def test_names_that_begin_as_a_records_do(store, model, optimizer, saved):
    """Where its own tensors have that name, parts could not be told from them, nor restored
    alone."""

    def make(seed):
        state = build(seed)
        return {model: state["model"], optimizer: state["optimizer"]}

    def step(state, _):
        train({"model": state[model], "optimizer": state[optimizer]})

    check_run(store, make, step, saved)


def test_a_class_of_the_program_that_was_started_and_is_imported_now(store, monkeypatch):
    class Own(Plain):
        pass

    with monkeypatch.context() as patch:
        patch.setattr(Own, "__module__", "__main__")
        frozen = run_logged(store, build(1, Own), train, steps=4)
    check_steps(store, build(2, Own), frozen)
    Own.__qualname__ = "Other"
    with (
        checkpointer(store, build(2, Own)) as restorer,
        pytest.raises(Mismatch, match=r"is a test_log_states\.Other now"),
    ):
        restorer.restore(4)


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

    check_run(store, make, step)


def test_hyperparameters_of_other_kinds_and_names(store):
    """A learning rate is a tensor at first; a note comes and goes."""

    def make(seed):
        state = build(seed)
        state["optimizer"].param_groups[0]["lr"] = torch.tensor(0.01)
        return state

    def step(state, number):
        train(state)
        group = state["optimizer"].param_groups[0]
        if number == 3:
            group["note"] = 1
        elif number == 4:
            group["lr"] = 0.02
        elif number == 5:
            del group["note"]

    check_run(store, make, step)


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
            state["optimizer"].load_state_dict(copy.deepcopy(state["optimizer"].state_dict()))
        if number == 8:  # the same tensors, in other dicts
            state["optimizer"].load_state_dict(state["optimizer"].state_dict())
        train(state)

    frozen = run_logged(store, build(1), step)
    assert kinds(store) == "brbrrbrr"
    fresh = build(2)
    assert restore(store, fresh, 2) == 2
    check_same(snapshot(fresh), frozen[2])
    step(fresh, 3)
    for number in (3, 5, 6, 8):
        restore(store, fresh, number)
        check_same(snapshot(fresh), frozen[number])


def test_parameters_of_two_optimizers(store):
    def make(seed):
        state = build(seed)
        second = torch.optim.SGD(state["model"].parameters(), lr=0.1, momentum=0.9)
        return {**state, "second": second}

    def step(state, _):
        train(state)
        state["second"].step()

    check_run(store, make, step, "bbbbbbbb", strategy="auto", base_every=None)
    assert "has two optimizers" in Store(store).manifest(8).capture["auto"]["reason"]


def test_parameters_that_no_module_has_are_in_bases_only(store):
    def make(seed):
        torch.manual_seed(seed)
        weights = [torch.randn(9, 6, requires_grad=True), torch.randn(6, requires_grad=True)]
        return {"weights": weights, "optimizer": torch.optim.AdamW(weights), "note": [0.5]}

    def train(state, step):
        first, second = state["weights"]
        state["optimizer"].zero_grad()
        (torch.randn(4, 9) @ first + second).square().mean().backward()
        state["optimizer"].step()
        state["note"].append(step)

    frozen = run_logged(store, make(1), train, steps=9, base_every=4, window=2)
    for step in (2, 3, 7, 8):
        (table,) = Store(store).tables(Store(store).manifest(step))[-1:]
        assert not [name for name in table.tensors if name.startswith("weights")]
    check_steps(store, make(2), frozen)
    fresh = make(3)
    with checkpointer(store, fresh) as restorer:
        for step in (9, 6, 2):
            assert restorer.restore(step, only="weights") == step
            assert freeze(fresh["weights"]) == frozen[step]["state"]["weights"]


def test_groups_that_are_one_now(store):
    """Their hyperparameters were equal at the base, and are at the end, but not between."""

    def make(seed, is_one):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 40), nn.Linear(40, 6))
        groups = [{"params": list(layer.parameters())} for layer in model]
        if is_one:
            groups = [{"params": list(model.parameters())}]
        return {"model": model, "optimizer": torch.optim.AdamW(groups, lr=0.01)}

    def train_at(state, step):
        group = state["optimizer"].param_groups[1]
        group["lr"] = 0.05 if step == 4 else 0.01
        train(state)
        group["lr"] = 0.01

    frozen = run_logged(store, make(1, False), train_at, steps=6)
    assert kinds(store) == "brrrrr"
    check_steps(store, make(2, False), frozen)
    fresh = make(2, True)
    with checkpointer(store, fresh) as restorer:
        for step in (1, 3):
            assert restorer.restore(step) == step
            check_same(freeze(fresh["model"]), frozen[step]["state"]["model"])
        before = freeze(fresh)
        for step in (4, 6):
            with pytest.raises(Mismatch, match="different hyperparameters then"):
                restorer.restore(step)
            check_same(freeze(fresh), before)


class Unusual(Plain):
    """State in lists, under a number, of other strides and of another shape than its parameter's,
    and a counter that all have in common; with sums that depend on the order in memory."""

    @torch.no_grad()
    def update(self, scale=1.0):
        for group in self.param_groups:
            for parameter in group["params"]:
                kept = self.state[parameter] or self.make(parameter)
                both = kept["both"][0].t().view(parameter.shape)
                kept["count"] += 1
                for mean in (kept["means"][0], kept[0], kept["turned"], both):
                    mean.mul_(1 - 1 / float(kept["count"] + 1)).add_(parameter.grad)
                    parameter.sub_(mean / (mean.norm() + 1), alpha=group["lr"])

    def make(self, parameter):
        first = next((entry for entry in self.state.values() if entry), {})
        turned = torch.zeros(parameter.shape[::-1])
        size = (len(parameter), parameter[0].numel())
        self.state[parameter] = {
            "means": [torch.zeros_like(parameter), {"unused": torch.ones(3)}],
            0: torch.zeros_like(parameter),
            "turned": turned.permute(*range(turned.ndim)[::-1]),
            "both": torch.zeros(2, *size).transpose(1, 2),
            "count": first.get("count", torch.zeros(())),
        }
        return self.state[parameter]


@pytest.mark.parametrize("strategy", ["full", "log"])
def test_state_of_unusual_forms(store, strategy):
    """Restored as it was, and so that it goes on as it did."""
    frozen = run_logged(store, build(1, Unusual), train, strategy=strategy)
    assert kinds(store) == ("bbbbbbbb" if strategy == "full" else "brrrrrrr")
    check_steps(store, build(2, Unusual), frozen)
    for step in (2, 6):
        fresh = build(2, Unusual)
        with checkpointer(store, fresh) as restorer:
            restorer.restore(step)
        strides = [each["turned"].stride() for each in states(fresh)]
        for _ in range(step, 8):
            train(fresh)
        check_same(snapshot(fresh), frozen[8])
        assert [each["turned"].stride() for each in states(fresh)] == strides


def states(state):
    """Of an optimizer, by parameter."""
    return state["optimizer"].state.values()


@pytest.mark.parametrize("has_group", [False, True])
def test_parameters_that_are_trained_later(store, caplog, has_group):
    """Nothing is in other memory then."""

    def make(seed):
        state = build(seed)
        first, _, last = state["model"]
        trained = last if has_group else state["model"]
        first.requires_grad_(False)
        return {**state, "optimizer": torch.optim.AdamW(trained.parameters(), lr=0.01)}

    def change(state, step):
        if step == 4:
            first = state["model"][0].requires_grad_(True)
            if has_group:
                state["optimizer"].add_param_group({"params": list(first.parameters())})
        train(state)

    frozen = run_logged(store, make(1), change)
    assert kinds(store) == "brrbrrrr"
    assert not caplog.messages
    for step in (3, 4, 8):
        fresh = make(2)
        if step > 3 and has_group:
            first = list(fresh["model"][0].parameters())
            fresh["optimizer"].add_param_group({"params": first})
        assert restore(store, fresh, step) == step
        assert snapshot(fresh) == frozen[step]
