"""`python -m benchmarks.codecs.curves`: the losses of runs that send a hundredth of their gradients
and are killed ten times, beside those of runs that are not; as a picture, docs/topk.png.

A run is a process that checkpoints every step in a log, and a kill is SIGKILL. What top-k had not
sent yet is in whole states alone (`residual="bases"`), or in each record. Three seeds. What has run
is kept in build/codecs, and not run again.
"""

import json
import os
import signal
import statistics
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import everstep
from benchmarks.codecs.residual import KILLS, begin, kills_of
from benchmarks.losses import Losses, draw, kept, parsed, run_apart, train_step
from benchmarks.machine import await_end_of_keeper

_KILLED = f"killed {KILLS} times, residual="
WAYS = {
    "no kills": ("no kills", "-", "#1d2733"),
    "records": (f'{_KILLED}"records"', "--", "#f0a202"),  # it lies on that without kills
    "bases": (f'{_KILLED}"bases"', "-", "#3b6fb6"),
}
"""Their labels, lines and colours. "no kills" is with `residual="bases"`, which changes nothing
then."""
MODULE = "benchmarks.codecs.curves"


def main(arguments: list[str] | None = None) -> None:
    args = parsed(MODULE, arguments, "docs/topk.png")
    if args.run:
        folder, way, seed = args.run
        train(Path(folder), way, int(seed), args.steps)
        return
    found: dict[str, list[Losses]] = {way: [] for way in WAYS}
    for seed in range(1, args.seeds + 1):
        for way in WAYS:
            name = f"codecs/topk-{args.steps}-{way}-{seed}"
            found[way].append(kept(name, partial(run, way, seed, args.steps)))
            print(f"{way}, seed {seed}: {statistics.mean(found[way][-1][-50:]):.3f}", flush=True)
    draw(found, WAYS, args.picture, "more than without kills")


def run(way: str, seed: int, steps: int) -> Losses:
    """The losses by step, of a run to its end; of what a kill has undone those of the second
    time."""
    with tempfile.TemporaryDirectory() as folder:
        kills = 0
        while (code := run_apart(MODULE, folder, way, seed, steps)) == -signal.SIGKILL:
            kills += 1
        if code or kills != (KILLS if way != "no kills" else 0):
            raise RuntimeError(f"{way}: ended with {code} after {kills} kills")
        lines = (Path(folder) / "losses").read_text().splitlines()
        await_end_of_keeper(Path(folder) / "store")
    return list(dict(map(json.loads, lines)).values())


def train(folder: Path, way: str, seed: int, steps: int) -> None:
    """Go on where the store is; die at the next step of those at which that is due."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    where = "records" if way == "records" else "bases"
    model, hook, optimizer, loader = begin("AdamW", seed, where)
    state = {"model": model, "optimizer": optimizer, "loader": loader, "compression": hook}
    kills = kills_of(seed, steps) if way != "no kills" else set()
    log = everstep.Log(base_every=100)
    with everstep.Checkpointer(folder / "store", state, strategy=log) as checkpointer:
        start = checkpointer.restore()
        for step in range(start + 1, steps + 1):
            loss = train_step(model, optimizer, loader)
            with (folder / "losses").open("a") as file:
                file.write(json.dumps([step, loss]) + "\n")
            checkpointer.step(step)
            if step in kills and not (done := folder / f"killed-{step}").exists():
                done.touch()
                os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
