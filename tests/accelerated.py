"""Programs with Accelerate, for runs that are killed and resumed (harness.py): on the processor,
and with FSDP2 in tests/gpu as well."""

import functools
import os

import torch
from torch import nn

import everstep
from harness import check_resumes, random_seed, trains_on_ranks

EPOCHS, BATCHES, ACCUMULATE = 3, 10, 4
PER_EPOCH = 3  # updates: the last one is of two batches


class Noisy(torch.utils.data.Dataset):
    """Rows with noise, drawn when they are loaded; so many batches of four."""

    def __init__(self, batches=BATCHES):
        self._batches = batches

    def __len__(self):
        return 4 * self._batches

    def __getitem__(self, index):
        return torch.full((8,), float(index)) + torch.rand(8)


class Block(nn.Module):
    """What FSDP2 takes for a layer. Its sizes are no multiples of two ranks."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 15), nn.GELU(), nn.Dropout(0.2), nn.Linear(15, 8))

    def forward(self, rows):
        return rows + self.inner(rows)


def llama(**config):
    """A small one, and its data."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=4, attention_dropout=0.1, **config)
    )
    rows = torch.randint(0, 64, (4 * BATCHES, 16), generator=torch.Generator().manual_seed(0))
    return model, [{"input_ids": row, "labels": row} for row in rows]


def fsdp2(device, layer, shards=None, **options):
    """An Accelerator that shards each `layer` over all ranks, or `shards` of them. Accelerate has
    FSDP for GPUs only: it is told that these processors are some."""
    from accelerate import (
        Accelerator,
        DistributedType,
        FullyShardedDataParallelPlugin,
        ParallelismConfig,
        PartialState,
    )

    if device == "cpu":
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[layer],
        **options,
    )
    others = shards and int(os.environ["WORLD_SIZE"]) // shards
    made = Accelerator(
        parallelism_config=shards and ParallelismConfig(others, shards),
        cpu=device == "cpu",
        mixed_precision="bf16",
        gradient_accumulation_steps=ACCUMULATE,
        fsdp_plugin=plugin,
    )
    assert made.is_fsdp2
    assert made.device.type == device
    return made


def prepared(device="cpu", shards=None):
    """That Accelerator, and blocks, AdamW, loader and scheduler that it has prepared. An epoch has
    as many updates on any number of ranks."""
    from accelerate.utils import set_seed

    set_seed(1)
    accelerator = fsdp2(device, "Block", shards)
    model = nn.Sequential(Block(), Block(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ranks = accelerator.num_processes
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, EPOCHS * PER_EPOCH * ranks)
    loader = torch.utils.data.DataLoader(Noisy(BATCHES * ranks), batch_size=4, shuffle=True)
    return accelerator, accelerator.prepare(model, optimizer, loader, scheduler)


def trains_fsdp2(store, trace, device="cpu", strategy="auto", shards=None):
    accelerator, parts = prepared(device, shards)
    train(store, trace, accelerator, *parts, strategy=strategy)


def train(
    store,
    trace,
    accelerator,
    model,
    optimizer,
    loader,
    scheduler,
    *,
    strategy="auto",
    only=None,
    told=lambda step: None,
):
    """To the end, with everstep where there is a store. `told`: called at each step."""
    from everstep.integrations.accelerate import state_of

    state = state_of(accelerator)
    checkpointer = everstep.Checkpointer(store, state, strategy=strategy) if store else None
    step = checkpointer.restore(only=only) if checkpointer else 0
    trace.resumed(step)
    told(step)
    for _ in range(loader.iteration, EPOCHS):
        for batch in loader:
            with accelerator.accumulate(model):
                if isinstance(batch, dict):
                    loss = model(**batch).loss
                else:
                    loss = (model(batch) - batch.mean(1, keepdim=True)).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step += 1
                trace.note("loss", step, loss)
                if checkpointer:
                    checkpointer.step(step)
                told(step)
    if checkpointer:
        checkpointer.close()
    counters = {"step": accelerator.step, "epoch": loader.iteration}
    trace.end(model=model, optimizer=optimizer, scheduler=scheduler, counters=counters)


def check_fsdp2(folder, *, ranks, strategy="auto", kills=1, method="forkserver", **options):
    """Asserts that trains_fsdp2 is the same when it is killed, on so many ranks."""
    run = functools.partial(trains_fsdp2, strategy=strategy, **options)
    check_resumes(
        functools.partial(trains_on_ranks, ranks, run),
        folder,
        steps=EPOCHS * PER_EPOCH,
        epoch=PER_EPOCH,
        kills=kills,
        seed=random_seed(),
        method=method,
    )
    store = everstep.Store(folder / "store")
    assert strategy == "auto" or any(store.manifest(step).records for step in store.steps())
