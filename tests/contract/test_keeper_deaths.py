"""The keeper outlives its trainers, and they it: nothing that was sealed is lost."""

import contextlib
import os
import random
import shutil
import signal
import socket
import sys
import threading

import pytest
import torch
from keepers import Process, Trainer, arenas_mapped, crash, descriptors, ended, until

import stores
from everstep import Checkpointer, Store, Unavailable
from everstep.keeper import client
from everstep.keeper.arena import SlotState
from everstep.restore.choose import find_held
from examples import slow


def _memory(keeper):
    """How many descriptors of arenas it has open."""
    return len([name for name in descriptors(keeper).values() if "memfd" in name])


# ---- the keeper's death ----------------------------------------------------------------------


def test_a_new_keeper_takes_over_what_was_sealed(store):
    with Trainer(store) as trainer:
        trainer.start()
        first = trainer.keeper
        os.kill(first, signal.SIGSTOP)
        sequences = [trainer.seal(step) for step in (1, 2)]
        assert [trainer.state_of(number) for number in sequences] == [SlotState.SEALED] * 2
        os.kill(first, signal.SIGKILL)
        for number in sequences:
            trainer.expect("local", number)
        assert trainer.keeper != first
        assert trainer.save(3)
        assert arenas_mapped(trainer.keeper) == {str(trainer.arena.identity[1])}
    assert Store(store).steps() == [1, 2, 3]
    assert Store(store).manifest(3).parent == {"step": 2, "epoch": 1}


def test_a_commit_that_nobody_heard_of_is_told_by_the_next_keeper(store):
    """The keeper may die between the commit and the message."""
    with Trainer(store) as trainer:
        sequence = trainer.start().save(1)
        os.kill(trainer.keeper, signal.SIGKILL)
        trainer.expect("local", sequence, count=2)
        assert trainer.state_of(sequence) is SlotState.DONE


BROKEN = """
import os, sys
if "everstep.keeper" in sys.orig_argv:
    from everstep.keeper.session import Session

    answer = Session.{name}

    def once(self, *arguments):
        try:
            os.unlink({flag!r})
        except FileNotFoundError:
            return answer(self, *arguments)
        raise RuntimeError("nobody thought of it")

    Session.{name} = once
"""


