"""`python -m benchmarks.codecs` (or `make bench-codecs`): a step until it is durable behind links
of several speeds, written raw, with one codec on everything, and as everstep chooses.

Each cell is a run of its own, whose keeper's writes take as long as such a link would; training
goes on meanwhile, on one thread, so that one core of two is free; in the last rows on two, where
nothing is. The first saves, by which everstep learns link and samples, do not count. Medians.

The models are trained once, for 2,000 steps in which the rate falls to a tenth, and kept in
build/codecs; LoRA goes on from the float32 one, 200 steps.

`--disk` measures something else: training that saves every step to this machine's own disk, raw and
as everstep chooses, in turn with training alone.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import everstep
from benchmarks import keepers
from benchmarks.codecs.states import Training, build
from benchmarks.machine import await_end_of_keeper, describe
from everstep.codecs import codec
from everstep.format.packs import CHUNK_BYTES
from everstep.keeper.encoder import SMALL_BYTES, Speeds, figures_of
from everstep.state.view import State

KINDS = ("fp32", "bf16", "lora")
LINKS = (50e6, 200e6, 1e9, 5e9)
MODES = ("raw", "zstd", "planes", "auto")
TRAINED_STEPS, LORA_STEPS = 2000, 200
LEARNING, SAVES = 3, 5
DISK_ROUNDS, DISK_STEPS = 5, 40
KEPT = Path(__file__).parents[2] / "build" / "codecs"
_MEMORY = Path("/dev/shm")
_KEEPER = """
import threading, time
from everstep.keeper import encoder
from everstep.tiers.system import System

plain, lock, free_at, mode = System.pwrite, threading.Lock(), 0.0, {mode!r}

def pwrite(system, fd, data, offset):
    global free_at
    began = time.monotonic()
    size = plain(system, fd, data, offset)
    with lock:
        free_at = until = max(free_at, began) + size / {link}
    time.sleep(max(0.0, until - time.monotonic()))
    return size

System.pwrite = pwrite
if mode != "auto":
    encoder.choose = lambda samples, *_: {{}} if mode == "raw" else dict.fromkeys(samples, mode)
    encoder.REACH_BYTES_PER_S = 1e18 if mode != "raw" else 0.0
    encoder.FreeCores.look = lambda self, own_s: 1.0
