"""One rank of a run on two: trains with each kind of compression, each with a store of its own.

python ranks.py RANK FOLDER MEETING STEPS [die]

Prints a line of JSON for each kind: the losses, and a digest of parameters, optimizer and hook.
"""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from runs import freeze
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import everstep

KINDS = {
    "fp16": {},
    "bf16": {},
    "topk": {"density": 0.05, "residual_dtype": torch.bfloat16},
}


def build(kind):
    torch.manual_seed(3)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 16)),
        bucket_cap_mb=0.01,
    )
    hook = everstep.compress(model, kind, **KINDS[kind])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(10 + dist.get_rank())
    return {"model": model, "optimizer": optimizer, "compression": hook, "data": data}


def train(state):
    inputs = torch.randn(8, 16, generator=state["data"])
    state["optimizer"].zero_grad()
    loss = (state["model"](inputs) - inputs).square().mean()
    loss.backward()
    everstep.clip_grad_norm_(state["model"].parameters(), 1.0)
    state["optimizer"].step()
    return loss.item().hex()


def newest(store):
    """The step that all ranks have: one may have lost its last one."""
    steps = everstep.Store(store).steps() if store.exists() else []
    step = torch.tensor(max(steps, default=0))
    dist.all_reduce(step, dist.ReduceOp.MIN)
    return int(step)


def main(rank, folder, meeting, last, dies):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    savers = []
    for kind in KINDS:
        store = folder / f"{kind}.{rank}"
        state = build(kind)
        saver = everstep.Checkpointer(
            store, state, strategy=everstep.Log(base_every=100), ranks=everstep.Ranks(alone=True)
        )
        savers.append(saver)
        first = newest(store)
        if first:
            saver.restore(first)
        losses = {}
        for step in range(first + 1, last + 1):
            losses[step] = train(state)
            saver.step(step)
        found = hashlib.sha256(repr(freeze(state)).encode()).hexdigest()
        print(json.dumps({"kind": kind, "first": first, "losses": losses, "state": found}))
        sys.stdout.flush()
    if dies:
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    for saver in savers:
        saver.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(
        int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5:] == ["die"]
    )
