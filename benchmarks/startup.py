"""How long the command and the keeper take to start, and what a keeper without an arena weighs.

    python benchmarks/startup.py [--runs 10] [--steps 100]

Medians over fresh processes, on a store of that many checkpoints. The first run of each is thrown
away: it reads Python's files from the disk, and compiles modules, as the first run after an
installation does. Aims: `everstep ls` under 0.15 s, a keeper that answers
in under 0.3 s and needs under 80 MiB.
"""

import argparse
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import stores
from everstep.keeper import wire

COMMAND = "import sys; from everstep.cli.main import main; sys.exit(main(sys.argv[1:]))"
TIMEOUT_S = 10.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="everstep-startup-") as directory:
        os.environ["PYTHONPYCACHEPREFIX"] = str(Path(directory) / "compiled")
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        store = Path(directory) / "store"
        stores.make_store(store, range(1, args.steps + 1), stores.MIXED)
        report("python -c pass", [run_python("-c", "pass") for _ in range(args.runs + 1)])
        for words in (["--help"], ["ls", str(store)], ["show", str(store)]):
            times = [run_python("-c", COMMAND, *words) for _ in range(args.runs + 1)]
            report(f"everstep {words[0]}", times)
        started = [start_keeper(store) for _ in range(args.runs + 1)]
        report("keeper, to its first answer", [row[:2] for row in started])
        resident = statistics.median(kib for *_, kib in started) / 1024
        print(f"{'keeper, resident':32} {resident:7.1f} MiB")


def report(label: str, seconds: list[tuple[float, float]]) -> None:
    walls, processors = (sorted(times) for times in zip(*seconds[1:], strict=True))
    wall, processor = statistics.median(walls) * 1e3, statistics.median(processors) * 1e3
    spread = f"{walls[0] * 1e3:.1f} to {walls[-1] * 1e3:.1f}"
    print(f"{label:32} {wall:7.1f} ms   ({spread}; processor {processor:.1f})")


def run_python(*words: str) -> tuple[float, float]:
    """(seconds of wall time, of processor time)."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL, check=True)
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def start_keeper(store: Path) -> tuple[float, float, int]:
    """(seconds from its start to its first answer, of processor time till then, resident KiB)."""
    words = ["-P", "-m", "everstep.keeper", str(store), "--idle-s", "0.1"]
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, *words], stderr=subprocess.DEVNULL)
    try:
        connection = retry(lambda: wire.connect(wire.endpoint(store).with_suffix(".sock")))
        hello = {"type": "attach", "id": 1, "protocol": wire.PROTOCOL}
        wire.send(connection, {**hello, "keep": None, "epoch": None, "parent": None})
        connection.settimeout(TIMEOUT_S)
        answer = wire.receive(connection)
        seconds = time.perf_counter() - began
        assert answer is not None, "the keeper closed the connection"
        assert answer[0]["type"] == "attached", answer
        processor = processor_seconds(process.pid)
        resident = resident_kib(process.pid)
        connection.close()
        return seconds, processor, resident
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()


def retry(attempt: Callable[[], socket.socket]) -> socket.socket:
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            return attempt()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.001)


def processor_seconds(pid: int) -> float:
    """To 10 ms, as Linux counts."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


if __name__ == "__main__":
    main()
