"""Runs of torchtitan's own Trainer and Llama, with an FSDP2 of one rank: on a GPU, or on the CPU.

torchtitan knows GPUs only: it is told that the CPU is one (`on_the_cpu`).
"""

import collections
import functools
import os
import socket
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch.utils.data import IterableDataset

from harness import check_resumes, random_seed

STEPS = 10


class Tokens(IterableDataset):
    """Tokens that follow from the position."""

    def __init__(self, size):
        self.size, self.position = size, 0

    def __iter__(self):
        while True:
            self.position += 1
            generator = torch.Generator().manual_seed(self.position)
            tokens = torch.randint(0, 2048, (self.size + 1,), generator=generator)
            yield {"input": tokens[:-1]}, tokens[1:]

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def alone():
    """One rank, as torchrun would start it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "NCCL_SOCKET_IFNAME": "lo"}
    os.environ |= {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if not hasattr(torch.distributed, "set_timeout"):  # torch 2.13 has none yet
        torch.distributed.set_timeout = lambda *_: None


def on_the_cpu():
    """Before torchtitan is imported. The same rank."""
    alone()
    torch._utils._get_available_device_type = lambda: "cpu"
    figures = {
        "current_device": 0,
        "get_device_name": "cpu",
        "get_device_properties": SimpleNamespace(total_memory=1 << 34),
        "memory_stats": collections.defaultdict(int),
        "reset_peak_memory_stats": None,
        "empty_cache": None,
    }
    for name, value in figures.items():
        setattr(torch.cpu, name, lambda *_, value=value: value)


def config_of(folder, checkpoint, workers=0, steps=STEPS):
    """Of a Trainer whose losses do not depend on the machine's load."""
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.config import DebugConfig, TrainingConfig
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry
    from torchtitan.trainer import Trainer

    class Loader(ParallelAwareDataloader):
        @dataclass(kw_only=True, slots=True)
        class Config(ParallelAwareDataloader.Config):
            pass

        def __init__(
            self, config, *, dp_rank, dp_world_size, seq_len, local_batch_size, tokenizer, **others
        ):
            del tokenizer
            others |= {"batch_size": local_batch_size, "num_workers": config.num_workers}
            super().__init__(Tokens(seq_len), dp_rank, dp_world_size, **others)

    class Tokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config, **_):
            super().__init__()

        def encode(self, *_, **__):
            raise NotImplementedError

        decode = get_vocab_size = encode

    model = model_registry("debugmodel")
    model.model.layers = model.model.layers[:1]
    for _, _, parent, name in list(model.model.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())
    optimizer = default_adamw(lr=1e-3)
    optimizer.implementation = "fused"
    return Trainer.Config(
        model_spec=model,
        dump_folder=str(folder),
        optimizer=optimizer,
        loss=CrossEntropyLoss.Config(global_vocab_size=2048),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        tokenizer=Tokenizer.Config(),
        dataloader=Loader.Config(num_workers=workers),
        training=TrainingConfig(
            local_batch_size=1,
            global_batch_size=2,
            seq_len=16,
            steps=steps,
            disable_cuda_graphs=True,
            mixed_precision_param="float32",
        ),
        debug=DebugConfig(seed=1, deterministic=True),
        checkpoint=checkpoint,
    )


def watch_losses(trainer, told):
    """Call `told(step, loss)` after each update."""
    train_step, losses = trainer.train_step, []

    def keeps_its_loss(**inputs):
        losses.append(type(trainer).forward_backward_step(trainer, **inputs).detach())
        return losses[-1]

    def tells_its_loss(batches):
        losses.clear()
        train_step(batches)
        told(trainer.step, sum(losses))

    trainer.forward_backward_step, trainer.train_step = keeps_its_loss, tells_its_loss


def trains(store, trace, device="cpu"):
    """With everstep where there is a store."""
    if device == "cpu":
        on_the_cpu()
    else:
        alone()
    from torchtitan.components.checkpointer import CheckpointManager

    from everstep.integrations.torchtitan import EverstepCheckpointManager

    checkpoint, folder = CheckpointManager.Config(), "unused"
    if store:
        checkpoint, folder = EverstepCheckpointManager.Config(folder=store.name), store.parent
    trainer = config_of(folder, checkpoint, workers=1).build()
    load = trainer.checkpointer.load

    def tells_where_it_goes_on(step):
        load(step)
        trace.resumed(trainer.step)

    trainer.checkpointer.load = tells_where_it_goes_on
    watch_losses(trainer, lambda step, loss: trace.note("loss", step, loss))
    trainer.train()
    trainer.close()
    (optimizer,) = trainer.optimizers
    trace.end(
        model=[local(each) for each in trainer.model_parts[0].parameters()],
        moments=[list(map(local, each.values())) for each in optimizer.state.values()],
        schedule=trainer.lr_schedulers,
        counters=trainer,
        generator=torch.get_rng_state(),
    )


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def check_trainer(folder, *, device="cpu", kills=1, method="forkserver"):
    """Asserts that `trains` is the same when it is killed."""
    run = functools.partial(trains, device=device)
    seed = random_seed()
    check_resumes(run, folder, steps=STEPS, epoch=5, kills=kills, seed=seed, method=method)
