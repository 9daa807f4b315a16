"""What a keeper serves to other nodes: to partners what is theirs, and to nobody else anything."""

import contextlib
import logging
import os
import signal
import socket
import struct
import threading
import time

import pytest
import torch

import everstep
from everstep import Corrupt, Missing, Unavailable
from everstep.format.manifest import CheckpointName
from everstep.keeper import serve
from everstep.keeper.serve import Service
from everstep.sharding.partners import new_address
from everstep.store import catalog
from everstep.store.copy import Copier
from everstep.tiers import peer as peers
from everstep.tiers.disk import Disk
from everstep.tiers.files import DiskReader
from everstep.tiers.memory import Memory
from everstep.tiers.peer import Address, Link, Peer
from partners import Attentive, end
from stores import make_store, write


def connected(partner):
    host, port, _ = partner.service.address
    return socket.create_connection((host, port), 10)


def is_closed(connection, within_s=10.0):
    """Whether the other end closes it."""
    connection.settimeout(within_s)
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def wait_until(holds, seconds=10.0):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.01)


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(peers, "GREETING_S", 0.5)


@pytest.mark.parametrize(
    "says",
    [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 3, b"\0" * 64, os.urandom(1 << 16), b"half"],
    ids=["nothing", "http", "zeros", "noise", "half"],
)
def test_strangers_are_told_nothing_and_harm_nobody(partner, impatient, caplog, says):
    other = partner.peer()
    partner.memory.create("everstep.json", b"{}")
    with connected(partner) as stranger:
        with contextlib.suppress(ConnectionError):
            stranger.sendall(says)
        assert is_closed(stranger)
    assert other.read("everstep.json") == b"{}"
    refusals = [each for each in caplog.records if "refused a connection" in each.message]
    assert len(refusals) == 1
    with connected(partner) as stranger:
        stranger.sendall(says or b"?")
    assert other.list("") == ["everstep.json"]


def test_a_stranger_that_drips_has_as_little_time_as_any(partner, impatient):
    with connected(partner) as stranger:
        began = time.monotonic()
        with pytest.raises(ConnectionError):  # noqa: PT012 - until it is refused
            while time.monotonic() < began + 10:
                stranger.sendall(b"x")
                time.sleep(0.05)
        assert time.monotonic() < began + 5


def test_many_strangers_are_refused_and_partners_served_after_them(partner, impatient, caplog):
    crowd = [connected(partner) for _ in range(serve.STRANGERS_MAX + 5)]
    assert all(map(is_closed, crowd))
    assert "there are too many" in caplog.text
    for each in crowd:
        each.close()
    assert partner.peer(away_s=5.0).list("") == []


def test_a_partner_of_another_run_is_refused(partner, caplog):
    with pytest.raises(Unavailable, match="does not have the secret of this run"):
        partner.peer(secret="00" * 32).read("everstep.json")
    wait_until(lambda: "refused a connection" in caplog.text)  # both ends see it for themselves


