"""Memory is used again when nobody can see it any more, and never before."""

import torch

from everstep.format.packs import Spec
from everstep.format.tables import TensorEntry
from everstep.restore.buffer_pool import Slabs


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
