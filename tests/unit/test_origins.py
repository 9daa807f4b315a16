"""What a clipped gradient was made of: noted while somebody records, for as long as it holds."""

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from gradients import (
    assert_same,
    noise,
    origin_of,
    parameters_of,
    raw_of,
    recording,
    with_gradient,
)
from torch import Tensor, nn

from everstep.redo import clipping
from everstep.redo.clipping import Recording, clip_grad_norm_, release


@pytest.fixture(autouse=True)
def recorder() -> Iterator[Recording]:
    with recording() as wanted:
        yield wanted


class Halved:
    """What a hook sent of a gradient: half of it."""

    def __init__(self, half: Tensor) -> None:
        self.half = half

    def makes(self, gradient: Tensor, coefficient: Tensor | None, foreach: bool) -> Tensor:
        made = self.half * 2
        if coefficient is not None:
            clipping.scale_in_place([made], coefficient, foreach)
        return (made == gradient).all()


def test_the_gradient_stays_where_it_is():
    flat = noise(12)
    first, second = with_gradient(flat[:8].view(2, 4)), with_gradient(flat[8:])
    views = [first.grad, second.grad]
    clip_grad_norm_([first, second], 0.1)
    assert [first.grad is views[0], second.grad is views[1]] == [True, True]
    assert_same(torch.cat([first.grad.flatten(), second.grad]), flat)
    assert_same(raw_of(first), noise(12)[:8].view(2, 4))
    assert raw_of(first).untyped_storage().nbytes() == 32


def test_without_room_for_copies_it_is_torchs(monkeypatch):
    monkeypatch.setattr(clipping, "has_room", lambda tensors: not list(tensors))
    [expected] = parameters_of(lambda: [noise(5, 3)])
    [held] = parameters_of(lambda: [noise(5, 3)])
    torch.nn.utils.clip_grad_norm_(expected, 0.5)
    clip_grad_norm_(held, 0.5)
    assert origin_of(held) is None
    assert_same(held.grad, expected.grad)


def test_a_gradient_with_a_graph_stays_in_it():
    parameter = nn.Parameter(noise(3))
    with pytest.warns(UserWarning, match="create_graph"):
        parameter.pow(3).sum().backward(create_graph=True)
    expected = parameter.grad.detach().clone()
    clip_grad_norm_([parameter], 0.1)
    assert parameter.grad.requires_grad
    assert_same(raw_of(parameter), expected)
    parameter.grad = None  # a cycle with the graph


# --- how long an origin holds ------------------------------------------------------------------


def clipped_model() -> tuple[nn.Linear, Tensor]:
    model = nn.Linear(3, 1, bias=False)
    model(torch.ones(3)).sum().backward()
    clip_grad_norm_(model.parameters(), 0.1)
    assert origin_of(model.weight) is origin_of(model.weight) is not None
    return model, model.weight


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.weight.grad.mul_(1.0),
        lambda model: model.weight.grad.zero_(),
        lambda model: model.weight.grad.data[0, 1].add_(1),
        lambda model: setattr(model.weight, "grad", None),
        lambda model: setattr(model.weight, "grad", model.weight.grad.clone()),
        lambda model: setattr(model.weight, "grad", model.weight.grad.detach()),
        lambda model: model(torch.ones(3)).sum().backward(),
        lambda model: (model.zero_grad(), model(torch.ones(3)).sum().backward()),
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda model: release(model.parameters()),
    ],
)
def test_a_change_ends_it(change):
    model, weight = clipped_model()
    change(model)
    assert origin_of(weight) is None


def test_clipping_again_replaces_it():
    _, weight = clipped_model()
    before = weight.grad.clone()
    first = weakref.ref(raw_of(weight))
    clip_grad_norm_([weight], 0.01)
    assert first() is None
    assert_same(raw_of(weight), before)


@pytest.mark.parametrize("pre_clip", [False, True])
def test_what_was_sent_is_noted_with_its_coefficient(recorder, pre_clip):
    recorder.set(True, pre_clip)
    sent, dense = parameters_of(lambda: [noise(4), noise(5)])
    clipping.note(sent, Halved(noise(4) / 2))
    assert origin_of(sent).coefficient is None
    clip_grad_norm_([sent, dense], 0.1)
    assert isinstance(origin_of(sent).source, Halved)
    assert origin_of(sent).coefficient < 1
    assert (origin_of(dense) is not None) == pre_clip
    clip_grad_norm_([sent, dense], 0.01)  # of two coefficients none is noted
    assert (raw_of(sent) is not None) == pre_clip
    assert pre_clip == isinstance(raw_of(sent), Tensor)


def test_what_was_sent_and_changed_then_is_no_origin():
    sent, other = parameters_of(lambda: [noise(4), noise(5)])
    for parameter, shape in ((sent, 4), (other, 5)):
        clipping.note(parameter, Halved(noise(shape) / 2))
    sent.grad.data.mul_(0.5)
    assert clipping.origins([sent, other]).keys() == {id(other)}
    clip_grad_norm_([sent, other], 0.1)
    assert clipping.origins([sent, other]).keys() == {id(other)}


@pytest.mark.parametrize("end", ["parameter", "release", "zero_grad and release"])
def test_no_leak(end):
    model, weight = clipped_model()
    raw, gradient = weakref.ref(raw_of(weight)), weakref.ref(weight.grad)
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
    assert len(clipping._origins) == 0


def test_without_a_recorder_it_is_torchs(recorder):
    other = Recording()
    other.set(True)
    _, weight = clipped_model()
    other.set(False)
    other.set(False)  # once is enough
    assert origin_of(weight) is not None  # the fixture's still holds
    recorder.set(False)
    assert not clipping.is_recording()
    assert origin_of(weight) is None
    clip_grad_norm_([weight], 0.01)
    assert not clipping._origins


def test_a_recorder_that_is_gone_wants_nothing(recorder):
    recorder.set(False)
    other = Recording()
    other.set(True, pre_clip=True)
    assert clipping.is_recording()
    del other
    assert not clipping.is_recording()


def test_nobody_wants_it_any_more(recorder):
    model, weight = clipped_model()
    raw = weakref.ref(raw_of(weight))
    recorder.set(True, pre_clip=False)
    clip_grad_norm_(model.parameters(), 0.01)
    assert raw() is None
    assert origin_of(weight) is None


def test_inference_mode_makes_no_inference_gradient():
    [parameter] = parameters_of(lambda: [noise(3)])
    with torch.inference_mode():
        clip_grad_norm_([parameter], 0.1)
    assert not parameter.grad.is_inference()
    assert origin_of(parameter) is None
