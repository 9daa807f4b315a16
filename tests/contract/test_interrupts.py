"""Ctrl-C within step(), wherever it comes: that step is not saved, and all goes on."""

import contextlib
import json

import pytest
from logs import build, train
from runs import check_steps, checkpointer, snapshot

from everstep import Store, Unavailable
from everstep.capture import pool
from everstep.capture.captures import Captures
from everstep.capture.copier import Copier
from everstep.capture.log import Log
from everstep.capture.plan import Planner
from everstep.capture.pool import Pool
from everstep.capture.saves import Saves
from examples import slow

LAST, EVERY = 19, 4
POINTS = [
    (Planner, "plan"),
    (Pool, "acquire"),
    (Captures, "_describe"),
    (Copier, "begin"),
    (Log, "begun"),
    (Saves, "begin"),
    (Copier, "go_on"),
]


def interrupt(patch, kind, name, when):
    """After what this method does, where `when` says so. Before the call is over."""
    method = getattr(kind, name)

    def interrupted(self, *args, **options):
        found = method(self, *args, **options)
        if when():
            raise KeyboardInterrupt
        return found

    patch.setattr(kind, name, interrupted)


@pytest.mark.parametrize("strategy", ["log", *slow("full")])
@pytest.mark.parametrize("point", POINTS, ids=lambda point: f"{point[0].__name__}.{point[1]}")
def test_one_step_is_lost_and_no_memory(store, monkeypatch, strategy, point):
    if point[0] is Log and strategy == "full":
        return
    state, frozen, due = build(1), {}, []
    interrupt(monkeypatch, *point, lambda: due and due.pop())
    with checkpointer(store, state, strategy=strategy) as saver:
        for step in range(1, LAST + 1):
            train(state)
            if step % EVERY == 0:
                due.append(step)
                with pytest.raises(KeyboardInterrupt):
                    saver.step(step)
                handle = saver._saves.newest
                if point != (Copier, "go_on"):  # it was as good as over
                    with pytest.raises(Unavailable, match="interrupted by KeyboardInterrupt"):
                        handle.wait()
            else:
                saver.step(step).wait()
            frozen[step] = snapshot(state)
    found = check_steps(store, build(2), frozen)
    assert {step for step in range(1, LAST) if step % EVERY} <= set(found)


def test_restoring_after_it(store, monkeypatch):
    state, due = build(1), []
    interrupt(monkeypatch, Saves, "begin", lambda: due and due.pop())
    saver = checkpointer(store, state)
    train(state)
    saver.step(1)
    saved = snapshot(state)
    train(state)
    due.append(2)
    with pytest.raises(KeyboardInterrupt):
        saver.step(2)
    assert saver.restore() == 1
    assert snapshot(state) == saved
    train(state)
    saver.step(2).wait()
    saver.close()


def test_the_strategy_is_let_alone(store, monkeypatch):
    """`auto` goes on with its log."""
    state, due = build(1), []
    interrupt(monkeypatch, Log, "begun", lambda: due and due.pop())
    with checkpointer(store, state, strategy="auto") as saver:
        for step in range(1, LAST + 1):
            train(state)
            if step == 10:
                due.append(step)
                with pytest.raises(KeyboardInterrupt):
                    saver.step(step)
            else:
                saver.step(step).wait()


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_next_one_in_a_slot_has_headers_of_its_own(store, monkeypatch, when):
    """A file is what its header says, also where an interrupt came while headers were written."""
    clear, due = pool._clear_gaps, []

    def interrupted(*args):
        if when == "after":
            clear(*args)
        if due and due.pop():
            raise KeyboardInterrupt
        clear(*args)

    monkeypatch.setattr(pool, "_clear_gaps", interrupted)
    state = build(1)
    with checkpointer(store, state, strategy="log", base_every=3) as saver:
        for step in range(1, 14):
            train(state)
            due.append(step % 2 == 0)
            with contextlib.suppress(KeyboardInterrupt):
                saver.step(step).wait()
            due.clear()
    known = Store(store)
    assert len(known.steps()) >= 6
    for step in known.steps():
        manifest = known.manifest(step)
        for part, table in zip(manifest.all_parts, known.tables(manifest), strict=True):
            names = set()
            for link in part.packs:
                data = (store / link.path).read_bytes()
                header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
                names |= {n for n in header if n != "__metadata__" and not n.startswith("__pad__")}
            assert names == set(table.tensors)
