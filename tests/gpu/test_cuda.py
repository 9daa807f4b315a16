"""The CUDA path: side stream, pinned arena, updates held on the stream, exact restores."""

import time

import pytest
import torch
from torch import nn

import everstep
from choices import chosen


def build(seed: int, width: int = 1024, layers: int = 6, dtype=torch.float32, **options):
    torch.manual_seed(seed)
    parts = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.1)]
    model = nn.Sequential(*parts).to("cuda", dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
    return {"model": model, "optimizer": optimizer}


def train(state, scaler=None) -> torch.Tensor:
    model, optimizer = state["model"], state["optimizer"]
    weight = model[0].weight
    data = torch.randn(64, weight.shape[1], device="cuda", dtype=weight.dtype)
    loss = (model(data) - data).square().mean()
    optimizer.zero_grad()
    if scaler is None:
        loss.backward()
        optimizer.step()
    else:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return loss.detach()


def state_bytes(state) -> dict[str, bytes]:
    tensors = dict(state["model"].state_dict())
    for index, parameter in enumerate(state["model"].parameters()):
        for key, value in state["optimizer"].state[parameter].items():
            tensors[f"optimizer.{index}.{key}"] = value
    return {
        name: tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()
        for name, tensor in tensors.items()
    }


def saved(store, state, work, steps: int, bytes_of=state_bytes, **options):
    """Do `work` and save, so many times; the bytes after each."""
    expected = {}
    with everstep.Checkpointer(store, state, **chosen(**options)) as saver:
        for step in range(1, steps + 1):
            work()
            saver.step(step)
            expected[step] = bytes_of(state)
    return expected


def check_steps(store, fresh, expected, bytes_of=state_bytes, **options) -> None:
    """Each of these steps, the newest first, is restored to just these bytes."""
    with everstep.Checkpointer(store, fresh, **options) as restorer:
        for step, wanted in sorted(expected.items(), reverse=True):
            assert restorer.restore(step) == step
            assert bytes_of(fresh) == wanted, step


@pytest.mark.filterwarnings("ignore:This instance was constructed with capturable")
@pytest.mark.parametrize(
    "options",
    [
        {"foreach": True},
        {"fused": True},
        {"foreach": False},
        {"foreach": True, "capturable": True},
        {"fused": True, "amsgrad": True},
    ],
    ids=str,
)
def test_every_step_is_exact_while_training_runs_ahead(tmp_path, options):
    """The host runs ahead of the device: copies must still see each step's own bytes."""
    state = build(0, **options)
    expected = {}
    with everstep.Checkpointer(tmp_path / "run", state) as checkpointer:
        for step in range(1, 9):
            train(state)
            checkpointer.step(step)
            if step % 2:  # a synchronisation at some steps only, so that others overlap fully
                expected[step] = state_bytes(state)
        losses = [train(state) for _ in range(3)]
    check_steps(tmp_path / "run", build(1, **options), expected)
    other = build(2, **options)
    with everstep.Checkpointer(tmp_path / "run", other) as checkpointer:
        assert checkpointer.restore(8) == 8
        assert [loss.item() for loss in losses] == [train(other).item() for _ in range(3)]


def test_update_is_held_on_the_stream_and_not_on_the_host(tmp_path):
    """With a long kernel queued ahead of the copies, step() and optimizer.step() return at once."""
    state = build(0)
    with everstep.Checkpointer(tmp_path / "run", state) as checkpointer:
        for step in range(1, 4):
            train(state)
            checkpointer.step(step)
        checkpointer.wait()
        torch.cuda.synchronize()
        done = torch.cuda.Event()
        torch.cuda._sleep(4_000_000_000)  # about two seconds of device time
        done.record()
        train(state)
        handle = checkpointer.step(4)
        train(state)
        assert not done.query(), "the host waited for the device"
        assert handle.level is None
        handle.wait()
        assert done.query()


def test_memory_freed_after_the_call_is_not_reused_under_the_copy(tmp_path):
    """The caching allocator may hand out a freed block at once; a capture holds what it copies."""
    state = build(0)
    with everstep.Checkpointer(tmp_path / "run", state) as checkpointer:
        train(state)
        expected = state_bytes(state)
        torch.cuda._sleep(1_000_000_000)
        handle = checkpointer.step(1)
        for parameter in state["model"].parameters():
            for key in list(state["optimizer"].state[parameter]):
                state["optimizer"].state[parameter][key] = None
        junk = [torch.full((1024, 1024), 3.0, device="cuda") for _ in range(64)]
        handle.wait()
        del junk
    check_steps(tmp_path / "run", build(1), {1: expected})


def test_grad_scaler_and_cuda_generators(tmp_path):
    state = build(0)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40)
    state["scaler"] = scaler
    with everstep.Checkpointer(tmp_path / "run", state) as checkpointer:
        for step in range(1, 6):
            train(state, scaler)
            checkpointer.step(step)
        expected = scaler.state_dict()
        drawn = torch.rand(16, device="cuda")
    other = build(1)
    other["scaler"] = torch.amp.GradScaler("cuda")
    with everstep.Checkpointer(tmp_path / "run", other) as checkpointer:
        assert checkpointer.restore() == 5
        assert other["scaler"].state_dict() == expected
        assert torch.equal(torch.rand(16, device="cuda"), drawn)


