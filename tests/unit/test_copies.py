"""How tensors are cut into units, how far an image is told to be whole, what memory captures
take."""

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everstep.capture import copies, pool
from everstep.capture.copies import Batch, Progress
from everstep.capture.plan import STILL_BYTES_MIN, Planner, Still
from everstep.format.packs import round_up
from everstep.keeper.arena import Arena
from everstep.keeper.wire import Place
from everstep.sharding.leaves import Leaf
from everstep.state.view import Collected, Walk


def collected(leaves):
    names = {id(leaf.tensor): leaf.name for leaf in leaves}
    return Collected(Walk(tuple(leaves), names, {}, {}), (), {}, {}, {})


@given(
    sizes=st.lists(st.integers(0, 5000), max_size=12), share=st.sampled_from([64, 1000, 1 << 20])
)
def test_all_bytes_are_copied_whatever_the_units(sizes, share):
    kept = copies._SHARE_BYTES
    copies._SHARE_BYTES = share
    try:
        leaves = [
            Leaf(f"t{index}", torch.randint(0, 256, (size,), dtype=torch.uint8), 0)
            for index, size in enumerate(sizes)
        ]
        leaves.append(Leaf("strided", torch.randn(30, 20).t(), 0))
        plan = Planner().plan(collected(leaves))
        batch = Batch.of(leaves, plan)
        arena = Arena.create(1, 1 << 16, plan.layout.size)
        arrived = []
        batch.copy_from_cpu(arena, 0, None, arrived.append)
        assert sorted(arrived) == sorted(batch.starts())
        for leaf in leaves:
            at = plan.offsets[leaf.name]
            data = leaf.tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            assert bytes(arena.image(0)[at : at + len(data)]) == data
        assert all(sum(size for _, _, size in part) <= share for part in batch.shares)
    finally:
        copies._SHARE_BYTES = kept


@given(count=st.integers(1, 60), seed=st.integers(0, 99))
def test_nothing_is_told_that_has_not_arrived(count, seed):
    unit = copies._SHARE_BYTES // 2
    order = list(range(0, count * unit, unit))
    random.Random(seed).shuffle(order)
    arrived, told = set(), []

    def tell(whole):
        assert all(start in arrived for start in order if start < whole)
        told.append(whole)

    progress = Progress(order, count * unit, tell)
    for start in order:
        arrived.add(start)
        progress.arrived(start)
    assert told == sorted(told)
    assert len(told) <= copies._MESSAGES_MAX


def test_nothing_is_told_of_which_a_second_copy_is_still_to_come():
    unit, told = copies._SHARE_BYTES, []
    progress = Progress([0, unit, 0, 2 * unit], 3 * unit, told.append)
    for start in (0, unit):
        progress.arrived(start)
    assert not told
    progress.arrived(0)
    assert told == [2 * unit]


@pytest.mark.parametrize(("ranks", "slots"), [(1, 3), (2, 3), (4, 2), (8, 2)])
def test_all_ranks_of_a_node_share_what_is_there(monkeypatch, ranks, slots):
    """Each is asked before any has taken its part."""
    size = 1 << 20
    client = SimpleNamespace(
        place=Place("run", tuple(range(ranks))),
        add_arena=lambda key, arena: None,
        release_arena=lambda key: None,
    )
    of_slot = 2 * round_up(size)
    monkeypatch.setattr(pool, "available_memory", lambda: 2 * 2 * 3 * of_slot)
    found = pool.Pool(cast(Any, client), None)
    _, arena = found._create(size - pool._STILL_SLACK_BYTES, size)
    assert arena.slot_count == slots
    arena.close()


def test_what_is_told_again_moves_nothing():
    state = collected([Leaf(name, torch.zeros(STILL_BYTES_MIN)) for name in ("a", "b")])
    still = Still()
    planner = Planner(still)
    still.hear({"a": True})
    plan = planner.plan(state)
    first = still.look(state.walk)
    still.hear({"a": True})
    assert still.look(state.walk) is first
    assert planner.plan(state) is plan
    still.hear({"a": False})
    assert not still.look(state.walk)
    still.hear({"a": True})  # what was taken for still, and was not, is not tried again
    assert not still.look(state.walk)