def test_who_serves_must_have_the_secret_too(partner):
    """Else whoever listens at a port that was a partner's would get what is sent there."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = Peer(Address(*listener.getsockname(), "5e" * 32), patience_s=5.0)
        client_says = []

        def serve_wrongly():
            connection, _ = listener.accept()
            connection.sendall(peers._GREETING + bytes(32))
            client_says.append(connection.recv(51, socket.MSG_WAITALL))
            connection.sendall(bytes(32))
            client_says.append(connection.recv(64, socket.MSG_WAITALL))
            connection.close()

        thread = threading.Thread(target=serve_wrongly)
        thread.start()
        with pytest.raises(Unavailable, match="does not have the secret"):
            client.read("data/tables/00ff.json")
        thread.join()
    assert len(client_says[1]) == 32  # its proof, and nothing more


def linked(partner):
    """A connection of one who has the secret."""
    link = Link(connected(partner), 5.0)
    link.greet(partner.service.address.secret, b"client", b"partner")
    return link


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"op": "size"},
        {"op": "size", "tier": "disk", "path": "x"},
        {"op": "size", "tier": "store", "path": "../secret"},
        {"op": "size", "tier": "store", "path": "/etc/passwd"},
        {"op": "read", "tier": "store", "path": "a/../../b"},
        {"op": "read", "tier": "memory", "path": "x\0y"},
        {"op": "range", "tier": "memory", "path": "x", "offset": 0, "count": 1 << 40},
        {"op": "range", "tier": "memory", "path": "x", "offset": -1, "count": 1},
        {"op": "create", "tier": "memory", "path": "data/tables/00ff.json"},
        {"op": "hold", "path": ["x"]},
        {"op": "replace", "tier": "store", "path": "checkpoints/00000001-0001/part-1.json"},
        {"op": "delete", "tier": "store", "path": "epochs/0001.json"},
        {"op": "eval", "tier": "memory", "path": "x"},
        {"op": ["size"], "tier": {}, "path": 3},
    ],
)
def test_what_no_partner_says_ends_the_connection(partner, tmp_path, caplog, message):
    (tmp_path / "secret").write_text("secret")
    link = linked(partner)
    link.send(message)
    with pytest.raises((EOFError, ConnectionError)):
        link.receive()
    link.close()
    assert "a partner: " in caplog.text
    assert partner.memory.used_bytes == 0
    assert partner.peer().list("") == []
    assert not partner.store.root.exists()


def test_sizes_are_checked_before_memory_is_taken(partner):
    link = linked(partner)
    text = b'{"op":"size","tier":"store","path":"x","size":1000000000000}'
    link._connection.sendall(struct.pack("!I", len(text)) + text)
    with pytest.raises((EOFError, ConnectionError)):
        link.receive()
    link.close()
    link = linked(partner)
    link._connection.sendall(struct.pack("!I", 1 << 31))
    with pytest.raises((EOFError, ConnectionError)):
        link.receive()
    link.close()


def test_a_store_is_read_by_others(partner):
    partner.store.create("everstep.json", b"{}")
    write(partner.store, "data/pack", [memoryview(b"bytes")])
    client = partner.peer("store")
    assert client.read("everstep.json") == b"{}"
    view = memoryview(bytearray(3))
    client.open("data/pack").read_into(1, view)
    assert view == b"yte"
    with pytest.raises(Missing):
        client.open("data/other")


def test_a_partner_that_went_away_is_unavailable_and_found_again(partner):
    client, late = partner.peer(), partner.peer(away_s=10.0)
    partner.memory.create("everstep.json", b"{}")
    for each in (client, late):
        assert each.holds("everstep.json")
    address = partner.service.address
    end(partner.service)
    began = time.monotonic()
    with pytest.raises(Unavailable, match="is not there"):
        client.read("everstep.json")
    assert time.monotonic() - began < 5
    again = Attentive(partner.memory, partner.store, Address(*address))
    try:
        assert late.read("everstep.json") == b"{}"
        assert client.read("everstep.json") == b"{}"
    finally:
        end(again)


@pytest.mark.slow
def test_a_partner_that_hangs_is_unavailable_after_a_while(partner):
    """Stopped with a connection open, and a new one."""
    ready, pid = os.pipe(), os.fork()
    if pid == 0:
        try:
            service = Service(partner.memory, partner.store, Address("127.0.0.1", 0, "00" * 32))
            os.write(ready[1], struct.pack("!I", service.address.port))
            signal.pause()
        finally:
            os._exit(0)
    try:
        (port,) = struct.unpack("!I", os.read(ready[0], 4))
        client = Peer(Address("127.0.0.1", port, "00" * 32), patience_s=0.3)
        assert client.list("") == []
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        for _ in range(2):
            began = time.monotonic()
            with pytest.raises(Unavailable, match="no answer for 0 s"):
                client.list("")
            assert time.monotonic() - began < 8
        client.close()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for each in ready:
            os.close(each)


@pytest.fixture
def before(partner, tmp_path):
    """A node whose checkpoints the partner holds: its store, which is served as well."""
    trainer = make_store(tmp_path / "own", [1, 2, 3])
    service = Attentive(Memory(0), trainer.disk, Address("127.0.0.1", 0, "5e" * 32))
    source = Peer(service.address, "store")
    partner.service.meet(everstep.Store(tmp_path / "own").run, source, (0,))
    yield trainer
    source.close()
    end(service)


def held(partner):
    return [name.step for name in catalog.committed(partner.memory)]


def test_a_partner_holds_the_newest_and_what_it_goes_back_to(partner, before, tmp_path):
    memory, told = partner.peer(), []

    def holds(step):
        memory.hold(f"{step:08}-0001", lambda *progress: told.append(progress))
        return held(partner)

    assert holds(1) == [1]
    assert told[-1][0] == told[-1][1]
    partner.memory.replace("data/00000002-0001-in-vain-0.safetensors", b"half of it")
    assert holds(3) == [3]
    assert holds(2) == [2, 3]  # it came late
    before.record(4, follows=3)
    before.record(5, follows=4)
    assert holds(5) == [2, 3, 4, 5]
    before.save(6)
    assert holds(6) == [6]
    assert len(memory.list("data")) == 2  # its pack, and tables
    Copier(memory, Disk(tmp_path / "back")).copy(CheckpointName(6, 1))
    assert everstep.Store(tmp_path / "back").verify().ok
    assert everstep.Store(tmp_path / "back").run == everstep.Store(tmp_path / "own").run
    partner.service.meet("another run", None, ())
    assert partner.memory.used_bytes == 0
    with pytest.raises(Unavailable, match="has not met the one before it"):
        holds(6)


def test_what_is_damaged_on_its_way_is_not_held(partner, before, monkeypatch):
    read_into = DiskReader.read_into

    def damage(self, offset, view):
        read_into(self, offset, view)
        if len(view) > 1000:
            view[1000] ^= 1

    monkeypatch.setattr(DiskReader, "read_into", damage)
    with pytest.raises(Corrupt, match="have digest"):
        partner.peer().hold("00000003-0001", lambda *progress: None)
    assert held(partner) == []
    monkeypatch.undo()
    partner.peer().hold("00000003-0001", lambda *progress: None)
    assert held(partner) == [3]


def test_a_budget_holds_and_what_failed_frees_its_memory(partner, before):
    partner.memory.budget_bytes = 5000
    with pytest.raises(Unavailable, match=r"writing memory://here/data/.* bytes are in use"):
        partner.peer().hold("00000003-0001", lambda *progress: None)
    assert held(partner) == []
    assert partner.memory.used_bytes == sum(map(len, partner.memory._files.values()))


def test_a_copy_that_nobody_waits_for_is_broken_off(partner, before):
    def leave(done, total):
        raise RuntimeError("it was closed")

    with pytest.raises(RuntimeError, match="it was closed"):
        partner.peer().hold("00000003-0001", leave)
    partner.peer().hold("00000003-0001", lambda *progress: None)
    assert held(partner) == [3]


def test_a_node_is_found_at_the_address_by_which_it_reaches_the_first(monkeypatch):
    monkeypatch.delenv("EVERSTEP_ADDRESS", raising=False)
    for master, host in (("127.0.0.1", "127.0.0.1"), ("no.such.host.invalid", "127.0.0.1")):
        monkeypatch.setenv("MASTER_ADDR", master)
        assert new_address().host == host
    monkeypatch.setenv("EVERSTEP_ADDRESS", "10.1.2.3")
    assert new_address()[:2] == ("10.1.2.3", 0)
    assert new_address().secret != new_address().secret


def test_who_has_no_other_node_is_told(store, caplog):
    state = {"model": torch.nn.Linear(2, 2)}
    with everstep.Checkpointer(store, state, tiers=everstep.Tiers(peers=1)) as checkpointer:
        assert "peers=1, but there is no other node" in caplog.text
        checkpointer.step(1).wait()
        with pytest.raises(ValueError, match="'replicated'"):
            checkpointer.wait("replicated")


@pytest.fixture(autouse=True)
def _hear(caplog):
    caplog.set_level(logging.INFO)
