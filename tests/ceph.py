"""A real server of buckets on loopback: Ceph's object gateway over one monitor and one storage
daemon that keeps all in memory. Up in about 15 s, with about 400 MB.

Debian has it: apt-get install --no-install-recommends radosgw ceph-mon ceph-osd ceph-common
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from buckets import environment

PROGRAMS = ("monmaptool", "ceph-mon", "ceph-osd", "ceph", "radosgw", "radosgw-admin")
KEYS = {"AWS_ACCESS_KEY_ID": "testkey", "AWS_SECRET_ACCESS_KEY": "testsecret"}
PATIENCE_S = 90.0

_CONF = """\
[global]
fsid = {fsid}
mon host = v1:127.0.0.1:{monitor}
mon initial members = a
auth cluster required = none
auth service required = none
auth client required = none
run dir = {folder}/run
pid file = {folder}/run/$type.$id.pid
admin socket = {folder}/run/$type.$id.$pid.asok
log file = {folder}/run/$type.$id.log
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd crush chooseleaf type = 0
mon allow pool size one = true
mon data = {folder}/mon
osd data = {folder}/osd
osd objectstore = memstore
memstore device bytes = 4294967296
ms bind ipv6 = false
public addr = 127.0.0.1
cluster addr = 127.0.0.1
mon osd full ratio = .99
rgw gc obj min wait = 1
rgw gc processor period = 2
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:{gateway}
rgw dns name = localhost
"""


def is_installed() -> bool:
    """Whether it can be started."""
    return all(map(shutil.which, PROGRAMS))


@contextlib.contextmanager
def server(folder: Path) -> Iterator[str]:
    """A running server's URL."""
    for name in ("mon", "osd", "run"):
        (folder / name).mkdir(parents=True)
    fsid, gateway = str(uuid.uuid4()), _free_port()
    monitor = _free_port()
    conf = folder / "ceph.conf"
    conf.write_text(_CONF.format(fsid=fsid, folder=folder, gateway=gateway, monitor=monitor))
    try:
        _start(folder, fsid, monitor)
        _await(f"http://127.0.0.1:{gateway}/")
        user = ["--uid=test", "--display-name=test"]
        keys = ["--access-key=testkey", "--secret=testsecret"]
        _run(folder, "radosgw-admin", "-n", "client.rgw", "user", "create", *user, *keys)
        yield f"http://127.0.0.1:{gateway}"
    finally:
        for file in (folder / "run").glob("*.pid"):
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.kill(int(file.read_text()), signal.SIGKILL)


def _start(folder: Path, fsid: str, monitor: int) -> None:
    osd, monmap = str(uuid.uuid4()), str(folder / "monmap")
    address = f"[v1:127.0.0.1:{monitor}]"
    _run(folder, "monmaptool", "--create", "--fsid", fsid, "--addv", "a", address, monmap)
    _run(folder, "ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap)
    _run(folder, "ceph-mon", "-i", "a")
    _run(folder, "ceph", "osd", "new", osd, patience_s=PATIENCE_S)
    _run(folder, "ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
    _run(folder, "ceph-osd", "-i", "0", patience_s=PATIENCE_S)
    _run(folder, "radosgw", "-n", "client.rgw")


def _run(folder: Path, *command: str, patience_s: float = 0.0) -> None:
    """`patience_s`: a monitor that has just started refuses this and that."""
    deadline = time.monotonic() + patience_s
    while True:
        ended = subprocess.run(
            command,
            env={**os.environ, "CEPH_CONF": str(folder / "ceph.conf")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=PATIENCE_S,
            text=True,
        )
        if ended.returncode == 0:
            return
        assert time.monotonic() < deadline, f"{command}: {ended.stderr}"
        time.sleep(0.2)


def _await(url: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not _answers(url):
        assert time.monotonic() < deadline, "the gateway does not answer"
        time.sleep(0.2)


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=10).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture(scope="session")
def ceph_server(tmp_path_factory):
    """The URL of a server that serves all tests of this process; skips where it is not there."""
    if not is_installed():
        pytest.skip("Ceph is not installed: " + (__doc__ or "").strip().splitlines()[-1])
    with server(tmp_path_factory.mktemp("ceph")) as endpoint:
        yield endpoint


@pytest.fixture
def ceph_bucket(ceph_server, monkeypatch, request):
    """The URL of a place for one store."""
    import boto3

    for name, value in {**environment(ceph_server), **KEYS}.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket="tests")
    name = re.sub(r"\W+", "-", request.node.name)
    return f"s3://tests/{name}-{os.getpid()}"
