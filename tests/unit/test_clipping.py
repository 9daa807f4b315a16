"""Clipping gives torch's bytes, and what was noted of it makes them again, while that holds."""

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from everstep.redo import clipping
from everstep.redo.clipping import Origin, Recording, clip_grad_norm_, release, scale_in_place
from examples import examples

# ---- gradients, and how they are compared --------------------------------------------------------


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INFINITY, NAN = float("inf"), float("nan")
FOREACH = pytest.mark.parametrize("foreach", [None, True, False])


@contextlib.contextmanager
def recording() -> Iterator[Recording]:
    """As for a log that wants gradients from before clipping; afterwards none is left."""
    recording = Recording()
    recording.set(True, pre_clip=True)
    yield recording
    recording.set(False)
    assert not clipping._origins


def origin_of(parameter: Tensor) -> Origin | None:
    return clipping.origins([parameter]).get(id(parameter))


def raw_of(parameter: Tensor) -> Tensor | None:
    """The gradient from before clipping, where it is known."""
    origin = origin_of(parameter)
    return None if origin is None else origin.source


def with_gradient(gradient: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    shape = () if gradient is None else gradient.shape
    dtype = dtype or (torch.float32 if gradient is None else gradient.dtype)
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
    parameter.grad = gradient
    return parameter


def parameters_of(make: Callable[[], list[Tensor | None]]) -> list[Tensor]:
    gradients = make()
    gradients.reverse()  # popped, so that nobody else holds them
    return [with_gradient(gradients.pop()) for _ in range(len(gradients))]


def bits(tensor: Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().reshape(-1).contiguous()
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def assert_same(found: Tensor | None, expected: Tensor | None) -> None:
    if found is None or expected is None:
        assert found is expected
        return
    assert (found.dtype, found.shape, found.stride()) == (
        expected.dtype,
        expected.shape,
        expected.stride(),
    )
    assert bits(found) == bits(expected)


def assert_as_torch(
    make: Callable[[], list[Tensor | None]],
    max_norm: float = 1.0,
    kept: bool = True,
    **options: object,
) -> list[Tensor]:
    """Clip two equal lists, torch's way and ours; the raw gradients scale to the same bytes."""
    expected, found = parameters_of(make), parameters_of(make)
    norm = nn.utils.clip_grad_norm_(expected, max_norm, **options)
    assert_same(clip_grad_norm_(found, max_norm, **options), norm)
    before = make()
    for mine, theirs, raw in zip(found, expected, before, strict=True):
        assert_same(mine.grad, theirs.grad)
        origin = origin_of(mine)
        assert (origin is not None) == (kept and raw is not None)
        if origin is not None:
            assert_same(origin.source, raw)
            assert origin.coefficient.dim() == 0
            assert origin.foreach == (options.get("foreach") is not False)
            again = origin.source.clone()
            scale_in_place([again], origin.coefficient, origin.foreach)
            assert_same(again, theirs.grad)
            assert_same(origin.source, raw)
    return found


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ---- clipping ------------------------------------------------------------------------------------


@FOREACH
@pytest.mark.parametrize("value", [NAN, INFINITY, -INFINITY])
@pytest.mark.parametrize("dtype", DTYPES)
def test_not_finite(foreach, value, dtype):
    def make():
        gradient = noise(1037, dtype=dtype)
        gradient[[3, 1036]] = value
        return [noise(9, dtype=dtype), gradient, noise(dtype=dtype)]

    assert_as_torch(make, foreach=foreach)
    assert_as_torch(make, foreach=foreach, norm_type=INFINITY)
    parameters = parameters_of(make)
    kept = [parameter.grad for parameter in parameters]
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True, foreach=foreach)
    for parameter, gradient, raw in zip(parameters, kept, make(), strict=True):
        assert parameter.grad is gradient
        assert_same(gradient, raw)
        assert raw_of(parameter) is None


@FOREACH
def test_gaps_and_overlaps_are_torchs(foreach):
    assert_as_torch(lambda: [noise(8, 6)[:, ::2], noise(8, 6)[:, 1]], kept=False, foreach=foreach)

    # As many elements as its storage has, but some twice: scaled twice.
    def woven():
        return [torch.empty(0).set_(noise(4).untyped_storage(), 0, (2, 2), (1, 1))]

    assert_as_torch(woven, 0.1, kept=False, foreach=foreach)
    for clip in (clip_grad_norm_, nn.utils.clip_grad_norm_):
        parameter = with_gradient(torch.ones(1).expand(4))
        with pytest.raises(RuntimeError, match="single memory location"):
            clip([parameter], 1.0, foreach=foreach)


def test_one_gradient_twice():
    def clip_all(clip):
        once, twice, flat = with_gradient(noise(4)), with_gradient(noise(5)), noise(6)
        first, second = with_gradient(flat), with_gradient(flat.detach())
        shared = with_gradient(None)
        shared = nn.Parameter(torch.zeros(4))
        shared.grad = once.grad
        listed = [once, twice, twice, first, second, shared]
        return [clip(listed, 0.5), *(parameter.grad for parameter in listed)], listed

    (found, parameters), (expected, _) = (
        clip_all(clip_grad_norm_),
        clip_all(nn.utils.clip_grad_norm_),
    )
    for mine, theirs in zip(found, expected, strict=True):
        assert_same(mine, theirs)
    assert all(raw_of(parameter) is None for parameter in parameters)


def test_kinds_of_lists():
    for clip in (clip_grad_norm_, nn.utils.clip_grad_norm_):
        assert_same(clip([], 1.0), torch.tensor(0.0))
        assert_same(clip([with_gradient(None)], 1.0), torch.tensor(0.0))
        assert_same(clip((p for p in [with_gradient(None)]), 1.0), torch.tensor(0.0))
        with pytest.warns(UserWarning, match="empty generator"):
            clip((p for p in []), 1.0)
        with pytest.raises(TypeError):
            clip(None, 1.0)
    single, listed = with_gradient(noise(7)), with_gradient(noise(7))
    assert_same(clip_grad_norm_(single, 0.1), nn.utils.clip_grad_norm_(listed, 0.1))
    assert_same(single.grad, listed.grad)
    assert_same(raw_of(single), noise(7))
    model = nn.Linear(3, 2)
    model(torch.ones(3)).sum().backward()
    clip_grad_norm_(model.parameters(), torch.tensor(0.5))
    assert all(raw_of(parameter) is not None for parameter in model.parameters())


def test_complex_and_lazy_conjugate():
    assert_as_torch(lambda: [torch.complex(noise(9), noise(9, seed=1))], 0.2)
    [found] = assert_as_torch(
        lambda: [torch.complex(noise(9), noise(9)).conj()], 0.2, kept=False, foreach=False
    )
    assert found.grad.is_conj()


@FOREACH
@pytest.mark.parametrize(
    "gradient",
    [torch.eye(4)[0].to_sparse(), torch.zeros(0), torch.ones(2, dtype=torch.int64)],
    ids=["sparse", "maximum of nothing", "integers"],
)
def test_what_torch_cannot_clip(foreach, gradient):
    """Or, of sparse ones from torch 2.15 on, can: it is torch's, and not kept."""

    def outcome(clip):
        # No parameter of this dtype requires a gradient, but it may have one.
        parameter = torch.zeros(gradient.shape, dtype=gradient.dtype)
        parameter.grad = gradient.clone()
        try:
            said = clip([parameter], 1.0, INFINITY, foreach=foreach).item()
        except (RuntimeError, IndexError) as error:
            said = str(error)
        assert raw_of(parameter) is None
        return said, parameter.grad.to_dense().tolist()

    assert outcome(clip_grad_norm_) == outcome(nn.utils.clip_grad_norm_)


def test_subclass_is_torchs():
    class Mine(Tensor):
        pass

    [parameter] = parameters_of(lambda: [noise(6).as_subclass(Mine)])
    gradient = parameter.grad
    clip_grad_norm_([parameter], 0.1)
    assert parameter.grad is gradient
    assert raw_of(parameter) is None


@settings(max_examples=examples(80))
@given(st.data())
def test_any_list(data):
    shapes = st.lists(st.integers(0, 5), max_size=3)
    seeds = data.draw(
        st.lists(
            st.tuples(shapes, st.sampled_from(DTYPES), st.integers(0, 99), st.integers(-30, 30)),
            max_size=6,
        )
    )
    special = data.draw(st.sampled_from([None, 0.0, -0.0, 1e-40, INFINITY, NAN]))
    transposed = data.draw(st.booleans())

    def make():
        gradients = []
        for shape, dtype, seed, exponent in seeds:
            gradient = noise(*shape, seed=seed).mul_(2.0**exponent).to(dtype)
            if special is not None and gradient.numel():
                gradient.view(-1)[0] = special
            if transposed and gradient.dim() > 1:
                held = gradient.transpose(0, 1).contiguous()
                gradient = torch.empty_strided(
                    gradient.shape, held.transpose(0, 1).stride(), dtype=dtype
                ).copy_(gradient)
            gradients.append(gradient)
        return gradients

    # torch has no maximum of nothing.
    norms = [1.0, 2.0, 3.5]
    norms += [INFINITY, "inf"] if all(gradient.numel() for gradient in make()) else []
    assert_as_torch(
        make,
        data.draw(st.sampled_from([0.0, 0.3]) | st.floats(0, 1e30)),
        norm_type=data.draw(st.sampled_from(norms)),
        foreach=data.draw(st.sampled_from([None, True, False])),
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@FOREACH
@pytest.mark.parametrize("norm_dtype", DTYPES)
def test_on_cuda_and_mixed_with_cpu(foreach, norm_dtype):
    def make():
        return [
            noise(7, dtype=norm_dtype),
            *(noise(70, dtype=dtype).cuda() for dtype in DTYPES),
            *(noise(dtype=dtype).cuda() for dtype in DTYPES),
        ]

    def parameters():
        found = []
        for gradient in make():
            found.append(nn.Parameter(torch.zeros_like(gradient)))
            found[-1].grad = gradient
        return found

    mine, theirs, raws = parameters(), parameters(), make()
    addresses = [parameter.grad.data_ptr() for parameter in mine]
    norm = nn.utils.clip_grad_norm_(theirs, 0.3, foreach=foreach)
    assert_same(clip_grad_norm_(mine, 0.3, foreach=foreach).cpu(), norm.cpu())
    for parameter, other, raw, address in zip(mine, theirs, raws, addresses, strict=True):
        assert_same(parameter.grad.cpu(), other.grad.cpu())
        origin = origin_of(parameter)
        assert_same(origin.source.cpu(), raw.cpu())
        assert origin.coefficient.device == raw.device
        scale_in_place([origin.source], origin.coefficient, origin.foreach)
        assert_same(origin.source.cpu(), other.grad.cpu())
        assert parameter.grad.data_ptr() == address


# ---- what a clipped gradient was made of ---------------------------------------------------------


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
