"""The keeper: a process of its own that outlives trainers, survives nonsense and loses nothing."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import stat
import sys
import threading
from pathlib import Path

import pytest
import torch
from keepers import (
    Process,
    Trainer,
    arenas_mapped,
    crash,
    descriptors,
    ended,
    socket_of,
    until,
)

import stores
from everstep import Checkpointer, Store, Unavailable
from everstep.keeper import client, home, wire
from everstep.keeper.arena import Arena, SlotState
from everstep.restore.choose import find_held

WIDE = (*stores.SMALL, stores.Spec("wide", "float32", (300, 1000)))
WIDER = (*stores.SMALL, stores.Spec("wider", "float32", (3000, 1000)))


# ---- a process of its own --------------------------------------------------------------------


def test_it_shares_nothing_with_the_trainer(store):
    process = Process(store, "print(trainer.start().keeper, flush=True); sys.stdin.read()")
    keeper = int(process.read())
    assert os.getsid(keeper) != os.getsid(process.pid)
    status = Path(f"/proc/{keeper}/status").read_text()
    assert int(re.search(r"PPid:\s+(\d+)", status)[1]) != process.pid
    theirs = descriptors(process.pid)
    fds = descriptors(keeper)
    assert fds[0] == "/dev/null"
    assert fds[1] == fds[2] == str(socket_of(store).with_suffix(".log"))
    assert not {name for name in theirs.values() if "pipe" in name} & set(fds.values())
    maps = Path(f"/proc/{keeper}/maps").read_text()
    assert "torch" not in maps
    assert "numpy" not in maps
    assert int(re.search(r"RssAnon:\s+(\d+)", status)[1]) < 60 << 10
    process.kill()


def test_it_is_no_zombie_and_no_child(store):
    with Trainer(store, idle_s=0.0) as trainer:
        keeper = trainer.keeper
        os.kill(keeper, signal.SIGKILL)
        trainer.start()
        assert trainer.keeper != keeper
        with pytest.raises(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)


def test_only_this_user_can_open_it(store):
    with Trainer(store):
        path = socket_of(store)
        for file in (path, path.with_suffix(".lock"), path.with_suffix(".log")):
            found = file.stat()
            assert found.st_uid == os.getuid()
            assert stat.S_IMODE(found.st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_eight_trainers_at_once_have_one_keeper(store):
    script = "print(trainer.keeper, flush=True); sys.stdin.read()"
    places = [{**os.environ, "TMPDIR": "/var/tmp"}, {**os.environ, "XDG_RUNTIME_DIR": "/nowhere"}]
    processes = [Process(store, script, env=places[number % 2]) for number in range(8)]
    assert len({process.read() for process in processes}) == 1
    for process in processes:
        process.close()


def test_left_over_files_do_no_harm(store):
    path = socket_of(store)
    path.write_text("no socket")
    path.with_suffix(".lock").write_text("a lock of nobody")
    with Trainer(store) as trainer:
        trainer.start().save(1)


# ---- its end ---------------------------------------------------------------------------------


def test_it_ends_when_the_trainers_have_left(store):
    with Trainer(store, idle_s=0.1) as trainer:
        trainer.start().save(1)
    assert ended(trainer.keeper)
    assert not socket_of(store).exists()


def test_it_ends_when_a_dead_trainer_does_not_come_back(store):
    keeper = int(crash(store, "trainer.start().save(1); said = trainer.keeper", idle_s=0.3))
    assert ended(keeper)
    assert Store(store).steps() == [1]


def test_sigterm_finishes_what_is_sealed(store):
    with Trainer(store, confirms=False) as trainer:
        trainer.start()
        sequence = trainer.seal(1)
        trainer.expect("written", sequence)
        os.kill(trainer.keeper, signal.SIGTERM)
        trainer.client.confirm(sequence, None)
        trainer.expect("local", sequence)
        keeper = trainer.keeper
    assert ended(keeper, 20)  # at once, though idle_s is longer
    assert Store(store).steps() == [1]


def test_leaving_and_coming_back_at_once(store):
    """The old keeper is on its way out: whoever connects to it must not be lost."""
    for step in range(1, 7):
        with Trainer(store, idle_s=0.0) as trainer:
            trainer.start().save(step)
    assert Store(store).verify().checkpoints == 6


# ---- its death -------------------------------------------------------------------------------


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
        with pytest.raises(Unavailable, match="starting the keeper"):
            trainer.client.claim(None)
        sequence = trainer.seal(1)
        monkeypatch.undo()
        trainer.expect("found")
        trainer.expect("local", sequence)
        trainer.client.ensure()


def _memory(keeper):
    """How many descriptors of arenas it has open."""
    return len([name for name in descriptors(keeper).values() if "memfd" in name])


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


@pytest.mark.parametrize("steps", [40, pytest.param(400, marks=pytest.mark.slow)])
def test_killed_and_cut_off_at_random_moments(store, steps, monkeypatch):
    """Every state that was sealed is committed, once, and told."""
    monkeypatch.setattr(client, "_DEATHS_S", 0.0)
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
        assert bytes(held[2].image[: trainer.layout.size]) == bytes(
            stores.image_of(
                trainer.layout, {spec.name: stores.content(spec, 2) for spec in trainer.specs}
            )
        )
        arena.close()


def test_memory_of_a_run_that_was_deleted_is_not_taken_for_this_one(store):
    crash(store, "trainer.start().save(1); said = trainer.save(5)")
    shutil.rmtree(store)
    state = {"weight": torch.zeros(3)}
    with Checkpointer(store, state) as checkpointer:
        arenas = [arena for _, arena in checkpointer._client.settle()]
        assert {name.step for name in find_held(arenas)} == {1, 5}
        assert checkpointer._held(arenas) == {}
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


# ---- nonsense --------------------------------------------------------------------------------

HELLO = {"type": "attach", "id": -1, "protocol": wire.PROTOCOL, "keep": None, "epoch": None}
HELLO |= {"parent": None}


def _stranger(store, hello=None):
    connection = wire.connect(socket_of(store))
    connection.settimeout(60)
    if hello is not None:
        connection.send(hello if isinstance(hello, bytes) else json.dumps(hello).encode())
    return connection


def _is_dropped(connection):
    with connection:
        try:
            while connection.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass
    return True


@pytest.mark.parametrize(
    "hello",
    [
        b"",
        b"nonsense",
        b"[]",
        {"type": "claim"},
        {"type": "attach"},
        {**HELLO, "keep": {"last": 0}},
        {**HELLO, "keep": {"x": 1}},
        {**HELLO, "keep": 5},
        {**HELLO, "epoch": "x"},
        {**HELLO, "epoch": -1},
        {**HELLO, "parent": [1]},
        {**HELLO, "parent": 5},
        {**HELLO, "parent": ["a", "b"]},
        {key: value for key, value in HELLO.items() if key != "id"} | {"token": []},
    ],
    ids=str,
)
def test_strangers_that_talk_nonsense(store, hello):
    with Trainer(store) as trainer:
        connection = _stranger(store, hello)
        if hello == {key: value for key, value in HELLO.items() if key != "id"} | {"token": []}:
            assert wire.receive(connection)[0]["type"] == "attached"
            connection.close()
        else:
            assert _is_dropped(connection)
        trainer.start().save(1)


def _pipe():
    reading, writing = os.pipe()
    os.close(writing)
    return reading


def _memfd(size, content=b"", seals=0):
    import fcntl

    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.pwrite(fd, content, 0)
    os.ftruncate(fd, size)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 7)
    return fd


ARENA = {"type": "arena", "arena": "k"}
NONSENSE = {
    "unknown": ({"type": "dance"}, None),
    "no arena": (ARENA, None),
    "a pipe": (ARENA, _pipe),
    "a file": (ARENA, lambda: os.open("/etc/passwd", os.O_RDONLY)),
    "a directory": (ARENA, lambda: os.open("/", os.O_RDONLY)),
    "memory that can shrink": (ARENA, lambda: _memfd(2 << 20, b"everstep arena 1")),
    "no arena in it": (ARENA, lambda: _memfd(2 << 20, b"x", seals=7)),
    "empty memory": (ARENA, lambda: _memfd(0, seals=7)),
    "more memory than there is": (ARENA, lambda: _memfd(1 << 50, seals=7)),
    "a long key": ({**ARENA, "arena": "k" * 1000}, lambda: _memfd(2 << 20, seals=7)),
    "a key that is none": ({**ARENA, "arena": []}, lambda: _memfd(2 << 20, seals=7)),
    "a job of nothing": ({"type": "job"}, None),
    "a job of a list": ({"type": "job", "arena": []}, None),
    "an answer to nothing": ({"type": "confirm"}, None),
    "an answer of a list": ({"type": "confirm", "sequence": [], "problem": 5}, None),
    "an id that is none": ({"type": "settle", "id": "x" * 60000}, None),
    "no id": ({"type": "settle"}, None),
    "adopting a list": ({"type": "adopt", "id": 1, "arena": []}, None),
    "a descriptor too many": ({"type": "dance"}, _pipe),
}


@pytest.mark.parametrize("case", NONSENSE)
def test_trainers_that_talk_nonsense(store, case):
    message, make = NONSENSE[case]
    with Trainer(store) as trainer:
        trainer.start().save(1)
        before = descriptors(trainer.keeper)
        connection = _stranger(store, HELLO)
        assert wire.receive(connection)[0]["type"] == "attached"
        fds = [make()] if make else None
        wire.send(connection, message, fds)
        assert _is_dropped(connection)
        trainer.save(2)
        until(lambda: len(descriptors(trainer.keeper)) <= len(before), "nothing is left open")
        for fd in fds or ():
            os.close(fd)


def test_nonsense_in_a_claim_does_not_reach_the_store(store):
    with Trainer(store) as trainer:
        trainer.start()
        for parent, fork in (("x", 0), (None, -1), (None, 1.5), ([], {})):
            message = {"type": "claim", "parent": parent, "fork": fork}
            reply, _ = trainer.client._request(message)
            assert "the keeper failed" in reply["message"]
        trainer.save(1)
    assert len(list((store / "epochs").iterdir())) == 1


def test_whoever_says_nothing_or_reads_nothing_holds_nobody_up(store):
    with Trainer(store) as trainer:
        trainer.start()
        silent = _stranger(store)
        deaf = _stranger(store, HELLO)
        deaf.setblocking(False)
        until(lambda: _send_until_dropped(deaf), "one that does not read is dropped")
        for step in range(1, 4):
            trainer.save(step)
        assert _is_dropped(silent)
        deaf.close()


def _send_until_dropped(connection):
    try:
        wire.send(connection, {"type": "adopt", "id": 1, "arena": "none"})
    except BlockingIOError:
        return False
    except OSError:
        return True
    return False


def test_another_trainers_arena_is_not_taken(store):
    with Trainer(store) as trainer:
        trainer.start().save(1)
        thief = _stranger(store, HELLO)
        assert wire.receive(thief)[0]["type"] == "attached"
        wire.send(thief, {"type": "arena", "arena": "mine"}, [trainer.arena.fd])
        assert _is_dropped(thief)
        trainer.save(2)


def test_another_protocol_is_refused_and_an_unused_keeper_makes_way(store):
    with Trainer(store) as trainer:
        keeper = trainer.keeper
        with _stranger(store, {**HELLO, "protocol": 99}) as connection:
            assert wire.receive(connection)[0] == {"type": "refused", "protocol": wire.PROTOCOL}
        trainer.start().save(1)
        assert trainer.keeper == keeper
    crash(store, "said = trainer.start().save(2)")
    with _stranger(store, {**HELLO, "protocol": 99}) as connection:
        assert wire.receive(connection)[0]["type"] == "refused"
    assert ended(keeper)
    assert Store(store).steps() == [2]


def test_a_trainer_that_is_stopped_holds_up_nobody_else(store):
    process = Process(
        store,
        "trainer.start(); trainer.confirms = False\n"
        "trainer.expect('written', trainer.seal(1)); print(1, flush=True); sys.stdin.read()",
    )
    process.read()
    os.kill(process.pid, signal.SIGSTOP)
    with Trainer(store) as other:
        assert other.client.settle() == []
        other.start().save(2)
    process.kill()


# ---- its files -------------------------------------------------------------------------------


def test_a_socket_that_was_deleted_comes_back(store):
    with Trainer(store) as trainer:
        socket_of(store).unlink()
        until(socket_of(store).exists, "the keeper mends it")
        with Trainer(store) as other:
            assert other.keeper == trainer.keeper
        trainer.start().save(1)


def test_a_keeper_that_was_replaced_leaves_its_successor_alone(store):
    with Trainer(store) as trainer:
        trainer.start().save(1)
        old = trainer.keeper
        os.kill(old, signal.SIGSTOP)
        for suffix in (".sock", ".lock"):
            socket_of(store).with_suffix(suffix).unlink()
        with Trainer(store) as other:
            os.kill(old, signal.SIGCONT)
            assert other.keeper != old
            trainer.save(2)
            trainer.close()
            assert ended(old)
            assert socket_of(store).exists()
            other.start().save(3)


def test_its_log_has_a_limit(store):
    with Trainer(store) as trainer:
        path = socket_of(store).with_suffix(".log")
        with path.open("ab") as log:
            log.write(b"x" * (home.LOG_BYTES_MAX + 1) + b"the end\n")
        until(lambda: path.stat().st_size < home.LOG_BYTES_MAX, "the log is trimmed")
        assert path.read_bytes().endswith(b"the end\n")
        trainer.start()


# ---- the trainer's own things ----------------------------------------------------------------


def test_a_closed_trainer_leaves_nothing_in_its_process(store):
    state = {"weight": torch.arange(1000.0)}
    handles = []
    mapped = arenas_mapped("self")  # by the tests before this one
    with Checkpointer(store, state, under_pressure="wait") as checkpointer:
        handles.append(checkpointer.save(1))
    del checkpointer
    before = sorted(descriptors("self").values())
    for step in range(2, 5):
        with Checkpointer(store, state, under_pressure="wait") as checkpointer:
            checkpointer.restore()
            handles.append(checkpointer.save(step))
        assert arenas_mapped("self") <= mapped
    assert len(descriptors("self")) <= len(before)
    assert not [each for each in threading.enumerate() if each.name == "everstep-client"]
    assert [handle.level for handle in handles] == ["local"] * 4


def test_arenas_of_absurd_sizes_are_refused():
    with pytest.raises(Unavailable, match="is the limit"):
        Arena.create(1, 2 << 30, 4096)
