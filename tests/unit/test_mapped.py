"""Local memory as boxes of global tensors, against arrays of numbers; without a keeper."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from partitions import shapes
from torch import nn

from everstep import Mismatch, Shard, Unsupported
from everstep.format.boxes import Box
from everstep.format.manifest import Manifest
from everstep.format.packs import Spec
from everstep.format.tables import TensorEntry
from everstep.sharding.mapped import Mapped
from everstep.state.placement import Saved
from everstep.state.view import State
from examples import examples

KEYS = ("exp_avg", "exp_avg_sq")
PADDING = 3


class Flat(nn.Module):
    """A rank of several, with a range of all tensors, one after another, and padding."""

    def __init__(self, size):
        super().__init__()
        self.memory = nn.Parameter(torch.zeros(size))


def filled(shards):
    """The global arrays that shards make up, -1 where none is."""
    found = {}
    for name, shape, box, values in shards:
        array = found.setdefault(name, np.full(shape, -1.0))
        part = array[(*box.slices_in(Box.whole(shape)), ...)]
        assert np.all(part == -1)
        array[(*box.slices_in(Box.whole(shape)), ...)] = values
    return found


@settings(max_examples=examples(200))
@given(st.data())
def test_a_range_is_views_of_its_memory(data):
    shape = data.draw(shapes())
    count = int(np.prod(shape))
    start = data.draw(st.integers(0, count))
    length = data.draw(st.integers(0, count - start))
    memory = torch.arange(start, start + length)
    shards = Shard.flat("w", shape, start, memory)
    for shard in shards:
        numbers = torch.arange(count).view(shape)[(*shard.box.slices_in(Box.whole(shape)), ...)]
        assert torch.equal(shard.tensor, numbers)
        if shard.tensor.numel():
            assert shard.tensor.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
    assert sum(shard.tensor.numel() for shard in shards) == length
    if shape:
        assert shards  # of nothing, one that says to what it belongs


def test_what_is_no_shard_is_refused():
    with pytest.raises(ValueError, match="does not lie in the global shape"):
        Shard("w", (4, 4), (2, 0), torch.zeros(3, 4))
    with pytest.raises(ValueError, match="does not lie in the global shape"):
        Shard("w", (4, 4), (0,), torch.zeros(3, 4))
    with pytest.raises(ValueError, match="is no range"):
        Shard.flat("w", (4, 4), 10, torch.zeros(7))
    with pytest.raises(ValueError, match="is no range"):
        Shard.flat("w", (4, 4), 0, torch.zeros(4, 4))


@pytest.mark.parametrize(
    ("shards", "problem"),
    [
        (lambda t: [Shard("w", (4,), (0,), torch.zeros(4))], "no view of this tensor's memory"),
        (lambda t: [Shard("w", (2, 2), (0, 0), t.double())], "no view of this tensor's memory"),
        (lambda t: [Shard("a", (2, 2), (0, 0), t), Shard("b", (2, 2), (0, 0), t)], "8 elements"),
    ],
)
def test_a_layout_gives_parts_of_the_memory(shards, problem):
    tensor = torch.zeros(2, 2)
    with pytest.raises(ValueError, match=problem):
        Mapped(lambda name, tensor: shards(tensor)).name_of("model.w", tensor)


def ranges(sizes, ranks):
    """(start, end) of each rank's share of all numbers, as large as the others'; the last is
    padded."""
    share = -(-sum(sizes) // ranks)
    return [(rank * share, (rank + 1) * share) for rank in range(ranks)]


def layout_of(tensors, start):
    """Of the rank whose memory begins at number `start` of all."""

    def layout(name, memory):
        assert name == "model.memory"
        found, first = [], 0
        for name, shape in tensors.items():
            size = int(np.prod(shape))
            begin, end = max(first, start), min(first + size, start + len(memory) - PADDING)
            at = max(begin, min(end, begin)) - start if begin < end else 0
            part = memory[at : at + max(0, end - begin)]
            found += Shard.flat(name, shape, begin - first if begin < end else 0, part)
            first += size
        return found

    return layout


def trained(size, layout):
    """A state whose memory and moments are numbers of their own."""
    model = Flat(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.memory.grad = torch.zeros(size)
    optimizer.step()
    state = State({"model": model, "optimizer": optimizer}, layout=layout)
    return model, optimizer, state


@settings(max_examples=examples(100))
@given(st.data())
def test_ranks_make_up_tensors_and_optimizer_state_and_take_them_back(data):
    listed = data.draw(
        st.lists(shapes().filter(lambda s: s and np.prod(s)), min_size=1, max_size=4)
    )
    tensors = {f"model.{n}": tuple(shape) for n, shape in enumerate(listed)}
    sizes = [int(np.prod(shape)) for shape in tensors.values()]
    ranks = data.draw(st.integers(1, 4))
    shards, tables = [], []
    for start, end in ranges(sizes, ranks):
        size = end - start + PADDING
        model, optimizer, state = trained(size, layout_of(tensors, start))
        with torch.no_grad():
            model.memory.copy_(torch.arange(start, start + size))
            for number, key in enumerate(KEYS, 1):
                moment = torch.arange(start, start + size) + 1000.0 * number
                optimizer.state[model.memory][key].copy_(moment)
        collected = state.collect()
        shards += [
            (leaf.name, leaf.shape, leaf.box, leaf.tensor.detach().numpy())
            for leaf in collected.walk.leaves
            if not leaf.name.endswith(".step")
        ]
        steps = {leaf.name: leaf.tensor for leaf in collected.walk.leaves} if ranks == 1 else {}
        for name in tensors if ranks == 1 else ():
            assert steps[f"optimizer.{name}.step"].item() == 1
        tables.append(collected.walk.optimizers["optimizer"])
        assert tables[-1]["groups"] == dict.fromkeys(tensors, 0)
    found, first = filled(shards), 0
    for (name, shape), size in zip(tensors.items(), sizes, strict=True):
        numbers = np.arange(first, first + size).reshape(shape)
        assert np.array_equal(found[name], numbers)
        for number, key in enumerate(KEYS, 1):
            assert np.array_equal(found[f"optimizer.{name}.{key}"], numbers + 1000 * number)
        first += size
    again = data.draw(st.integers(1, 4))
    for start, end in ranges(sizes, again):
        _takes_back(tensors, found, start, end)


def _takes_back(tensors, found, start, end, steps=None):
    size = end - start + PADDING
    model, optimizer, state = trained(size, layout_of(tensors, start))
    if size % 2:
        optimizer.state.clear()
    steps = steps or dict.fromkeys(tensors, 7.0)
    arrays = found | {f"optimizer.{n}.step": np.array(v, np.float32) for n, v in steps.items()}
    sets = {"optimizer": [{"lr": 0.5, "betas": {"$": "tuple", "v": [0.5, 0.5]}}]}
    saved = Saved(
        {name: whole(name, array.shape) for name, array in arrays.items()},
        {
            "optimizer": {
                "groups": dict.fromkeys(tensors, 0),
                "state": {name: ["step", *KEYS] for name in tensors},
            }
        },
        Manifest(7, 1, "run", "", (), {}, sets),
    )
    placement = state.place(saved)
    state.prepare(placement, None)
    placement.problems = [text for text in placement.problems if not text.startswith("extra")]
    placement.check(1, "a test")
    with torch.no_grad():
        for name, (_, destinations) in placement.destinations.items():
            for destination in destinations:
                array = arrays[name]
                inside = array[(*destination.box.slices_in(Box.whole(array.shape)), ...)]
                destination.tensor.copy_(torch.from_numpy(np.array(inside)))
    placement.finish()
    total = sum(int(np.prod(shape)) for shape in tensors.values())
    count = max(0, min(total, end) - start)
    here = torch.arange(start, start + count)
    assert torch.equal(model.memory[:count].detach(), here.float())
    if count:
        moments = optimizer.state[model.memory]
        assert moments["step"].item() == 7
        for number, key in enumerate(KEYS, 1):
            assert moments[key].shape == model.memory.shape
            assert torch.equal(moments[key][:count], here + 1000.0 * number)
    assert optimizer.param_groups[0]["lr"] == 0.5


def whole(name, shape):
    return TensorEntry(Spec(name, "float32", tuple(shape)), (), (), "cpu", None)


TWO = {"model.a": (2, 3), "model.b": (4,)}
ARRAYS = {
    name: np.arange(first, first + int(np.prod(shape))).reshape(shape) + base * 1000.0
    for prefix, suffix, base in (
        ("", "", 0),
        ("optimizer.", ".exp_avg", 1),
        ("optimizer.", ".exp_avg_sq", 2),
    )
    for (key, shape), first in zip(TWO.items(), (0, 6), strict=True)
    for name in [f"{prefix}{key}{suffix}"]
}


def test_one_parameter_has_one_step():
    _takes_back(TWO, ARRAYS, 0, 10)
    with pytest.raises(Mismatch, match="here it is one with"):
        _takes_back(TWO, ARRAYS, 0, 10, {"model.a": 7.0, "model.b": 8.0})
    _takes_back(TWO, ARRAYS, 0, 6, {"model.a": 7.0, "model.b": 8.0})  # b is not here


def test_state_of_another_shape_is_refused():
    model = Flat(10 + PADDING)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state[model.memory]["rows"] = torch.zeros(2)
    state = State({"model": model, "optimizer": optimizer}, layout=layout_of(TWO, 0))
    with pytest.raises(Unsupported, match="another shape"):
        state.collect()


def test_an_object_cannot_hold_what_is_boxes():
    model = Flat(10 + PADDING)
    state = State({"model": model, "best": model.memory}, layout=layout_of(TWO, 0))
    with pytest.raises(Unsupported, match="cannot be part of an object"):
        state.collect()


def test_names_of_a_stage_are_those_of_the_model():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    state = State(
        {"model": model, "optimizer": optimizer},
        layout=lambda name, tensor: (
            name.replace("model.", "model.stage1.") if "1." in name else None
        ),
    )
    collected = state.collect()
    names = {leaf.name for leaf in collected.walk.leaves}
    assert {"model.0.weight", "model.stage1.1.running_mean"} <= names
    assert "optimizer.model.stage1.1.weight.momentum_buffer" in names
    assert set(collected.walk.optimizers["optimizer"]["groups"]) == {
        "model.0.weight", "model.0.bias", "model.stage1.1.weight", "model.stage1.1.bias",
    }  # fmt: skip
