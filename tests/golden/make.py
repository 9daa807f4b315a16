"""Write golden stores: once for each version of the format, or of the code, then never again.

python tests/golden/make.py                writes tests/golden/version-N, which must not exist
python tests/golden/make.py runs [NAME]    writes tests/golden/archives/NAME.zip: all, or one

The runs were written at commit 9fc7cd0, whose options are used here: to see how, check it out and
put this folder into it. Each archive has a store, and expected.safetensors: what the run had after
each step, as STEP/TENSOR, or STEP-EPOCH/TENSOR of a branch that was left.
"""

import shutil
import socket
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from programs import ALONE, TOGETHER, Contents, Job, fresh, fused, runs_on, unboxed
from programs import flat as flat_boxes
from safetensors.torch import save_file

from everstep import Checkpointer, Store
from everstep.format.document import FORMAT_VERSION
from stores import SMALL, end_keeper, go_on, make_store

HERE = Path(__file__).parent
DATE = (2025, 1, 1, 0, 0, 0)
WAIT = {"under_pressure": "wait", "rng": False}
LOG = {"strategy": "log", "base_every": 4, **WAIT}
WINDOW = {"base_every": 5, "window": 3}
SPREAD = {"strategy": "spread", "every": 4, "window": 3, **WAIT}


def advance(saver: Checkpointer, job: Job, steps: range, **named: Any) -> dict[str, Contents]:
    """Train and save; the contents of each step. `named`: a tag for the first of these steps."""
    found = {}
    for step in steps:
        job.train(step)
        handle = saver.save(step, **named) if named else saver.step(step)
        named = {}
        found[f"{step}"] = job.contents()
        if handle:
            handle.wait("local")
    return found


def runs(name: str, store: Path, last: int, **options: Any) -> dict[str, Contents]:
    """From the start to a step."""
    job = ALONE[name](1)
    with job.attached(store, **options) as saver:
        return advance(saver, job, range(1, last + 1))


def branches(name: str, store: Path, **options: Any) -> dict[str, Contents]:
    """Four steps; then, from the second one on, two others and one more."""
    job = ALONE[name](1)
    with job.attached(store, **options) as saver:
        found = advance(saver, job, range(1, 3))
        found |= advance(saver, job, range(3, 5), tag="best", metrics={"loss": 0.25})
    for step in ("3", "4"):
        found[f"{step}-1"] = found.pop(step)
    job = fresh(name)
    with job.attached(store, **options) as saver:
        saver.restore(2)
        torch.randn(3)
        for parameter in job.state["model"].parameters():
            parameter.data += 0.125
        found |= advance(saver, job, range(3, 6))
    return found


def goes_by_itself(name: str, store: Path) -> dict[str, Contents]:
    """Auto, which decides soon."""
    from everstep.capture import auto

    auto.SAVES_MIN, auto.SLOWER = 3, float("inf")
    return runs(name, store, 12, **WAIT)


def catches_up(name: str, store: Path) -> dict[str, Contents]:
    """Some steps are made whole in the background."""
    job = ALONE[name](1)
    with job.attached(store, **{**LOG, "base_every": 100, "catch_up": 3}) as saver:
        found = advance(saver, job, range(1, 6))
        end = time.monotonic() + 400
        while not saver.metrics.catch_ups:
            assert time.monotonic() < end
            time.sleep(0.05)
        return found | advance(saver, job, range(6, 8))


def freezes(name: str, store: Path) -> dict[str, Contents]:
    """Said to be changed by nobody."""
    return runs(name, store, 6, **LOG, derive={"model.encoder": None, "table": None})


def boxes(name: str, store: Path, made: tuple) -> dict[str, Contents]:
    """Parameters that are boxes. A twin that has none comes to the same bits."""
    state, train, layout = made
    twin, found = unboxed(1), {}
    with Checkpointer(store, state, layout=layout, audit="full", **LOG) as saver:
        for step in range(1, 7):
            train(step)
            twin.train(step)
            saver.step(step).wait("local")
            found[f"{step}"] = twin.contents()
    return found


