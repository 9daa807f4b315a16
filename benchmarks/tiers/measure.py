"""`python -m benchmarks.tiers` (or `make bench-tiers`): what tiers cost and give back.

upload   a committed step copied to a bucket, beside obstore's own multipart put of as many bytes
restore  from the keeper's memory, beside a plain copy of as many bytes; from the bucket; of a node
         that was lost from the other one's memory and store, over loopback
stall    a step of training with a remote tier behind a throttled link, beside one without it
route    the policy on traces (benchmarks.tiers.simulate)

The bucket is that of AWS_ENDPOINT_URL and so on where BUCKET is given, else moto's on loopback.
Contenders take turns; medians, ratios and their intervals are printed.
"""

import argparse
import contextlib
import multiprocessing
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import everstep
from benchmarks.figures import Samples, ratio, summary
from benchmarks.machine import await_end_of_keeper, describe, evict
from benchmarks.tiers import simulate
from everstep.cli.top import status
from everstep.store import catalog
from everstep.store.copy import Copier
from everstep.tiers.tier import tier_at

STEP_S = 0.2
"""Of a step of training in `stall`: small products of matrices, as long as this takes."""
LINK_BYTES_PER_S = 40e6
NICE = 19
"""Of what stands for another machine here: the bucket's server, and the link to it."""
_PORT = re.compile(rb"Running on http://127\.0\.0\.1:(\d+)")


