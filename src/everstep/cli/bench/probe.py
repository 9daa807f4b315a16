"""One restore in a process of its own, as after a crash: nothing was computed in it before, and its
memory is touched for the first time. `recovery` starts one after the other.

The memory was in use until shortly before, as that of a trainer that has died: a virtual machine's
host takes back what is free for seconds, and a restore that needs more than the one before it would
pay for that (docs/results.md).

A probe either restores a step, or goes the same way with nothing at the same time as anything else:
the base, and then, of record after record, a read and an update.
"""

import json
import mmap
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_args

import torch

from everstep import Checkpointer
from everstep.cli import workload
from everstep.cli.bench.checks import digest, forget
from everstep.format.tables import Table
from everstep.redo.replay import Loaded, clip, redo
from everstep.restore.apply import apply
from everstep.restore.buffer_pool import Slabs
from everstep.restore.choose import Candidate, Described
from everstep.restore.load import Loader
from everstep.restore.records import United, load_record
from everstep.sharding.world import World
from everstep.state.view import State
from everstep.store import catalog
from everstep.store.names import CheckpointName
from everstep.tiers.disk import Disk

_RUN_STEPS = 1000
_TIMEOUT_S = 300.0
_IN_USE = 10
"""Of the parameters' bytes: more than any of these restores takes at once."""
T = TypeVar("T")


def ask(do: str, root: Path, size: workload.Size, text: bytes, **request: Any) -> dict[str, Any]:
    """`restore` or `apart`, in a new process; blocks. Raises subprocess.SubprocessError."""
    told = {"do": do, "root": str(root), "size": size, "text_bytes": len(text), **request}
    process = subprocess.run(
        [sys.executable, "-m", "everstep.cli.bench.probe", json.dumps(told)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        check=True,
        timeout=_TIMEOUT_S,
    )
    reply: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return reply


def restore(root: Path, run: workload.Run, step: int) -> dict[str, Any]:
    """What `Checkpointer.restore(step)` takes, the store's files not in the page cache."""
    with Checkpointer(root, run.state()) as checkpointer:
        _use_memory(run)
        cache = forget(root)
        began = time.perf_counter()
        checkpointer.restore(step)
        seconds = time.perf_counter() - began
    return {"seconds": seconds, "digest": digest(run), "cache": cache}


def apart(root: Path, run: workload.Run, base: int, last: int) -> dict[str, Any]:
    """Each read of a record, and each update, from after the base `base` to the step `last`: one
    after the other, into one record's memory. The parts that a restore of `last` does at once.

    `record_s`: of a read, from the record's manifest to gradients as the optimizer consumed them
    (multiplied by what clipping came to). `bytes_s`: what of that its bytes take, read and
    verified. `digest`: of the model alone, see `weights`.
    """
    disk = Disk(root)
    state = State(run.state(), rng=True)
    optimizers = {optimizer.name: optimizer for optimizer in state.optimizers}
    reads: list[float] = []
    loads: list[float] = []
    updates: list[float] = []
    kind = type(run.optimizer)
    step = kind.step
    kind.step = lambda optimizer: _timed(partial(step, optimizer), updates)  # type: ignore[method-assign, assignment]
    _use_memory(run)
    forget(root)
    with Loader() as loader:
        apply(Candidate(catalog.find(disk, base), disk), state, None, loader)
        slabs = Slabs()
        known: dict[str | None, Table] = {}
        alone = World(0, 1)

        def read(name: CheckpointName) -> Loaded:
            manifest = catalog.read_manifest(disk, name)
            for part in manifest.all_parts:  # most records share one
                if part.table.digest not in known:
                    known[part.table.digest] = catalog.read_table(disk, part)
            tables = [known[part.table.digest] for part in manifest.all_parts]
            ((record, own),) = Described(manifest, tables).records
            united, candidate = United.of(own), Candidate(name, disk)
            load = partial(load_record, candidate, record, united, None, loader, slabs, alone)
            return clip(_timed(load, loads))

        for described in Candidate(catalog.find(disk, last), disk).describe()[1:]:
            name = CheckpointName(described.manifest.step, described.manifest.epoch)
            loaded = _timed(partial(read, name), reads)
            redo(loaded, optimizers)
            del loaded
    return {"record_s": reads, "bytes_s": loads, "update_s": updates, "digest": weights(run)}


def weights(run: workload.Run) -> str:
    """A digest of what updates change."""
    return "".join(optimizer.digest() for optimizer in State(run.state(), rng=False).optimizers)


def _use_memory(run: workload.Run) -> None:
    """Touch as much as any restore takes, and give it back."""
    size = _IN_USE * sum(parameter.nbytes for parameter in run.model.parameters())
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as region:
        for start in range(0, size, mmap.PAGESIZE):
            region[start] = 1


def _timed(action: Callable[[], T], seconds: list[float]) -> T:
    began = time.perf_counter()
    found = action()
    seconds.append(time.perf_counter() - began)
    return found


def main() -> None:
    """Do what the first argument says, and print the reply as the last line."""
    told = json.loads(sys.argv[1])
    do, root, size = told.pop("do"), Path(told.pop("root")), told.pop("size")
    assert size in get_args(workload.Size)
    text = bytes(told.pop("text_bytes"))  # nothing is trained here
    run = workload.build(text, seed=2, steps=_RUN_STEPS, size=size)
    actions: dict[str, Callable[..., dict[str, Any]]] = {"restore": restore, "apart": apart}
    reply = actions[do](root, run, **told)
    print(json.dumps({**reply, "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()
