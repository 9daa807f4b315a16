"""Records that are committed together: when a group is, and that nobody ever waits for it in vain.

Where a group is not to end by itself, its bounds are an hour and more bytes than there are: then
each test ends only if what it is about ends the group.
"""

import os
import signal

import pytest
from keepers import Process, SlotState, Trainer, ended, until
from logs import build, train
from runs import check_same, check_steps, checkpointer, kinds, logged, snapshot

import everstep
import forked
from everstep import Keep, Store
from everstep.format.packs import lay_out
from everstep.store import catalog, retain
from everstep.store.names import CheckpointName
from everstep.tiers.disk import Disk
from stores import SMALL

ENDLESS = (1 << 40, 3_600_000)


def waiting(store, group_commit=ENDLESS, slots=8, **options):
    """A trainer whose state 1 is durable."""
    trainer = Trainer(store, slots=slots, group_commit=group_commit, **options).start()
    trainer.save(1)
    return trainer


def steps_of(store):
    return [name.step for name in catalog.committed(Disk(store))]


def check(store, last):
    """All up to this step are there, chained, and verify."""
    assert steps_of(store) == list(range(1, last + 1))
    assert Store(store).verify().ok
    chain = catalog.read_chain(Disk(store), CheckpointName(last, 1))
    assert [manifest.step for manifest in chain] == list(range(chain[0].step, last + 1))


def order(trainer):
    """What the keeper said of records and states, in its order: (type, sequence)."""
    kinds_told = ("written", "local")
    return [(e["type"], e["sequence"]) for e in trainer.events if e["type"] in kinds_told]


def test_so_many_bytes_are_a_group(store):
    with waiting(store, (2 * lay_out(SMALL).size, ENDLESS[1])) as trainer:
        for step in (2, 4):
            trainer.record(step)
            trainer.expect("written", step)
            assert steps_of(store) == list(range(1, step))
            trainer.record(step + 1)
            trainer.expect("local", step + 1)
            told = order(trainer)
            assert told.index(("written", step + 1)) < told.index(("local", step))
    check(store, 5)


def test_so_many_milliseconds_are_a_group(store):
    with waiting(store, (ENDLESS[0], 20)) as trainer:
        for step in (2, 3, 4):
            trainer.record(step)
            trainer.expect("local", step)
    check(store, 4)


def test_what_waits_anyway_is_a_group(store):
    """Without bounds: while the keeper waits for the word on the state, records come."""
    with Trainer(store, slots=8, confirms=False).start() as trainer:
        trainer.seal(1)
        trainer.expect("written", 1)
        for step in (2, 3, 4):
            trainer.record(step)
        trainer.client.settle()  # by now the keeper has heard of them
        trainer.client.confirm(1, None)
        trainer.expect("written", 4)  # none of them was confirmed yet
        assert steps_of(store) == [1]
        for step in (2, 3, 4):
            trainer.client.confirm(step, None)
        trainer.expect("local", 4)
        assert [step for kind, step in order(trainer) if kind == "local"] == [1, 2, 3, 4]
    check(store, 4)


def test_a_torn_record_in_the_middle(store):
    with waiting(store) as trainer:
        trainer.confirms = False
        for step in (2, 3, 4):
            trainer.record(step)
        trainer.expect("written", 4)
        trainer.client.confirm(3, "something has written to it")
        for step in (2, 4):
            trainer.client.confirm(step, None)
        trainer.client.flush(4)
        assert trainer.expect("failed", 3)["kind"] == "Unsupported"
        assert trainer.expect("failed", 4)["kind"] == "Unavailable"
        trainer.expect("local", 2)
        until(lambda: trainer.state_of(4) is SlotState.FAILED, "its slot is free again")
        assert trainer.state_of(3) is SlotState.FREE
    check(store, 2)


def test_whoever_waits_ends_the_group(store):
    with waiting(store) as trainer:
        for step in (2, 3):
            trainer.record(step)
        trainer.expect("written", 3)
        assert steps_of(store) == [1]
        trainer.client.flush(3)
        trainer.expect("local", 3)
        trainer.client.flush(5)  # they come later than the word that somebody waits for them
        for step in (4, 5):
            trainer.record(step)
            trainer.expect("local", step)
        trainer.record(6)
        trainer.expect("written", 6)
        assert steps_of(store) == [1, 2, 3, 4, 5]
    check_after_close(store, 6)


def check_after_close(store, last):
    until(lambda: steps_of(store)[-1] == last, f"step {last} is committed")
    with Trainer(store) as other:
        other.client.settle()
        check(store, last)


@pytest.mark.parametrize("what", ["state", "announced state"])
def test_what_is_no_record_ends_the_group(store, what):
    with waiting(store) as trainer:
        trainer.record(2)
        trainer.expect("written", 2)
        if what == "state":
            trainer.seal(3)
        else:
            trainer.announce(3)
        trainer.expect("local", 2)
        if what != "state":
            trainer.arrive(3, trainer.layout.size)
            trainer.end(SlotState.SEALED)
        trainer.expect("local", 3)
    check(store, 3)


def test_a_record_that_is_given_up_ends_the_group(store):
    with waiting(store) as trainer:
        trainer.record(2)
        trainer.expect("written", 2)
        trainer.announce(3, follows=2)
        trainer.client.settle()  # by now the keeper has heard of it
        trainer.end(SlotState.TORN)
        trainer.expect("local", 2)
        trainer.expect("failed", 3)
    check(store, 2)


