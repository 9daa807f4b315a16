"""What a module may hold comes back bit for bit, and training goes on with equal bits."""

import copy
import os
import re

import pytest
import torch
from runs import bits, check_same, checkpointer, freeze, restore, round_trip, save, supervised
from torch import nn

from everstep import Mismatch, Store
from everstep.format.dtypes import ITEM_SIZES
from everstep.sharding.leaves import canonical

DTYPES = [getattr(torch, name) for name in ITEM_SIZES if hasattr(torch, name)]


class Holder(nn.Module):
    """Buffers by name."""

    def __init__(self, **tensors):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(f"kept_{name}", tensor)


def random_bits(shape, dtype, seed):
    """Any bits at all, nan and subnormal numbers too (of bool: 0 and 1)."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(shape, dtype=dtype).numel() * dtype.itemsize
    top = 2 if dtype is torch.bool else 256
    data = torch.randint(0, top, (size,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).reshape(shape)


def odd_tensors(seed):
    """Tensors of every dtype, shape and layout that torch.save takes too."""
    found = {f"{str(d).removeprefix('torch.')}": random_bits((3, 5), d, seed) for d in DTYPES}
    found |= {
        "zero_dim": torch.tensor(1.5 * seed),
        "empty": torch.empty(0),
        "empty_2d": torch.empty(3, 0, dtype=torch.int16),
        "one": torch.full((1, 1, 1), seed),
        "channels_last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "transposed": torch.randn(7, 5).t(),
        "bool_transposed": (torch.randn(7, 5) > 0).t(),
        "bfloat16_sliced": torch.randn(9, 6).bfloat16()[::2, 1:4],
        "fp8_transposed": torch.randn(4, 6).to(torch.float8_e4m3fn).t(),
        "e8m0_transposed": random_bits((4, 6), torch.float8_e8m0fnu, seed).t(),
        "uint16_transposed": random_bits((4, 6), torch.uint16, seed).t(),
        "uint64_transposed": random_bits((4, 6), torch.uint64, seed).t(),
        "expanded": torch.tensor([1.0 * seed, 2.0, 3.0]).expand(4, 3),
        "expanded_0": torch.tensor(float("nan") if seed == 1 else 1.0).expand(2, 2),
        "conj": torch.randn(3, 4, dtype=torch.complex64).conj(),
        "neg": torch.randn(5, dtype=torch.complex128).conj().imag,
        "large": torch.randn(1500, 1024),  # more than a chunk of 4 MiB
        "specials": torch.tensor([float("inf"), float("-inf"), float("nan"), -0.0, 1e-45]) * seed,
    }
    storage = torch.randn(20)
    found |= {"view_a": storage[2:12], "view_b": storage[8:].view(3, 4)}
    return found


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_tensors_of_all_kinds(store):
    torch.manual_seed(1)
    first = {"buffers": Holder(**odd_tensors(1)), "value": odd_tensors(1)}
    torch.manual_seed(2)
    second = {"buffers": Holder(**odd_tensors(2)), "value": odd_tensors(2)}
    strides = {name: tensor.stride() for name, tensor in second["value"].items()}
    identities = {name: id(tensor) for name, tensor in second["value"].items()}
    expected = freeze(first)
    save(store, first)
    assert restore(store, second) == 1
    check_same(freeze(second), expected)
    assert {name: tensor.stride() for name, tensor in second["value"].items()} == strides
    assert {name: id(tensor) for name, tensor in second["value"].items()} == identities
    shared = second["value"]
    shared["view_a"][6] = 7.0
    assert shared["view_b"][0, 0] == 7.0, "views still share their storage"
    for name, tensor in Store(store).read(1).items():
        if name.startswith("value."):
            assert bits(tensor) == bits(first["value"][name.removeprefix("value.")]), name


def test_the_dtypes_that_are_refused():
    every = {str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)}
    refused = every - {str(dtype) for dtype in DTYPES}
    packed = re.compile(r"torch\.(bits.*|q.*|u?int[1-7])")  # quantised, or less than a byte each
    new = {"torch.bcomplex32"}  # torch 2.14
    assert all(packed.fullmatch(name) for name in refused - new), refused


def test_expanded_tensor_that_does_not_fit(store):
    save(store, {"t": torch.arange(12.0).reshape(4, 3)})
    with pytest.raises(Mismatch, match="share memory along dim 0"):
        restore(store, {"t": torch.zeros(3).expand(4, 3)})


class Tied(nn.Module):
    def __init__(self, tied=True):
        super().__init__()
        self.embed = nn.Linear(6, 6, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 6, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, inputs):
        return self.head(self.norm(self.embed(inputs)))


def build_tied(seed, tied=True):
    torch.manual_seed(seed)
    model = Tied(tied)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}


def test_a_relative_path_stays_what_it_was(tmp_path, monkeypatch):
    """Also when the program goes to another directory."""
    monkeypatch.chdir(tmp_path)
    for name in ("runs/läufe ⚡ 1\n", os.fsdecode(b"runs/\xff")):
        state = {"x": torch.tensor(1.0)}
        with checkpointer(name, state) as saver:
            saver.save(1).wait("local")
            opened = Store(name)
            (tmp_path / "elsewhere").mkdir(exist_ok=True)
            monkeypatch.chdir(tmp_path / "elsewhere")
            saver.save(2)
        assert opened.steps() == [1, 2]
        assert opened.verify().ok
        assert not os.listdir(".")
        monkeypatch.chdir(tmp_path)
        assert restore(name, state) == 2


def test_tied_weights_and_batch_norm(store):
    state = round_trip(store, build_tied, supervised, steps=4, strategy="full")
    assert state["model"].head.weight is state["model"].embed.weight
    assert state["model"].norm.num_batches_tracked.item() == 7
    (table,) = Store(store).tables(Store(store).manifest(4))
    assert table.tensors["model.embed.weight"].aliases == ("model.head.weight",)
    assert "model.head.weight" not in table.tensors


def test_tied_and_untied_do_not_fit(store, other_store):
    save(store, build_tied(1))
    untied = build_tied(2, tied=False)
    before = freeze(untied)
    with pytest.raises(Mismatch, match=r"does not have 'model\.head\.weight'"):
        restore(store, untied)
    check_same(freeze(untied), before)
    save(other_store, {"model": Tied(tied=False)})
    with pytest.raises(Mismatch, match="one tensor in the state, two in the checkpoint"):
        restore(other_store, {"model": Tied()})


def test_untied_weights_take_those_of_a_tied_checkpoint(store):
    tied, untied = build_tied(1), Tied(tied=False)
    save(store, tied)
    restore(store, {"model": untied}, only="model")
    assert torch.equal(untied.head.weight, tied["model"].embed.weight)


class Counting(nn.Module):
    """Extra state, as torch lets a module have it."""

    def __init__(self, count):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.count, self.table = count, torch.full((3,), count)

    def forward(self, inputs):
        self.count += 1
        self.table += 1
        return self.linear(inputs)

    def get_extra_state(self):
        return {"count": self.count, "table": self.table, "pair": (1, None)}

    def set_extra_state(self, state):
        assert state["pair"] == (1, None)
        self.count, self.table = state["count"], state["table"]


def test_extra_state(store):
    def build(seed):
        model = nn.Sequential(Counting(seed), Counting(10 * seed))
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

    state = round_trip(store, build, supervised)
    assert [module.count for module in state["model"]] == [7, 16]


def test_two_names_for_one_tensor_or_module(store):
    def build(seed):
        torch.manual_seed(seed)
        model, free = nn.Linear(6, 6), torch.randn(4)
        return {
            "model": model,
            "whole": nn.ModuleDict({"inner": model}),
            "weights": list(model.parameters()),
            "pair": {"a": free, "b": free, "c": (free, free[1:])},
            "optimizer": torch.optim.Adam(model.parameters()),
        }

    state = round_trip(store, build, supervised)
    assert state["pair"]["a"] is state["pair"]["b"] is state["pair"]["c"][0]
    assert state["weights"][0] is state["model"].weight


def test_what_is_replaced_between_saves_is_seen(store):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    optimizer = state["optimizer"]

    def replace_state_dict():
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    def replace_entry():
        entry = optimizer.state[model[0].weight]
        optimizer.state[model[0].weight] = {name: item.clone() for name, item in entry.items()}

    def replace_storage():
        model[0].weight.data = torch.randn(6, 6)

    def replace_buffer():
        model[1].running_var = torch.rand(6)

    def convert():
        model[0].to(torch.float64)
        model[0].to(torch.float32)

    def forget():
        optimizer.state.clear()

    changes = [replace_state_dict, replace_entry, replace_storage, replace_buffer, convert, forget]
    frozen = []
    with checkpointer(store, state) as saver:
        supervised(state)
        for step, change in enumerate([lambda: None, *changes], 1):
            saver.step(step).wait("captured")
            change()
            if change is not forget:
                supervised(state)
            saver.save(100 + step).wait("captured")
            frozen.append((100 + step, freeze(state)))
        saver.wait("local")
        for step, expected in frozen:
            assert saver.restore(f"{step}-1") == step
            check_same(freeze(state), expected)


def test_a_module_that_is_replaced_between_saves_is_seen(store):
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    model.register_buffer("odd", torch.randn(4, 3))
    with checkpointer(store, {"model": model}) as saver:
        saver.step(1)
        model.odd.t_()
        model[1] = nn.BatchNorm1d(6)
        nn.init.uniform_(model[1].running_mean)
        saver.step(2)
    found = Store(store).read(2)
    assert torch.equal(found["model.1.running_mean"], model[1].running_mean)
    assert torch.equal(found["model.odd"], model.odd)


def test_data_in_the_same_memory_with_another_shape_or_dtype_is_seen(store):
    model = Holder(late=None)
    model.weight = nn.Parameter(torch.randn(6, 6).half())
    model.register_parameter("bias", None)

    def transpose():
        model.weight.data = model.weight.data.t()

    def shorten():
        model.weight.data = model.weight.data[:5]

    def view():
        model.weight.data = model.weight.data.view(torch.bfloat16)

    def set_late():
        model.kept_late = torch.randn(3)

    def set_bias():
        model.bias = nn.Parameter(torch.randn(4))

    with checkpointer(store, {"model": model}) as saver:
        saver.step(1)
        for step, change in enumerate([transpose, shorten, view, set_late, set_bias], 2):
            pointer = model.weight.data_ptr()
            change()
            assert model.weight.data_ptr() == pointer
            expected = freeze({"model": model})["model"]
            saver.step(step).wait("local")
            found = Store(store).read(step)
            check_same({name: bits(found[f"model.{name}"]) for name in expected}, expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, in torch.compile
def test_wrappers_leave_the_names_as_they_are(store, other_store):
    def build(seed):
        torch.manual_seed(seed)
        return nn.Sequential(Counting(seed), nn.Linear(6, 6))

    plain = build(1)
    compiled = torch.compile(build(2))
    inner = build(3)
    inner[0] = torch.compile(inner[0])
    parallel = nn.DataParallel(torch.compile(build(4)))
    save(store, {"model": plain})
    for wrapped in (compiled, inner, parallel):
        restore(store, {"model": wrapped})
        for ours, theirs in zip(plain.parameters(), wrapped.parameters(), strict=True):
            assert torch.equal(ours, theirs)
    save(other_store, {"model": inner})
    fresh = build(5)
    restore(other_store, {"model": fresh})
    check_same(freeze(fresh), freeze(plain))
    assert (
        canonical("a._orig_mod.b._checkpoint_wrapped_module.my_orig_mod.c") == "a.b.my_orig_mod.c"
    )
