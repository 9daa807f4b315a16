"""Little programs that hypothesis draws: what is trained, how, and what is done to its tensors."""

import itertools
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import derived
import logs
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from runs import end_keeper
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import everstep


class Momentum(logs.Plain):
    """A user's own: a counter that is a python number, and a shared one that belongs to none."""

    @torch.no_grad()
    def update(self):
        self.state["calls"] = {"count": self.state.get("calls", {"count": 0})["count"] + 1}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["lr"])

    def _update(self, parameter, rate):
        entry = self.state[parameter]
        entry["count"] = entry.get("count", 0) + 1
        if "mean" not in entry:
            entry["mean"] = torch.zeros_like(parameter, dtype=torch.float32)
        entry["mean"].lerp_(parameter.grad.float(), 1 / entry["count"])
        parameter.add_(entry["mean"].to(parameter.dtype), alpha=-rate / entry["count"] ** 0.5)


SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
OPTIMIZERS = {
    "SGD": (SGD, {}),
    "SGD momentum": (SGD, {"momentum": 0.9, "weight_decay": 0.01}),
    "SGD nesterov foreach": (SGD, {"momentum": 0.9, "nesterov": True, "foreach": True}),
    "SGD fused": (SGD, {"fused": True}),  # with momentum torch fails where gradients come late
    "Adam": (ADAM, {"weight_decay": 0.01}),
    "Adam amsgrad": (ADAM, {"amsgrad": True}),
    "Adam maximize": (ADAM, {"maximize": True, "foreach": True}),
    "AdamW": (ADAMW, {}),
    "AdamW foreach": (ADAMW, {"foreach": True}),
    "AdamW fused": (ADAMW, {"fused": True}),
    "AdamW fused amsgrad": (ADAMW, {"fused": True, "amsgrad": True}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "NAdam": (torch.optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.01}),
    "Rprop": (torch.optim.Rprop, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1}),
    "Adagrad fused": (torch.optim.Adagrad, {"fused": True}),
    "Adamax": (torch.optim.Adamax, {}),
    "ASGD": (torch.optim.ASGD, {"t0": 2.0}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "own": (Momentum, {}),
}
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["Muon"] = (torch.optim.Muon, {})
FUSED = {name for name, (_, options) in OPTIMIZERS.items() if options.get("fused")}
SCHEDULERS = {
    "none": None,
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 7),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.05, total_steps=60),
    "steps": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 5], 0.5),
}
COMPRESSIONS = {
    "fp16": ("fp16", {}),
    "bf16": ("bf16", {}),
    "int8": ("int8", {}),
    "topk": ("topk", {"ratio": 0.1, "residual": "records"}),
    "topk of all": (
        "topk",
        {"ratio": 1.0, "residual": "records", "residual_dtype": torch.bfloat16},
    ),
    "topk without residual": ("topk", {"ratio": 0.05, "error_feedback": False}),
}
NEEDS_LAYERS = (derived.of_half_precision, derived.strided)
AVERAGES = {make.__name__: make for make in derived.WAYS if make not in NEEDS_LAYERS}