"""


@dataclass
class Row:
    """What saves of one run came to. `slowdown`: of steps while one is on its way."""

    durable_s: float
    bytes: float
    slowdown: float
    codecs: str


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codecs", description=__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--links", nargs="+", type=float, default=LINKS, metavar="BYTES_PER_S")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--samples", action="store_true", help="tell what is seen of tensors, too")
    parser.add_argument("--disk", type=Path, metavar="FOLDER", help="save every step there")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp(prefix="codecs-", dir=_MEMORY if _MEMORY.is_dir() else None))
    console = Console(width=150)
    table = Table("state, link", *args.modes, "auto / best of the others")
    try:
        print(", ".join(f"{key} {value}" for key, value in describe(root).items()))
        trained = {kind: _trained(kind) for kind in args.kinds}
        if args.disk:
            for kind, training in trained.items():
                for strategy in ("full", "log"):
                    console.print(every_step(args.disk, kind, training, strategy))
            return
        for kind, training in trained.items():
            if args.samples:
                console.print(_samples(kind, training))
            for link in args.links:
                _measure(table, root, kind, training, link, args.modes, threads=1)
        kind, training = next(iter(trained.items()))
        _measure(table, root, kind, training, args.links[len(args.links) // 3], args.modes, 2)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    console.print(table)


def _measure(
    table: Table,
    root: Path,
    kind: str,
    training: Training,
    link: float,
    modes: Sequence[str],
    threads: int,
) -> None:
    """One row."""
    torch.set_num_threads(threads)
    rows = {mode: run(root, training, link, mode) for mode in modes}
    torch.set_num_threads(1)
    others = [row.durable_s for mode, row in rows.items() if mode != "auto"]
    is_whole = "auto" in rows and others
    ratio = f"{rows['auto'].durable_s / min(others):.2f}" if is_whole else ""
    busy = ", no core free" if threads > 1 else ""
    table.add_row(f"{kind}, {link / 1e6:,.0f} MB/s{busy}", *map(_text, rows.values()), ratio)


def _samples(kind: str, training: Training) -> Table:
    """What everstep sees of the tensors: by what they are, the share of bytes that stays, and MB of
    raw bytes that a core encodes in a second."""
    table = Table(kind, "MB", *codec.ENCODERS)
    state = State(training.state)
    groups: dict[str, list[tuple[memoryview, int]]] = {}
    for leaf in state.collect().walk.leaves:
        if leaf.tensor.nbytes >= SMALL_BYTES:
            first, last = leaf.name.partition(".")[0], leaf.name.rpartition(".")[2]
            what = f"{first} {last}" if last.startswith("exp_") else first
            raw = leaf.tensor.detach().reshape(-1).view(torch.uint8).numpy().data[:CHUNK_BYTES]
            chunk = raw, leaf.tensor.element_size()
            groups.setdefault(f"{what}, {leaf.tensor.dtype}", []).append(chunk)
    for what, chunks in groups.items():
        size, cells = sum(len(raw) for raw, _ in chunks), []
        for encoder in codec.ENCODERS:
            found = [
                (len(raw), figures_of(raw, item_size, (encoder,), Speeds())[encoder])
                for raw, item_size in chunks
            ]
            share = sum(nbytes * figures.share for nbytes, figures in found) / size
            speed = size / sum(nbytes / figures.bytes_per_s for nbytes, figures in found)
            cells.append(f"{share:.2f}, {speed / 1e6:,.0f}")
        table.add_row(what, f"{size / 1e6:.1f}", *cells)
    return table


def _trained(kind: str) -> Training:
    """As it is kept, or trained now."""
    steps = LORA_STEPS if kind == "lora" else TRAINED_STEPS
    base = _trained("fp32").state["model"].state_dict() if kind == "lora" else None
    training = build(kind, base)
    with everstep.Checkpointer(KEPT / f"{kind}-{steps}", training.state) as checkpointer:
        done = checkpointer.restore()
        for step in range(done + 1, steps + 1):
            training.set_rate(1 - 0.9 * step / steps)
            training.step()
        if done < steps:
            checkpointer.save(steps)
    return training


def run(root: Path, training: Training, link: float, mode: str) -> Row:
    """Save, and train until that is durable; a few times."""
    store = root / "store"
    plain, beside, durable, sizes = [], [], [], []
    with keepers.changed(root / "keeper", _KEEPER.format(mode=mode, link=link)):
        with everstep.Checkpointer(store, training.state, strategy="full") as checkpointer:
            for number in range(1, LEARNING + SAVES + 1):
                plain += [_timed(training), _timed(training)]
                handle = checkpointer.save(number)
                while handle.level != "local":
                    beside.append(_timed(training))
                    if len(beside) > 10_000:
                        raise RuntimeError(f"step {number} was never durable")
                if number > LEARNING:
                    durable.append(checkpointer.metrics.durable_seconds[-1])
                    sizes.append(handle.bytes or 0)
        codecs = _codecs(store, LEARNING + SAVES)
    await_end_of_keeper(store)
    shutil.rmtree(store)
    middle = statistics.median
    return Row(middle(durable), middle(sizes), middle(beside) / middle(plain) - 1, codecs)


def every_step(folder: Path, kind: str, training: Training, strategy: str) -> Table:
    """Train with a save at each step, by one way after another."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for number in range(DISK_ROUNDS):
        modes = ["alone", "raw", "auto"]
        for mode in modes[number % 3 :] + modes[: number % 3]:
            with tempfile.TemporaryDirectory(prefix="codecs-", dir=folder) as root:
                found.setdefault(mode, []).append(_steps(Path(root), training, mode, strategy))
    table = Table(
        f"{kind}, {strategy}, each step", "step, ms", "call, ms", "durable, s", "steps / raw"
    )
    for mode, rows in found.items():
        step, call, durable = map(statistics.median, zip(*rows, strict=True))
        ratios = [own[0] / raw[0] for own, raw in zip(rows, found["raw"], strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} … {max(ratios):.2f})"
        saves = (f"{1e3 * call:.2f}", f"{durable:.3f}") if mode != "alone" else ("", "")
        table.add_row(mode, f"{1e3 * step:.1f}", *saves, spread)
    return table


def _steps(store: Path, training: Training, mode: str, strategy: str) -> tuple[float, float, float]:
    """Seconds of a step with its call, of the call alone, and until it is durable."""
    if mode == "alone":
        return statistics.median(_timed(training) for _ in range(DISK_STEPS)), 0.0, 0.0
    calls, steps = [], []
    keep, tiers = everstep.Keep(last=2), everstep.Tiers(codecs=mode)
    options = {"strategy": strategy, "keep": keep, "tiers": tiers}
    with everstep.Checkpointer(store, training.state, **options) as checkpointer:
        for number in range(1, DISK_STEPS + 1):
            seconds, began = _timed(training), time.perf_counter()
            checkpointer.step(number)
            calls.append(time.perf_counter() - began)
            steps.append(seconds + calls[-1])
    await_end_of_keeper(store)
    durable = checkpointer.metrics.durable_seconds
    middle = [statistics.median(each[DISK_STEPS // 4 :]) for each in (steps, calls, durable)]
    return middle[0], middle[1], middle[2]


def _timed(training: Training) -> float:
    began = time.perf_counter()
    training.step()
    return time.perf_counter() - began


def _codecs(store: Path, step: int) -> str:
    (part,) = everstep.Store(store).manifest(step).parts
    codecs = {each.codec.partition(":")[0] for each in part.encoded or ()}
    return "+".join(sorted(codecs)) or "raw"


def _text(row: Row) -> str:
    figures = f"{row.durable_s:.3f} s, {row.bytes / 1e6:.1f} MB, {row.slowdown:+.0%}"
    return f"{figures} ({row.codecs})"
