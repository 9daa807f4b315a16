"""What stays, what goes, and what is freed."""

import os
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep import Corrupt, Keep, Store
from everstep.format.manifest import CheckpointName
from everstep.store import catalog, retain
from stores import go_on, make_store, packs_of


def _kept(trainer, keep: Keep) -> list[str]:
    committed = catalog.committed(trainer.disk)
    gone = retain.superfluous(trainer.disk, committed, keep)
    return [f"{n.step}-{n.epoch}" for n in committed if n not in gone]


def test_the_last_of_the_run_and_of_each_branch(tmp_path):
    trainer = make_store(tmp_path, range(1, 7))
    go_on(trainer, 3, [4, 5])
    assert _kept(trainer, Keep(last=2)) == ["4-2", "5-1", "5-2", "6-1"]
    assert _kept(trainer, Keep(last=1)) == ["5-2", "6-1"]


def test_every_and_tags(tmp_path):
    trainer = make_store(tmp_path, {step: "best" if step == 3 else None for step in range(1, 9)})
    assert _kept(trainer, Keep(last=1, every=4)) == ["3-1", "4-1", "8-1"]
    assert _kept(trainer, Keep(last=1, tags=False)) == ["8-1"]


def test_deleting_frees_the_disk_and_touches_nothing_else(tmp_path):
    trainer = make_store(tmp_path, range(1, 6))
    size = sum((tmp_path / name).stat().st_size for name in packs_of(tmp_path))
    freed = retain.apply(trainer.disk, Keep(last=2))
    assert freed == size * 3 // 5
    assert sum((tmp_path / name).stat().st_size for name in packs_of(tmp_path)) == size - freed
    store = Store(tmp_path)
    assert store.steps() == [4, 5]
    assert store.verify().ok
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2
    assert retain.apply(trainer.disk, Keep(last=2)) == 0


def test_nothing_is_deleted_while_a_manifest_cannot_be_read(tmp_path):
    trainer = make_store(tmp_path, range(1, 4))
    path = tmp_path / "checkpoints/00000002-0001/manifest.json"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Corrupt, match=r"everstep rm .* 00000002-0001"):
        retain.delete(trainer.disk, [CheckpointName(1, 1)])
    assert len(packs_of(tmp_path)) == 3
    Store(tmp_path).delete("2-1")  # the damaged one itself may go
    assert Store(tmp_path).steps() == [1, 3]
    Store(tmp_path).delete(1)
    assert Store(tmp_path).verify().ok


def test_gc_leaves_the_newest_epoch_and_everything_young(tmp_path):
    trainer = make_store(tmp_path, [1])
    orphan = tmp_path / "data/00000002-0001-ab-0.safetensors"
    table = tmp_path / "data/tables/00.json"
    draft = tmp_path / "tags/best.json.aa.tmp"
    foreign = tmp_path / "data/notes.txt"
    (tmp_path / "tags").mkdir(exist_ok=True)
    for path in (orphan, table, draft, foreign):
        path.write_bytes(b"12345")
    store = Store(tmp_path)
    assert store.gc() == (0, 0)
    for path in (table, draft, foreign):
        os.utime(path, (time.time() - 7200,) * 2)
    assert store.gc() == (2, 10)
    trainer.claim(CheckpointName(1, 1))
    assert store.gc() == (1, 5)
    assert foreign.exists()
    assert store.verify().ok


@pytest.mark.parametrize("wrong", [{"last": 0}, {"every": -1}])
def test_keep_refuses_nonsense(wrong):
    with pytest.raises(ValueError, match="Keep needs"):
        Keep(**wrong)


@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=5),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_what_is_kept_always_verifies(tmp_path_factory, moves, last, every):
    path = tmp_path_factory.mktemp("store")
    trainer = make_store(path, [1])
    for count, back in moves:
        steps = Store(path).steps()
        start = steps[0 if back else -1]
        trainer = go_on(trainer, start, range(start + 1, start + 1 + count))
        retain.apply(trainer.disk, Keep(last=last, every=every))
        store = Store(path)
        assert store.verify().ok
        assert store.latest() == start + count
        assert len(packs_of(path)) == len(catalog.committed(trainer.disk))
