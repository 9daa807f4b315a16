"""strategy="log" against chance: random little runs, every step of which is restored byte for byte.

A run is drawn by hypothesis as a `Plan`; it is trained once without everstep, and once with it,
with deaths, restores and branches in between. A failing example prints its plan.
"""

import itertools
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from logs import Plain
from runs import checkpointer, difference, end_keeper, freeze, kinds, snapshot
from torch import nn

import everstep
from everstep import Store
from everstep.redo.clipping import Recording
from examples import examples

# Of a scheduler that goes on after a restore, before the optimizer does.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of")


@pytest.fixture(autouse=True, scope="module")
def pre_clip():
    """Where everstep clips, gradients from before that are recorded."""
    recording = Recording()
    recording.set(True, pre_clip=True)
    yield
    recording.set(False)


class Momentum(Plain):
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
        self.to(dtype)

    def forward(self, rows, step):
        images = self.embed(rows)[:, :, None, None].reshape(-1, 2, 3, 1).expand(-1, -1, -1, 3)
        images = images.contiguous(memory_format=torch.channels_last)
        hidden = self.embed(rows) + self.conv(images).mean((1, 2, 3))[:, None]
        hidden = torch.tanh(self.first(self.norm(self.drop(hidden))))
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
    base_every: int
    every: int
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
    """The state of a run before its first step."""
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
    if make := SCHEDULERS[plan.scheduler]:
        state["schedulers"] = [make(optimizer) for optimizer in optimizers]
    if plan.scaler:
        state["scaler"] = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    return state


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
    parameters = list(state["model"].parameters())
    if plan.clip == "torch":
        nn.utils.clip_grad_norm_(parameters, 0.1)
    elif plan.clip != "none":
        everstep.clip_grad_norm_(parameters, 0.1, foreach=plan.clip == "foreach")


def train(plan, state, step):
    """One step; the loss as its bits."""
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


def _steps(plan, state, steps, saver=None, others=()):
    """Train these steps; each one's loss, and the state that a save of it has."""
    losses, frozen = {}, {}
    for step in steps:
        losses[step] = train(plan, state, step)
        if plan.schedule_first:
            schedule(state)
        if saver:
            saver.step(step)
        frozen[step] = snapshot(state)
        if not plan.schedule_first:
            schedule(state)
    return losses, frozen


def _check(plan, state, frozen, step):
    found = difference(snapshot(state), frozen[step], f"step {step}")
    assert found is None, f"{plan}: {found}"
    if not plan.schedule_first:
        schedule(state)


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
    clip=st.sampled_from(["none", "torch", "foreach", "for loop"]),
    scaler=st.booleans(),
    autocast=st.booleans(),
    scheduler=st.sampled_from(sorted(SCHEDULERS)),
    schedule_first=st.booleans(),
    set_to_none=st.booleans(),
    tensor_rate=st.booleans(),
    closure=st.booleans(),
    base_every=st.integers(1, 5),
    every=st.integers(1, 3),
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
        and plan.autocast == autocasts
        and not (one_cycle and not momentum)
        and not (plan.dtype is torch.float16 and names & {"Muon", "Adafactor"})
    )


possible = plans.filter(_is_possible)
fast = settings(
    deadline=None,
    derandomize=False,
    print_blob=True,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
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


@settings(fast, max_examples=examples(30))
@given(plan=possible)
def test_every_step_comes_back(plan):
    """Every step that the store lists, in a fresh state; going on from the middle ends equal."""
    last = 9
    with Places() as places:
        store = places.new()
        state = build(plan, plan.seed)
        options = {"strategy": "log", "base_every": plan.base_every, "every": plan.every}
        with checkpointer(store, state, **options) as saver:
            losses, frozen = _steps(plan, state, range(1, last + 1), saver)
        assert Store(store).steps() == list(range(1, last + 1))
        fresh = build(plan, plan.seed + 1)
        with checkpointer(store, fresh) as restorer:
            for step in range(last, 0, -2):
                assert restorer.restore(step) == step
                found = difference(snapshot(fresh), frozen[step], f"step {step}")
                assert found is None, f"{plan}, {kinds(store)}: {found}"
            assert restorer.restore(4) == 4
            _check(plan, fresh, frozen, 4)
            if plan.set_to_none:  # else gradients of zero go on to be updates: no part of a state
                again, ends = _steps(plan, fresh, range(5, last + 1))
                assert again == {step: losses[step] for step in again}, plan
                assert difference(ends[last], frozen[last]) is None


@settings(fast, max_examples=examples(12))
@given(
    plan=possible,
    moves=st.lists(
        st.tuples(st.integers(1, 5), st.sampled_from(["log", "full"]), st.integers(0, 3)),
        min_size=2,
        max_size=4,
    ),
)
def test_going_back_and_on(plan, moves):
    """Attachments one after another: so many steps under a strategy, then back by some and on."""
    if not plan.set_to_none:
        return
    total = sum(count for count, _, _ in moves)
    reference = build(plan, plan.seed)
    start = torch.get_rng_state()
    expected, frozen = _steps(plan, reference, range(1, total + 1))
    with Places() as places:
        store, done = places.new(), 0
        for number, (count, strategy, back) in enumerate(moves):
            state = build(plan, plan.seed if number == 0 else 999)
            torch.set_rng_state(start)
            options = {"strategy": strategy}
            if strategy == "log":
                options["base_every"] = plan.base_every
            with checkpointer(store, state, **options) as saver:
                reached = saver.restore(max(1, done - back) if done else None)
                assert reached == (max(1, done - back) if done else 0)
                if reached:
                    _check(plan, state, frozen, reached)
                done = reached + count
                losses, _ = _steps(plan, state, range(reached + 1, done + 1), saver)
                assert losses == {step: expected[step] for step in losses}, plan
        fresh = build(plan, 998)
        with checkpointer(store, fresh) as restorer:
            assert restorer.restore() == done
            assert difference(snapshot(fresh), frozen[done]) is None, plan
            assert restorer.restore(1) == 1
            assert difference(freeze(fresh), frozen[1]["state"]) is None, plan
        assert Store(store).verify().ok
