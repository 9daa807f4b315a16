"""How much slower the trainers that people use get by a checkpoint of every step.

    python -m benchmarks.trainers            # needs: pip install -e '.[integrations]'

Each trainer trains a small GPT-2 with and without everstep, in turn, in processes of their own; a
step is timed from one end of it to the next. Medians, and their ratio.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

TRAINERS = ("transformers", "accelerate", "lightning")
SKIPPED = 3
"""The first steps: optimizers make their state, logs their first base."""


class Data(torch.utils.data.Dataset):
    """Tokens; all the same to each trainer."""

    def __init__(self, count):
        self.tokens = torch.randint(
            0, 1000, (count, 64), generator=torch.Generator().manual_seed(1)
        )

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    size = {"n_embd": 256, "n_layer": 6, "n_head": 4, "vocab_size": 1000, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))


def transformers(store, steps, ends):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from everstep.integrations.transformers import everstep_trainer

    class Ends(TrainerCallback):
        def on_step_begin(self, *_, **__):
            ends.append(time.perf_counter())

    kind, own = (everstep_trainer(Trainer), {"everstep": store}) if store else (Trainer, {})
    arguments = {"max_steps": steps, "per_device_train_batch_size": 8, "save_strategy": "no"}
    arguments |= {"report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_strategy": "no"}
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(folder, **arguments)
        data = Data(8 * steps)
        kind(model=gpt2(), args=args, train_dataset=data, callbacks=[Ends()], **own).train()


def accelerate(store, steps, ends):
    from accelerate import Accelerator

    from everstep import Checkpointer
    from everstep.integrations.accelerate import state_of

    accelerator, model = Accelerator(cpu=True), gpt2()
    optimizer = torch.optim.AdamW(model.parameters())
    loader = torch.utils.data.DataLoader(Data(8 * steps), batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    checkpointer = Checkpointer(store, state_of(accelerator)) if store else None
    if checkpointer:
        checkpointer.restore()
    for step, batch in enumerate(loader, 1):
        accelerator.backward(model(**batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if checkpointer:
            checkpointer.step(step)
        ends.append(time.perf_counter())
    if checkpointer:
        checkpointer.close()


def lightning(store, steps, ends):
    import lightning as L  # noqa: N812 - as everybody calls it

    from everstep.integrations.lightning import EverstepCallback

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = gpt2()

        def training_step(self, batch, _):
            ends.append(time.perf_counter())
            return self.model(**batch).loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "accelerator": "cpu", "gradient_clip_val": 1.0}
    callbacks = [EverstepCallback(store)] if store else []
    loader = torch.utils.data.DataLoader(Data(8 * steps), batch_size=8, shuffle=True)
    L.Trainer(max_steps=steps, callbacks=callbacks, **quiet).fit(Module(), loader)


def step_times(name, steps, saves):
    """Seconds of each step of one run, in a process of its own."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        words = [name, str(steps), str(Path(folder).absolute() / "store") if saves else ""]
        command = [sys.executable, "-m", "benchmarks.trainers", "--run", *words]
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    return json.loads(ended.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.run:
        name, steps, store = chosen.run
        ends = []
        globals()[name](store or None, int(steps), ends)
        times = [later - now for now, later in pairwise(ends)]
        print(json.dumps(times[SKIPPED:]))
        return
    table = Table("trainer", "plain, s", "with everstep, s", "slower by (each round)")
    for name in TRAINERS:
        rounds = [
            [statistics.median(step_times(name, chosen.steps, saves)) for saves in (False, True)]
            for _ in range(chosen.rounds)
        ]
        plain, saved = (statistics.median(each) for each in zip(*rounds, strict=True))
        each = ", ".join(f"{with_ / without - 1:+.1%}" for without, with_ in rounds)
        table.add_row(name, f"{plain:.3f}", f"{saved:.3f}", f"{saved / plain - 1:+.1%} ({each})")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
