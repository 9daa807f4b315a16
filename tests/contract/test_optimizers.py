"""Every optimizer of torch comes back bit for bit, and goes on with equal bits."""

import pytest
import torch
from runs import (
    bits,
    build_plain,
    check_same,
    checkpointer,
    freeze,
    restore,
    round_trip,
    save,
    supervised,
)
from torch import nn

from everstep import Checkpointer, Mismatch, Unsupported
from everstep.format.packs import Spec
from everstep.format.tables import TensorEntry
from everstep.state.optimizers import _counts_on_device, _device

ALL = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
}
VARIANTS = {
    "Adadelta": [{}],
    "Adafactor": [{}, {"beta2_decay": -0.5, "d": 1.5}],
    "Adagrad": [{}, {"lr_decay": 0.1}],
    "Adam": [{}, {"amsgrad": True}, {"foreach": True}, {"fused": True}, {"foreach": False}],
    "AdamW": [{}, {"amsgrad": True, "fused": True}, {"foreach": True, "maximize": True}],
    "Adamax": [{}],
    "ASGD": [{}, {"t0": 2.0}],
    "LBFGS": [{"history_size": 3, "max_iter": 4}, {"line_search_fn": "strong_wolfe"}],
    "Muon": [{}],
    "NAdam": [{}, {"decoupled_weight_decay": True}],
    "RAdam": [{}],
    "RMSprop": [{}, {"momentum": 0.9, "centered": True}],
    "Rprop": [{}],
    "SGD": [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "fused": True}],
    "SparseAdam": [{}],
}


class Tanh(nn.Module):
    """Two layers, and a weight in another memory format."""

    def __init__(self, name):
        super().__init__()
        self.sparse = name == "SparseAdam"
        if self.sparse:
            self.embed = nn.Embedding(8, 6, sparse=True)
            return
        bias = name != "Muon"  # it takes matrices only
        self.first, self.second = nn.Linear(6, 5, bias=bias), nn.Linear(5, 6, bias=bias)
        if name != "LBFGS":  # it flattens gradients without a copy
            self.first.weight = nn.Parameter(torch.randn(6, 5).t())
        if bias and name != "LBFGS":
            kernel = torch.randn(4, 2, 3, 3).contiguous(memory_format=torch.channels_last)
            self.kernel = nn.Parameter(kernel)

    def forward(self, inputs):
        if self.sparse:
            return self.embed((inputs[:, 0].abs() * 3).long().clamp(max=7))
        hidden = torch.tanh(self.first(inputs))
        if hasattr(self, "kernel"):
            image = inputs[:, :2, None, None].expand(-1, 2, 4, 4)
            hidden = hidden + nn.functional.conv2d(image, self.kernel).mean((1, 2, 3))[:, None]
        return self.second(hidden)


def test_every_optimizer_of_torch(store):
    assert VARIANTS.keys() == ALL.keys(), "a new optimizer: add it here"

    def build(seed):
        torch.manual_seed(seed)
        models, optimizers = nn.ModuleDict(), {}
        for name, variants in VARIANTS.items():
            for index, options in enumerate(variants):
                model = models[f"{name}_{index}"] = Tanh(name)
                optimizers[f"{name}_{index}"] = ALL[name](model.parameters(), **options)
        return {"models": models, "optimizers": optimizers}

    def train(state):
        for name, model in state["models"].items():
            inputs = torch.randn(8, 6)
            optimizer = state["optimizers"][name]

            def closure(model=model, inputs=inputs, optimizer=optimizer):
                optimizer.zero_grad()
                loss = (model(inputs) - 1).square().mean()
                loss.backward()
                return loss

            closure()
            optimizer.step(*([closure] if name.startswith("LBFGS") else []))

    state = round_trip(store, build, train)
    moments = state["optimizers"]["Adam_0"].state
    kernel = state["models"]["Adam_0"].kernel
    assert moments[kernel]["exp_avg"].stride() == kernel.stride()


def test_groups_with_their_own_hyperparameters(store):
    def build(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6))
        rates = [torch.tensor(0.01 * seed), 0.1 * seed]
        groups = [
            {"params": model[0].parameters(), "lr": rates[0], "note": ("first", seed)},
            {"params": [model[2].weight], "weight_decay": 0.5 * seed, "betas": (0.5, 0.9)},
            {"params": [("bias", model[2].bias)][0][1:], "lr": rates[1]},
        ]
        return {
            "model": model,
            "optimizer": torch.optim.AdamW(groups, lr=0.2 * seed, foreach=False),
        }

    def train(state):
        supervised(state)
        first, *rest = state["optimizer"].param_groups
        first["lr"].mul_(0.9)
        for group in rest:
            group["lr"] *= 0.8

    fresh = build(2)
    rate = fresh["optimizer"].param_groups[0]["lr"]
    round_trip(store, build, train, fresh=fresh)
    assert fresh["optimizer"].param_groups[0]["lr"] is rate, "a graph may hold the tensor"
    assert fresh["optimizer"].param_groups[0]["note"] == ("first", 1)


