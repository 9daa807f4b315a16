"""Images that are written while they still arrive, and those that never come to an end."""

import os
import signal

import numpy as np
import pytest
from keepers import PATIENCE_S, Process, Trainer, crash, ended, until

import stores
from everstep import Checkpointer, Store
from everstep.keeper.arena import Arena, SlotState
from everstep.keeper.job import ALL, Job
from everstep.tiers.files import EXTENT_BYTES

LARGE = (*stores.SMALL, stores.Spec("large", "float32", (3 * EXTENT_BYTES // 4,)))
HALF = 3 * EXTENT_BYTES // 2


def bytes_on_disk(store):
    """What was written already: files are allocated at once, so that their size says nothing."""
    return sum(np.count_nonzero(np.fromfile(path, np.uint8)) for path in packs(store))


def packs(store):
    return list((store / "data").glob("*.safetensors"))


def check(store, step):
    found = Store(store).read(step)
    for spec in LARGE:
        assert (
            stores.content(spec, step) == found[spec.name].contiguous().view(-1).numpy().tobytes()
        )


@pytest.fixture
def trainer(store):
    with Trainer(store, specs=LARGE) as trainer:
        trainer.start().save(1)
        yield trainer


def test_it_is_written_while_it_arrives(store, trainer):
    before = bytes_on_disk(store)
    sequence = trainer.announce(2)
    trainer.arrive(2, HALF)
    first = np.count_nonzero(np.frombuffer(trainer.arena.image(trainer.slot)[:EXTENT_BYTES], "u1"))
    assert first > EXTENT_BYTES // 2
    until(lambda: bytes_on_disk(store) >= before + first, "nothing is written")
    assert Store(store).steps() == [1]
    trainer.fill(2, 0, trainer.layout.size)
    trainer.end(SlotState.SEALED)
    trainer.expect("held", sequence)
    trainer.expect("local", sequence)
    check(store, 2)


def test_what_is_torn_is_thrown_away(store, trainer):
    sequence = trainer.announce(2)
    trainer.arrive(2, HALF)
    until(lambda: len(packs(store)) == 2, "nothing is written")
    trainer.end(SlotState.TORN)
    until(lambda: trainer.state_of(sequence) is SlotState.FREE, "the slot is not freed")
    assert len(packs(store)) == 1
    trainer.save(2)
    assert Store(store).verify().checkpoints == 2
    check(store, 2)


def test_a_death_before_the_end_leaves_what_was_there(store):
    script = f"""
trainer.specs = [*trainer.specs, stores.Spec("large", "float32", ({3 * EXTENT_BYTES // 4},))]
trainer.__init__({str(store)!r}, specs=trainer.specs)
trainer.start().save(1)
trainer.announce(2)
trainer.arrive(2, {HALF})
said = trainer.keeper
"""
    keeper = int(crash(store, script))
    with Trainer(store, specs=LARGE) as trainer:
        assert trainer.keeper == keeper
        arenas = trainer.client.settle()
        states = [arena.state(slot) for _, arena in arenas for slot in range(arena.slot_count)]
        assert SlotState.DONE in states
        assert {SlotState.ANNOUNCED, SlotState.TORN}.isdisjoint(states)
        for _, arena in arenas:
            arena.close()
        assert Store(store).steps() == [1]
        assert len(packs(store)) == 1
        trainer.start().save(2)
    check(store, 2)


@pytest.mark.parametrize("last", [SlotState.SEALED, SlotState.TORN])
def test_another_keeper_takes_it_over(store, trainer, last):
    sequence = trainer.announce(2)
    trainer.arrive(2, HALF)
    os.kill(keeper := trainer.keeper, signal.SIGKILL)
    assert ended(keeper)
    trainer.fill(2, 0, trainer.layout.size)
    trainer.end(last)
    if last is SlotState.SEALED:
        trainer.expect("local", sequence)
        check(store, 2)
    else:
        until(lambda: trainer.state_of(sequence) is SlotState.FREE, "the slot is not freed")
        assert Store(store).steps() == [1]


def test_a_slot_is_not_let_go_before_the_copies_have_ended(store, trainer):
    """Though the keeper knows that nothing can come of it: the trainer still writes there."""
    newer = Process(store, "print(trainer.start().epoch, flush=True); sys.stdin.read()")
    newer.read()
    sequence = trainer.announce(2)
    trainer.arrive(2, HALF)
    assert trainer.state_of(sequence) is SlotState.ANNOUNCED
    trainer.end(SlotState.SEALED)
    assert trainer.expect("failed", sequence)["kind"] == "Conflict"
    assert trainer.state_of(sequence) is SlotState.FREE
    newer.close()


def test_nonsense_about_it_ends_the_connection_only(store, trainer):
    keeper = trainer.keeper
    for step, count in enumerate((-1, 1 << 63, "all", None, 1.5), 2):
        sequence = trainer.announce(step)
        trainer.client.tell_copied(sequence, count)
        trainer.fill(step, 0, trainer.layout.size)
        trainer.end(SlotState.SEALED)
        trainer.expect("local", sequence)
        check(store, step)
    assert trainer.keeper == keeper


def test_bytes_arrive():
    job = Job(Arena.create(1, 4096, 4096), 0, 1)
    job.wait(0)
    job.advance(10)
    job.advance(5)
    job.wait(10)
    assert not job.over
    job.advance(ALL)
    assert job.complete
    job.give_up("too late")
    job.wait(1 << 40)


def test_a_run_announces_its_saves(store, monkeypatch):
    """All but the first, for which an epoch has to be claimed."""
    import torch

    from everstep.keeper.arena import Arena

    announced, announce = [], Arena.announce

    def spy(self, slot, record, *documents):
        announced.append(record.step)
        announce(self, slot, record, *documents)

    monkeypatch.setattr(Arena, "announce", spy)
    model = torch.nn.Linear(512, 512)
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpointer(store, {"model": model, "optimizer": optimizer}) as checkpointer:
        for step in range(1, 5):
            model(torch.randn(2, 512)).sum().backward()
            optimizer.step()
            checkpointer.step(step).wait(timeout=PATIENCE_S)
    assert announced == [2, 3, 4]
    assert Store(store).verify().checkpoints == 4