class Net(nn.Module):
    """Convolution (channels last), normalisation, embedding, tied and frozen and unused weights."""

    def __init__(self, dtype):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.conv = nn.Conv2d(2, 3, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(6)
        self.first, self.tied = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.sometimes, self.never = nn.Linear(6, 6), nn.Parameter(torch.randn(3))
        self.drop = nn.Dropout(0.1)
        self.register_buffer("anew", torch.zeros(6))
        self.to(dtype)

    def forward(self, rows, step):
        images = self.embed(rows)[:, :, None, None].reshape(-1, 2, 3, 1).expand(-1, -1, -1, 3)
        images = images.contiguous(memory_format=torch.channels_last)
        hidden = self.embed(rows) + self.conv(images).mean((1, 2, 3))[:, None]
        hidden = torch.tanh(self.first(self.norm(self.drop(hidden))))
        self.anew = self.anew * 0.5 + hidden.detach().mean(0).to(self.anew.dtype)
        if step % 3 == 2:
            hidden = hidden + self.sometimes(hidden)
        return self.tied(self.frozen(hidden))


@dataclass(frozen=True)
class Plan:
    """A run: what is trained and how, and what happens to it."""

    optimizers: tuple[str, ...]
    dtype: torch.dtype
    micro: int
    clip: str
    scaler: bool
    autocast: bool
    scheduler: str
    schedule_first: bool
    set_to_none: bool
    tensor_rate: bool
    closure: bool
    average: str
    compression: str
    thaws_at: int
    freezes_at: int
    updates: tuple[int, ...]
    """Of each step, in turn."""
    writes: Mapping[int, str]
    """By step: what is written to behind the optimizer's back."""
    seed: int


def _optimizer(name, parameters, rate, tensor_rate):
    kind, options = OPTIMIZERS[name]
    takes_tensors = kind in (ADAM, ADAMW) and not options.get("foreach")
    parameters = list(parameters)
    groups = [
        {"params": parameters[::2], "lr": torch.tensor(rate) if tensor_rate else rate},
        {"params": parameters[1::2]},
    ]
    if not takes_tensors:
        groups[0]["lr"] = rate
    return kind([group for group in groups if group["params"]], lr=rate / 2, **options)


def build(plan, seed):
    """The state of a run before its first step, and the rules of what is derived in it."""
    torch.manual_seed(seed)
    model = Net(plan.dtype)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    shares = [list(model.parameters())] if len(plan.optimizers) == 1 else [matrices, others]
    if len(plan.optimizers) == 1 and plan.optimizers[0] == "Muon":
        shares = [matrices]
    optimizers = [
        _optimizer(name, share, 0.02, plan.tensor_rate)
        for name, share in zip(plan.optimizers, shares, strict=True)
    ]
    state = {"model": model, "optimizers": optimizers}
    if plan.compression != "none":
        kind, options = COMPRESSIONS[plan.compression]
        wrapped = {"gradient_as_bucket_view": plan.seed % 2 == 0, "bucket_cap_mb": 0.0005}
        state["model"] = DistributedDataParallel(model, find_unused_parameters=True, **wrapped)
        state["compression"] = everstep.compress(state["model"], kind, **options)
    if make := SCHEDULERS[plan.scheduler]:
        state["schedulers"] = [make(optimizer) for optimizer in optimizers]
    if plan.scaler:
        state["scaler"] = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    return state, AVERAGES[plan.average](state) if plan.average != "none" else {}


def _backward(plan, state, step):
    total = 0.0
    for number in range(plan.micro):
        rows = torch.randint(0, 7, (8,))
        with torch.autocast("cpu", torch.bfloat16, enabled=plan.autocast):
            loss = state["model"](rows, step).float().square().mean() / plan.micro
        if plan.scaler and step % 4 == 3 and number == 0:
            loss = loss * torch.tensor(torch.inf)  # a step that is skipped
        (state["scaler"].scale(loss) if plan.scaler else loss).backward()
        total += loss.item()
    return total


def _clip(plan, state):
    parameters = [p for p in state["model"].parameters() if p.grad is not None]
    for word in plan.clip.split(", "):
        if word == "torch":
            nn.utils.clip_grad_norm_(parameters, 0.1)
        elif word in ("foreach", "for loop"):
            everstep.clip_grad_norm_(parameters, 0.1, foreach=word == "foreach")
        elif word == "one":
            parameters[-1].grad.add_(0.01)
        elif word == "data":
            for parameter in parameters:
                parameter.grad.data.mul_(0.5)


def net_of(state):
    """The model, without what is around it."""
    return getattr(state["model"], "module", state["model"])


def _write_weight(state, write):
    write(net_of(state).first.weight)


def _write_moments(state):
    for optimizer in state["optimizers"]:
        for entry in optimizer.state.values():
            for value in entry.values():
                if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim():
                    value.mul_(0.5)


WRITES = {how: partial(_write_weight, write=write) for how, write in logs.WRITES.items()}
WRITES |= {
    "moments": _write_moments,
    "buffer": lambda state: net_of(state).norm.running_mean.zero_(),
    "channels last": lambda state: net_of(state).conv.weight.data.mul_(0.5),
}
COUNTED = {"in place", "swap", "moments", "buffer"}
"""What a fingerprint sees whichever bytes it looks at: by version counters and addresses."""


def train(plan, state, step):
    """One step; the losses of its updates as their bits."""
    if step in plan.writes:
        with torch.no_grad():
            WRITES[plan.writes[step]](state)
    if plan.compression == "none":
        net_of(state).sometimes.requires_grad_(plan.thaws_at <= step < plan.freezes_at)
    return [_update(plan, state, step) for _ in range(plan.updates[step % len(plan.updates)])]


def _update(plan, state, step):
    state["model"].zero_grad(set_to_none=plan.set_to_none)
    loss = _backward(plan, state, step)
    if plan.scaler and plan.clip != "none":
        for optimizer in state["optimizers"]:
            if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
                state["scaler"].unscale_(optimizer)
    _clip(plan, state)
    for optimizer in state["optimizers"]:
        if plan.scaler:
            state["scaler"].step(optimizer)
        else:
            optimizer.step(*([lambda: None] if plan.closure else []))
    if plan.scaler:
        state["scaler"].update()
    return loss.hex()


def schedule(state):
    for scheduler in state.get("schedulers", ()):
        scheduler.step()


CLIPS = ["none", "none", "torch", "foreach", "for loop", "data", "foreach, one", "one, for loop"]
CLIPS += ["foreach, foreach", "for loop, data"]
plans = st.builds(
    Plan,
    optimizers=st.one_of(
        st.sampled_from(sorted(OPTIMIZERS)).map(lambda name: (name,)),
        st.tuples(
            st.sampled_from(sorted(OPTIMIZERS)), st.sampled_from(sorted({*OPTIMIZERS} - {"Muon"}))
        ),
    ),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]),
    micro=st.integers(1, 2),
    clip=st.sampled_from(CLIPS),
    scaler=st.booleans(),
    autocast=st.booleans(),
    scheduler=st.sampled_from(sorted(SCHEDULERS)),
    schedule_first=st.booleans(),
    set_to_none=st.booleans(),
    tensor_rate=st.booleans(),
    closure=st.booleans(),
    average=st.sampled_from(["none", "none", *sorted(AVERAGES)]),
    thaws_at=st.integers(-9, 9),
    compression=st.sampled_from(["none", "none", *sorted(COMPRESSIONS)]),
    freezes_at=st.integers(1, 40),
    updates=st.sampled_from([(1,), (1,), (1,), (2, 1), (1, 2, 0)]),
    writes=st.just({})
    | st.dictionaries(st.integers(2, 9), st.sampled_from(sorted(WRITES)), min_size=1, max_size=2),
    seed=st.integers(0, 1000),
)


def _is_possible(plan):
    scales = plan.scaler and plan.dtype is not torch.float16  # it refuses to unscale those
    autocasts = plan.autocast and plan.dtype is torch.float32
    one_cycle = plan.scheduler == "one cycle"  # cycles what not every optimizer has
    names = set(plan.optimizers)
    momentum = all("momentum" in OPTIMIZERS[n][1] or n.startswith("Adam ") for n in names)
    return (
        plan.scaler == scales
        and (plan.compression == "none" or plan.average == "none")
        and plan.autocast == autocasts
        and not (one_cycle and not momentum)
        and not (plan.dtype is torch.bfloat16 and "numpy" in plan.writes.values())
        and not (plan.dtype is torch.float16 and names & {"Muon", "Adafactor"})
    )


possible = plans.filter(_is_possible)
fast = settings(
    derandomize=False,
    print_blob=True,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.filter_too_much],
)


class Places:
    """Stores whose keepers and files end with the example."""

    def __enter__(self):
        self._stack = ExitStack()
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self._names = map(str, itertools.count())
        return self

    def new(self):
        path = self._folder / next(self._names)
        self._stack.callback(end_keeper, path)
        return path

    def __exit__(self, *details):
        self._stack.close()
