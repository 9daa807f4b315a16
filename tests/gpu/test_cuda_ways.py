"""What a trainer on a GPU lives with: being killed, activations that are computed again, a compiled
model; and copies on a stream of their own."""

import json

import pytest
import torch
from test_cuda import build, check_steps, saved
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import everstep
from benchmarks.gpu import kills, traces
from benchmarks.gpu.part import Settings
from choices import chosen

STRATEGIES = ("full", "spread", "log", "auto")


@pytest.mark.slow
def test_a_killed_trainer_goes_on_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(kills, "STRATEGIES", ("full", "log"))
    monkeypatch.setattr(kills, "KILLS", 2)
    rows = tmp_path / "rows"
    kills.kills(Settings("cuda", str(rows), str(tmp_path), str(tmp_path), small=True))
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [(row["strategy"], row["equal"]) for row in found] == [("full", True), ("log", True)]


def recomputed(state, data):
    """Its dropout draws the same numbers again."""
    model = state["model"]
    for layer in range(0, len(model), 4):
        data = checkpoint(model[layer : layer + 4], data, use_reentrant=False)
    return data


def autocast(state, data):
    with torch.autocast("cuda", torch.bfloat16):
        return state["model"](data)


def accumulated(state, data):
    """Onto gradients of another batch."""
    state["model"](data).square().mean().backward()
    return state["model"](data)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "forward", [recomputed, autocast, accumulated], ids=lambda way: way.__name__
)
def test_every_step_comes_back(store, strategy, forward):
    def train():
        data = torch.randn(64, 256, device="cuda", requires_grad=True)
        state["optimizer"].zero_grad()
        functional.mse_loss(forward(state, data).float(), data.detach()).backward()
        state["optimizer"].step()

    state = build(0, width=256, fused=True)
    expected = saved(store, state, train, 9, strategy=strategy)
    check_steps(store, build(1, width=256, fused=True), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's advice on compilers
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_step_of_a_compiled_model_comes_back(store, strategy):
    def layers(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))).cuda()
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), fused=True)}

    def train():
        state["optimizer"].zero_grad()
        compiled(torch.randn(64, 512, device="cuda")).square().mean().backward()
        state["optimizer"].step()

    state = layers(0)
    compiled = torch.compile(state["model"])
    check_steps(store, layers(1), saved(store, state, train, 9, strategy=strategy))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the profiler
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_copies_have_a_stream_of_their_own_and_nobody_waits(store, strategy):
    state = build(0, width=512, fused=True)

    def train():
        state["optimizer"].zero_grad()
        state["model"](torch.randn(64, 512, device="cuda")).square().mean().backward()
        state["optimizer"].step()

    with everstep.Checkpointer(store, state, **chosen(strategy=strategy)) as checkpointer:
        for step in range(1, 9):  # arenas are pinned by then
            train()
            checkpointer.step(step)
        checkpointer.wait()

        def work():
            train()
            checkpointer.step(9)
            train()

        found = traces.traced(work, torch.device("cuda"))
        checkpointer.step(10)
    assert found["waits"] == []
    copies = [row for row in found["streams"] if "DtoH" in row["what"]]
    assert sum(row["bytes"] for row in copies) > 1 << 20
    assert all("Pageable" not in row["what"] for row in copies)
    trained_on = max(
        (row for row in found["streams"] if row["what"] == "kernels"), key=lambda row: row["count"]
    )
    assert {row["stream"] for row in copies}.isdisjoint({trained_on["stream"]})