def main() -> None:
    """Measure and show."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tiers", description=__doc__)
    parser.add_argument("--mib", type=int, default=256, help="of the state (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bucket", help="s3://...; without it moto's")
    parser.add_argument("--store-root", type=Path, default=Path.home())
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="tiers-", dir=args.store_root))
    samples = Samples()
    try:
        with _bucket(args.bucket) as bucket:
            for number in range(args.rounds):
                upload(root, bucket, args.mib << 20, samples, number)
                restore(root, bucket, args.mib << 20, samples, number)
                restore_from_peer(root, args.mib << 20, samples, number)
                stall(root, bucket, samples, number)
        _show(samples, describe(root))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    simulate.main([])


def upload(root: Path, bucket: str, size: int, samples: Samples, number: int) -> None:
    """Both read the same file from the disk, once each, in turn."""
    import obstore
    from obstore.store import from_url

    store = root / f"upload-{number}"
    saves(store, size)
    disk = tier_at(store)
    [name] = catalog.committed(disk)
    pack = max(catalog.read_manifest(disk, name).files, key=lambda link: link.size)
    plain = from_url(f"{bucket}/plain-{number}")

    def put() -> None:
        with open(store / pack.path, "rb") as file:
            obstore.put(plain, "pack", file, use_multipart=True)

    def copy() -> None:
        Copier(disk, tier_at(f"{bucket}/copy-{number}")).copy(name)

    for what, act in _turned([("obstore's put", put), ("upload", copy)], number):
        evict(store)
        samples.add(what, "seconds", number, [_timed(act)])
    shutil.rmtree(store)


def restore(root: Path, bucket: str, size: int, samples: Samples, number: int) -> None:
    """A trainer is killed when its step is in the bucket; another one restores it."""
    store, far = root / f"restore-{number}", f"{bucket}/restore-{number}"
    state = _state(size)
    source, target = torch.empty(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    source.fill_(1)
    target.fill_(2)
    tiers = everstep.Tiers(remote=far)
    trainer = multiprocessing.get_context("spawn").Process(target=_dies, args=(store, far, size))
    trainer.start()
    trainer.join()
    for where in ("memory", "bucket"):
        # First, since a keeper frees memory for a while after its Checkpointer has closed.
        samples.add("plain copy", "seconds", number, [_timed(lambda: target.copy_(source))])
        with everstep.Checkpointer(store, state, strategy="full", tiers=tiers) as checkpointer:
            assert checkpointer.restore() == 1
            seconds = checkpointer.metrics.restore_seconds
        samples.add(f"restore from {where}", "seconds", number, [seconds])
        os.kill(status(str(store))["pid"], signal.SIGKILL)  # it holds the memory of the dead
        await_end_of_keeper(store)
        shutil.rmtree(store)  # next from the bucket


def _dies(store: Path, remote: str, size: int) -> None:
    """A trainer whose one step is everywhere."""
    tiers = everstep.Tiers(remote=remote)
    checkpointer = everstep.Checkpointer(store, _state(size), strategy="full", tiers=tiers)
    checkpointer.save(1).wait("remote")
    os.kill(os.getpid(), signal.SIGKILL)


def restore_from_peer(root: Path, size: int, samples: Samples, number: int) -> None:
    """Of two nodes, each with a store of its own, one is lost, disk and all."""
    folder = root / f"peer-{number}"
    _, (lost, _) = _on_two_nodes(folder, "saves", size)
    os.kill(lost, signal.SIGKILL)
    shutil.rmtree(folder / "1")
    (first, _), (second, seconds) = _on_two_nodes(folder, "restores", size)
    samples.add("restore from a peer", "seconds", number, [seconds])
    for keeper in (first, second):
        os.kill(keeper, signal.SIGKILL)
    shutil.rmtree(folder)


def _on_two_nodes(folder: Path, what: str, size: int) -> list[Any]:
    """What each node's one rank says: its keeper's process, and how long it restored."""
    context = multiprocessing.get_context("spawn")
    folder.mkdir(exist_ok=True)
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    ranks = [
        context.Process(target=_rank, args=(rank, folder, what, size, pipes[rank][1]))
        for rank in range(2)
    ]
    for each in ranks:
        each.start()
    said = [receiver.recv() for receiver, _ in pipes]
    for each in ranks:
        each.join()
    return said


def _rank(rank: int, folder: Path, what: str, size: int, pipe: Any) -> None:
    """Saves a step that both nodes hold, or restores it; then it dies, so that its keeper stays."""
    store, run = folder / str(rank) / "store", folder / str(rank) / "run"
    run.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.environ |= {"EVERSTEP_NODE": str(rank), "EVERSTEP_RUNTIME_DIR": str(run)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/{what}", rank=rank, world_size=2)
    tiers = everstep.Tiers(peers=1)
    checkpointer = everstep.Checkpointer(store, _state(size), strategy="full", tiers=tiers)
    if what == "saves":
        checkpointer.save(1).wait("replicated", timeout=120)
    else:
        assert checkpointer.restore() == 1
    dist.barrier()
    pipe.send((status(str(store))["pid"], checkpointer.metrics.restore_seconds))
    os.kill(os.getpid(), signal.SIGKILL)


def stall(root: Path, bucket: str, samples: Samples, number: int) -> None:
    """Steps that save everything, in turn without and with a remote tier that takes less."""
    for what in [what for what, _ in _turned([("alone", None), ("remote", None)], number)]:
        store = root / f"stall-{number}-{what}"
        with contextlib.ExitStack() as stack:
            tiers = None
            if what == "remote":
                stack.enter_context(_throttled(LINK_BYTES_PER_S))
                tiers = everstep.Tiers(remote=f"{bucket}/stall-{number}")
            state = _state(16 << 20)
            before = resource.getrusage(resource.RUSAGE_SELF)
            with everstep.Checkpointer(store, state, strategy="full", tiers=tiers) as checkpointer:
                steps = [
                    _timed(lambda step=step: _train(checkpointer, step)) for step in range(1, 31)
                ]
            after = resource.getrusage(resource.RUSAGE_SELF)
        samples.add(f"step, {what}", "seconds", number, steps[5:])
        samples.add(f"stall, {what}", "seconds", number, [checkpointer.metrics.stall_seconds / 30])
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        samples.add(f"trainer's processor time, {what}", "seconds", number, [spent / 30])


def _train(checkpointer: everstep.Checkpointer, step: int) -> None:
    until = time.perf_counter() + STEP_S
    a = torch.randn(256, 256)
    while time.perf_counter() < until:
        a = torch.tanh(a @ a.T)
    checkpointer.step(step)


def saves(store: Path, size: int) -> None:
    """One step of a state of so many bytes."""
    with everstep.Checkpointer(store, _state(size), strategy="full") as checkpointer:
        checkpointer.save(1)
    await_end_of_keeper(store)


def _state(size: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(0)
    return {"state": [torch.randn(size // 32, generator=generator) for _ in range(8)]}


def _timed(act: object) -> float:
    began = time.perf_counter()
    act()  # type: ignore[operator]
    return time.perf_counter() - began


def _turned(items: list, number: int) -> list:  # type: ignore[type-arg]
    return items[number % len(items) :] + items[: number % len(items)]


# ---- buckets -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _bucket(given: str | None) -> Iterator[str]:
    if given:
        yield given
        return
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    os.setpriority(os.PRIO_PROCESS, process.pid, NICE)
    try:
        assert process.stderr
        found = next(filter(None, map(_PORT.search, process.stderr)))
        threading.Thread(target=process.stderr.read, daemon=True).start()
        endpoint = f"http://127.0.0.1:{int(found[1])}"
        os.environ |= {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }
        request = urllib.request.Request(f"{endpoint}/bench", method="PUT")
        urllib.request.urlopen(request, timeout=30).close()
        yield "s3://bench"
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _throttled(bytes_per_s: float) -> Iterator[None]:
    """A link to the bucket that carries so much, in a process of its own."""
    server = os.environ["AWS_ENDPOINT_URL"]
    receiver, sender = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("spawn")
    link = context.Process(target=_link, args=(server, bytes_per_s, sender), daemon=True)
    link.start()
    os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{receiver.recv()}"
    try:
        yield
    finally:
        os.environ["AWS_ENDPOINT_URL"] = server
        link.kill()
        link.join()


def _link(server: str, bytes_per_s: float, told: Any) -> None:
    os.nice(NICE)
    host, port = server.removeprefix("http://").split(":")
    listener = socket.create_server(("127.0.0.1", 0))
    told.send(listener.getsockname()[1])

    def carry(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(64 << 10):
                time.sleep(len(data) / bytes_per_s)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    while True:
        near, _ = listener.accept()
        far = socket.create_connection((host, int(port)))
        for pair in ((near, far), (far, near)):
            threading.Thread(target=carry, args=pair, daemon=True).start()


# ---- the table -----------------------------------------------------------------------------------

COMPARED = (
    ("upload", "obstore's put", "obstore's put / upload", "≥ 0.9"),
    ("restore from memory", "plain copy", "plain copy / restore from memory", "≥ 0.7"),
    ("restore from a peer", "plain copy", "plain copy / restore from a peer", ""),
    ("restore from bucket", "plain copy", "plain copy / restore from bucket", ""),
    ("step, alone", "step, remote", "step with remote_every=1 / without", "≤ 1.1"),
    ("stall, alone", "stall, remote", "stall with remote_every=1 / without", "≤ 1.1"),
    (
        "trainer's processor time, alone",
        "trainer's processor time, remote",
        "trainer's processor time with / without",
        "",
    ),
)
"""(mine, the other's, their ratio, what is aimed at)"""


def _show(samples: Samples, machine: dict[str, str]) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=120)
    console.print(" · ".join(machine.values()))
    table = Table("ratio", "median", "95%", "aim", "seconds of each", title="tiers")
    for mine, other, what, aim in COMPARED:
        pair = samples.rounds(mine, "seconds"), samples.rounds(other, "seconds")
        found, first, second = ratio(pair[1], pair[0]), summary(pair[0]), summary(pair[1])
        assert found
        assert first
        assert second
        low, high = found["interval"]
        each = f"{first['median']:.3f} / {second['median']:.3f}"
        table.add_row(what, f"{found['ratio']:.2f}", f"{low:.2f} … {high:.2f}", aim, each)
    console.print(table)
