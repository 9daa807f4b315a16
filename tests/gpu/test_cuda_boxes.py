"""Boxes of a stored tensor into memory of a GPU, from many boxes in several parts."""

import pytest
import torch

from everstep.format.boxes import Box
from everstep.format.dtypes import ITEM_SIZES
from everstep.format.packs import Spec
from everstep.restore.deliver import as_items
from everstep.sharding.layout import LocalBox
from written import Written


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
