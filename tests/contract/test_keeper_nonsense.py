"""The keeper serves on, whatever strangers and trainers say to it or do not say."""

import json
import os
import signal

from keepers import Process, Trainer, crash, descriptors, ended, socket_of, until

from everstep import Store
from everstep.keeper import wire

HELLO = {"type": "attach", "id": -1, "protocol": wire.PROTOCOL, "keep": None, "epoch": None}


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


STRANGE = [
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
]


def test_strangers_that_talk_nonsense(store):
    with Trainer(store) as trainer:
        keeper = trainer.start().keeper
        for step, hello in enumerate(STRANGE, 1):
            assert _is_dropped(_stranger(store, hello)), hello
            trainer.save(step)
        unnamed = {key: value for key, value in HELLO.items() if key != "id"} | {"token": []}
        with _stranger(store, unnamed) as connection:
            assert wire.receive(connection)[0]["type"] == "attached"
        trainer.save(100)
        assert trainer.keeper == keeper


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


ARENA = {"type": "arenas", "arenas": ["k"]}
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
    "a long key": ({**ARENA, "arenas": ["k" * 1000]}, lambda: _memfd(2 << 20, seals=7)),
    "a key that is none": ({**ARENA, "arenas": [[]]}, lambda: _memfd(2 << 20, seals=7)),
    "a job of nothing": ({"type": "job"}, None),
    "a job of a list": ({"type": "job", "arena": []}, None),
    "an answer to nothing": ({"type": "confirm"}, None),
    "an answer of a list": ({"type": "confirm", "sequence": [], "problem": 5}, None),
    "an id that is none": ({"type": "settle", "id": "x" * 60000}, None),
    "no id": ({"type": "settle"}, None),
    "adopting a list": ({"type": "adopt", "id": 1, "arena": []}, None),
    "a descriptor too many": ({"type": "dance"}, _pipe),
}


def test_trainers_that_talk_nonsense(store):
    with Trainer(store) as trainer:
        trainer.start().save(1)
        keeper, before = trainer.keeper, descriptors(trainer.keeper)
        for step, (case, (message, make)) in enumerate(NONSENSE.items(), 2):
            connection = _stranger(store, HELLO)
            assert wire.receive(connection)[0]["type"] == "attached"
            fds = [make()] if make else None
            wire.send(connection, message, fds)
            assert _is_dropped(connection), case
            trainer.save(step)
            until(lambda: len(descriptors(keeper)) <= len(before), f"{case}: something is open")
            for fd in fds or ():
                os.close(fd)
        assert trainer.keeper == keeper


def test_nonsense_in_a_claim_does_not_reach_the_store(store):
    with Trainer(store) as trainer:
        trainer.start()
        for parent in ("xy", [-1, 1], [1, 1.5], [], {}, [1]):
            message = {"type": "claim", "number": 1, "parent": parent}
            reply, _ = trainer.client._request(message)
            assert "the other process failed" in reply["message"]
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
