"""How many bytes a record of a log takes, beside a state, by how the gradients come about.

    python benchmarks/log_bytes.py [--size 25m] [--steps 8]

The GPT of the demo, AdamW, everstep.clip_grad_norm_, strategy="log". Medians over the records.

on disk   what the keeper wrote: it squeezes exponents only where the disk is slower than that
zeros     planes of zero bytes dropped, nothing else
entropy   exponents squeezed too
raw       nothing dropped

Several micro-batches or ranks add up numbers that were rounded to bfloat16 each, so that the sums
have more digits. With two ranks each has a store of its own; rank 0's is measured.
"""

import argparse
import contextlib
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import everstep
from everstep.cli import workload
from everstep.cli.strategies import NO_BASE
from everstep.codecs.planes import encode
from everstep.restore.choose import Candidate
from everstep.restore.load import Loader
from everstep.restore.records import empty
from everstep.store import catalog
from everstep.tiers.disk import Disk

CHUNK = 4 << 20
ROW = "{:38} {:>9} {:>9} {:>9} {:>8} {:>8} {:>8}"


@dataclass(frozen=True)
class Case:
    name: str
    bf16: bool
    micro_batches: int = 1
    ranks: int = 1


CASES = (
    Case("float32", bf16=False),
    Case("bf16 autocast", bf16=True),
    Case("bf16 autocast, 4 micro-batches", bf16=True, micro_batches=4),
    Case("bf16 autocast, 2 ranks (DDP, gloo)", bf16=True, ranks=2),
    Case("bf16 autocast, 2 ranks, 4 micro-batches", bf16=True, micro_batches=4, ranks=2),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=("25m", "tiny"), default="25m")
    parser.add_argument("--steps", type=int, default=8, help="records (%(default)s)")
    args = parser.parse_args()
    columns = ("state MB", "record MB", "/ state", "zeros", "entropy", "raw")
    print(ROW.format("gradients from", *columns))
    for case in CASES:
        with tempfile.TemporaryDirectory(prefix="log-bytes-") as root:
            if case.ranks == 1:
                train(0, case, args.size, args.steps, root)
            else:
                torch.multiprocessing.spawn(
                    train, (case, args.size, args.steps, root), nprocs=case.ranks
                )
            print(ROW.format(case.name, *measure(Path(root) / "rank-0", args.steps)), flush=True)


def train(rank: int, case: Case, size: workload.Size, steps: int, root: str) -> None:
    """A base and `steps` records, in a store of this rank's own."""
    text = workload.load_text()
    run = workload.build(text, seed=1, steps=100, size=size)
    if case.ranks > 1:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{root}/ranks", rank=rank, world_size=case.ranks
        )
        shape = workload.SHAPES[size]
        run.loader = workload.Loader(text, batch=shape.batch, sequence=shape.sequence, seed=rank)
        run.model = DistributedDataParallel(run.model)
    with everstep.Checkpointer(
        Path(root) / f"rank-{rank}",
        run.state(),
        strategy="log",
        base_every=NO_BASE,
        under_pressure="wait",
    ) as checkpointer:
        for step in range(1, steps + 2):
            update(run, case)
            checkpointer.step(step)
    if case.ranks > 1:
        dist.destroy_process_group()


def update(run: workload.Run, case: Case) -> None:
    """Forward, backward, clip, update."""
    run.optimizer.zero_grad(set_to_none=True)
    for index in range(case.micro_batches):
        inputs, targets = run.loader.next()
        is_last = index == case.micro_batches - 1
        alone = isinstance(run.model, DistributedDataParallel) and not is_last
        with run.model.no_sync() if alone else contextlib.nullcontext():
            with torch.autocast("cpu", torch.bfloat16, enabled=case.bf16):
                logits = run.model(inputs)
                loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            (loss / case.micro_batches).backward()
    everstep.clip_grad_norm_(run.model.parameters(), workload.GRADIENT_NORM_MAX)
    run.optimizer.step()
    run.scheduler.step()


def measure(root: Path, steps: int) -> list[str]:
    """Of the store: MB of the state and of a record, and the ratios of the second to the first."""
    store = everstep.Store(root)
    state = store.manifest(1).size
    records = [store.manifest(step) for step in range(2, steps + 2)]
    assert all(manifest.previous for manifest in records), "each step is a record"
    stored = statistics.median(manifest.size for manifest in records)
    zeros, entropy, raw = sizes(root, steps + 1)
    shares = (size / state for size in (stored, zeros, entropy, raw))
    return [f"{state / 1e6:.1f}", f"{stored / 1e6:.1f}", *(f"{share:.2f}" for share in shares)]


def sizes(root: Path, step: int) -> tuple[int, int, int]:
    """Of one record: bytes with zeros dropped, with exponents squeezed too, and raw."""
    disk = Disk(root)
    name = catalog.find(disk, step)
    (record,) = catalog.read_manifest(disk, name).records
    table = catalog.read_table(disk, record.part)
    wanted = [(entry, [empty(entry)]) for entry in table.tensors.values()]
    with Loader() as loader, Candidate(name, disk).sources(record.part) as sources:
        loader.load(record.part, sources, wanted, table)
    totals = [0, 0, 0]
    for _, (tensor,) in wanted:
        data = memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        for start in range(0, len(data), CHUNK):
            chunk = data[start : start + CHUNK]
            for index, squeezes in enumerate((False, True)):
                found = encode(chunk, tensor.element_size(), entropy=squeezes)
                totals[index] += len(chunk if found is None else found)
            totals[2] += len(chunk)
    return totals[0], totals[1], totals[2]


if __name__ == "__main__":
    main()
