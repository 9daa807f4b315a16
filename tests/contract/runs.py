"""Saves a run through a real Checkpointer, restores it into another, and compares byte for byte."""

import contextlib
import struct
import sys
from collections import deque
from pathlib import Path

import numpy as np
import torch
from torch import nn

from choices import chosen
from comparing import kinds
from everstep import Checkpointer, Store

sys.path.insert(0, str(Path(__file__).parents[1]))
from stores import end_keeper  # noqa: F401 - for the tests

torch.set_num_threads(1)  # sums in one order here and in the processes that import this


def tensor_bits(tensor):
    """dtype, shape and bytes: nan equals itself, 0.0 differs from -0.0."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    data = bytes(plain.reshape(-1).view(torch.uint8).numpy()) if plain.numel() else b""
    return ("tensor", str(tensor.dtype), tuple(tensor.shape), data)


def bits(value):
    """A value as something that == compares with types, bit for bit."""
    if isinstance(value, torch.Tensor):
        return tensor_bits(value)
    if isinstance(value, np.ndarray):
        return (np.ndarray, value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, np.generic):
        return (type(value), value.dtype.str, value.tobytes())
    if isinstance(value, float):
        return (type(value), struct.pack(">d", value))
    if isinstance(value, complex):
        return (type(value), struct.pack(">dd", value.real, value.imag))
    if isinstance(value, dict):
        factory = getattr(value, "default_factory", None)
        return (type(value), factory, [(bits(key), bits(item)) for key, item in value.items()])
    if isinstance(value, (list, tuple)):
        return (type(value), [bits(item) for item in value])
    if isinstance(value, deque):
        return (deque, value.maxlen, [bits(item) for item in value])
    if isinstance(value, (set, frozenset)):
        return (type(value), frozenset(bits(item) for item in value))
    return (type(value), value)


def freeze(value):
    """Everything that a state holds, for comparison, by means other than everstep's."""
    if isinstance(value, nn.Module):
        return {name: bits(item) for name, item in value.state_dict().items()}
    if isinstance(value, torch.optim.Optimizer):
        return freeze_optimizer(value)
    if isinstance(value, torch.Generator):
        return bits(value.get_state())
    if isinstance(value, np.random.RandomState):
        return bits(value.get_state())
    if hasattr(value, "bit_generator"):
        return bits(value.bit_generator.state)
    if hasattr(value, "getstate"):
        return value.getstate()
    if hasattr(value, "state_dict"):
        return bits(value.state_dict())
    if isinstance(value, dict):
        return {name: freeze(item) for name, item in value.items()}
    if isinstance(value, list):
        return [freeze(item) for item in value]
    return bits(value)


def freeze_optimizer(optimizer):
    """State by position of the parameter, and the groups; keys in any order."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    positions = {id(parameter): index for index, parameter in enumerate(parameters)}
    state = {
        positions.get(id(key), key): {name: bits(item) for name, item in entry.items()}
        if isinstance(entry, dict)
        else bits(entry)
        for key, entry in optimizer.state.items()
    }
    groups = [
        {name: bits(item) for name, item in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    return {"state": state, "groups": groups, "parameters": [bits(p) for p in parameters]}


def difference(left, right, path="state"):
    """Where two frozen states differ; None where they are equal."""
    if isinstance(left, dict) and isinstance(right, dict):
        if left.keys() != right.keys():
            return f"{path}: keys {sorted(map(str, left.keys() ^ right.keys()))} on one side only"
        pairs = [(f"{path}.{key}", left[key], right[key]) for key in left]
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        pairs = [(f"{path}.{i}", a, b) for i, (a, b) in enumerate(zip(left, right, strict=True))]
    else:
        return None if left == right else f"{path}: {str(left)[:200]} != {str(right)[:200]}"
    return next((found for pair in pairs if (found := difference(pair[1], pair[2], pair[0]))), None)


def check_same(left, right):
    """Two frozen states are equal."""
    found = difference(left, right)
    assert found is None, found


def checkpointer(store, state, **options):
    """A Checkpointer; a log takes the test's own optimizers on its word."""
    if options.get("strategy") == "log":
        found = [each for each in state.values() if isinstance(each, torch.optim.Optimizer)]
        options = {"optimizers": tuple({type(each) for each in found}), **options}
    return Checkpointer(store, state, **chosen(**{"when_full": "wait", **options}))