@pytest.mark.parametrize("slots", [2, 3, 4])
def test_no_free_slot_ends_the_group(store, slots):
    with waiting(store, slots=slots) as trainer:
        for step in range(2, slots + 2):
            trainer.record(step)
        trainer.expect("local", 2)
        trainer.client.flush(slots + 1)
        trainer.expect("local", slots + 1)
    check(store, slots + 1)


def test_a_trainer_that_leaves_ends_the_group(store):
    with waiting(store) as trainer:
        for step in (2, 3):
            trainer.record(step)
    check_after_close(store, 3)


GROUP = """
trainer.start()
trainer.save(1)
for step in (2, 3, 4):
    trainer.record(step)
trainer.expect("written", 4)
print("sealed", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_trainer_that_is_killed_loses_nothing_that_was_sealed(store, is_stopped):
    """`is_stopped`: the keeper, and so it hears of the death before it has written anything."""
    script = GROUP
    if is_stopped:
        script = GROUP.replace("for step", "os.kill(trainer.keeper, 19)\nfor step", 1)
        script = script.replace('trainer.expect("written", 4)', "print(trainer.keeper, flush=True)")
    process = Process(store, script, group_commit=ENDLESS)
    keeper = int(process.read()) if is_stopped else None
    assert process.read() == "sealed"
    if not is_stopped:
        assert steps_of(store) == [1]
    process.kill()
    if keeper:
        os.kill(keeper, signal.SIGCONT)
    with Trainer(store) as other:
        other.client.settle()
        check(store, 4)


@pytest.mark.parametrize("is_awaited", [False, True])
def test_a_keeper_that_dies_with_a_group(store, is_awaited):
    """The next one finds the records, and knows whether somebody waits."""
    with waiting(store) as trainer:
        for step in (2, 3):
            trainer.record(step)
        trainer.expect("written", 3)
        keeper = trainer.keeper
        if is_awaited:
            os.kill(keeper, signal.SIGSTOP)
            trainer.client.flush(3)
        os.kill(keeper, signal.SIGKILL)
        assert ended(keeper)
        if not is_awaited:
            trainer.expect("written", 3, count=2)
            assert steps_of(store) == [1]
            trainer.client.flush(3)
        trainer.expect("local", 3)
    check(store, 3)


# ---- a whole run -------------------------------------------------------------------------------


def grouped(store, state, **options):
    """A Checkpointer whose groups never end by themselves, with memory for some."""
    options = {"group_commit": ENDLESS, "memory_budget": 64 << 20, **options}
    return logged(store, state, **options)


def test_a_run(store):
    """Waiting in all ways that there are, and restoring every step."""
    state, frozen = build(1), {}
    with grouped(store, state) as saver:
        for step in range(1, 31):
            train(state)
            handle = saver.step(step)
            frozen[step] = snapshot(state)
            if step == 5:
                handle.wait("local")
                assert Store(store).latest() == 5
            if step == 12:
                saver.wait("local")
                assert Store(store).latest() == 12
            if step == 20:
                saver.save(20, tag="twenty")
                assert Store(store).latest() == 20
            if step == 25:
                assert saver.restore() == 25
    assert kinds(store) == "b" + 24 * "r" + "b" + 4 * "r"
    assert Store(store).verify().ok
    assert check_steps(store, build(2), frozen) == list(range(1, 31))


def test_memory_ends_groups(store):
    """Three slots, and nobody who waits for anything but memory."""
    state, frozen = build(1), {}
    with grouped(store, state, memory_budget=None) as saver:
        for step in range(1, 41):
            train(state)
            saver.step(step)
            frozen[step] = snapshot(state)
        assert saver.metrics.skips == saver.metrics.failures == 0
    assert check_steps(store, build(2), frozen) == list(range(1, 41))


def test_groups_with_retention_and_bases(store):
    state, frozen = build(1), {}
    options = {"keep": Keep(last=4), "base_every": 7, "window": 3}
    with grouped(store, state, group_commit=(1 << 20, 5), **options) as saver:
        for step in range(1, 61):
            train(state)
            saver.step(step)
            frozen[step] = snapshot(state)
    retain.apply(Disk(store), options["keep"])  # the keeper does it after it has told of the commit
    assert Store(store).verify().ok
    assert set(range(57, 61)) <= set(check_steps(store, build(2), frozen))


def is_ended(store, name):
    saver = grouped(store, state := build(1))
    for step in range(1, 8):
        train(state)
        last = saver.step(step)
        last.wait("local" if step == 1 else "held")
    print(last.level, saver.metrics.commits, flush=True)
    os.kill(os.getpid(), signal.Signals[name])
    signal.pause()


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_a_run_that_is_ended_by_a_signal(store, name):
    done = forked.run(is_ended, store, name)
    assert done.returncode == -signal.Signals[name]
    assert done.stdout.split() == ["held", "1"]
    fresh, reference = build(2), build(1)  # in this order: it seeds torch's generator
    for _ in range(7):
        train(reference)
    expected = snapshot(reference)
    with checkpointer(store, fresh) as restorer:
        assert restorer.restore() == 7
        check_same(snapshot(fresh), expected)
    assert Store(store).steps() == list(range(1, 8))


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (7, TypeError),
        ([1, 1, 1], TypeError),
        ((1,), TypeError),
        ((1.5, 1), TypeError),
        ((True, 1), TypeError),
        ((1, "1"), TypeError),
        ((0, 1), ValueError),
        ((1, 0), ValueError),
        ((1, -1.0), ValueError),
        ((1, float("nan")), ValueError),
        ((1, float("inf")), ValueError),
    ],
)
def test_settings(store, value, error):
    with pytest.raises(error, match="group_commit must be"):
        everstep.Checkpointer(store, build(1), group_commit=value)
