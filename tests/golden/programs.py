"""The runs whose stores are golden: what they train, and what of them is compared.

Code of before made them (see make.py); the tests build them anew, restore into them and go on.
Updates that a replay has to make again go by single elements, in one thread, so that they come to
the same bits on other processors, too.
"""

import contextlib
import json
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "dist"))
import zoo

import everstep

torch.set_num_threads(1)

Contents = dict[str, torch.Tensor]


@dataclass(slots=True)
class Job:
    """A training in one process. `train` makes the step of that number; `contents` gives copies of
    all that a restore has to bring back, tensors by the names that the store has for them."""

    state: dict[str, Any]
    train: Callable[[int], None]
    contents: Callable[[], Contents]
    derive: dict[str, Callable[[int], object]] | None = None

    def attached(self, store: Path, **options: Any) -> everstep.Checkpointer:
        """A Checkpointer of it."""
        if self.derive:
            options["derive"] = self.derive
        return everstep.Checkpointer(store, self.state, **options)


def contents_of(state: dict[str, Any]) -> Contents:
    """Tensors, and a digest of each object that is none."""
    names = {
        id(parameter): f"{part}.{name}"
        for part, module in state.items()
        if isinstance(module, nn.Module)
        for name, parameter in module.named_parameters()
    }
    found = {}
    for name, value in state.items():
        found |= dict(_walk(name, value, names))
    return {name: _copied(tensor) for name, tensor in found.items()}


def _walk(name: str, value: Any, names: dict[int, str]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, torch.optim.Optimizer):
        for group in value.param_groups:
            for parameter in group["params"]:
                yield from _walk(f"{name}.{names[id(parameter)]}", value.state[parameter], names)
        yield f"{name} (rates)", _digest([float(group["lr"]) for group in value.param_groups])
    elif isinstance(value, (dict, nn.Module, torch.amp.GradScaler)):
        for key, item in (value if isinstance(value, dict) else value.state_dict()).items():
            yield from _walk(f"{name}.{key}", item, names)
    else:
        yield f"{name} (object)", _digest(_plain(value))


def _plain(value: Any) -> object:
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
        return [value.last_epoch, value.get_last_lr()]
    return value


def _digest(value: object) -> torch.Tensor:
    digest = xxhash.xxh3_128_digest(json.dumps(value).encode())
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.clone(memory_format=torch.contiguous_format)


# ---- one process -------------------------------------------------------------------------------


class Noisy(torch.optim.Optimizer):
    """One that no list of known ones has: its updates draw from torch's generator."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 2**-6})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Make one update."""
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                noise = torch.randint(0, 8, parameter.shape)
                parameter.sub_(parameter.grad, alpha=group["lr"]).add_(noise, alpha=group["lr"])


adamw = partial(torch.optim.AdamW, lr=0.01, foreach=False)
momentum = partial(torch.optim.SGD, lr=2**-6, momentum=0.5, foreach=False)