@pytest.mark.parametrize("what", ["failed", "local"])
def test_a_keeper_that_cannot_answer_leaves_it_to_the_next_one(store, tmp_path, monkeypatch, what):
    """A trainer that has to wait (when_full="wait") would do so for ever."""
    flag = tmp_path / "flag"
    (tmp_path / "sitecustomize.py").write_text(BROKEN.format(name="end", flag=str(flag)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Trainer(store) as trainer:
        trainer.start().save(1)
        first = trainer.keeper
        flag.touch()
        sequence = trainer.seal(2) if what == "local" else trainer.record(7)
        trainer.expect(what, sequence)
        assert not flag.exists()
        assert trainer.keeper != first
        assert ended(first)
        assert trainer.save(3)
    assert Store(store).steps() == ([1, 2, 3] if what == "local" else [1, 3])


def test_a_torn_copy_stays_torn_for_the_next_keeper(store):
    with Trainer(store, confirms=False) as trainer:
        sequence = trainer.start().seal(1)
        trainer.expect("written", sequence)
        os.kill(trainer.keeper, signal.SIGKILL)
        trainer.expect("written", sequence, count=2)
        trainer.client.confirm(sequence, "it was torn")
        failed = trainer.expect("failed", sequence)
        assert (failed["kind"], failed["message"]) == ("Unsupported", "it was torn")
        assert trainer.state_of(sequence) is SlotState.FREE
    assert Store(store).steps() == []
    assert len(stores.packs_of(store)) <= 1  # what the dead keeper wrote is left to gc


def test_a_claim_is_asked_again(store):
    with Trainer(store) as trainer:
        first = trainer.keeper
        os.kill(first, signal.SIGSTOP)
        thread = threading.Thread(target=trainer.start)
        thread.start()
        until(lambda: trainer.client._waiting, "the claim is on its way")
        os.kill(first, signal.SIGKILL)
        thread.join(60)
        assert trainer.epoch == 1
        trainer.save(1)


def test_no_keeper_can_be_had_for_a_while(store, monkeypatch):
    with Trainer(store) as trainer:
        trainer.start()
        monkeypatch.setattr(sys, "executable", "/bin/false")
        os.kill(trainer.keeper, signal.SIGKILL)
        assert "status 1" in trainer.expect("lost")["message"]
        with pytest.raises(Unavailable, match="starting the keeper"):
            trainer.client.ensure()
        with monkeypatch.context() as patch:
            patch.setattr(client, "STALL_S", 0.5)
            with pytest.raises(Unavailable, match="starting the keeper"):
                trainer.client.settle()
        trainer.client.patience.note_commit()
        sequence = trainer.seal(1)
        claimed = []
        thread = threading.Thread(target=lambda: claimed.append(trainer.client.claim(None)))
        thread.start()  # it waits
        monkeypatch.undo()
        trainer.expect("found")
        trainer.expect("local", sequence)
        trainer.client.ensure()
        thread.join()
        assert claimed == [2]


def test_a_lost_connection_is_mended_without_doing_anything_twice(store):
    with Trainer(store, confirms=False) as trainer:
        sequence = trainer.start().seal(1)
        trainer.expect("written", sequence)
        keeper = trainer.keeper
        before = _memory(keeper)
        for count in (2, 3):
            trainer.client._connection.shutdown(socket.SHUT_RDWR)
            trainer.expect("written", sequence, count=count)
        assert trainer.keeper == keeper
        trainer.client.confirm(sequence, None)
        trainer.expect("local", sequence)
        assert len(arenas_mapped(keeper)) == 1
        assert _memory(keeper) == before
    assert len(stores.packs_of(store)) == 1


@pytest.mark.parametrize("steps", [40, *slow(400)])
def test_killed_and_cut_off_at_random_moments(store, steps, monkeypatch):
    """Every state that was sealed is committed, once, and told."""
    monkeypatch.setattr(client, "LOSSES_MAX", 1000)
    seed = int(os.environ.get("EVERSTEP_SEED", random.SystemRandom().randrange(1 << 30)))
    print(f"EVERSTEP_SEED={seed}")
    rng = random.Random(seed)
    with Trainer(store) as trainer:
        trainer.start()
        for step in range(1, steps + 1):
            older = trainer.sequence + 1 - trainer.slots
            if older > 0:
                trainer.expect("local", older)
            trainer.seal(step)
            if rng.random() < 0.15:
                trainer.expect(rng.choice(["held", "written", "local"]), rng.randint(1, step))
                if rng.random() < 0.5:
                    trainer.client._connection.shutdown(socket.SHUT_RDWR)
                else:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(trainer.keeper, signal.SIGKILL)
        for sequence in range(1, steps + 1):
            trainer.expect("local", sequence)
        assert not [event for event in trainer.events if event["type"] in ("failed", "lost")]
    assert Store(store).steps() == list(range(1, steps + 1))
    assert Store(store).verify().ok


# ---- the trainer's death ---------------------------------------------------------------------


def test_death_is_seen_though_a_child_holds_the_socket(store):
    script = """
trainer.start(); trainer.confirms = False
trainer.expect("written", trainer.seal(1))
reading, writing = os.pipe()
child = os.fork()
if not child:
    os.close(writing)
    os.read(0, 1)
    os._exit(0)
said = child
"""
    process = Process(store, script + "\nprint(said, flush=True); sys.stdin.read()")
    child = int(process.read())
    process.process.kill()
    process.process.wait()
    with Trainer(store) as successor:
        assert len(successor.client.settle()) == 1
        assert Store(store).steps() == [1]
        assert "socket:" in " ".join(descriptors(child).values())
    process.close()
    assert ended(child)


def test_what_it_leaves_goes_to_its_successor(store):
    script = """
trainer.start().save(1); trainer.save(2)
trainer.arena.set_state(0, SlotState.CAPTURING)
said = f"{trainer.arena.identity[1]} {trainer.keeper}"
"""
    inode, keeper = crash(store, script).split()
    with Trainer(store) as successor:
        assert successor.keeper == int(keeper)
        ((key, arena),) = successor.client.settle()
        assert str(arena.identity[1]) == inode
        assert arena.state(0) is SlotState.FREE
        assert {name.step for name in find_held([arena])} == {1, 2}
        assert successor.client.adopt(key, arena)
        assert not successor.client.adopt("another", arena)
        successor.epoch = successor.client.claim(None)
        successor.key, successor.arena, successor.sequence = key, arena, 2
        successor.save(3)
        assert arenas_mapped(successor.keeper) == {inode}
        assert Store(store).verify().ok


def test_a_sealed_slot_that_was_not_announced_is_committed(store):
    crash(store, "trainer.start().save(1); said = trainer.seal(2, submit=False)")
    with Trainer(store) as successor:
        ((_, arena),) = successor.client.settle()
        assert Store(store).steps() == [1, 2]
        arena.close()


def test_memory_does_not_grow_over_many_crashes(store):
    """Each dies with an arena of another size, before and after it has committed."""
    with Trainer(store) as watcher:
        for specs in ("SMALL", "MIXED", "SMALL", "MIXED"):
            for script in ("trainer.save(1)", "pass"):
                crash(
                    store,
                    f"trainer.specs = stores.{specs}; trainer.layout = lay_out(trainer.specs)\n"
                    "trainer.table = encode_table(trainer.layout, {}, {}, {})\n"
                    f"trainer.start(); {script}; said = 1",
                )
                watcher.client.settle()
                until(lambda: len(arenas_mapped(watcher.keeper)) <= 1, "one orphan's arena is kept")
        assert len(arenas_mapped(watcher.keeper)) == 1
        watcher.start().save(1)
        own = {str(watcher.arena.identity[1])}
        until(lambda: arenas_mapped(watcher.keeper) == own, "a successor has committed")
        assert _memory(watcher.keeper) <= 2  # one of ours, one of the mmap module's


def test_what_could_not_be_written_is_still_in_memory(store):
    """The newest state failed: it outlives the trainer, also one that left in peace."""
    with Trainer(store) as trainer:
        trainer.start().save(1)
        shutil.rmtree(store / "data")
        (store / "data").write_text("in the way")
        os.kill(trainer.keeper, signal.SIGSTOP)
        sequence = trainer.seal(2)
        os.kill(trainer.keeper, signal.SIGCONT)
        assert trainer.expect("failed", sequence)["kind"] == "Unavailable"
        assert trainer.state_of(sequence) is SlotState.FAILED
    with Trainer(store) as successor:
        ((_, arena),) = successor.client.settle()
        held = {name.step: state for name, state in find_held([arena]).items()}
        assert not held[2].is_committed
        found = bytearray(trainer.layout.size)
        (pack,) = held[2].packs
        pack.read_into(0, memoryview(found))
        contents = {spec.name: stores.content(spec, 2) for spec in trainer.specs}
        assert found == stores.image_of(trainer.layout, contents)
        arena.close()


def test_memory_of_a_run_that_was_deleted_is_not_taken_for_this_one(store):
    crash(store, "trainer.start().save(1); said = trainer.save(5)")
    shutil.rmtree(store)
    state = {"weight": torch.zeros(3)}
    with Checkpointer(store, state) as checkpointer:
        arenas = [arena for _, arena in checkpointer._client.settle()]
        assert {name.step for name in find_held(arenas)} == {1, 5}
        assert checkpointer._restores._held(arenas) == {}
        assert checkpointer.restore() in (0, None)


def test_two_trainers_are_served_and_the_newer_wins(store):
    with Trainer(store) as older, Trainer(store) as newer:
        assert older.keeper == newer.keeper
        older.start().save(1)
        newer.start()
        sequence = older.seal(2)
        assert older.expect("failed", sequence)["kind"] == "Conflict"
        assert older.state_of(sequence) is SlotState.FREE
        newer.save(7)