def test_groups_in_another_order_get_theirs_by_name(store):
    def build(seed, order):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters()}]
        return {"model": model, "optimizer": torch.optim.Adam([groups[i] for i in order])}

    first, second = build(1, (0, 1)), build(2, (1, 0))
    supervised(first)
    save(store, first)
    restore(store, second)
    assert [group["lr"] for group in second["optimizer"].param_groups] == [1e-3, 0.1]
    for ours, theirs in zip(first["model"].parameters(), second["model"].parameters(), strict=True):
        left, right = first["optimizer"].state[ours], second["optimizer"].state[theirs]
        assert bits(left["exp_avg"]) == bits(right["exp_avg"])
    joined = {"model": second["model"], "optimizer": torch.optim.Adam(second["model"].parameters())}
    with pytest.raises(Mismatch, match="different hyperparameters"):
        restore(store, joined)


def test_state_appears_disappears_and_is_replaced(store):
    state, frozen = build_plain(1), {}
    with checkpointer(store, state) as saver:
        saver.step(0)
        frozen[0] = freeze(state)
        for step in (1, 2):
            supervised(state)
            saver.step(step)
            frozen[step] = freeze(state)
        for step in (0, 2, 1, 0, 1):  # into state, out of state, and back
            assert saver.restore(f"{step}-1") == step
            check_same(freeze(state), frozen[step])
    supervised(fresh := build_plain(3))
    restore(store, fresh, "0-1")
    check_same(freeze(fresh), frozen[0])
    assert not fresh["optimizer"].state


@pytest.mark.parametrize(
    ("parameter", "state", "is_counter", "expected"),
    [
        ("cpu", "cpu", False, "meta"),  # a run on the CPU goes on elsewhere
        ("cpu", "cpu", True, "cpu"),
        ("cuda:0", "cuda:0", False, "meta"),
        ("cuda:0", "cuda:0", True, "meta"),
        ("cuda:0", "cpu", False, "cpu"),  # moments that were kept on the CPU
    ],
)
def test_state_goes_where_its_parameter_is(parameter, state, is_counter, expected):
    owner = TensorEntry(Spec("p", "float32", (2,)), (), device=parameter)
    entry = TensorEntry(Spec("o.p.s", "float32", (2,)), (), device=state)
    assert _device(entry, owner, torch.device("meta"), is_counter).type == expected
    assert _device(entry, owner, torch.device("cpu"), is_counter).type == "cpu"


def test_steps_are_counted_where_torch_wants_them():
    assert not _counts_on_device({"lr": 0.1, "fused": None, "capturable": False})
    assert _counts_on_device({"fused": True, "capturable": False})
    assert _counts_on_device({"capturable": True})


def test_another_optimizer_does_not_fit(store):
    supervised(first := build_plain(1))
    save(store, first)
    second = {**build_plain(2), "second": torch.optim.SGD(nn.Linear(2, 2).parameters())}
    with pytest.raises(Mismatch, match="the checkpoint has no optimizer 'second'"):
        restore(store, second)
    with pytest.raises(
        Mismatch, match=r"the state has no tensor 'optimizer\.model\.bias\.exp_avg'"
    ):
        restore(store, {"model": first["model"]})


def test_an_optimizer_of_another_class_is_told(store, caplog):
    supervised(first := build_plain(1))
    save(store, first, strategy="full")
    second = build_plain(2, torch.optim.Adam)
    restore(store, second, only="model")
    restore(store, build_plain(2))
    assert "AdamW" not in caplog.text
    restore(store, second)
    assert "'optimizer' was a torch.optim.adamw.AdamW, and is a torch.optim.adam" in caplog.text


def test_an_optimizer_without_state_is_missed_too(store):
    save(store, build_plain(1, torch.optim.SGD))
    with pytest.raises(Mismatch, match="the state has no 'optimizer'"):
        restore(store, {"model": nn.Linear(6, 6)})


def test_parameters_that_are_views_of_one_storage(store):
    def build(seed):
        torch.manual_seed(seed)
        flat = torch.randn(30)
        parts = [nn.Parameter(flat[:12].view(3, 4)), nn.Parameter(flat[12:])]
        optimizers = [torch.optim.SGD([part], lr=0.1) for part in parts]
        return {"parts": parts, "optimizers": optimizers}

    def train(state):
        for part, optimizer in zip(state["parts"], state["optimizers"], strict=True):
            part.grad = torch.randn(part.shape)
            optimizer.step()

    round_trip(store, build, train)
    state = build(1)
    state["flat"] = state["parts"][0].data
    with pytest.raises(Unsupported, match="'flat': it lies in memory of"):
        Checkpointer(store, state)
