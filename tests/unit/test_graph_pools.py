"""Memory that is set apart for CUDA graphs, as torch's allocator tells of it: here by its word
alone, on a real one in tests/gpu."""

import pytest
import torch

from everstep.redo.graphs import Pools

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


class Allocator:
    """What it says, and how often all its segments were looked at."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.backend = "native"
        self.reserved = {FIRST: 1000, SECOND: 1000}
        self.segments = [self.segment(FIRST, (0, 0)), self.segment(SECOND, (0, 0))]
        self.looks = 0
        patch.setattr(torch.cuda, "get_allocator_backend", lambda: self.backend)
        patch.setattr(torch.cuda, "memory_stats_as_nested_dict", self._stats)
        patch.setattr(torch.cuda, "memory_snapshot", self._snapshot)

    def reserve(self, device: torch.device, pool: tuple[int, int]) -> None:
        self.reserved[device] += 1000
        self.segments.append(self.segment(device, pool))

    @staticmethod
    def segment(device: torch.device, pool: tuple[int, int]) -> dict[str, object]:
        return {"device": device.index, "segment_pool_id": pool}

    def _stats(self, device: torch.device) -> dict[str, object]:
        return {"reserved_bytes": {"all": {"allocated": self.reserved[device]}}}

    def _snapshot(self) -> list[dict[str, object]]:
        self.looks += 1
        return self.segments


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    return Allocator(monkeypatch)


def test_a_graph_is_found_when_its_memory_was_reserved(allocator: Allocator) -> None:
    pools = Pools()
    assert not pools.are_apart({FIRST, SECOND})
    looks = allocator.looks
    assert not pools.are_apart({FIRST, SECOND})
    assert allocator.looks == looks  # nothing new
    allocator.reserve(FIRST, (0, 0))
    assert not pools.are_apart({FIRST})
    allocator.reserve(SECOND, (3, 0))
    assert not pools.are_apart({FIRST})
    assert pools.are_apart({FIRST, SECOND})
    assert pools.are_apart({SECOND})


def test_one_that_was_there_before_and_is_gone_counts_on(allocator: Allocator) -> None:
    allocator.reserve(FIRST, (0, 7))
    pools = Pools()
    assert pools.are_apart({FIRST})
    allocator.segments.pop()
    assert pools.are_apart({FIRST})
    assert not pools.are_apart(set())


def test_an_allocator_that_does_not_tell_may_have_any(allocator: Allocator) -> None:
    allocator.backend = "cudaMallocAsync"
    assert Pools().are_apart({FIRST})
    assert not allocator.looks