def together(name: str, store: Path, options: Mapping[str, Any]) -> dict[str, Contents]:
    """On several ranks."""
    from gang import Gang

    program = TOGETHER[name]
    last = {"full": 2, "log": 6, "spread": 8}[options["strategy"]]
    with Gang(len(program.nodes)) as gang:
        (first, found, errors), *_ = gang.run(runs_on, program, store, last, dict(options))
    for node in {"", *program.nodes}:
        end_keeper(store, node)
    assert (first, errors) == (0, [])
    del found[0]
    return {f"{step}": contents for step, contents in found.items()}


def _options_together(name: str) -> dict[str, Any]:
    if "log" not in name and "spread" not in name:
        options = {"strategy": "full", **WAIT}
    else:
        options = LOG if "log" in name else SPREAD
    if name in ("zero1-log", "fsdp2-log-clipped"):
        options = {**options, "audit": "full"}
    if "checked" in name:
        options = {**options, "check_replicas": True}
    if "own" in name:
        options = {**options, "by_rank": {"own": "exact"}, "rng": True}
    return {**options, **WINDOW} if "spread-bases" in name else options


MAKERS: dict[str, Callable[[str, Path], dict[str, Contents]]] = {
    "full": lambda name, store: branches(name, store, strategy="full", under_pressure="wait"),
    "spread": lambda name, store: runs(name, store, 9, **SPREAD),
    "auto": goes_by_itself,
    "log": lambda name, store: runs(name, store, 7, **{**LOG, "rng": True}),
    "log-branched": lambda name, store: branches(name, store, **LOG),
    "log-audited": lambda name, store: runs(name, store, 6, **LOG, audit="full"),
    "log-unusual": lambda name, store: runs(name, store, 6, **{**LOG, "rng": True}),
    "log-clipped": lambda name, store: runs(name, store, 6, **LOG),
    "log-spread-bases": lambda name, store: runs(name, store, 9, **{**LOG, **WINDOW}),
    "log-caught-up": catches_up,
    "log-packed": lambda name, store: runs(name, store, 4, **LOG),
    "log-derived": lambda name, store: runs(name, store, 6, **LOG, audit="full"),
    "log-frozen": freezes,
    "log-boxes-flat": lambda name, store: boxes(name, store, flat_boxes(3)),
    "log-boxes-fused": lambda name, store: boxes(name, store, fused()),
    **{
        name: lambda name, store: together(name, store, _options_together(name))
        for name in TOGETHER
    },
}


def make(name: str) -> None:
    """Run it, and put what it left into an archive."""
    path = HERE / "archives" / f"{name}.zip"
    assert not path.exists(), f"{path} is there: what was written stays as it is"
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        found = MAKERS[name](name, store)
        end_keeper(store)
        steps = [str(step) for step in Store(store).steps()]
        assert Store(store).verify().ok
        flat = {
            f"{step}/{key}": tensor
            for step, contents in found.items()
            if step in steps or "-" in step
            for key, tensor in contents.items()
        }
        assert steps == [step for step in found if step in steps]
        metadata = {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}
        save_file(flat, Path(folder) / "expected.safetensors", metadata)
        path.parent.mkdir(exist_ok=True)
        with zipfile.ZipFile(path, "x", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for file in sorted(Path(folder).rglob("*")):
                if file.is_file():
                    info = zipfile.ZipInfo(str(file.relative_to(folder)), DATE)
                    info.compress_type = zipfile.ZIP_DEFLATED
                    archive.writestr(info, file.read_bytes())
    opened = "".join("r" if found_record else "b" for found_record in _records(path))
    print(f"{name}: {path.stat().st_size >> 10} kB, {opened}")


def _records(path: Path) -> list[bool]:
    with tempfile.TemporaryDirectory() as folder:
        shutil.unpack_archive(path, folder)
        store = Store(Path(folder) / "store")
        return [bool(store.manifest(step).records) for step in store.steps()]


if __name__ == "__main__":
    if sys.argv[1:2] == ["runs"]:
        for name in sys.argv[2:] or MAKERS:
            make(name)
        sys.exit()
    path = HERE / f"version-{FORMAT_VERSION}"
    assert not path.exists(), f"{path} is there: old versions stay as they were written"
    socket.gethostname = lambda: "golden"
    go_on(make_store(path, {1: "best", 2: None, 3: None}, specs=SMALL), 2, [3])
