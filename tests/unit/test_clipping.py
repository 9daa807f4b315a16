"""Clipping gives torch's bytes, and what was noted of it makes them again."""

from collections.abc import Iterator

import pytest
import torch
from gradients import (
    DTYPES,
    FOREACH,
    INFINITY,
    NAN,
    assert_as_torch,
    assert_same,
    noise,
    origin_of,
    parameters_of,
    raw_of,
    recording,
    with_gradient,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from everstep.redo.clipping import clip_grad_norm_, scale_in_place
from examples import examples


@pytest.fixture(autouse=True)
def _recorder() -> Iterator[None]:
    with recording():
        yield


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
    def message(clip):
        # No parameter of this dtype requires a gradient, but it may have one.
        parameter = torch.zeros(gradient.shape, dtype=gradient.dtype)
        parameter.grad = gradient
        with pytest.raises((RuntimeError, IndexError)) as caught:
            clip([parameter], 1.0, INFINITY, foreach=foreach)
        assert raw_of(parameter) is None
        return str(caught.value)

    assert message(clip_grad_norm_) == message(nn.utils.clip_grad_norm_)


def test_subclass_is_torchs():
    class Mine(Tensor):
        pass

    [parameter] = parameters_of(lambda: [noise(6).as_subclass(Mine)])
    gradient = parameter.grad
    clip_grad_norm_([parameter], 0.1)
    assert parameter.grad is gradient
    assert raw_of(parameter) is None


@settings(max_examples=examples(80), deadline=None)
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
