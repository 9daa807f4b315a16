"""How many bytes a record of a log takes, beside a state, by how its gradients come about.

    python -m benchmarks.log_bytes [--params 25m] [--steps 8]

The GPT of the demo with AdamW and clipped gradients; medians over the records as they were stored.
Several micro-batches add up numbers that were rounded to bfloat16 each, so that the sums have more
digits. A record is smaller still where the disk is slow: then exponents are squeezed too.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

import torch
from torch.nn import functional

import everstep
from benchmarks.contenders import checkpointer_of
from benchmarks.machine import await_end_of_keeper
from everstep.cli import workload

CASES = (
    ("float32", torch.float32, 1),
    ("bf16 autocast", torch.bfloat16, 1),
    ("bf16 autocast, 4 micro-batches", torch.bfloat16, 4),
)
CLIPS = (("torch's clip", torch.nn.utils.clip_grad_norm_), ("ours", everstep.clip_grad_norm_))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", choices=workload.SHAPES, default="25m")
    parser.add_argument("--steps", type=int, default=8, help="records (%(default)s)")
    args = parser.parse_args()
    for name, dtype, micro_batches in CASES:
        for clip_name, clip in CLIPS:
            run = workload.build(workload.load_text(), seed=1, steps=100, size=args.params)
            run.clip = clip
            with tempfile.TemporaryDirectory(prefix="log-bytes-") as root:
                state, record = measure(run, dtype, micro_batches, args.steps, Path(root))
            share = f"{state / 1e6:8.1f} MB of state, {record / 1e6:8.1f} MB, {record / state:.2f}"
            print(f"{name + ', ' + clip_name:46} {share}", flush=True)


def measure(
    run: workload.Run, dtype: torch.dtype, micro_batches: int, steps: int, root: Path
) -> tuple[int, float]:
    """The bytes of a base, and of a record after it."""
    with checkpointer_of(run, root, 1, "log") as checkpointer:
        for step in range(1, steps + 2):
            update(run, dtype, micro_batches)
            checkpointer.step(step)
    await_end_of_keeper(root)
    store = everstep.Store(root)
    records = [store.manifest(step).size for step in range(2, steps + 2)]
    return store.manifest(1).size, statistics.median(records)


def update(run: workload.Run, dtype: torch.dtype, micro_batches: int) -> None:
    """Forward, backward, clip, update."""
    run.optimizer.zero_grad(set_to_none=True)
    for _ in range(micro_batches):
        inputs, targets = run.loader.next()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            logits = run.model(inputs)
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        (loss / micro_batches).backward()
    run.clip(run.model.parameters(), workload.GRADIENT_NORM_MAX)
    run.optimizer.step()
    run.scheduler.step()


if __name__ == "__main__":
    main()