def _net(seed: int) -> nn.Sequential:
    """Buffers, which no optimizer has, among the weights."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6))


def _backward(state: dict[str, Any], step: int) -> torch.Tensor:
    state["model"].zero_grad()
    data = torch.Generator().manual_seed(step)
    return (3 * state["model"](torch.randn(5, 6, generator=data)) - 1).square().mean()


def small(seed: int, optimizer: Callable[..., Any] = adamw, clips: bool = False) -> Job:
    """A model and its optimizer."""
    model = _net(seed)
    state = {"model": model, "optimizer": optimizer(model.parameters())}

    def train(step: int) -> None:
        _backward(state, step).backward()
        if clips:
            everstep.clip_grad_norm_(model.parameters(), 0.25)
        state["optimizer"].step()

    return Job(state, train, lambda: contents_of(state))


def rich(seed: int) -> Job:
    """Two optimizers, a scheduler, a scaler that skips a step, generators, values."""
    model = _net(seed)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    first = torch.optim.SGD(matrices, lr=0.02, momentum=0.9, nesterov=True, foreach=False)
    second = torch.optim.AdamW(
        [{"params": others[:3]}, {"params": others[3:], "weight_decay": 0.0, "lr": 0.003}],
        lr=0.01,
        amsgrad=True,
        foreach=False,
    )
    draws = torch.Generator().manual_seed(seed)
    state: dict[str, Any] = {
        "model": model,
        "optimizers": {"first": first, "second": second},
        "scheduler": torch.optim.lr_scheduler.StepLR(first, 2, 0.5),
        "scaler": torch.amp.GradScaler("cpu", init_scale=8.0 * seed, growth_interval=2),
        "draws": draws,
        "shuffles": random.Random(seed),
        "values": {
            "seen": seed,
            "notes": ["a", {"b": [seed / 7, None, True]}],
            "half": torch.full((3, 2), seed / 3, dtype=torch.bfloat16).t(),
            "wave": torch.full((2,), complex(seed, -seed)),
            "mask": torch.tensor([True, False, seed > 1]),
            "none": torch.zeros(0, 4, dtype=torch.float64),
        },
    }

    def train(step: int) -> None:
        loss = _backward(state, step) * torch.rand((), generator=draws)
        loss = loss * torch.inf if step == 4 else loss
        state["scaler"].scale(loss).backward()
        for optimizer in (first, second):
            state["scaler"].step(optimizer)
        state["scaler"].update()
        with warnings.catch_warnings(action="ignore"):  # of a scheduler, where a step was skipped
            state["scheduler"].step()
        values = state["values"]
        values["seen"] = step
        values["notes"][1]["b"][0] = step / 7
        values["half"] += 0.5
        values["wave"] *= 2
        state["shuffles"].random()

    def contents() -> Contents:
        optimizers = state["optimizers"]
        flat = {f"optimizers.{name}": optimizer for name, optimizer in optimizers.items()}
        return contents_of({**state, **flat, "optimizers": {}})

    return Job(state, train, contents)


def unusual(seed: int) -> Job:
    """A fused optimizer that is given the scale, one of the program's own that draws, a closure, a
    learning rate that is a tensor, autocast around the update."""
    model = _net(seed)
    scaled = torch.optim.AdamW(model[0].parameters(), lr=torch.tensor(0.01), fused=True)
    own = Noisy(model[1].parameters())
    closed = momentum(model[2].parameters(), lr=torch.tensor(2.0**-5))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0 * seed, growth_interval=2)
    state = {"model": model, "scaled": scaled, "own": own, "closed": closed, "scaler": scaler}

    def train(step: int) -> None:
        scaler.scale(_backward(state, step)).backward()
        scaler.step(scaled)
        with torch.autocast("cpu", torch.bfloat16):
            own.step()
        closed.step(lambda: 0.5 / step)
        scaler.update()

    return Job(state, train, lambda: contents_of(state))


def averaged(seed: int) -> Job:
    """An average of the weights, which a rule brings forward."""
    job = small(seed, momentum)
    average = {name: p.detach().clone() for name, p in job.state["model"].named_parameters()}
    job.state["ema"] = {"weights": average, "count": 0}

    @torch.no_grad()
    def rule(step: int) -> None:
        job.state["ema"]["count"] += 1
        for name, parameter in job.state["model"].named_parameters():
            average[name].mul_(0.5).add_(parameter, alpha=0.5)

    job.derive = {"ema": rule}
    return job


def adapted(seed: int) -> Job:
    """A frozen encoder, a frozen table, and what is trained."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({"encoder": nn.Linear(6, 12), "adapter": nn.Linear(12, 6)})
    model["encoder"].requires_grad_(False)
    state = {"model": model, "optimizer": adamw(model["adapter"].parameters())}
    state["table"] = {"rows": torch.randn(3, 3), "note": seed}

    def train(step: int) -> None:
        model.zero_grad()
        data = torch.Generator().manual_seed(step)
        hidden = model["encoder"](torch.randn(5, 6, generator=data))
        model["adapter"](hidden).square().mean().backward()
        state["optimizer"].step()
        state["table"]["note"] = step

    return Job(state, train, lambda: contents_of(state))


def large(seed: int) -> Job:
    """Gradients that can be packed: half of their bytes are zeros."""
    torch.manual_seed(seed)
    model = nn.Linear(128, 128, bias=False)
    model.weight.data.copy_(model.weight.data.bfloat16())
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5)}

    def train(step: int) -> None:
        data = torch.Generator().manual_seed(step)
        model.weight.grad = torch.randint(-3, 4, (128, 128), generator=data) / 32
        state["optimizer"].step()

    return Job(state, train, lambda: contents_of(state))


# ---- one process whose parameters are boxes ----------------------------------------------------

