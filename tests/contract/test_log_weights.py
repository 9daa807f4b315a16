"""strategy="log" where somebody else than the optimizer writes to weights or optimizer state: the
chain ends, a whole state is saved instead, and that is told."""

import pytest
import torch
from logs import WRITES, Plain, build, check_run, durable, train, write
from runs import bits, check_steps, checkpointer, kinds, logged, snapshot
from torch import nn

import forked
from examples import slow

QUICK = ["data", "swap"]
HOW = pytest.mark.parametrize("how", [*QUICK, *slow(*(how for how in WRITES if how not in QUICK))])


@HOW
def test_weights_changed_between_update_and_save(store, caplog, how):
    def change(state, step):
        train(state)
        if step == 5:
            write(state, how)

    check_run(store, build, change, "brrrbrrr")
    assert "'model.0.weight' changed" in caplog.text or how == "swap"


@HOW
@pytest.mark.parametrize("at", [1, 5])
def test_weights_changed_between_save_and_update(store, caplog, how, at):
    def change(state, step):
        if step == at + 1:
            write(state, how)
        train(state)

    saved = "bbrrrrrr" if at == 1 else "brrrrbrr"
    check_run(store, build, change, saved, each=durable)
    said = "is another tensor, or in other memory" if how == "swap" else "changed"
    assert caplog.text.count(f"'model.0.weight' {said}") == 1


@pytest.mark.parametrize("verify", ["rolling", "full"])
def test_weights_in_other_memory_again_and_again(store, caplog, verify):
    """It is told at once, and the third time whole states stay."""

    def change(state, step):
        train(state)
        if step >= 4:
            write(state, "swap")
        if step >= 6:
            entry = state["optimizer"].state[state["model"][2].weight]
            entry["exp_avg"] = entry["exp_avg"].clone()

    check_run(store, build, change, "brrbbbbb", each=durable, verify=verify)
    told = [line for line in caplog.messages if "no record is made" in line]
    steps = [line.split(":")[0].removeprefix("no record is made of step ") for line in told]
    assert steps == ["4", "5", "6"]
    assert "'model.0.weight' is another tensor" in told[0]
    assert "'optimizer.model.2.weight.exp_avg'" in told[2]
    assert told[2].endswith(", and from now on")


@pytest.mark.parametrize("moment", [None, "exp_avg"])
def test_few_elements_changed_around_the_version_counter(store, caplog, moment):
    """A sample of bytes does not see it; verify="full" does, and names the tensor."""

    def change(state, step):
        if step == 4:
            weight = state["model"][2].weight
            entry = state["optimizer"].state[weight]
            (entry[moment] if moment else weight).data[3, 17] += 1.0
        train(state)

    check_run(store, build, change, "brrbrrrr", each=durable, verify="full")
    name = f"optimizer.model.2.weight.{moment}" if moment else "model.2.weight"
    assert f"'{name}' changed between two calls" in caplog.text


@pytest.mark.parametrize("options", [{"base_every": 5}, {"base_every": 5, "window": 3}])
def test_digests_go_by_name(store, options):
    """A program that comes after may have other groups."""

    def make(seed, turn=1):
        state = build(seed)
        decayed, others = [], []
        for parameter in state["model"].parameters():
            (decayed if parameter.ndim > 1 else others).append(parameter)
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups[::turn], lr=0.01)
        return {"model": state["model"], "optimizer": optimizer}

    def by_name(state):
        moments = state["optimizer"].state
        return {
            name: [bits(tensor) for tensor in (parameter, *moments[parameter].values())]
            for name, parameter in state["model"].named_parameters()
        }

    state, frozen = make(1), {}
    with logged(store, state, verify="full", **options) as saver:
        for step in range(1, 9):
            train(state)
            saver.step(step)
            frozen[step] = by_name(state)
    for turn in (1, -1):
        fresh = make(2, turn)
        with checkpointer(store, fresh) as saver:
            for step, expected in frozen.items():
                assert saver.restore(step) == step
                assert by_name(fresh) == expected


def test_one_element_changed_after_a_base(store, caplog):
    """All bytes of the parameters are looked at there."""

    def change(state, step):
        if step in (2, 7):
            state["model"][2].weight.data[3, 17] += 1.0
        train(state)

    check_run(store, build, change, "bbrrrbbr", each=durable, base_every=4)
    assert caplog.text.count("'model.2.weight' changed between two calls") == 2


def frees(store):
    model = nn.Linear(4096, 4096)  # its weight is mapped for itself: unmapped when it is freed
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    with logged(store, state) as saver:
        for step in range(1, 7):
            optimizer.zero_grad(set_to_none=False)
            model(torch.randn(2, 4096)).square().mean().backward()
            optimizer.step()
            saver.step(step).wait("local")
            if step == 5:
                model.weight.data = model.weight.data * 0.5


def test_freed_memory_is_not_looked_at(store):
    assert forked.run(frees, store).returncode == 0


def test_optimizer_state_changed_by_hand(store, caplog):
    def change(state, step):
        if step == 5:
            for entry in state["optimizer"].state.values():
                entry["exp_avg"].zero_()
        train(state)

    check_run(store, build, change, "brrrbrrr", each=durable)
    assert ".exp_avg' changed" in caplog.text


class Numbered(Plain):
    """Its momentum has a number for a name."""

    @torch.no_grad()
    def update(self):
        for parameter in (each for group in self.param_groups for each in group["params"]):
            momentum = self.state[parameter].setdefault(0, torch.zeros_like(parameter))
            parameter.sub_(momentum.mul_(0.9).add_(parameter.grad), alpha=0.01)


@pytest.mark.parametrize("what", ["a weight that is copied at the call", "momentum"])
def test_what_moves_between_the_update_and_the_call(store, what):
    """No record tells of it, whatever looks at its address."""
    state, frozen = build(1, Numbered), {}
    weight = state["model"][2].weight
    with logged(store, state) as saver:
        if "call" in what:
            saver._state.suspect(["model.2.weight"])
            saver._state.suspect(["model.2.weight"])
        for step in range(1, 9):
            train(state)
            moved = state["optimizer"].state[weight][0] if what == "momentum" else weight
            if step == 5:
                moved.data = moved.data + 1.0
            saver.step(step).wait("local")
            frozen[step] = snapshot(state)
    assert kinds(store)[3:] == "rbrrr"
    check_steps(store, build(2, Numbered), frozen)
