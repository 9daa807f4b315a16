"""Records per second with and without group commit, where each step is fast.

    python benchmarks/group_commit.py [--directory .] [--rounds 3] [--records 200] [--width 64]

Settings take turns, so that what else the machine does hits all of them. A round writes so many
records of a small model, as fast as the keeper takes them (under_pressure="wait"), to a new store
in the directory: that of the disk which is to be measured. Counted is the time from the first
record to the moment at which the last is durable.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
from torch import nn

import everstep
from stores import end_keeper

BUDGET_BYTES = 256 << 20
SETTINGS: dict[str, dict[str, object]] = {
    "what waits": {},
    "group_commit=(1 MiB, 50 ms)": {
        "group_commit": (1 << 20, 50),
        "memory_budget": BUDGET_BYTES,
    },
    "group_commit=(64 MiB, 50 ms)": {
        "group_commit": (64 << 20, 50),
        "memory_budget": BUDGET_BYTES,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", default=".")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--records", type=int, default=200)
    parser.add_argument("--width", type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rates: dict[str, list[float]] = {name: [] for name in SETTINGS}
    for _ in range(args.rounds):
        for name, options in SETTINGS.items():
            with tempfile.TemporaryDirectory(dir=args.directory) as directory:
                store = Path(directory) / "store"
                rates[name].append(measure(store, args.records, args.width, options))
                end_keeper(store)
    for name, found in rates.items():
        each = ", ".join(f"{rate:.0f}" for rate in found)
        print(f"{name:32} {statistics.median(found):6.0f} records/s  ({each})")


def measure(store: Path, records: int, width: int, options: dict[str, object]) -> float:
    """Records per second of one run."""
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    data = torch.randn(8, width)
    with everstep.Checkpointer(
        store,
        state,
        strategy="log",
        base_every=10 * records,
        under_pressure="wait",
        **options,  # type: ignore[arg-type]
    ) as checkpointer:
        for step in range(records + 2):
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
            handle = checkpointer.step(step + 1)
            if step == 1:  # a base and a record: from now on everything has been seen once
                assert handle
                handle.wait("local")
                began = time.perf_counter()
        checkpointer.wait("local")
        return records / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