def save(store, state, step=1, **options):
    """Save a state, durably."""
    with checkpointer(store, state, **options) as saver:
        saver.save(step).wait("local")


def restore(store, state, step=None, **options):
    """Restore into a state; the step."""
    with checkpointer(store, state) as restorer:
        return restorer.restore(step, **options)


def check_restored(store, fresh, frozen, step=None, **options):
    """This step, or the newest, is restored into a state as it was: as freeze() said; the step."""
    found = restore(store, fresh, step, **options)
    assert step in (None, found)
    check_same(freeze(fresh), frozen)
    return found


def round_trip(store, build, train, steps=3, more=3, fresh=None, **options):
    """A run of `steps`, each saved, and `more`; one that is restored after `steps`: both are equal.

    `build(seed)` makes a state, `train(state)` one update of it. `fresh`: the state to restore
    into, if it is not built the same way. `options`: of the first Checkpointer. Returns the
    restored state.
    """
    first = build(1)
    with checkpointer(store, first, **options) as saver:
        for step in range(1, steps + 1):
            train(first)
            saver.step(step)
        saved = freeze(first)
        saver.wait("local")
        check_same(freeze(first), saved)
        for _ in range(more):
            train(first)
        final = freeze(first)
    second = build(2) if fresh is None else fresh
    with checkpointer(store, second) as restorer:
        assert restorer.restore() == steps
        check_same(freeze(second), saved)
        for _ in range(more):
            train(second)
        check_same(freeze(second), final)
    return second


def build_plain(seed, kind=torch.optim.AdamW, **options):
    torch.manual_seed(seed)
    model = nn.Linear(6, 6)
    return {"model": model, "optimizer": kind(model.parameters(), **options)}


def supervised(state, loss=None):
    """One update of {"model", "optimizer"} (and "scheduler") on random data."""
    model, optimizer = state["model"], state["optimizer"]
    inputs = torch.randn(8, 6)
    optimizer.zero_grad()
    value = model(inputs).square().mean() if loss is None else loss(model, inputs)
    value.backward()
    optimizer.step()
    if "scheduler" in state:
        state["scheduler"].step()


def logged(store, state, **options):
    """A Checkpointer that writes a base, and then records only."""
    return checkpointer(store, state, **{"strategy": "log", "base_every": 100, **options})


def snapshot(state):
    """A state and torch's generator, frozen."""
    return {"state": freeze(state), "rng": tensor_bits(torch.get_rng_state())}


def run_logged(store, state, train, steps=8, each=lambda handle: None, **options):
    """`train(state, step)` and a save, so many times; each step's snapshot. `each` gets the
    handles."""
    frozen = {}
    with logged(store, state, **options) as saver:
        for step in range(1, steps + 1):
            train(state, step)
            each(saver.step(step))
            frozen[step] = snapshot(state)
    return frozen


@contextlib.contextmanager
def threads(count):
    """So many for torch within."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_steps(store, fresh, frozen, steps=None, **options):
    """Whatever step the store offers is restored as it was, the newest first; its steps.

    `steps`: only these, in this order.
    """
    offered = Store(store).steps()
    with checkpointer(store, fresh, **options) as restorer:
        for step in reversed(offered) if steps is None else steps:
            assert restorer.restore(step) == step
            found = difference(snapshot(fresh), frozen[step], f"step {step}")
            assert found is None, f"{kinds(store)}: {found}"
    return offered
