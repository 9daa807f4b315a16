"""Bytes go where they belong, and nowhere else."""

import pytest
import torch

from everstep.format.boxes import Box
from everstep.restore.deliver import Delivery
from everstep.restore.plan import Target
from everstep.sharding.layout import LocalBox


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
