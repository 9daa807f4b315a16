"""Clipping gives torch's bytes, keeps raw gradients while they hold, and never longer."""

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from everstep.state import clipping, kept
from everstep.state.clipping import clip_grad_norm_, raw_gradient, release, scale, scale_in_place

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INFINITY, NAN = float("inf"), float("nan")
FOREACH = pytest.mark.parametrize("foreach", [None, True, False])


@pytest.fixture(autouse=True)
def recorder() -> Iterator[kept.Interest]:
    interest = kept.Interest()
    interest.set(True)
    yield interest
    interest.set(False)
    assert not clipping._entries


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
        clipped = raw_gradient(mine)
        assert (clipped is not None) == (kept and raw is not None)
        if clipped is not None:
            assert_same(clipped.raw, raw)
            assert clipped.coefficient.dim() == 0
            assert clipped.foreach == (options.get("foreach") is not False)
            assert clipped.raw.untyped_storage().data_ptr() != (
                mine.grad.untyped_storage().data_ptr() or None
            )
            [again] = scale([clipped.raw], clipped.coefficient, clipped.foreach)
            assert_same(again, theirs.grad)
            assert_same(clipped.raw, raw)
    return found


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# --- the same bytes as torch ---------------------------------------------------------------


@FOREACH
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.5, INFINITY, "inf"])
@pytest.mark.parametrize("max_norm", [0.3, 1e9, 0.0])
def test_dtypes_and_norms(foreach, dtype, norm_type, max_norm):
    def make():
        shapes = [(33, 7), (), (1,), (5, 1, 1), (513,)]
        if float(norm_type) != INFINITY:  # of nothing: torch raises
            shapes += [(0,), (0, 3)]
        return [noise(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]

    assert_as_torch(make, max_norm, norm_type=norm_type, foreach=foreach)


@FOREACH
def test_mixed_dtypes_scalars_and_absent_gradients(foreach):
    def make():
        gradients = [None]
        for index, dtype in enumerate(DTYPES * 2):
            gradients += [noise(dtype=dtype, seed=index), noise(65, dtype=dtype), None]
        return gradients

    assert_as_torch(make, 0.37, foreach=foreach)
    assert_as_torch(lambda: make()[::-1], 0.37, foreach=foreach)


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
        assert raw_gradient(parameter) is None


@FOREACH
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides(foreach, dtype):
    def make():
        return [
            noise(6, 5, dtype=dtype).t().clone(),  # dense, not contiguous
            noise(2, 3, 4, 5, dtype=dtype).to(memory_format=torch.channels_last),
            torch.empty_strided((3, 1), (1, 7), dtype=dtype).copy_(noise(3, 1, dtype=dtype)),
        ]

    assert make()[0].stride() == (1, 5)
    for parameter in assert_as_torch(make, 0.1, foreach=foreach):
        assert raw_gradient(parameter).raw.stride() == parameter.grad.stride()


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
    assert all(raw_gradient(parameter) is None for parameter in parameters)


def test_kinds_of_lists():
    for clip in (clip_grad_norm_, nn.utils.clip_grad_norm_):
        assert_same(clip([], 1.0), torch.tensor(0.0))
        assert_same(clip([with_gradient(None)], 1.0), torch.tensor(0.0))
        assert_same(clip((p for p in [with_gradient(None)]), 1.0), torch.tensor(0.0))
        with pytest.warns(UserWarning, match="empty generator") as caught:
            clip((p for p in []), 1.0)
        assert caught[0].filename == __file__
        with pytest.raises(TypeError):
            clip(None, 1.0)
    single, listed = with_gradient(noise(7)), with_gradient(noise(7))
    assert_same(clip_grad_norm_(single, 0.1), nn.utils.clip_grad_norm_(listed, 0.1))
    assert_same(single.grad, listed.grad)
    assert_same(raw_gradient(single).raw, noise(7))
    model = nn.Linear(3, 2)
    model(torch.ones(3)).sum().backward()
    clip_grad_norm_(model.parameters(), torch.tensor(0.5))
    assert all(raw_gradient(parameter) for parameter in model.parameters())


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
        assert raw_gradient(parameter) is None
        return str(caught.value)

    assert message(clip_grad_norm_) == message(nn.utils.clip_grad_norm_)


def test_subclass_is_torchs():
    class Mine(Tensor):
        pass

    [parameter] = parameters_of(lambda: [noise(6).as_subclass(Mine)])
    gradient = parameter.grad
    clip_grad_norm_([parameter], 0.1)
    assert parameter.grad is gradient
    assert raw_gradient(parameter) is None


@settings(max_examples=80, deadline=None)
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
    norms = [1.0, 2.0, INFINITY] if all(gradient.numel() for gradient in make()) else [1.0, 2.0]
    assert_as_torch(
        make,
        data.draw(st.floats(0, 1e30)),
        norm_type=data.draw(st.sampled_from(norms)),
        foreach=data.draw(st.sampled_from([None, True, False])),
    )


@given(
    values=st.lists(st.floats(width=32), min_size=1, max_size=40),
    factor=st.floats(0, 1, width=32),
    dtype=st.sampled_from(DTYPES),
    wide=st.booleans(),
    foreach=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_scale_is_multiplying_in_place(values, factor, dtype, wide, foreach):
    coefficient = torch.tensor(factor, dtype=torch.float64 if wide else torch.float32)
    raw = [torch.tensor(values).to(dtype), torch.tensor(values[0]).to(dtype)]
    expected = [tensor.clone() for tensor in raw]
    if foreach:
        torch._foreach_mul_(expected, coefficient)
    else:
        for tensor in expected:
            tensor.mul_(coefficient)
    untouched = [bits(tensor) for tensor in raw]
    for mine, theirs in zip(scale(raw, coefficient, foreach), expected, strict=True):
        assert_same(mine, theirs)
    assert [bits(tensor) for tensor in raw] == untouched
    scale_in_place(raw, coefficient, foreach)
    for mine, theirs in zip(raw, expected, strict=True):
        assert_same(mine, theirs)


def test_scale_of_nothing():
    assert scale([], torch.tensor(0.5), True) == []


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
def test_under_ddp(as_views):
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
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
    finally:
        torch.distributed.destroy_process_group()


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
    assert weight not in clipping._entries


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


def test_inference_mode_makes_no_inference_gradient():
    [parameter] = parameters_of(lambda: [noise(3)])
    with torch.inference_mode():
        clip_grad_norm_([parameter], 0.1)
    assert not parameter.grad.is_inference()
    assert raw_gradient(parameter) is None


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
        clipped = raw_gradient(parameter)
        assert_same(clipped.raw.cpu(), raw.cpu())
        assert clipped.coefficient.device == raw.device
        [again] = scale([clipped.raw], clipped.coefficient, clipped.foreach)
        assert_same(again.cpu(), other.grad.cpu())
        assert not raw.is_cuda or parameter.grad.data_ptr() == address
