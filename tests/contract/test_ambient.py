"""What a program has set for all of torch, where it saves and restores, changes nothing."""

import contextlib

import numpy as np
import pytest
import torch
from runs import (
    check_same,
    checkpointer,
    freeze,
    kinds,
    run_logged,
    snapshot,
    supervised,
    tensor_bits,
)
from torch import nn

from everstep import Store, Unsupported
from everstep.format.manifest import CheckpointName
from everstep.restore.materialize import materialize
from everstep.tiers.disk import Disk
from examples import slow
from forked import run


@contextlib.contextmanager
def default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)  # new memory is filled with nan then
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SETTINGS = {
    "another device": lambda: torch.device("meta"),
    "another dtype": default_dtype,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "deterministic": deterministic,
    "inference": torch.inference_mode,
    "no grad": torch.no_grad,
}


def build(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "values": {"tensor": torch.full((3,), seed), "array": np.full(4, seed)},
    }


@pytest.mark.parametrize("strategy", ["full", *slow("log")])
def test_saving_and_restoring(store, strategy):
    """A step is saved under each, and restored under each."""
    first, saved = build(1), {}
    with checkpointer(store, first, strategy=strategy) as saver:
        for step, name in enumerate(SETTINGS, 1):
            supervised(first)
            with SETTINGS[name]():
                saver.save(step).wait("local")
            saved[step] = freeze(first)
        supervised(first)
        final = freeze(first)
    assert kinds(store) == ("bbbbbb" if strategy == "full" else "brrrrr")
    for step, name in enumerate(SETTINGS, 1):
        second = build(2)
        with checkpointer(store, second) as restorer:
            for each in (step, len(SETTINGS)):
                with SETTINGS[name]():
                    assert restorer.restore(each) == each
                check_same(freeze(second), saved[each])
            supervised(second)
            check_same(freeze(second), final)


@pytest.mark.parametrize(
    "name", ["inference", *slow(*(name for name in SETTINGS if name != "inference"))]
)
def test_parts_and_reads_of_a_log(store, name):
    def make(seed):
        state = build(seed)
        state["model"].append(nn.Linear(6, 6, bias=False))  # unused: no gradient before step 3
        state["model"].register_buffer("turned", torch.full((2, 3), float(seed)).t())
        state["model"].register_buffer("empty", torch.empty(0, 3))
        return {**state, "optimizer": torch.optim.AdamW(state["model"].parameters())}

    def loss(model, inputs):
        return (model if step > 2 else model[:2])(inputs).square().mean()

    state, frozen = make(1), {}
    with checkpointer(store, state, strategy="log") as saver:
        for step in range(1, 6):
            supervised(state, loss)
            saver.save(step).wait("local")
            frozen[step] = freeze(state)
    assert kinds(store) == "brbrr"
    fresh = make(2)
    with checkpointer(store, fresh) as restorer, SETTINGS[name]():
        assert restorer.restore(2) == 2
        assert restorer.restore(5, only="model") == 5
        assert restorer.restore(4, only="optimizer") == 4
        materialize(Disk(store), CheckpointName(4, 1))
        found = {key: tensor_bits(value) for key, value in Store(store).read(4).items()}
        assert restorer.restore(1, only="values") == 1
    check_same(freeze(fresh["model"]), frozen[5]["model"])
    check_same(freeze(fresh["optimizer"])["state"], frozen[4]["optimizer"]["state"])
    models = {key: value for key, value in found.items() if key.startswith("model.")}
    check_same(models, {f"model.{key}": value for key, value in frozen[4]["model"].items()})


class Squares(torch.optim.Optimizer):
    """Its update multiplies matrices, which autocast rounds."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad.view(len(parameter), -1)
                change = gradient @ gradient.T @ gradient
                parameter.sub_(change.view_as(parameter), alpha=group["lr"])


@pytest.mark.parametrize("at_restore", [False, True])
def test_updates_under_autocast(store, at_restore):
    """Some of them; a replay casts as each of them did, whatever is cast where it is asked for."""

    def make(seed):
        state = build(seed)
        return {**state, "optimizer": Squares(state["model"].parameters())}

    state, frozen = make(1), {}
    with checkpointer(store, state, strategy="log") as saver:
        for step in range(1, 6):
            state["optimizer"].zero_grad()
            (state["model"](torch.randn(8, 6)) * 3).square().mean().backward()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=step in (2, 4)):
                state["optimizer"].step()
            saver.save(step).wait("local")
            frozen[step] = freeze(state)
    assert kinds(store) == "brrrr"
    fresh = make(2)
    with checkpointer(store, fresh) as restorer:
        for step in (5, 4, 3, 2):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=at_restore):
                assert restorer.restore(step, exact="require") == step
            check_same(freeze(fresh), frozen[step])


@pytest.mark.filterwarnings("ignore")  # torch.compile's own
@pytest.mark.parametrize("strategy", ["log", "full"])
@pytest.mark.slow
def test_an_update_that_is_compiled(store, strategy, caplog):
    """Hooks are not compiled with it; a log, which would replay the plain one, ends."""

    def train(state, compiled):
        state["optimizer"].zero_grad()
        state["model"](torch.randn(8, 6)).square().mean().backward()
        compiled()

    def compiled_step(state):
        return torch.compile(lambda: state["optimizer"].step(), backend="aot_eager")

    first = build(1)
    with checkpointer(store, first, strategy=strategy) as saver:
        step = compiled_step(first)
        for number in range(1, 6):
            train(first, step)
            saver.save(number)
        saved = freeze(first)
        saver.wait("local")
        assert saver.metrics.failures == 0
        assert saver.metrics.hold_seconds > 0, "each update was held for its copies"
        for _ in range(2):
            train(first, step)
        final = freeze(first)
    assert kinds(store) == "bbbbb"
    assert ("is compiled" in caplog.text) == (strategy == "log")
    second = build(2)
    with checkpointer(store, second) as restorer:
        assert restorer.restore() == 5
        check_same(freeze(second), saved)
        step = compiled_step(second)
        for _ in range(2):
            train(second, step)
        check_same(freeze(second), final)


def test_how_exact_matrix_products_are_belongs_to_a_replay(store):
    """As Muon's and PowerSGD's depend on it. A worker takes it over."""
    torch.set_float32_matmul_precision("high")
    try:
        frozen = run_logged(store, build(1), lambda state, _: supervised(state), 3)
    finally:
        torch.set_float32_matmul_precision("highest")
    state = build(2)
    with checkpointer(store, state) as saver:
        with pytest.raises(Unsupported, match="matmul high, here highest"):
            saver.restore(3, exact="require")
        assert saver.restore(3) == 3
    assert snapshot(state) == frozen[3]
    assert materialize(Disk(store), CheckpointName(3, 1)).exact
    assert torch.get_float32_matmul_precision() == "highest"


def save_with_precision_by_backend(store):
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    run_logged(store, build(1), lambda state, _: supervised(state), 3)


def restore_with_precision_by_backend(store):
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with checkpointer(store, build(2)) as saver:
        assert saver.restore(3, exact="require") == 3
    materialize(Disk(store), CheckpointName(2, 1))


@pytest.mark.slow
def test_precision_that_is_chosen_by_backend(store):
    """torch does not tell it in one word then, and raises where it is asked to."""
    for each in (save_with_precision_by_backend, restore_with_precision_by_backend):
        assert run(each, store).returncode == 0
    with checkpointer(store, build(2)) as saver:
        with pytest.raises(Unsupported, match="matmul tf32"):
            saver.restore(3, exact="require")
        assert saver.restore(3) == 3
