"""Boxes of a stored tensor into memory of a GPU, from many boxes in several parts."""

import pytest
import torch

import everstep
from divide import divide
from everstep.format.boxes import Box
from everstep.format.dtypes import ITEM_SIZES
from everstep.format.packs import Spec
from everstep.restore.deliver import as_items
from everstep.sharding.layout import LocalBox
from written import Written


def state(seed):
    torch.manual_seed(seed)
    with torch.device("cuda"):  # there: .cuda() would make those with gaps dense
        value = {
            "large": torch.randn(3000, 1111),
            "column": torch.randn(2000, 900).t(),
            "half": torch.randn(77, 33).bfloat16(),
            "image": torch.randn(8, 3, 5, 5).contiguous(memory_format=torch.channels_last),
            "gaps": torch.randn(400, 600)[::2, 1:500],
            "expanded": torch.full((3, 1), 1.0 * seed).expand(3, 50),
            "complex": torch.randn(9, 7, dtype=torch.complex128),
            "scalar": torch.tensor(2.5 * seed),
        }
    return {"value": value}


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_divided_checkpoint_on_a_gpu(store, seed):
    first, second = state(1), state(2)
    with everstep.Checkpointer(store, first) as saver:
        saver.save(1).wait("local")
    divide(store, 1, 2, seed)
    with everstep.Checkpointer(store, second) as restorer:
        assert restorer.restore(2) == 2
    for name, tensor in first["value"].items():
        assert as_items(second["value"][name]).equal(as_items(tensor)), name


@pytest.mark.parametrize("dtype", [name for name in ITEM_SIZES if hasattr(torch, name)])
def test_boxes_of_every_dtype(dtype):
    spec = Spec("x", dtype, (64, 40, 33))
    halves = [[[Box((0, 0, 0), (64, 17, 33))]], [[Box((0, 17, 0), (64, 23, 33))]]]
    source = Written(spec, halves, 1)
    inner, thin = Box((3, 5, 7), (50, 30, 20)), Box((9, 1, 1), (1, 30, 2))
    for box in (inner, thin, Box.whole(spec.shape)):
        for is_dense in (True, False):
            outer = box.lengths if is_dense else tuple(2 * length for length in box.lengths)
            raw = torch.zeros(torch.Size(outer).numel() * ITEM_SIZES[dtype], dtype=torch.uint8)
            memory = raw.cuda().view(getattr(torch, dtype)).view(outer)
            memory = memory if is_dense else memory[1::2, ::2, ::2]
            source.load([LocalBox(box, memory)])
            found = as_items(memory).cpu().contiguous().numpy().tobytes()
            assert found == source.bytes_of(box)
