"""Restores on the device, each into a fresh run, every byte compared: whole states from the memory
of the keeper and from a cold disk, a log of 20 records, and DCP's.

One process writes all of it and dies by SIGKILL; another one restores.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from benchmarks.gpu.part import Settings

RECORDS = 20
STEPS = RECORDS + 1
"""The first is the log's base; all are restored at the last."""


def restores(settings: Settings) -> None:
    """Write, die, restore."""
    for name, wanted in (("write", -signal.SIGKILL), ("read", 0)):
        process = settings.child(name)
        print(process.communicate()[0], end="")
        if process.returncode != wanted:
            sys.exit(f"{name}: exit code {process.returncode}")


def write(settings: Settings) -> None:
    """A log with its records, then DCP's files and a whole state of its last step; then it dies."""
    import everstep
    from benchmarks.contenders import Dcp, checkpointer_of, digest
    from benchmarks.gpu import training

    training.make_exact()
    run = training.build(settings.size_of("killed"), settings.device, settings.seed)
    root = Path(settings.disk)
    run.clip = everstep.clip_grad_norm_
    with checkpointer_of(run, root / "log", 1, "log") as checkpointer:
        for step in range(1, STEPS + 1):
            run.train_step()
            checkpointer.step(step)
    (root / "dcp").mkdir()
    Dcp(run, root / "dcp", 1).step(STEPS, due=True)
    whole = checkpointer_of(run, root / "full", 1, "full", keep=1)
    whole.save(STEPS).wait("local")
    (root / "expected").write_text(json.dumps(digest(run)))
    os.kill(os.getpid(), signal.SIGKILL)


def read(settings: Settings) -> None:
    """Restore each, timed from the call to the last byte on the device."""
    from benchmarks.contenders import Dcp, Everstep, digest
    from benchmarks.gpu import training
    from benchmarks.machine import await_end_of_keeper, evict, processes

    training.make_exact()
    expected = json.loads((Path(settings.disk) / "expected").read_text())
    for name, kind in (
        ("whole state, the keeper's memory", "full"),
        ("whole state, cold disk", "full"),
        (f"log of {RECORDS} records, cold disk", "log"),
        ("DCP, cold disk", "dcp"),
    ):
        root = Path(settings.disk) / kind
        if "cold" in name:
            for pid in processes([], str(root)):  # its keeper would give what it holds in memory
                os.kill(pid, signal.SIGTERM)
            await_end_of_keeper(root)
            evict(root)
        run = training.build(settings.size_of("killed"), settings.device, settings.seed + 1)
        contender = Dcp(run, root, 1) if kind == "dcp" else Everstep(run, root, 1, kind)
        restore = contender.reader(run, STEPS)
        training.synchronize(run.device)
        began = time.perf_counter()
        restore()
        training.synchronize(run.device)
        seconds = time.perf_counter() - began
        is_equal = digest(run) == expected
        settings.report(restore=name, seconds=seconds, equal=is_equal)
        contender.close()
