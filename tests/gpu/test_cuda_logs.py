"""strategy="log" on CUDA: whatever is done with gradients, every step comes back byte for byte."""

from functools import partial

import pytest
import torch
from test_cuda import build, check_steps, saved, state_bytes

import everstep
from everstep.capture import layerwise
from everstep.format.manifest import CheckpointName
from everstep.redo import clipping
from everstep.restore.materialize import materialize
from everstep.tiers.disk import Disk

DATA = (64, 512)
LOG = {"strategy": "log", "base_every": 100}


def plain(state):
    state["optimizer"].zero_grad()
    loss_of(state).backward()
    state["optimizer"].step()


@pytest.fixture(autouse=True)
def _pre_clip():
    """Where everstep clips, gradients from before that are recorded."""
    recording = clipping.Recording()
    recording.set(True, pre_clip=True)
    yield
    recording.set(False)


def clipped(state):
    state["optimizer"].zero_grad()
    loss_of(state).backward()
    everstep.clip_grad_norm_(state["model"].parameters(), 0.01)
    state["optimizer"].step()


def clipped_by_torch(state):
    state["optimizer"].zero_grad()
    loss_of(state).backward()
    torch.nn.utils.clip_grad_norm_(state["model"].parameters(), 0.01)
    state["optimizer"].step()


def accumulated(state):
    state["optimizer"].zero_grad()
    for _ in range(2):
        loss_of(state).backward()
    state["optimizer"].step()


def kept(state):
    """The same memory at each step."""
    state["optimizer"].zero_grad(set_to_none=False)
    loss_of(state).backward()
    state["optimizer"].step()


def scaled(state, clips=False):
    """The first ones overflow and are skipped; a fused optimizer is told so by a tensor."""
    state["optimizer"].zero_grad()
    with torch.autocast("cuda", torch.float16):
        loss = loss_of(state)
    state["scaler"].scale(loss).backward()
    if clips:
        state["scaler"].unscale_(state["optimizer"])
        everstep.clip_grad_norm_(state["model"].parameters(), 0.01)
    state["scaler"].step(state["optimizer"])
    state["scaler"].update()


def scaled_and_clipped(state):
    scaled(state, clips=True)


def in_closure(state):
    def closure():
        state["optimizer"].zero_grad()
        loss = loss_of(state)
        loss.backward()
        return loss

    state["optimizer"].step(closure)


def loss_of(state):
    data = torch.randn(*DATA, device="cuda")
    return (state["model"](data) - data).square().mean()


def make(seed, train, options):
    state = build(seed, width=DATA[1], layers=3, **options)
    if train in (scaled, scaled_and_clipped):
        state["scaler"] = torch.amp.GradScaler("cuda", init_scale=2.0**30, growth_interval=3)
    return state


@pytest.mark.parametrize(
    "train", [plain, clipped, accumulated, kept, scaled, scaled_and_clipped, in_closure]
)
@pytest.mark.parametrize("verify", ["rolling", "full"])
@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=str)
def test_every_step_comes_back(store, train, verify, options):
    state = make(1, train, options)
    expected = saved(store, state, partial(train, state), 15, **LOG, verify=verify)
    assert everstep.Store(store).manifest(15).previous is not None
    fresh = make(2, train, options)
    check_steps(store, fresh, expected)
    with everstep.Checkpointer(store, fresh) as restorer:
        assert restorer.restore(7) == 7
        for step in range(8, 16):
            train(fresh)
            assert state_bytes(fresh) == expected[step], step


@pytest.mark.parametrize(
    "train",
    [plain, clipped, clipped_by_torch, accumulated, kept, scaled, scaled_and_clipped, in_closure],
)
@pytest.mark.parametrize("group_bytes", [1, 1 << 30])
def test_gradients_that_are_copied_within_backward(store, train, group_bytes, monkeypatch):
    """Each at once, off the device; those that are changed afterwards are copied again. Or all when
    the update comes, after clipping."""
    monkeypatch.setattr(layerwise, "GROUP_BYTES", group_bytes)
    found = []
    take = layerwise.Layerwise.take
    monkeypatch.setattr(
        layerwise.Layerwise, "take", lambda *given: (found.append(take(*given)), found[-1])[1]
    )
    state = make(1, train, {})
    strategy = everstep.Log(base_every=100, layerwise=True)
    expected = saved(store, state, partial(train, state), 15, strategy=strategy)
    expected_early = [plain, accumulated, kept, in_closure]
    expected_early += [clipped_by_torch] if group_bytes > 1 else []
    assert any(found) == (train in expected_early)
    check_steps(store, make(2, train, {}), expected)


def test_a_learning_rate_on_the_device_is_noted_as_it_was(store):
    """It changes in place, after the call that used it."""

    def with_rate(seed):
        state = build(seed, width=DATA[1], layers=2, fused=True)
        state["optimizer"].param_groups[0]["lr"] = torch.tensor(1e-2, device="cuda")
        return state

    def train_and_decay():
        plain(state)
        state["optimizer"].param_groups[0]["lr"].mul_(0.7)

    state, fresh = with_rate(1), with_rate(2)
    expected = saved(store, state, train_and_decay, 9, **LOG)
    check_steps(store, fresh, expected)
    with everstep.Checkpointer(store, fresh) as restorer:
        assert restorer.restore() == 9
        rates = [one["optimizer"].param_groups[0]["lr"] for one in (state, fresh)]
        assert rates[0].equal(rates[1])


def test_without_room_the_clipped_gradients_are_recorded(store, monkeypatch):
    device = torch.device("cuda", torch.cuda.current_device())
    assert clipping.has_room([torch.zeros(1, device=device)])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 1))
    monkeypatch.setattr(torch.cuda, "memory_reserved", torch.cuda.memory_allocated)
    assert not clipping.has_room([torch.zeros(1, device=device)])
    state = make(1, clipped, {"fused": True})
    expected = saved(store, state, partial(clipped, state), 7, **LOG)
    check_steps(store, make(2, clipped, {"fused": True}), expected)


def test_a_replay_on_the_cpu_is_not_exact_and_no_damage(store):
    """As `materialize`, host catch-up and restore(only=) make them."""
    state = build(1, width=DATA[1], layers=2)
    saved(store, state, partial(plain, state), 5, **LOG, verify="full")
    weight = state["model"][0].weight.detach()
    made = materialize(Disk(store), CheckpointName(5, 1))
    assert not made.exact
    assert "parameters on cuda, here on cpu" in made.topology["replayed"]["differs"]
    fresh = build(2, width=DATA[1], layers=2)
    with everstep.Checkpointer(store, fresh) as restorer:
        with pytest.raises(everstep.Unsupported, match="here on cpu"):
            restorer.restore(5, only="model", exact="require")
        assert restorer.restore(5, only="model") == 5
        torch.testing.assert_close(fresh["model"][0].weight.detach(), weight)
        assert restorer.restore(5, exact="require") == 5
    assert state_bytes(fresh) == state_bytes(state)