SHAPES = {"q": (6, 5), "k": (3, 5), "v": (3, 5), "norm": (5,), "scale": ()}
boxed_adamw = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.3, amsgrad=True, foreach=False)


def numbers(name: str, step: int) -> torch.Tensor:
    """A parameter at the start, and its gradients."""
    generator = torch.Generator().manual_seed(100 * [*SHAPES].index(name) + step)
    return torch.randn(SHAPES[name], generator=generator)


def unboxed(seed: int) -> Job:
    """Each of SHAPES is a parameter."""
    model = nn.ParameterDict({name: nn.Parameter(numbers(name, 1 - seed)) for name in SHAPES})
    state = {"model": model, "optimizer": boxed_adamw(model.parameters())}

    def train(step: int) -> None:
        for name, parameter in model.items():
            parameter.grad = numbers(name, step)
        state["optimizer"].step()

    return Job(state, train, lambda: contents_of(state))


# ---- several ranks -----------------------------------------------------------------------------

RECIPE = zoo.Recipe(
    layers=1,
    width=6,
    heads=2,
    hidden=9,
    vocabulary=11,
    grouped=False,
    optimizer=partial(torch.optim.AdamW, lr=0.01, eps=1e-4, foreach=False),
)


@dataclass(frozen=True, slots=True)
class Ranks:
    """A run of several ranks."""

    layout: str
    nodes: str
    """The node of each rank; all "a" where there is but one."""

    clips: bool = False
    compression: tuple[str, dict[str, Any]] | None = None
    extra: str = ""
    """What its state has beside model and optimizer: "ema", "hook" (what a compression owes), or
    "own", of each rank."""


def on_ranks(program: Ranks) -> Job:
    """Of this rank; the contents are on rank 0 only, and all have to ask for them."""
    if len({*program.nodes}) > 1 and dist.is_initialized():
        os.environ["EVERSTEP_NODE"] = program.nodes[dist.get_rank()]
    layout = program.layout if dist.is_initialized() else "dense"
    made = zoo.build(layout, RECIPE)
    state: dict[str, Any] = {"model": made.model, "optimizer": made.optimizer}
    job = Job(state, made.train, lambda: _named(made))
    if program.clips:
        weights = list(made.model.parameters())
        made.optimizer.register_step_pre_hook(
            lambda *_: everstep.clip_grad_norm_(weights, 0.25) and None
        )
    if program.compression and dist.is_initialized():
        kind, options = program.compression
        with contextlib.suppress(ValueError):  # PowerSGD is read, and no longer made
            hook = everstep.compress(made.model, kind, **options)
            if program.extra == "hook":
                state["hook"] = hook
    if program.extra == "ema":
        _average(made, job)
    if program.extra == "own" and dist.is_initialized():
        rank = dist.get_rank()
        state["own"] = {"rank": rank, "seen": 0}

        def train(step: int) -> None:
            made.train(step)
            state["own"]["seen"] = step * (rank + 1)

        job.train = train
    return job


def _named(made: zoo.Job) -> Contents:
    found = {}
    for name, tensor in made.full_state().items():
        parameter, _, key = name.partition(":")
        at = f"optimizer.model.{parameter}.{key}" if key else f"model.{parameter}"
        found[at] = _copied(tensor)
    return found


def _average(made: zoo.Job, job: Job) -> None:
    weights = {
        name.removeprefix("module."): parameter for name, parameter in made.model.named_parameters()
    }
    average = job.state["ema"] = {name: each.detach().clone() for name, each in weights.items()}

    @torch.no_grad()
    def rule(step: int) -> None:
        for name, weight in weights.items():
            average[name].mul_(0.5).add_(weight, alpha=0.5)

    def contents() -> Contents:
        found = _named(made)
        for name, tensor in average.items():
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            if found:
                found[f"ema.{name}"] = _copied(whole)
        return found

    job.derive, job.contents = {"ema": rule}, contents


def _parts(program: Ranks, job: Job) -> list[str] | None:
    """What is restored: all, but for what a hook owes that is made no longer."""
    return None if program.extra in ("", *job.state) else ["model", "optimizer"]


