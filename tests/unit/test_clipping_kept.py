"""Which tensor a clipped gradient is, and how long the raw one beside it holds."""

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from gradients import assert_same, bits, noise, parameters_of, recording, with_gradient
from torch import Tensor, nn

from alone import one_rank
from everstep.redo import clipping, kept
from everstep.redo.clipping import clip_grad_norm_, raw_gradient, release, scale


@pytest.fixture(autouse=True)
def recorder() -> Iterator[kept.Interest]:
    with recording() as interest:
        yield interest


# --- which tensor p.grad is ------------------------------------------------------------------


def test_a_gradient_nobody_sees_is_replaced():
    model = nn.Linear(4, 3)
    model(torch.ones(2, 4)).square().sum().backward()
    for _ in range(2):  # the second time ours is replaced
        addresses = [parameter.grad.data_ptr() for parameter in model.parameters()]
        clip_grad_norm_(model.parameters(), 0.5)
        for parameter, address in zip(model.parameters(), addresses, strict=True):
            assert raw_gradient(parameter).raw.data_ptr() == address
            assert parameter.grad.data_ptr() != address


def test_without_room_for_copies_it_is_torchs(monkeypatch):
    """On a device: here all gradients are held by somebody else, and so would be copied."""
    monkeypatch.setattr(clipping, "has_room", lambda tensors: not list(tensors))
    others = [noise(5, 3), noise(7, seed=1)]
    expected = parameters_of(lambda: [gradient.clone() for gradient in others])
    held = parameters_of(lambda: list(others))
    torch.nn.utils.clip_grad_norm_(expected, 0.5)
    clip_grad_norm_(held, 0.5)
    for parameter, other in zip(held, expected, strict=True):
        assert raw_gradient(parameter) is None
        assert_same(parameter.grad, other.grad)


@pytest.mark.parametrize(
    "see",
    [
        lambda gradient: gradient,
        lambda gradient: gradient.detach(),
        lambda gradient: gradient.view(-1),
        lambda gradient: gradient.data,
        lambda gradient: gradient.numpy(),
        lambda gradient: gradient.untyped_storage(),
    ],
)
def test_whoever_sees_the_gradient_sees_it_clipped(see):
    [parameter] = parameters_of(lambda: [noise(2, 3)])
    address, seen = parameter.grad.data_ptr(), see(parameter.grad)
    clip_grad_norm_([parameter], 0.1)
    assert seen is not None
    assert parameter.grad.data_ptr() == address
    assert_same(raw_gradient(parameter).raw, noise(2, 3))


def test_parts_of_a_buffer_stay_in_it():
    flat = noise(12)
    first, second = with_gradient(flat[:8].view(2, 4)), with_gradient(flat[8:])
    alone = parameters_of(lambda: [noise(3)])
    views = [first.grad, second.grad]
    clip_grad_norm_([first, *alone, second], 0.1)
    assert [first.grad is views[0], second.grad is views[1]] == [True, True]
    assert_same(torch.cat([first.grad.flatten(), second.grad]), flat)
    assert_same(raw_gradient(first).raw, noise(12)[:8].view(2, 4))
    assert_same(raw_gradient(second).raw, noise(12)[8:])
    assert raw_gradient(alone[0]) is not None


def test_a_raw_gradient_does_not_hold_a_larger_buffer():
    # No view: that would hold its base, and so be seen by others.
    [parameter] = parameters_of(
        lambda: [torch.empty(0).set_(noise(12).untyped_storage(), 0, (3,), (1,))]
    )
    assert parameter.grad.untyped_storage().nbytes() == 48
    clip_grad_norm_([parameter], 0.1)
    assert raw_gradient(parameter).raw.untyped_storage().nbytes() == 12


def test_a_gradient_with_a_graph_stays_in_it():
    parameter = nn.Parameter(noise(3))
    with pytest.warns(UserWarning, match="create_graph"):
        parameter.pow(3).sum().backward(create_graph=True)
    assert parameter.grad.requires_grad
    address, expected = parameter.grad.data_ptr(), parameter.grad.detach().clone()
    clip_grad_norm_([parameter], 0.1)
    assert parameter.grad.data_ptr() == address
    assert parameter.grad.requires_grad
    assert_same(raw_gradient(parameter).raw, expected)
    parameter.grad = None  # a cycle with the graph


