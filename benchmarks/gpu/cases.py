"""Unusual ways of training: every step comes back byte for byte, or is saved whole with a warning,
or is refused where a log was asked for that cannot be had."""

import logging
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import everstep
from benchmarks.gpu import training
from benchmarks.gpu.part import Settings
from benchmarks.gpu.training import DeviceRun

STRATEGIES = ("full", "log", "auto")
STEPS = 8
WARM_STEPS = 3
ORDINARY: dict[str, dict[str, Any]] = {
    "gradient accumulation": {"micro_batches": 4},
    "GradScaler with fp16": {"fp16": True},
    "activation checkpointing": {"recompute": True},
}


def cases(settings: Settings) -> None:
    """Each case under each strategy."""
    training.make_exact()
    is_cuda = settings.device == "cuda"
    size = settings.size_of("case")
    built = partial(training.build, size, settings.device, settings.seed)
    ways: dict[str, Callable[[], DeviceRun]] = {
        name: partial(built, **options) for name, options in ORDINARY.items()
    }
    if is_cuda:
        ways["graph of forward and backward"] = lambda: graphed(built(capturable=True), False)
        ways["graph with the update"] = lambda: graphed(built(capturable=True), True)
    compiled_by = {"mode": "reduce-overhead"} if is_cuda else {"backend": "eager"}
    ways["torch.compile"] = lambda: compiled(built(), {} if is_cuda else compiled_by)
    ways["torch.compile, reduce-overhead"] = lambda: compiled(built(), compiled_by)
    for name, make in ways.items():
        for strategy in STRATEGIES:
            store = Path(settings.fast) / f"{name}-{strategy}".replace(" ", "-")
            settings.report(case=name, strategy=strategy, **_outcome(make, store, strategy))
            torch.compiler.reset()


def compiled(run: DeviceRun, how: dict[str, Any]) -> DeviceRun:
    """Its forward compiled."""
    forward = torch.compile(run.model, **how)

    def step(inputs: torch.Tensor) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return forward(inputs)

    run.forward = step
    return run


def graphed(run: DeviceRun, with_update: bool) -> DeviceRun:
    """Its forward and backward, and its update as well, replayed as a CUDA graph."""
    batch = [part.clone() for part in run.batch()]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_STEPS):
            run.train_step()
    torch.cuda.current_stream().wait_stream(stream)
    run.optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run.backward(*batch)
        if with_update:
            run.clip(run.model.parameters(), 1.0)
            run.optimizer.step()

    def replay(*drawn: torch.Tensor) -> None:
        for place, part in zip(batch, drawn, strict=True):
            place.copy_(part)
        graph.replay()

    run.replay, run.is_updated = replay, with_update
    return run


def _outcome(make: Callable[[], DeviceRun], store: Path, strategy: str) -> dict[str, Any]:
    """What became of it, in words, and what was warned of."""
    warned: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("everstep").addHandler(handler)
    try:
        words, is_good = _tried(make, store, strategy)
        if words == "whole states" and strategy != "full":
            is_good = is_good and bool(warned)
    except everstep.Unsupported as error:
        words, is_good = f"refused: {error}", strategy == "log"
    except Exception as error:  # noqa: BLE001  whatever it is, the other cases go on
        traceback.print_exc()
        words, is_good = f"{type(error).__name__}: {error}", False
    finally:
        logging.getLogger("everstep").removeHandler(handler)
    return {"outcome": words, "good": is_good, "warnings": sorted(set(warned))}


def _tried(make: Callable[[], DeviceRun], store: Path, strategy: str) -> tuple[str, bool]:
    """What was saved, and whether each step is saved and comes back."""
    run, expected = make(), {}
    with everstep.Checkpointer(store, run.state(), strategy=strategy) as checkpointer:
        for step in range(1, STEPS + 1):
            run.train_step()
            checkpointer.step(step)
            expected[step] = training.digest(run)
    known = everstep.Store(store)
    if known.steps() != list(expected):
        return f"only steps {known.steps()} are saved", False
    records = sum(known.manifest(step).previous is not None for step in expected)
    fresh = make()
    with everstep.Checkpointer(store, fresh.state()) as restorer:
        wrong = [
            step
            for step in reversed(expected)
            if restorer.restore(step) != step or training.digest(fresh) != expected[step]
        ]
    if wrong:
        return f"steps {wrong} DIFFER", False
    return f"{records} records" if records else "whole states", True