def runs_on(
    program: Ranks, store: Path, last: int, options: dict[str, Any], more: int = 0
) -> tuple[int, dict[int, Contents], list[str]]:
    """On each rank: restore, train up to step `last`, or `more` steps, and save each: where it
    began, the contents then and after each step, and what failed."""
    job = on_ranks(program)
    with job.attached(store, **options) as saver:
        first = saver.restore(only=_parts(program, job))
        found, handles = {first: job.contents()}, []
        for step in range(first + 1, max(last, first + more) + 1):
            job.train(step)
            handles.append(saver.step(step))
            found[step] = job.contents()
        saver.wait()
        errors = [str(handle.error) for handle in handles if handle and handle.error]
    return first, found, errors


def restores_on(program: Ranks, store: Path, steps: list[int]) -> list[Contents]:
    """On each rank: the contents at each of these steps; and what else each has of its own."""
    job, found = on_ranks(program), []
    with job.attached(store) as restorer:
        for step in steps:
            assert restorer.restore(step, only=_parts(program, job)) == step
            found.append(job.contents())
            if program.extra == "own":
                assert job.state["own"]["seen"] == step * (dist.get_rank() + 1)
    return found


# ---- all of them -------------------------------------------------------------------------------

ALONE: dict[str, Callable[[int], Job]] = {
    "full": rich,
    "spread": small,
    "auto": small,
    "log": rich,
    "log-branched": small,
    "log-audited": rich,
    "log-unusual": unusual,
    "log-clipped": partial(small, clips=True),
    "log-spread-bases": partial(small, clips=True),
    "log-caught-up": partial(small, clips=True),
    "log-packed": large,
    "log-derived": averaged,
    "log-frozen": adapted,
    "log-boxes-flat": unboxed,
    "log-boxes-fused": unboxed,
}
TOPK = "topk", {"ratio": 0.1, "residual": "records"}
TOGETHER = {
    "ddp-full-checked": Ranks("ddp", "aa"),
    "ddp-full-own": Ranks("ddp", "aa", extra="own"),
    "ddp-spread": Ranks("ddp", "aa"),
    "ddp-log": Ranks("ddp", "aa", extra="own"),
    "ddp-log-derived": Ranks("ddp", "aa", extra="ema"),
    "ddp-log-bf16": Ranks("ddp", "aa", compression=("bf16", {})),
    "ddp-log-fp16-clipped": Ranks("ddp", "aa", clips=True, compression=("fp16", {})),
    "ddp-log-topk": Ranks("ddp", "aa", extra="hook", compression=TOPK),
    "ddp-log-powersgd": Ranks(
        "ddp", "aa", extra="hook", compression=("powersgd", {"start_powerSGD_iter": 2})
    ),
    "ddp-log-powersgd-2": Ranks(
        "ddp",
        "aa",
        clips=True,
        compression=(
            "powersgd",
            {
                "start_powerSGD_iter": 2,
                "matrix_approximation_rank": 2,
                "min_compression_rate": 1,
                "orthogonalization_epsilon": 1e-8,
            },
        ),
    ),
    "fsdp2-full": Ranks("fsdp2", "aa"),
    "fsdp2-log-clipped": Ranks("fsdp2", "aa", clips=True),
    "fsdp2-log-derived": Ranks("fsdp2", "aa", extra="ema"),
    "fsdp2-log-spread-bases": Ranks("fsdp2", "aa", clips=True),
    "hsdp-full-checked": Ranks("hsdp", "aaaa"),
    "fsdp_tp-log": Ranks("fsdp_tp", "aaaa"),
    "fsdp1-full": Ranks("fsdp1", "aa"),
    "fsdp1-log": Ranks("fsdp1", "aa"),
    "fsdp1_flat-log": Ranks("fsdp1_flat", "aa"),
    "zero1-full": Ranks("zero1", "aa"),
    "zero1-log": Ranks("zero1", "aa"),
    "nodes-fsdp2-full": Ranks("fsdp2", "ab"),
    "nodes-fsdp2-log-clipped": Ranks("fsdp2", "ab", clips=True),
    "nodes-ddp-log-topk": Ranks("ddp", "ab", extra="hook", compression=TOPK),
    "nodes-zero1-log": Ranks("zero1", "ab"),
}


def fresh(name: str) -> Job:
    """In this process alone: another start than the run's, to restore into."""
    if name in ALONE:
        return ALONE[name](2)
    job = on_ranks(TOGETHER[name])
    for parameter in job.state["model"].parameters():
        parameter.data.mul_(0.5)
    return job
