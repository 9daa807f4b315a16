"""Records that wait are committed together: what a group is, and what becomes of it."""

import os
import signal

import pytest
from keepers import Process, SlotState, Trainer, ended, until

from everstep import Store
from everstep.format.manifest import CheckpointName
from everstep.store import catalog
from everstep.tiers.disk import Disk


def waiting(store, *steps):
    """A trainer whose records wait while the keeper waits for the word on state 1."""
    trainer = Trainer(store, slots=8, confirms=False).start()
    trainer.seal(1)
    trainer.expect("written", 1)
    for step in steps:
        trainer.record(step)
    trainer.client.settle()  # by now the keeper has heard of them
    return trainer


def steps_of(store):
    return [name.step for name in catalog.committed(Disk(store))]


def check(store, last):
    """All up to this step are there, chained, and verify."""
    assert steps_of(store) == list(range(1, last + 1))
    assert Store(store).verify().ok
    chain = catalog.read_chain(Disk(store), CheckpointName(last, 1))
    assert [manifest.step for manifest in chain] == list(range(chain[0].step, last + 1))


def committed(trainer):
    return [event["sequence"] for event in trainer.events if event["type"] == "local"]


def test_what_waits_anyway_is_a_group(store):
    with waiting(store, 2, 3, 4) as trainer:
        trainer.client.confirm(1, None)
        trainer.expect("written", 4)  # none of them was confirmed yet
        assert steps_of(store) == [1]
        for step in (2, 3, 4):
            trainer.client.confirm(step, None)
        trainer.expect("local", 4)
        assert committed(trainer) == [1, 2, 3, 4]
    check(store, 4)


def test_a_torn_record_in_the_middle(store):
    with waiting(store, 2, 3, 4) as trainer:
        trainer.client.confirm(1, None)
        trainer.expect("written", 4)
        trainer.client.confirm(3, "something has written to it")
        for step in (2, 4):
            trainer.client.confirm(step, None)
        assert trainer.expect("failed", 3)["kind"] == "Unsupported"
        assert trainer.expect("failed", 4)["kind"] == "Unavailable"
        trainer.expect("local", 2)
        until(lambda: trainer.state_of(4) is SlotState.FAILED, "its slot is free again")
        assert trainer.state_of(3) is SlotState.FREE
    check(store, 2)


@pytest.mark.parametrize("what", ["state", "announced", "torn"])
def test_what_is_no_sealed_record_is_not_taken_along(store, what):
    with waiting(store, 2) as trainer:
        if what == "state":
            trainer.seal(3)
        else:
            trainer.announce(3, follows=2)
        for step in (1, 2):
            trainer.client.confirm(step, None)
        trainer.expect("local", 2)
        if what == "announced":
            trainer.arrive(3, trainer.layout.size)
        if what != "state":
            trainer.end(SlotState.TORN if what == "torn" else SlotState.SEALED)
        trainer.client.confirm(3, None)
        trainer.expect("failed" if what == "torn" else "local", 3)
    check(store, 2 if what == "torn" else 3)


GROUP = """
trainer.start()
trainer.save(1)
os.kill(trainer.keeper, 19)
for step in (2, 3):
    trainer.record(step)
print(trainer.keeper, flush=True)
sys.stdin.read()
"""


def test_a_trainer_that_is_killed_loses_nothing_that_was_sealed(store):
    """The keeper hears of the death before it has written anything."""
    process = Process(store, GROUP)
    keeper = int(process.read())
    process.kill()
    os.kill(keeper, signal.SIGCONT)
    with Trainer(store) as other:
        other.client.settle()
        check(store, 3)


def test_a_keeper_that_dies_with_a_group(store):
    """The next one finds the records."""
    with waiting(store, 2, 3) as trainer:
        trainer.client.confirm(1, None)
        trainer.expect("written", 3)
        keeper = trainer.keeper
        os.kill(keeper, signal.SIGKILL)
        assert ended(keeper)
        trainer.expect("written", 2, count=2)
        for step in (2, 3):
            trainer.client.confirm(step, None)
        trainer.expect("local", 3)
    check(store, 3)
