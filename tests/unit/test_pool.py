"""How much memory captures take by themselves."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from everstep.capture import pool
from everstep.format.packs import round_up
from everstep.keeper.wire import Place


@pytest.mark.parametrize(("ranks", "slots"), [(1, 3), (2, 3), (4, 2), (8, 2)])
def test_all_ranks_of_a_node_share_what_is_there(
    monkeypatch: pytest.MonkeyPatch, ranks: int, slots: int
) -> None:
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
