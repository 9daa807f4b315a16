"""Optimizers of users, wrappers, and parameters that come late: back bit for bit as well."""

from collections import OrderedDict, defaultdict

import logs
import pytest
import torch
from runs import (
    build_plain,
    check_restored,
    check_same,
    checkpointer,
    freeze,
    kinds,
    restore,
    round_trip,
    run_logged,
    snapshot,
    supervised,
)
from torch import nn

import examples
from everstep import Checkpointer, Store, Unsupported


class Odd(torch.optim.Optimizer):
    """State as users have it: counters, None, lists, keys that are no strings, and its own."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr, "limits": (None, 1e9)})
        self.state["calls"] = 0
        self.state["history"] = {"losses": [], 3: torch.zeros(2)}

    @torch.no_grad()
    def step(self, closure=None):
        self.state["calls"] += 1
        self.state["history"]["losses"].append(float(self.state["calls"]))
        self.state["history"][3] += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                entry = self.state[parameter]
                entry["count"] = entry.get("count", 0) + 1
                entry["none"] = None
                entry["$"] = "dollar"
                entry[7] = (entry["count"], torch.full((2,), entry["count"]))
                entry["old"] = [*entry.get("old", []), parameter.grad.clone()][-3:]
                entry["mean"] = sum(entry["old"]) / len(entry["old"])
                parameter -= group["lr"] * entry["mean"] / entry["count"] ** 0.5


class OwnMethods(torch.optim.SGD):
    """Overrides how its state is told and taken."""

    def state_dict(self):
        return {"mine": super().state_dict(), "scale": self.scale}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict["mine"])
        self.scale = state_dict["scale"]

    def step(self, closure=None):
        self.scale *= 1.5
        return super().step(closure)


def test_optimizers_of_users(store):
    def build(seed):
        torch.manual_seed(seed)
        models = [nn.Linear(6, 6), nn.Linear(6, 6)]
        own = OwnMethods(models[1].parameters(), lr=0.1, momentum=0.9)
        own.scale = float(seed)
        return {"models": models, "odd": Odd(models[0].parameters()), "own": own}

    def train(state):
        for model, optimizer in zip(state["models"], (state["odd"], state["own"]), strict=True):
            supervised({"model": model, "optimizer": optimizer})

    state = round_trip(store, build, train)
    assert state["own"].scale == 1.5**6
    assert state["odd"].state["calls"] == 6
    assert len(state["odd"].state["history"]["losses"]) == 6


class Wrapper(torch.optim.Optimizer):
    """As Accelerate's: an Optimizer by its class alone."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)

    def step(self, closure=None):
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)


class Imitation:
    """As Lightning's: all that it does not have is what it wraps, down to the class."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.__class__ = type("Imitation", (type(self), type(optimizer)), {})

    def step(self, closure=None):
        return self.optimizer.step(closure)

    def __getattr__(self, name):
        return getattr(self.optimizer, name)


Fabrics = type("Fabrics", (Imitation,), {"__module__": "lightning.fabric.wrappers"})


class Lookahead(Imitation):
    """Looks like an optimizer, and has state of its own."""

    def __init__(self, optimizer):
        self.calls = 0
        self.slow = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
        super().__init__(optimizer)

    @torch.no_grad()
    def step(self, closure=None):
        self.optimizer.step()
        self.calls += 1
        for slow, parameter in zip(self.slow, self.param_groups[0]["params"], strict=True):
            if self.calls % 3 == 0:
                slow += 0.5 * (parameter - slow)
                parameter.copy_(slow)

    def state_dict(self):
        return {"fast": self.optimizer.state_dict(), "slow": self.slow, "calls": self.calls}

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state["fast"])
        self.slow, self.calls = [slow.clone() for slow in state["slow"]], state["calls"]


def test_a_wrapper_with_state_of_its_own(store):
    def build(seed):
        state = build_plain(seed)
        return {**state, "optimizer": Lookahead(state["optimizer"])}

    round_trip(store, build, supervised)
    with pytest.raises(Unsupported, match="whose updates nobody here knows"):
        Checkpointer(store, build(1), strategy="log")


@pytest.mark.parametrize("wrap", [Wrapper, Fabrics])
@pytest.mark.parametrize("strategy", ["log", *examples.slow("full", "spread", "auto")])
def test_a_wrapper_that_is_no_optimizer_by_itself(store, strategy, wrap):
    def build(seed):
        state = build_plain(seed)
        return {**state, "optimizer": wrap(state["optimizer"])}

    state, frozen = build(1), {}
    with checkpointer(store, state, strategy=strategy) as saver:
        for step in range(1, 6):
            supervised(state)
            saver.step(step)
            frozen[step] = freeze({**state, "optimizer": state["optimizer"].optimizer})
    assert ("r" in kinds(store)) == (strategy in ("log", "auto"))
    for step, expected in frozen.items():
        check_restored(store, build_plain(2), expected, step)
    with pytest.raises(Unsupported, match="Give the optimizer that it wraps"):
        Checkpointer(store, {"optimizer": Wrapper(None)})


class NeverInitialised(torch.optim.Optimizer):
    """Lookahead as alphadl's: no Optimizer.__init__, and slow weights in a state of its own, which
    its state_dict() tells by id()."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.state = defaultdict(dict)
        for group in self.param_groups:
            group["counter"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.optimizer.step(closure)
        for group in self.param_groups:
            group["counter"] += 1
            if group["counter"] % 3 == 0:
                for fast in group["params"]:
                    slow = self.state[fast].setdefault("slow", fast.clone())
                    fast.copy_(slow.add_(fast - slow, alpha=0.5))

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self):
        slow = {id(parameter): state for parameter, state in self.state.items()}
        return {"fast": self.optimizer.state_dict(), "slow": slow}


