"""Runs with parts that a rule brings forward, for the tests of derive=: ways to average."""

import copy

import logs
import torch
from runs import check_steps, run_logged
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def build(seed, make):
    """A state, and the rules of its derived parts."""
    state = logs.build(seed)
    return state, make(state)


# ---- ways to average ---------------------------------------------------------------------------


def averaged(state, **options):
    options = {"multi_avg_fn": get_ema_multi_avg_fn(0.9), **options}
    ema = state["ema"] = AveragedModel(state["model"], **options)
    return {"ema": lambda step: ema.update_parameters(state["model"])}


def with_buffers(state):
    return averaged(state, use_buffers=True)


def swa(state):
    return averaged(state, multi_avg_fn=None)


def now_and_then(state):
    ema = state["ema"] = AveragedModel(state["model"])
    return {"ema": lambda step: step % 3 or ema.update_parameters(state["model"])}


def by_hand(state):
    """A dict of tensors, changed in place, around the version counter."""
    ema = state["ema"] = {key: p.detach().clone() for key, p in state["model"].named_parameters()}

    def rule(step):
        for key, parameter in state["model"].named_parameters():
            ema[key].data.mul_(0.9).add_(parameter.data, alpha=0.1)

    return {"ema": rule}


def swapped(state):
    """A module whose parameters get new memory each time."""
    ema = state["ema"] = copy.deepcopy(state["model"])

    def rule(step):
        for mean, parameter in zip(ema.parameters(), state["model"].parameters(), strict=True):
            mean.data = mean.data * 0.9 + parameter.data * 0.1

    return {"ema": rule}


def anew(state):
    """A dict that gets new tensors, a count, and a decay that follows the step."""
    weights = {key: p.detach().clone() for key, p in state["model"].named_parameters()}
    ema = state["ema"] = {"weights": weights, "count": 0}

    def rule(step):
        ema["count"] += 1
        decay = min(0.9, (1 + step) / (10 + ema["count"]))
        for key, parameter in state["model"].named_parameters():
            ema["weights"][key] = ema["weights"][key] * decay + parameter.detach() * (1 - decay)

    return {"ema": rule}


class Average:
    """An object with a state_dict, of copies."""

    def __init__(self, model):
        self.model, self.count = model, 0
        self.shadow = [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def update(self, step):
        self.count += 1
        for mean, parameter in zip(self.shadow, self.model.parameters(), strict=True):
            mean.lerp_(parameter, 1 / (1 + self.count))

    def state_dict(self):
        return {"count": self.count, "shadow": [mean.clone() for mean in self.shadow]}

    def load_state_dict(self, state):
        self.count, self.shadow = state["count"], state["shadow"]


def stateful(state):
    ema = state["ema"] = Average(state["model"])
    return {"ema": ema.update}


def two_in_a_row(state):
    """The second follows from the first, and is nested in a dict with other parts."""
    first = state["ema"] = AveragedModel(state["model"], multi_avg_fn=get_ema_multi_avg_fn(0.5))
    second = AveragedModel(first, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    state["more"] = {"slow": second, "note": {"any": 3}}
    return {
        "ema": lambda step: first.update_parameters(state["model"]),
        "more.slow": lambda step: second.update_parameters(first),
    }


def of_half_precision(state):
    ema = copy.deepcopy(state["model"]).to(torch.bfloat16).requires_grad_(False)
    ema[0].to(memory_format=torch.contiguous_format)
    state["ema"] = ema

    @torch.no_grad()
    def rule(step):
        for mean, tensor in zip(
            ema.state_dict().values(), state["model"].state_dict().values(), strict=True
        ):
            if mean.is_floating_point():
                mean.mul_(0.5).add_(tensor.to(torch.bfloat16), alpha=0.5)
            else:
                mean.copy_(tensor)

    return {"ema": rule}


def strided(state):
    """Tensors that are transposed, and views of one buffer."""
    flat = torch.zeros(40 * 6 + 6)
    ema = state["ema"] = {"first": flat[:240].view(6, 40).t(), "last": flat[240:]}

    @torch.no_grad()
    def rule(step):
        ema["first"].lerp_(state["model"][0].weight, 0.3)
        ema["last"].lerp_(state["model"][2].bias, 0.3)

    return {"ema": rule}


WAYS = [
    averaged,
    with_buffers,
    swa,
    now_and_then,
    by_hand,
    swapped,
    anew,
    stateful,
    two_in_a_row,
    of_half_precision,
    strided,
]


def run(store, make, steps=9, each=logs.train, **options):
    """A run of so many steps, saved as a log unless options say else; each step's snapshot."""
    state, rules = build(1, make)
    return run_logged(store, state, each, steps, derive=rules, **options)


def check_all(store, make, frozen, **options):
    """Whatever step the store offers is restored, with the rules, as it was."""
    fresh, rules = build(2, make)
    check_steps(store, fresh, frozen, derive=rules, **options)


def twice(state):
    """As a training loop that still calls what is a rule now."""
    state["ema"].update_parameters(state["model"])
