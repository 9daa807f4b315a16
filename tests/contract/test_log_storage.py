"""strategy="log" on a disk that lies, fills up or is cleaned up, and with keepers that die."""

import contextlib
import itertools
import json
import os
import random
import signal

import pytest
from keepers import ended, until
from logs import build, train
from runs import (
    check_same,
    check_steps,
    checkpointer,
    end_keeper,
    kinds,
    logged,
    run_logged,
    snapshot,
)
from test_bad_disk import fill, small  # noqa: F401 - a fixture

from everstep import Conflict, Corrupt, EverstepError, Store, Unavailable
from examples import slow
from stores import files_of, packs_of


def files_behind(store, step):
    """Manifest, table and packs of a step's own."""
    manifest = Store(store).manifest(step)
    own = [store / f"checkpoints/{step:08}-{manifest.epoch:04}/manifest.json"]
    packs = [store / link.path for link in manifest.files if link.path.endswith("safetensors")]
    tables = [store / link.path for link in manifest.files if link.path.endswith("json")]
    return {"manifest": own, "pack": packs, "table": tables}


def flip(path, rng):
    data = bytearray(path.read_bytes())
    place = rng.randrange(len(data))
    if path.suffix == ".safetensors":  # where a tensor is that every replay reads
        header = 8 + int.from_bytes(data[:8], "little")
        pieces = [(name, e) for name, e in json.loads(data[8:header]).items() if name[:2] != "__"]
        recorded = [piece for piece in pieces if piece[0].startswith("@")]
        start, end = rng.choice(recorded or pieces)[1]["data_offsets"]
        place = header + rng.randrange(start, end)
    data[place] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def cut(path, rng):
    path.write_bytes(path.read_bytes()[: -1 - rng.randrange(path.stat().st_size // 2)])


def remove(path, rng):
    path.unlink()


@pytest.mark.parametrize(
    ("at", "what", "damage"),
    [
        (1, "pack", flip),
        (4, "pack", cut),
        (6, "manifest", flip),
        (6, "pack", remove),
        (8, "pack", flip),
        (8, "manifest", remove),
        *slow(*itertools.product([1, 4, 6, 8], ["manifest", "pack"], [flip, cut, remove])),
    ],
)
def test_damage_in_a_chain(store, damage, what, at, caplog):
    """b1 r2 r3 r4 r5 b6 r7 r8: what does not need the damaged step is restored, and no other."""
    frozen = run_logged(store, build(1), train, base_every=5)
    assert kinds(store) == "brrrrbrr"
    chosen = random.Random(at)
    damage(files_behind(store, at)[what][0], chosen)
    lost = {1: range(1, 6), 4: (4, 5), 6: (6, 7, 8), 8: (8,)}[at]
    remains = [step for step in range(1, 9) if step not in lost]
    gone = damage is remove and what == "manifest"
    verdict = Store(store).verify()
    assert not verdict.ok or (gone and at == 8)
    for step in {*lost} - ({at} if gone else set()):
        assert not Store(store).verify(step).ok
    fresh = build(2)
    with checkpointer(store, fresh) as restorer:
        end_keeper(store)  # and with it the memory that would serve instead
        assert restorer.restore() == remains[-1]
        tried = caplog.text.count("cannot be restored")
        assert (tried > 0) == (8 in lost and not (gone and at == 8))
        assert tried <= 2  # the newest, and a manifest that cannot be read
        check_same(snapshot(fresh), frozen[remains[-1]])
        for step in sorted({*lost} - ({at} if gone else set())):
            with pytest.raises(Corrupt):
                restorer.restore(step)
        for step in remains:
            assert restorer.restore(step) == step
            check_same(snapshot(fresh), frozen[step])
        train(fresh)
        restorer.step(20).wait("local")
    assert Store(store).latest() == 20


def test_a_record_of_another_chain_in_its_place(store, other_store):
    """The same steps of another run: every file is whole, but the chain says no."""
    run_logged(store, build(1), train, steps=4)
    run_logged(other_store, build(3), train, steps=4)
    ours, theirs = files_behind(store, 3), files_behind(other_store, 3)
    ours["manifest"][0].write_bytes(theirs["manifest"][0].read_bytes())
    for path in theirs["pack"] + theirs["table"]:
        (store / path.relative_to(other_store)).write_bytes(path.read_bytes())
    assert not Store(store).verify().ok
    fresh = build(2)
    with checkpointer(store, fresh) as restorer:
        end_keeper(store)
        for step in (4,):
            with pytest.raises(Corrupt):
                restorer.restore(step)
        assert restorer.restore() in (2, 3)  # the one in its place follows its own step 2


def test_deleting_what_a_record_follows(store):
    run_logged(store, build(1), train, base_every=5)
    before = files_of(store)
    for step in (1, 3, 6, 7):
        with pytest.raises(Conflict, match="Delete what follows first"):
            Store(store).delete(step)
    assert files_of(store) == before
    for step in (8, 7, 6):
        assert Store(store).delete(step) > 0
    assert kinds(store) == "brrrr"
    assert Store(store).verify().ok
    assert len(packs_of(store)) == 5


def test_a_full_disk_ends_the_chain(small, caplog):  # noqa: F811
    store, state, frozen = small / "store", build(1, width=1000), {}
    failed = []
    with logged(store, state) as saver:
        for step in range(1, 11):
            if step == 4:
                filler = fill(small)
            if step == 7:
                filler.unlink()
            train(state)
            handle = saver.step(step)
            frozen[step] = snapshot(state)
            try:
                handle.wait("local")
            except Unavailable:
                failed.append(step)
        assert failed == [4, 5, 6]
        assert "No space left" in caplog.text
        assert saver.metrics.failures == 3
    assert kinds(store) == "brrbrrr"
    assert Store(store).verify().ok
    assert check_steps(store, build(2, width=1000), frozen) == [1, 2, 3, 7, 8, 9, 10]


def test_a_full_disk_that_nobody_waits_for(small):  # noqa: F811
    """Records that follow one that failed fail as well: no gap in a chain, and all handles tell."""
    store, state, frozen, handles = small / "store", build(1, width=1000), {}, {}
    with logged(store, state) as saver:
        for step in itertools.count(1):
            if step == 10:
                filler = fill(small)
            if step == 25:
                filler.unlink()
            train(state)
            handles[step] = saver.step(step)
            frozen[step] = snapshot(state)
            if step > 38:  # what failed may be told late: then the next ones are saved
                with contextlib.suppress(EverstepError):
                    handles[step].wait("local")
                    break
            assert step < 80
    saved = {step for step, handle in handles.items() if handle.error is None}
    assert saved == {*Store(store).steps()}
    assert Store(store).verify().ok
    check_steps(store, build(2, width=1000), frozen)


@pytest.mark.parametrize("waits", [True, False])
def test_the_keeper_dies_in_the_middle_of_a_chain(store, waits):
    state, frozen = build(1), {}
    with logged(store, state) as saver:
        for step in range(1, 21):
            if step in (5, 6, 13):
                keeper = saver._client.keeper_pid
                os.kill(keeper, signal.SIGKILL)
                if waits:
                    assert ended(keeper)
            train(state)
            handle = saver.step(step)
            frozen[step] = snapshot(state)
            if step % 4 == 0:
                until(handle.done, "the save comes to an end")
        until(handle.done, "the last save comes to an end")
    assert Store(store).latest() == 20
    assert Store(store).verify().ok
    check_steps(store, build(2), frozen)


def test_a_log_whose_newest_step_is_deleted_begins_anew(store):
    """Nothing followed it when it was deleted; what comes next must not go on from it."""
    state, frozen = build(1), {}
    with logged(store, state) as saver:
        for step in range(1, 10):
            train(state)
            handle = saver.step(step)
            if step == 5:
                with pytest.raises(Unavailable, match=r"00000004-0001.*was deleted meanwhile"):
                    handle.wait()
            else:
                handle.wait()
            frozen[step] = snapshot(state)
            if step == 4:
                Store(store).delete(4)
    assert Store(store).steps() == [1, 2, 3, 6, 7, 8, 9]
    assert kinds(store) == "brrbrrr"
    check_steps(store, build(2), frozen)
