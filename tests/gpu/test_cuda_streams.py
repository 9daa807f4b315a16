"""Training on a stream of its own, beside which nothing is in order by itself; and pinning."""

import pytest
import torch
from test_cuda import build, check_steps, state_bytes, train
from torch import nn

import everstep
from choices import chosen
from everstep.capture.copies import Devices
from everstep.keeper.arena import Arena


@pytest.mark.parametrize("strategy", ["full", "log", "spread"])
@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=str)
def test_every_step_is_exact_on_another_stream(store, strategy, options):
    """Each step's copies race with a device that is kept busy on both sides of the call."""
    settings = {"every": 3, "window": 3} if strategy == "spread" else {}
    expected = {}
    with torch.cuda.stream(torch.cuda.Stream()):
        state = build(0, **options)
        with everstep.Checkpointer(
            store, state, **chosen(strategy=strategy, **settings)
        ) as checkpointer:
            for step in range(1, 13):
                torch.cuda._sleep(20_000_000)
                train(state)
                checkpointer.step(step)
                if step % 3 == 0:
                    expected[step] = state_bytes(state)
            losses = [train(state) for _ in range(3)]
    with torch.cuda.stream(torch.cuda.Stream()):
        other = build(1, **options)
        with everstep.Checkpointer(store, other) as checkpointer:
            for step, wanted in expected.items():
                assert checkpointer.restore(step) == step
                assert state_bytes(other) == wanted, step
            assert checkpointer.restore(12) == 12
            assert [loss.item() for loss in losses] == [train(other).item() for _ in range(3)]


def test_gradients_that_a_record_holds_are_not_reused(store):
    """zero_grad() lets go of them while the device is still far from having copied them."""
    state = build(0)
    expected = {}
    with everstep.Checkpointer(store, state, strategy=everstep.Log(base_every=100)) as checkpointer:
        for step in range(1, 11):
            train(state)
            torch.cuda._sleep(100_000_000)
            checkpointer.step(step)
            state["optimizer"].zero_grad()
            junk = [torch.full((1024, 1024), 3.0, device="cuda") for _ in range(64)]
            del junk
            if step > 5:
                expected[step] = state_bytes(state)
    check_steps(store, build(1), expected)


def test_a_failed_pinning_is_no_error_of_the_run(caplog):
    """Memory can be registered once: the second fails, and neither that nor undoing it is raised by
    the next kernel, or undoes the first."""
    device = torch.device("cuda", torch.cuda.current_device())
    arena = Arena.create(1, 1 << 16, 1 << 20)
    image = torch.frombuffer(arena.image(0), dtype=torch.uint8)
    first, second = Devices(), Devices()
    first.pin(arena, device)
    assert image.is_pinned()
    second.pin(arena, device)
    assert "pinning" in caplog.text
    assert torch.ones(4, device=device).sum().item() == 4
    second.unpin(arena)
    assert torch.ones(4, device=device).sum().item() == 4
    assert image.is_pinned()
    first.unpin(arena)
    assert not image.is_pinned()


def test_gradients_with_strides_are_there_when_the_replay_wants_them(store):
    """They are read in another thread, whose last kernel runs on another stream."""

    def convolutions(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(*(nn.Conv2d(64, 64, 3, padding=1) for _ in range(6)))
        model = model.to("cuda", memory_format=torch.channels_last)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}

    with torch.cuda.stream(torch.cuda.Stream()):
        state, expected = convolutions(0), {}
        with everstep.Checkpointer(
            store, state, strategy=everstep.Log(base_every=100)
        ) as checkpointer:
            for step in range(1, 10):
                data = torch.randn(4, 64, 32, 32, device="cuda")
                data = data.contiguous(memory_format=torch.channels_last)
                state["optimizer"].zero_grad()
                state["model"](data).square().mean().backward()
                state["optimizer"].step()
                checkpointer.step(step)
                expected[step] = state_bytes(state)
        check_steps(store, convolutions(1), expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("strategy", ["full", "log"])
def test_every_step_is_exact_on_two_devices(store, strategy):
    """Each device has streams and events of its own; the second has buffers that are copied at the
    call."""

    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(1024, 1024).to("cuda:0")
            self.second = nn.Sequential(nn.Linear(1024, 1024), nn.BatchNorm1d(1024)).to("cuda:1")

        def forward(self, data):
            return self.second(self.first(data).to("cuda:1"))

    def split(seed):
        torch.manual_seed(seed)
        model = Split()
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}

    state, expected = split(0), {}
    with everstep.Checkpointer(store, state, strategy=strategy) as checkpointer:
        for step in range(1, 10):
            for device in ("cuda:0", "cuda:1"):
                with torch.cuda.device(device):
                    torch.cuda._sleep(20_000_000)
            state["optimizer"].zero_grad()
            state["model"](torch.randn(64, 1024, device="cuda:0")).square().mean().backward()
            state["optimizer"].step()
            checkpointer.step(step)
            if step % 2:
                expected[step] = state_bytes(state)
    check_steps(store, split(1), expected)
