"""Bytes go where they belong, and nowhere else; what is delivered is what was verified; and memory
is used again when nobody can see it any more, and never before."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import xxhash

from everstep import Corrupt
from everstep.format.boxes import Box
from everstep.format.manifest import Part
from everstep.format.packs import Spec, lay_out
from everstep.format.tables import FileLink, TensorEntry, decode_table, encode_table
from everstep.restore import load as load_module
from everstep.restore.deliver import Delivery
from everstep.restore.load import Loader, MemorySource
from everstep.restore.plan import Target
from everstep.restore.records import Slabs
from everstep.sharding.layout import LocalBox
from stores import content, image_of


@pytest.mark.parametrize("before", [0, 1, 100, 4096, 5000])
@pytest.mark.parametrize("size", [1, 4095, 4096, 8192, 12_289, 50_000])
def test_only_the_chunks_own_bytes_are_written(before, size):
    """Whatever pages they share with others, in new memory and in memory that is in use."""
    memory = torch.full((70_000,), 7, dtype=torch.uint8)
    box = Box.whole((size,))
    delivery = Delivery.to(LocalBox(box, memory[before : before + size]))
    for turn in (1, 2):
        chunk = bytearray((turn * index) % 251 for index in range(size))
        delivery.put(Target("t", box, 0, 0, size, 0, size, 1), memoryview(chunk))
        assert bytes(memory[before : before + size].numpy()) == chunk
    assert (memory[:before] == 7).all()
    assert (memory[before + size :] == 7).all()


def test_memory_that_changes_after_the_check(monkeypatch):
    spec = Spec("x", "float32", (5000,))
    layout = lay_out([spec])
    expected = content(spec, 1)
    image = image_of(layout, {"x": expected})
    digests = [""] * layout.digest_count
    digests[layout.pieces[0].digest] = xxhash.xxh3_128_hexdigest(expected)
    part = Part(0, FileLink("table", 0), (FileLink("pack", layout.size),), tuple(digests), 1)
    source = MemorySource([memoryview(image)])
    copy_chunk = load_module.copy_chunk

    def copy_and_overwrite(*arguments):
        copy_chunk(*arguments)
        image[:] = bytes(len(image))

    monkeypatch.setattr(load_module, "copy_chunk", copy_and_overwrite)
    tensor = torch.zeros(5000)
    table = decode_table(encode_table(layout, {}, {}, {}), "a table")
    candidate = SimpleNamespace(sources=lambda part: nullcontext([[source]]), already=())
    wanted = {spec.name: [Delivery.to(LocalBox.whole(tensor))]}
    with Loader() as loader:
        loader.load(candidate, part, table, wanted)
        assert tensor.numpy().tobytes() == expected
        with pytest.raises(Corrupt):
            loader.load(candidate, part, table, wanted)


# ---- memory that is used again -------------------------------------------------------------------


def entries(*shapes, dtype="float32", strides=None):
    return [
        TensorEntry(Spec(f"t{index}", dtype, shape), (), strides=strides)
        for index, shape in enumerate(shapes)
    ]


def test_memory_comes_again_when_its_tensors_are_gone():
    slabs = Slabs()
    first = slabs.tensors(entries((3, 5), (7,)))
    place = first[0].data_ptr()
    assert all(tensor.data_ptr() % 64 == 0 for tensor in first)
    del first
    assert slabs.tensors(entries((3, 5), (7,)))[0].data_ptr() == place


def test_memory_that_somebody_holds_is_left_alone():
    slabs = Slabs()
    first = slabs.tensors(entries((3, 5), (7,)))
    kept = first[1].detach()[2:3].fill_(5.0)  # as an optimizer that keeps a part of a gradient
    del first
    second = slabs.tensors(entries((3, 5), (7,)))
    for tensor in second:
        tensor.fill_(9.0)
    assert kept.item() == 5.0
    place = kept.data_ptr()
    del kept, second
    regions = [slabs.tensors(entries((3, 5), (7,))) for _ in range(2)]
    assert len({region[0].data_ptr() for region in regions}) == 2
    assert any(region[1].data_ptr() + 8 == place for region in regions)


def test_larger_ones_get_new_memory_and_the_old_is_let_go():
    slabs = Slabs()
    del (small := [slabs.tensors(entries((4,)))])[:]
    assert slabs.tensors(entries((1 << 20,)))[0].shape == (1 << 20,)
    assert len(slabs._slabs) == 1
    assert small == []


def test_any_dtype_shape_and_strides():
    for dtype in ("bool", "bfloat16", "float8_e4m3fn", "complex128", "int64"):
        scalar, empty, matrix = Slabs().tensors(entries((), (0, 3), (2, 3), dtype=dtype))
        assert (scalar.shape, empty.shape, matrix.shape) == ((), (0, 3), (2, 3))
        assert str(matrix.dtype) == f"torch.{dtype}"
    [turned] = Slabs().tensors(entries((2, 3), strides=(1, 2)))
    assert turned.stride() == (1, 2)
    assert torch.equal(turned.copy_(torch.arange(6.0).view(2, 3)), torch.arange(6.0).view(2, 3))