@pytest.mark.parametrize("as_views", [False, True])
def test_under_ddp(as_views, tmp_path):
    with one_rank(tmp_path):
        models, losses = [], [[], []]
        for _ in range(2):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 1))
            models.append(
                nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=as_views)
            )
        for step in range(4):
            clips = (clip_grad_norm_, nn.utils.clip_grad_norm_)
            for model, clip, said in zip(models, clips, losses, strict=True):
                loss = model(noise(8, 5, seed=step)).square().mean()
                loss.backward()
                clip(model.parameters(), 0.05)
                said.append(bits(loss))
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter -= 0.1 * parameter.grad
                        assert (raw_gradient(parameter) is not None) == (model is models[0])
                        if as_views:
                            assert parameter.grad._is_view()
                model.zero_grad(set_to_none=step % 2 == 0)
        assert losses[0] == losses[1]


# --- how long a raw gradient holds -----------------------------------------------------------


def clipped_model(shared: bool) -> tuple[nn.Linear, Tensor]:
    model = nn.Linear(3, 1, bias=False)
    model(torch.ones(3)).sum().backward()
    view = model.weight.grad.view(-1) if shared else None
    clip_grad_norm_(model.parameters(), 0.1)
    del view
    assert raw_gradient(model.weight) is not None
    assert raw_gradient(model.weight) is raw_gradient(model.weight)
    return model, model.weight


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.weight.grad.mul_(1.0),
        lambda model: model.weight.grad.zero_(),
        lambda model: model.weight.grad[0].add_(1),
        lambda model: setattr(model.weight, "grad", None),
        lambda model: setattr(model.weight, "grad", model.weight.grad.clone()),
        lambda model: setattr(model.weight, "grad", model.weight.grad.detach()),
        lambda model: model(torch.ones(3)).sum().backward(),
        lambda model: (model.zero_grad(), model(torch.ones(3)).sum().backward()),
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda model: raw_gradient(model.weight).raw.zero_(),
        lambda model: release(model.parameters()),
    ],
)
def test_a_change_ends_it(shared, change):
    model, weight = clipped_model(shared)
    change(model)
    assert raw_gradient(weight) is None


def test_clipping_again_replaces_it():
    _, weight = clipped_model(False)
    before = weight.grad.clone()
    first = weakref.ref(raw_gradient(weight).raw)
    clip_grad_norm_([weight], 0.01)
    assert first() is None
    assert_same(raw_gradient(weight).raw, before)
    weight.grad = None
    clip_grad_norm_([weight], 0.01)
    assert clipping._entries.get(weight) is None


def test_an_optimizer_hook_finds_it():
    model, weight = clipped_model(False)
    optimizer, found = torch.optim.SGD(model.parameters()), []

    def hook(optimizer, args, kwargs):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        found.extend(raw_gradient(parameter) for parameter in parameters)
        release(parameters)

    optimizer.register_step_pre_hook(hook)
    optimizer.step()
    optimizer.step()
    assert_same(found[0].raw, torch.ones(1, 3))
    assert_same(scale([found[0].raw], found[0].coefficient, found[0].foreach)[0], weight.grad)
    assert found[1] is None


@pytest.mark.parametrize("end", ["parameter", "release", "zero_grad and release"])
def test_no_leak(end):
    model, weight = clipped_model(False)
    raw, gradient = weakref.ref(raw_gradient(weight).raw), weakref.ref(weight.grad)
    if end == "parameter":
        del model, weight
        gc.collect()
        assert gradient() is None
    elif end == "release":
        release([weight])
        release([weight])
    else:
        model.zero_grad()
        assert gradient() is None  # only the raw one is held
        release([weight])
    assert raw() is None
    assert len(clipping._entries) == 0


def test_without_a_recorder_it_is_torchs(recorder):
    other = kept.Interest()
    other.set(True)
    _, weight = clipped_model(False)
    other.set(False)
    other.set(False)  # once is enough
    assert raw_gradient(weight) is not None  # the fixture's still holds
    recorder.set(False)
    assert not kept.is_wanted()
    assert raw_gradient(weight) is None
    gradient = weight.grad
    clip_grad_norm_([weight], 0.01)
    assert weight.grad is gradient
    assert raw_gradient(weight) is None


def test_nobody_wants_it_any_more(recorder):
    model, weight = clipped_model(False)
    raw = weakref.ref(raw_gradient(weight).raw)
    recorder.set(True, raw=False)
    clip_grad_norm_(model.parameters(), 0.01)
    assert raw() is None
    assert raw_gradient(weight) is None
    assert clipping.has_replaced(weight)  # by the clipping before


def test_inference_mode_makes_no_inference_gradient():
    [parameter] = parameters_of(lambda: [noise(3)])
    with torch.inference_mode():
        clip_grad_norm_([parameter], 0.1)
    assert not parameter.grad.is_inference()
    assert raw_gradient(parameter) is None
