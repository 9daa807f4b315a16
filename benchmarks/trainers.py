"""`python -m benchmarks.trainers`: what a checkpoint of every step costs in each trainer.

The same small Llama in transformers' Trainer, Accelerate, Lightning and a loop of one's own, with
everstep and without it in turn, each block in a process of its own. A step is measured from one
update to the next; of a block the median counts, of a trainer the ratios of neighbouring blocks.
Needs `pip install -e .[integrations]`.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import everstep
from benchmarks.machine import describe

WARM_STEPS = 5
BATCH, TOKENS, VOCABULARY = 4, 64, 8192


def main() -> int:
    """Measure, and print a table."""
    args = _parsed()
    if args.block:
        name, store = args.block[0], args.block[1] if len(args.block) > 1 else None
        print(json.dumps(_block(name, store, args.steps)))
        return 0
    with tempfile.TemporaryDirectory(dir=args.store_root) as root:
        print(json.dumps(describe(Path(root))), file=sys.stderr)
        print(f"{'trainer':<12}  {'step, ms':>9}  with everstep  slowdown (of each pair)")
        for name in args.only or list(TRAINERS):
            _row(name, _pairs(name, Path(root), args))
    return 0


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trainers", description=__doc__)
    parser.add_argument("--only", nargs="*", choices=TRAINERS)
    parser.add_argument("--steps", type=int, default=25, help="timed steps of a block")
    parser.add_argument("--rounds", type=int, default=4, help="pairs of blocks of each trainer")
    parser.add_argument("--store-root", type=Path, help="where stores go")
    parser.add_argument("--block", nargs="+", help=argparse.SUPPRESS)
    return parser.parse_args()


def _pairs(name: str, root: Path, args: argparse.Namespace) -> list[tuple[float, float]]:
    """Seconds of a step, without and with everstep; which comes first takes turns."""
    pairs = []
    for number in range(args.rounds):
        store = root / f"{name}-{number}"
        order = (None, store) if number % 2 else (store, None)
        found = {one: _measured(name, one, args.steps) for one in order}
        pairs.append((found[None], found[store]))
    return pairs


def _measured(name: str, store: Path | None, steps: int) -> float:
    words = [sys.executable, "-m", "benchmarks.trainers", "--steps", str(steps), "--block", name]
    words += [str(store)] if store else []
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    return statistics.median(json.loads(done.stdout.splitlines()[-1]))


def _row(name: str, pairs: list[tuple[float, float]]) -> None:
    plain, saved = (statistics.median(column) * 1e3 for column in zip(*pairs, strict=True))
    slow = sorted(100 * (after / before - 1) for before, after in pairs)
    spread = f"({slow[0]:+.1f} … {slow[-1]:+.1f})"
    print(f"{name:<12}  {plain:9.1f}  {saved:13.1f}  {statistics.median(slow):+.1f}% {spread}")


def _block(name: str, store: str | None, steps: int) -> list[float]:
    """Seconds of each step after the first ones."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    clock = Clock()
    with contextlib.redirect_stdout(sys.stderr):
        TRAINERS[name](store, steps + WARM_STEPS, clock)
    if store:
        assert everstep.Store(store).latest() == steps + WARM_STEPS, "not every step was saved"
    return clock.seconds[WARM_STEPS:]


class Clock:
    """Times from one update of an optimizer to the next."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last: float | None = None

    def watch(self, optimizer: Any) -> Any:
        optimizer.register_step_post_hook(self._note)
        return optimizer

    def _note(self, *_: Any) -> None:
        now = time.perf_counter()
        self.seconds += [now - self._last] if self._last is not None else [0.0]
        self._last = now


def _model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=4, **sizes))


def _rows(steps: int) -> list[dict[str, Any]]:
    rows = torch.randint(0, VOCABULARY, (BATCH * steps, TOKENS))
    return [{"input_ids": row, "labels": row} for row in rows]


def _loader(steps: int) -> Any:
    return torch.utils.data.DataLoader(_rows(steps), batch_size=BATCH, shuffle=True)


def _adamw(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def _own(store: str | None, steps: int, clock: Clock, accelerator: Any = None) -> None:
    model, loader = _model(), _loader(steps)
    optimizer = clock.watch(_adamw(model))
    backward, state = (lambda loss: loss.backward()), {"model": model, "optimizer": optimizer}
    if accelerator:
        from everstep.integrations.accelerate import state_of

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        backward, state = accelerator.backward, state_of(accelerator) if store else {}
    with _checkpointer(store, state) as save:
        for step, batch in enumerate(loader, 1):
            backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
            save(step)


def _accelerate(store: str | None, steps: int, clock: Clock) -> None:
    from accelerate import Accelerator

    _own(store, steps, clock, Accelerator(cpu=True))


@contextlib.contextmanager
def _checkpointer(store: str | None, state: dict[str, Any]) -> Any:
    if store is None:
        yield lambda step: None
        return
    with everstep.Checkpointer(store, state) as checkpointer:
        yield checkpointer.step


def _lightning(store: str | None, steps: int, clock: Clock) -> None:
    import lightning.pytorch as pl

    from everstep.integrations.lightning import EverstepCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = _model()

        def training_step(self, batch: Any) -> Any:
            loss = self.model(**batch).loss
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return clock.watch(_adamw(self))

    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    callbacks = [EverstepCallback(store)] if store else []
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=callbacks, enable_checkpointing=False, **quiet
    )
    trainer.fit(Module(), _loader(steps))


def _transformers(store: str | None, steps: int, clock: Clock) -> None:
    from transformers import Trainer, TrainingArguments

    from everstep.integrations.transformers import everstep_trainer

    quiet = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True}
    size = {"num_train_epochs": 1, "per_device_train_batch_size": BATCH}
    with tempfile.TemporaryDirectory() as folder:
        given = {"model": _model(), "args": TrainingArguments(folder, **quiet, **size)}
        given |= {"optimizers": (clock.watch(_adamw(given["model"])), None)}
        kind = everstep_trainer(Trainer) if store else Trainer
        given |= {"everstep": store} if store else {}
        kind(**given, train_dataset=_rows(steps)).train()


TRAINERS: dict[str, Callable[[str | None, int, Clock], None]] = {
    "own loop": _own,
    "accelerate": _accelerate,
    "lightning": _lightning,
    "transformers": _transformers,
}

if __name__ == "__main__":
    raise SystemExit(main())
