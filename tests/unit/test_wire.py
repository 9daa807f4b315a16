"""The keeper's socket: other messages, limits, other users."""

import fcntl
import gc
import os
import socket

import pytest

from everstep import Unavailable
from everstep.keeper import home, wire


@pytest.fixture
def pair():
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield ends
    for end in ends:
        end.close()


def _open_descriptors() -> int:
    gc.collect()  # what tests before this one have left
    return len(os.listdir("/proc/self/fd"))


def test_messages_and_descriptors_arrive(pair):
    here, there = pair
    reading, writing = os.pipe()
    wire.send(here, {"type": "arena", "text": "ü" * 1000}, [reading])
    message, fds = wire.receive(there)
    assert message == {"type": "arena", "text": "ü" * 1000}
    os.write(writing, b"x")
    assert os.read(fds[0], 1) == b"x"
    assert not os.get_inheritable(fds[0])
    for fd in (reading, writing, *fds):
        os.close(fd)


def test_the_end(pair):
    pair[0].close()
    assert wire.receive(pair[1]) is None


def test_what_a_peer_said_before_it_died_is_heard(pair):
    """Also where it had not read all: then Linux tells of its death first."""
    near, far = pair
    wire.send(near, {"type": "unread"})
    with open("/dev/null") as file:
        wire.send(far, {"type": "last"}, [file.fileno()])
    far.close()
    message, fds = wire.receive(near)
    os.close(*fds)
    assert message == {"type": "last"}
    assert wire.receive(near) is None


@pytest.mark.parametrize(
    "data", [b"{", b"[]", b"5", b'{"kind":"x"}', b'{"type":5}', b"\xff", b"[" * 60_000]
)
def test_what_is_no_message_is_a_value_error(pair, data):
    before = _open_descriptors()
    socket.send_fds(pair[0], [data], [pair[0].fileno()])
    with pytest.raises(ValueError):  # noqa: PT011 - the kind is the contract
        wire.receive(pair[1])
    assert _open_descriptors() == before


def test_too_long_messages_are_refused(pair):
    with pytest.raises(AssertionError):
        wire.send(pair[0], {"type": "x", "text": "x" * wire.MESSAGE_BYTES_MAX})
    pair[0].send(b'{"type":"' + b"x" * wire.MESSAGE_BYTES_MAX + b'"}')
    with pytest.raises(ValueError, match="cut short"):
        wire.receive(pair[1])


def test_too_many_descriptors_are_refused_and_closed(pair):
    before = _open_descriptors()
    fds = [pair[0].fileno()] * (wire.DESCRIPTORS_MAX + 8)
    socket.send_fds(pair[0], [b'{"type":"x"}'], fds)
    with pytest.raises(ValueError, match="cut short"):
        wire.receive(pair[1])
    assert _open_descriptors() == before


def test_the_longest_failure_fits_into_a_message(pair):
    failed = {
        "type": "failed",
        "sequence": 1 << 60,
        "kind": "Unavailable",
        "message": "😀" * wire.TEXT_MAX,
    }
    wire.send(pair[0], failed)
    assert wire.receive(pair[1])[0] == failed


def test_one_lock_and_one_listener(tmp_path):
    lock = home.take_lock(tmp_path / "x.lock")
    assert home.take_lock(tmp_path / "x.lock") is None
    os.close(lock)
    again = home.take_lock(tmp_path / "x.lock")
    assert again is not None
    os.close(again)
    for _ in range(2):  # what a dead keeper left is replaced
        listener = home.listen(tmp_path / "x.sock")
        assert (tmp_path / "x.sock").stat().st_mode & 0o777 == 0o600
        connection = wire.connect(tmp_path / "x.sock")
        assert wire.check_peer(connection) == os.getpid()
        connection.close()
        listener.close()
    with pytest.raises(ConnectionRefusedError):
        wire.connect(tmp_path / "x.sock")


def test_another_users_peer_is_refused(pair, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(PermissionError, match="other end"):
        wire.check_peer(pair[0])


def spoil(directory, how):
    """Make it one that somebody else could enter."""
    directory.mkdir(mode=0o700)
    if how == "mode":
        directory.chmod(0o755)
    elif how == "owner":
        os.chown(directory, 12345, 12345)
    else:
        directory.rmdir()
        directory.symlink_to("/") if how == "link" else directory.write_bytes(b"")


SPOILED = ["mode", "link", "file", *(["owner"] if os.getuid() == 0 else [])]


@pytest.mark.parametrize("how", SPOILED)
def test_the_directory_is_this_users_alone(temporary_directory, how, monkeypatch):
    directory = home.runtime_directory()
    assert directory == temporary_directory / f"everstep-{os.getuid()}"
    assert directory.stat().st_mode & 0o777 == 0o700
    directory.rmdir()
    spoil(directory, how)
    assert home.runtime_directory() == directory.with_name(f"{directory.name}-1")
    monkeypatch.setenv("EVERSTEP_RUNTIME_DIR", str(directory))  # the user's word: nothing else
    with pytest.raises(Unavailable, match=r"preparing.*EVERSTEP_RUNTIME_DIR"):
        home.runtime_directory()


@pytest.mark.parametrize("how", SPOILED)
def test_the_users_choice_comes_first(temporary_directory, how, monkeypatch):
    session = temporary_directory / "session"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))
    assert (
        home.runtime_directory() == temporary_directory / f"everstep-{os.getuid()}"
    )  # it does not exist
    session.mkdir(mode=0o700)
    assert home.runtime_directory() == session / "everstep"
    monkeypatch.setenv("EVERSTEP_RUNTIME_DIR", str(temporary_directory / "chosen"))
    assert home.runtime_directory() == temporary_directory / "chosen"
    monkeypatch.setenv("EVERSTEP_RUNTIME_DIR", str(temporary_directory / ("long" * 20)))
    with pytest.raises(Unavailable, match="shorter"):
        home.runtime_directory()
    monkeypatch.delenv("EVERSTEP_RUNTIME_DIR")
    spoil(temporary_directory / "other", how)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(temporary_directory / "other"))
    assert home.runtime_directory() == temporary_directory / f"everstep-{os.getuid()}"


def test_a_lock_whose_file_was_removed_is_made_anew(tmp_path, monkeypatch):
    """The keeper that had it ends between the opening of its file and the locking."""
    path = tmp_path / "x.lock"
    removed, flock = [], fcntl.flock

    def remove_first(fd, how):
        if not removed:
            path.unlink()
            removed.append(fd)
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    lock = home.take_lock(path)
    assert os.path.samestat(os.fstat(lock), path.stat())
    assert home.take_lock(path) is None
    os.close(lock)


def test_every_name_of_a_store_has_one_endpoint(tmp_path):
    (tmp_path / "s").mkdir()
    (tmp_path / "l").symlink_to("s")
    assert home.endpoint(tmp_path / "s") == home.endpoint(f"{tmp_path}/x/../l/")
    assert home.endpoint(tmp_path / "s") != home.endpoint(tmp_path)
