"""How many bytes a record of a log takes, beside a state: `python -m benchmarks.log_bytes`.

The GPT of the demo with AdamW and clipped gradients, in float32 and with bf16 autocast; medians
over the records as they were stored. Where the disk is slow, exponents are squeezed too.
"""

import statistics
import tempfile
from pathlib import Path

import torch

import everstep
from benchmarks.contenders import checkpointer_of
from benchmarks.machine import await_end_of_keeper
from everstep.cli import workload

RECORDS = 8


def main() -> None:
    for name, is_bf16 in (("float32", False), ("bf16 autocast", True)):
        with tempfile.TemporaryDirectory(prefix="log-bytes-") as root:
            state, record = measure(is_bf16, Path(root))
        sizes = f"{state / 1e6:8.1f} MB of state, {record / 1e6:8.1f} MB of a record"
        print(f"{name:16} {sizes}, {record / state:.2f}", flush=True)


def measure(is_bf16: bool, root: Path) -> tuple[int, float]:
    """The bytes of a base, and of a record after it."""
    run = workload.build(workload.load_text(), seed=1, steps=100)
    run.clip = everstep.clip_grad_norm_
    with checkpointer_of(run, root, 1, "log") as checkpointer:
        for step in range(1, RECORDS + 2):
            with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
                run.train_step()
            checkpointer.step(step)
    await_end_of_keeper(root)
    store = everstep.Store(root)
    records = [store.manifest(step).size for step in range(2, RECORDS + 2)]
    return store.manifest(1).size, statistics.median(records)


if __name__ == "__main__":
    main()