class KeyedByParameter(NeverInitialised):
    """As pytorch_optimizer's: it has dicts for hooks, which nothing calls, and a state_dict() whose
    keys are the parameters themselves."""

    param_groups = property(lambda self: self.optimizer.param_groups, lambda self, value: None)

    def __init__(self, optimizer):
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        super().__init__(optimizer)
        self.defaults = optimizer.defaults

    def state_dict(self):
        return {"slow": self.state, "fast": self.optimizer.state_dict()}

    def load_state_dict(self, state):
        self.state = state["slow"]
        self.optimizer.load_state_dict(state["fast"])


@pytest.mark.parametrize("kind", [NeverInitialised, KeyedByParameter])
def test_lookaheads_go_on_in_the_midst_of_a_round(store, kind):
    def build(seed):
        state = build_plain(seed)
        return {**state, "optimizer": kind(state["optimizer"])}

    run = build(1)
    with Checkpointer(store, run) as saver:
        for step in range(1, 12):
            supervised(run)
            saver.step(step)
    for step in (2, 4, 11):
        resumed, begun = build(2), build(1)
        for _ in range(step):
            supervised(begun)
        restore(store, resumed, step=step)
        for _ in range(5):
            for state in (begun, resumed):
                torch.manual_seed(step)
                supervised(state)
        check_same(freeze(resumed["model"]), freeze(begun["model"]))
    assert kind.__name__ in Store(store).manifest(11).capture["auto"]["reason"]
    with pytest.raises(Unsupported, match=kind.__name__):
        Checkpointer(store, build(3), strategy="log")


class Around(torch.optim.Optimizer):
    """Its groups and its state are those of the optimizer that it wraps."""

    param_groups = property(lambda self: self.optimizer.param_groups, lambda self, value: None)
    state = property(lambda self: self.optimizer.state, lambda self, value: None)

    def __init__(self, optimizer):
        self.optimizer = optimizer
        super().__init__(optimizer.param_groups[0]["params"], {})

    def add_param_group(self, group):
        pass

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.sign_()
        self.optimizer.step(closure)


@pytest.mark.parametrize("strategy", ["full", "log"])
def test_an_optimizer_that_wraps_another(store, strategy):
    def build_wrapped(seed):
        state = logs.build(seed)
        return {**state, "optimizer": Around(state["optimizer"])}

    logs.check_run(store, build_wrapped, logs.train, strategy=strategy)


def build_lazy(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.LazyLinear(6))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01 * seed)}


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("strategy", ["full", "log", "spread", "auto"])
def test_parameters_that_are_not_initialised_yet(store, strategy):
    frozen = run_logged(
        store, build_lazy(1), lambda state, _: supervised(state), 4, strategy=strategy
    )
    fresh = build_lazy(2)
    fresh["model"](torch.zeros(1, 6))
    for step, expected in frozen.items():
        assert restore(store, fresh, step) == step
        assert snapshot(fresh) == expected
