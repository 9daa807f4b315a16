"""A training sharded over four ranks loses one of them, and goes on with two.

torchrun --nproc-per-node 4 examples/train_fsdp2.py [--steps 12] [--runs runs]

The first process directs, the others leave. It starts this file three more times, each under a
torchrun of its own: a training that nothing stops, one of whose ranks is killed in the middle of a
step, and half as many ranks that go on from what was saved. Then it compares their losses.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import everstep

WIDTH, LENGTH, BATCH = 128, 32, 8


class Loader:
    """Random pieces of a text, the same on all ranks, of which each rank takes its part."""

    def __init__(self, text: bytes) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.generator = torch.Generator().manual_seed(0)

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(self.text) - LENGTH, (BATCH, 1), generator=self.generator)
        pieces = self.text[starts + torch.arange(LENGTH + 1)]
        mine = pieces.chunk(dist.get_world_size())[dist.get_rank()]
        return mine[:, :-1], mine[:, 1:]

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.generator.set_state(state["generator"])


def train(store: Path, losses: Path, steps: int, killed_at: int) -> None:
    """What each rank does: train with FSDP2, and save every step."""
    is_on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_on_gpus else "cpu"
    if is_on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if is_on_gpus else "gloo")
    rank = dist.get_rank()

    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(256, WIDTH), *layers, nn.Linear(WIDTH, 256)).to(device)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = Loader(Path(__file__).read_bytes())
    state = {"model": model, "optimizer": optimizer, "loader": loader}

    shared = {"loader": "replicate"}  # the loader's position is that of all ranks, however many
    with everstep.Checkpointer(
        store, state, strategy="full", ranks=everstep.Ranks(by_rank=shared)
    ) as checkpointer:
        start = checkpointer.restore()
        if start and rank == 0:
            print(f"  restored step {start}", flush=True)
        for step in range(start + 1, steps + 1):
            text, following = (part.to(device) for part in loader.next())
            loss = functional.cross_entropy(model(text).flatten(0, 1), following.flatten())
            optimizer.zero_grad()
            loss.backward()
            if step == killed_at and rank == 1:
                print(f"  rank 1 is killed in the middle of step {step}", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            checkpointer.step(step)
            mean = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"  step {step:2d}   loss {mean:.5f}", flush=True)
                with losses.open("a") as file:
                    print(json.dumps([step, mean.item()]), file=file)
    dist.destroy_process_group()


def life(ranks: int, store: Path, losses: Path, steps: int, killed_at: int = 0) -> dict[int, float]:
    """Run `train` under torchrun until it ends, or is killed; its losses by step."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", __file__, f"--life={store}", f"--losses={losses}"]
    log = losses.with_suffix(".log")
    with log.open("w") as errors:  # torchrun has much to say about a rank that was killed
        ended = subprocess.run(
            [*command, f"--steps={steps}", f"--killed-at={killed_at}"],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=errors,
        )
    if (ended.returncode == 0) == bool(killed_at):
        raise SystemExit(f"torchrun ended with status {ended.returncode}:\n{log.read_text()}")
    return dict(json.loads(line) for line in losses.read_text().splitlines())


def direct(ranks: int, steps: int, runs: Path) -> None:
    """Three lives, and what came of them."""
    runs.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="fsdp2-", dir=runs))
    fewer, killed_at = max(1, ranks // 2), steps // 2 + 1
    print(f"{ranks} ranks, and nothing stops them", flush=True)
    whole = life(ranks, folder / "whole", folder / "whole.losses", steps)
    print(f"{ranks} ranks, and one will be killed", flush=True)
    before = life(ranks, folder / "store", folder / "before.losses", steps, killed_at)
    print(f"{fewer} ranks go on", flush=True)
    after = life(fewer, folder / "store", folder / "after.losses", steps)

    restored = min(after) - 1
    same = all(before[step] == whole[step] for step in range(1, restored + 1))
    apart = max(abs(after[step] - whole[step]) for step in after)
    print(f"Losses up to step {restored}: {'equal to the last bit' if same else 'DIFFERENT'}")
    print(f"Losses from step {restored + 1} on, with {fewer} ranks: at most {apart:.1e} apart")
    print(f"The checkpoints: everstep ls {folder / 'store'}")
    if not same or apart > 1e-4 or max(after) != steps:
        raise SystemExit("the training did not go on as it was")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--life", type=Path, metavar="STORE", help=argparse.SUPPRESS)
    parser.add_argument("--losses", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--killed-at", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.life:
        train(chosen.life, chosen.losses, chosen.steps, chosen.killed_at)
    elif os.environ.get("RANK", "0") == "0":
        direct(int(os.environ.get("WORLD_SIZE", "4")), chosen.steps, chosen.runs)
