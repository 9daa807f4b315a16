"""How long the command, and a keeper, take to start, and how much memory a keeper needs.

    python -m benchmarks.startup

Medians over fresh processes, on a store of 100 checkpoints; the first run of each is thrown
away, since it reads Python's files from the disk. Aims: `everstep ls` under 0.15 s, a Checkpointer
that is ready in 0.3 s (its keeper has answered), a keeper under 80 MiB.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.machine import await_end_of_keeper, memory_bytes, processes

RUNS, STEPS = 10, 100
COMMAND = "import sys; from everstep.cli.main import main; sys.exit(main(sys.argv[1:]))"
OPEN = """
import sys, time, torch, everstep
state = {"model": torch.nn.Linear(64, 64)}
began = time.perf_counter()
with everstep.Checkpointer(sys.argv[1], state) as checkpointer:
    print(time.perf_counter() - began, flush=True)
    sys.stdin.read()
    for step in range(1, int(sys.argv[2]) + 1):
        checkpointer.save(step).wait()
"""


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="everstep-startup-") as directory:
        os.environ["PYTHONPYCACHEPREFIX"] = str(Path(directory) / "compiled")
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        store = Path(directory) / "store"
        open_store(store, STEPS)
        report("python -c pass", [run("-c", "pass") for _ in range(RUNS + 1)])
        for words in (["--help"], ["ls", str(store)], ["show", str(store)]):
            times = [run("-c", COMMAND, *words) for _ in range(RUNS + 1)]
            report(f"everstep {words[0]}", times)
        opened = [open_store(Path(directory) / f"{n}", 0) for n in range(RUNS + 1)]
        report("a Checkpointer and its keeper", [seconds for seconds, _ in opened])
        resident = statistics.median(size for _, size in opened) / 2**20
        print(f"{'the keeper, resident':32} {resident:7.1f} MiB")


def report(label: str, seconds: list[float]) -> None:
    kept = [value * 1e3 for value in seconds[1:]]
    spread = f"({min(kept):.1f} to {max(kept):.1f})"
    print(f"{label:32} {statistics.median(kept):7.1f} ms   {spread}")


def run(*words: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def open_store(store: Path, steps: int) -> tuple[float, int]:
    """Seconds until a Checkpointer of a new store is ready, and its keeper's memory in bytes."""
    command = [sys.executable, "-c", OPEN, str(store), str(steps)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout
        seconds = float(process.stdout.readline())
        keepers = [pid for pid in processes([], str(store)) if pid != process.pid]
        size = memory_bytes(keepers)
        process.communicate()
    await_end_of_keeper(store)
    return seconds, size


if __name__ == "__main__":
    main()
