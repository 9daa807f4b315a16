"""`python -m benchmarks.tiers.spill DIRECTORY`: what a second memory saves, by a true keeper whose
disk is throttled: each sync takes as long as a disk of DISK_BYTES_PER_S would have taken.

Training is a timed wait and a true update of a state of some 24 MB. What is shown is the time that
all steps took beyond that, without a second memory, and with one of so many states in DIRECTORY.
"""

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import everstep
from benchmarks import keepers

FLOATS = 2_000_000
STEP_S = 0.2
STATE_BYTES = 12 * FLOATS
DISK_BYTES_PER_S = STATE_BYTES / (2 * STEP_S)
STEPS = 40
SIZES = (0, 5, 10, 40)
KEEPER = f"""
import os, time
from everstep.tiers.system import System

def fsync(system, fd):
    os.fsync(fd)
    time.sleep(os.fstat(fd).st_size / {DISK_BYTES_PER_S})

System.fsync = fsync
"""


def measure(root: Path, directory: Path, states: int) -> tuple[float, int, bool]:
    """Seconds that training stood still; how many captures were spilled; whether all is durable."""
    weights = nn.Parameter(torch.randn(FLOATS))
    optimizer = torch.optim.AdamW([weights], fused=True)
    spill = states * (STATE_BYTES + (4 << 20))
    tiers = everstep.Tiers(spill=directory, spill_bytes=spill) if states else None
    state = {"model": nn.ParameterList([weights]), "optimizer": optimizer}
    store = root / f"store-{states}"
    with everstep.Checkpointer(store, state, strategy="full", tiers=tiers) as checkpointer:
        for step in range(STEPS):
            began = time.perf_counter()
            weights.grad = torch.ones_like(weights)
            optimizer.step()
            time.sleep(max(0.0, STEP_S - (time.perf_counter() - began)))
            checkpointer.step(step + 1)
        metrics = checkpointer.metrics
        stall_s = metrics.stall_seconds
    return stall_s, metrics.spills, everstep.Store(store).steps() == list(range(1, STEPS + 1))


def main() -> None:
    """Measure and print."""
    directory = Path(sys.argv[1])
    root = Path(tempfile.mkdtemp(prefix="spill-", dir=os.environ.get("STORE_ROOT")))
    torch.set_num_threads(1)
    print(
        f"{STEPS} steps of {STEP_S} s, {STATE_BYTES >> 20} MiB each, a disk that takes half of it"
    )
    try:
        with keepers.changed(root / "keeper", KEEPER):
            for states in SIZES:
                stall_s, spills, is_whole = measure(root, directory, states)
                stood = f"training stood still for {stall_s:5.2f} s, {spills:2} spilled"
                print(f"second memory of {states:2} states: {stood}, all durable: {is_whole}")
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