def test_low_precision_and_strided_tensors(tmp_path):
    torch.manual_seed(0)
    tensors = {
        "bf16": torch.randn(1000, 33, device="cuda", dtype=torch.bfloat16),
        "fp8": torch.randn(4096, device="cuda").to(torch.float8_e4m3fn),
        "transposed": torch.randn(65, 129, device="cuda").t(),
        "channels_last": torch.randn(2, 8, 5, 5, device="cuda").to(
            memory_format=torch.channels_last
        ),
        "empty": torch.empty(0, 3, device="cuda"),
        "scalar": torch.tensor(2.5, device="cuda"),
    }
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    with everstep.Checkpointer(tmp_path / "run", {"values": tensors}) as checkpointer:
        checkpointer.save(1).wait()
        for tensor in tensors.values():
            tensor.zero_()
        assert checkpointer.restore() == 1
    for name, tensor in tensors.items():
        assert tensor.float().equal(expected[name].float()), name
        assert tensor.stride() == expected[name].stride()


def test_captured_means_that_the_device_has_been_read(tmp_path):
    state = build(0, width=2048)
    with everstep.Checkpointer(tmp_path / "run", state) as checkpointer:
        train(state)
        expected = state_bytes(state)
        handle = checkpointer.step(1)
        handle.wait("captured")
        with torch.no_grad():
            for parameter in state["model"].parameters():
                parameter.zero_()
        handle.wait()
    check_steps(tmp_path / "run", build(1, width=2048), {1: expected})


def test_a_write_behind_the_optimizers_back_is_found(tmp_path):
    state = build(0)
    with everstep.Checkpointer(tmp_path / "run", state) as checkpointer:
        train(state)
        checkpointer.step(1).wait()
        train(state)
        torch.cuda._sleep(2_000_000_000)
        handle = checkpointer.step(2)
        with torch.no_grad():
            state["model"][0].weight.mul_(0.5)
        with pytest.raises(everstep.Unsupported, match=r"model\.0\.weight"):
            handle.wait()
        train(state)
        checkpointer.step(3).wait()
    assert everstep.Store(tmp_path / "run").steps() == [1, 3]


@pytest.mark.slow
def test_pinning_makes_copies_fast(tmp_path, record_property):
    """Reports the bandwidth of a capture; asserts only that the arena really is pinned."""
    state = build(0, width=4096, layers=8)
    with everstep.Checkpointer(tmp_path / "run", state) as checkpointer:
        for step in range(1, 5):
            train(state)
            torch.cuda.synchronize()
            began = time.perf_counter()
            handle = checkpointer.step(step)
            called = time.perf_counter() - began
            handle.wait("captured")
            record_property(f"call_ms_{step}", called * 1e3)
            record_property(f"captured_ms_{step}", (time.perf_counter() - began) * 1e3)
            handle.wait()
        arena = checkpointer._captures.pool._current[1]
        assert torch.frombuffer(arena.image(0), dtype=torch.uint8).is_pinned()
