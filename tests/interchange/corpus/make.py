"""Write the corpus: what the libraries themselves have saved of some tiny trainings.

python tests/interchange/corpus/make.py [NAME ...]    writes NAME.zip beside this file

It needs everstep's extras `integrations` and `deepspeed`. Samples stay as they were written: a new
one is for another format, or for what a newer version of a library writes differently.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import multiprocessing, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from trained import Job  # noqa: E402


def job():
    made = Job()
    made.run(1, 3)
    return made


def make_torch(folder):
    saved = {name: part.state_dict() for name, part in job().state.items()}
    torch.save({**saved, "rng": {"numpy": [1.5]}, "step": 2}, folder / "latest.pt")


def make_safetensors(folder):
    weights = {name: each for name, each in job().model.state_dict().items() if "head" not in name}
    save_file(weights, folder / "model.safetensors")


def gpt2():
    import transformers

    config = transformers.GPT2Config(
        vocab_size=12,
        n_positions=4,
        n_embd=4,
        n_layer=1,
        n_head=1,
        n_inner=4,
        bos_token_id=1,
        eos_token_id=1,
    )
    return transformers.GPT2LMHeadModel(config)


def make_shards(folder):
    gpt2().save_pretrained(folder, max_shard_size=400)


def make_trainer(folder):
    import transformers

    tokens = torch.arange(4)
    arguments = transformers.TrainingArguments(
        str(folder / "out"), max_steps=1, save_steps=1, report_to=[], use_cpu=True, seed=3
    )
    data = [{"input_ids": tokens, "labels": tokens}] * 8
    model = gpt2()
    by_name = torch.optim.AdamW(model.named_parameters()), None
    transformers.Trainer(model, arguments, train_dataset=data, optimizers=by_name).train()
    shutil.move(folder / "out" / "checkpoint-1", folder / "checkpoint-1")
    shutil.rmtree(folder / "out")


def make_accelerate(folder):
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    made = job()
    prepared = accelerator.prepare(made.model, made.optimizer, made.scheduler)
    accelerator.save_state(str(folder), safe_serialization=False)
    assert prepared


def make_lightning(folder):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(3, 2)

        def training_step(self, rows):
            return self.net(rows).square().mean()

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters())
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = lightning.Trainer(max_steps=2, accelerator="cpu", **quiet)
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(4, 3)))
    trainer.save_checkpoint(folder / "last.ckpt")


# ---- of two ranks --------------------------------------------------------------------------------


def in_two(work, *given):
    multiprocessing.spawn(_rank, (work, given), nprocs=2)


def _rank(rank, work, given):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29431", "DS_ACCELERATOR": "cpu"}
    dist.init_process_group("gloo")
    work(*given)
    dist.barrier()
    dist.destroy_process_group()


def make_dcp(folder):
    in_two(_sharded, folder)


def _sharded(folder):
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments, "own": [1, {"a": 2}]}, checkpoint_id=folder)


def make_zero(folder, stage):
    in_two(_zero, folder, stage)
    for name in folder.glob("*.py"):  # DeepSpeed's own converter
        name.unlink()


def _zero(folder, stage):
    import deepspeed

    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    config = {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True}
    config |= {"zero_force_ds_cpu_optimizer": False, "zero_optimization": {"stage": stage}}
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(engine(torch.randn(2, 4)).sum())
    engine.step()
    engine.save_checkpoint(str(folder))


def make_ucp(folder):
    make_zero(folder / "zero", 2)
    (tag,) = (folder / "zero").glob("global_step*")
    program = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    words = ["--input_folder", tag, "--output_folder", folder / tag.name, "--inject_missing_state"]
    subprocess.run([*program, *map(str, words)], check=True)
    shutil.rmtree(folder / "zero")


MAKERS = {
    "torch": make_torch,
    "dcp": make_dcp,
    "safetensors": make_safetensors,
    "shards": make_shards,
    "trainer": make_trainer,
    "accelerate": make_accelerate,
    "lightning": make_lightning,
    "zero-2": lambda folder: make_zero(folder, 2),
    "zero-3": lambda folder: make_zero(folder, 3),
    "ucp": make_ucp,
}


if __name__ == "__main__":
    for name in sys.argv[1:] or MAKERS:
        with tempfile.TemporaryDirectory() as made:
            MAKERS[name](Path(made))
            shutil.make_archive(str(HERE / name), "zip", made)
