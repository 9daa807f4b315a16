"""Gradients that a communication hook compresses: records hold the compressed form, replay makes of
it what the optimizer consumed, and the hook goes on as if nothing had been. One rank, in-process;
two ranks in test_ranks.py."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from runs import (
    check_same,
    check_steps,
    checkpointer,
    difference,
    end_keeper,
    freeze,
    kinds,
    logged,
    restore,
    run_logged,
    snapshot,
)
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import everstep
from everstep import Mismatch, Store, Unsupported
from everstep.cli.main import main
from everstep.restore.materialize import materialize
from everstep.state import compressed, kept
from everstep.store import catalog
from everstep.tiers.disk import Disk

KINDS = {
    "fp16": {},
    "bf16": {},
    "topk": {"density": 0.05},
    "powersgd": {"matrix_approximation_rank": 2, "start_powerSGD_iter": 3},
}
each_kind = pytest.mark.parametrize("kind", KINDS)
two_kinds = pytest.mark.parametrize("kind", ["fp16", "topk"])  # the others: ..._plans.py
SHARE = {"fp16": 0.501, "bf16": 0.501, "topk": 0.12, "powersgd": 0.15}
"""Of the gradients' bytes that their forms take here, at most."""


@pytest.fixture(autouse=True)
def _group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    assert not kept.is_wanted()
    assert not compressed._entries


@pytest.fixture
def stores(tmp_path):
    """Stores by name, whose keepers end with the test."""
    made = set()

    def store(name):
        made.add(tmp_path / str(name))
        return tmp_path / str(name)

    yield store
    for path in made:
        end_keeper(path)


class Net(nn.Module):
    """A convolution in channels last, an embedding of which few rows are used, and matrices."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 18)
        self.conv = nn.Conv2d(2, 24, 3, padding=1).to(memory_format=torch.channels_last)
        self.first, self.norm = nn.Linear(24, 60), nn.BatchNorm1d(60)
        self.second = nn.Linear(60, 60)
        self.sometimes = nn.Linear(60, 60)
        self.frozen = nn.Linear(60, 18).requires_grad_(False)

    def forward(self, rows, step=1):
        images = self.embed(rows).view(-1, 2, 3, 3).contiguous(memory_format=torch.channels_last)
        hidden = torch.tanh(self.norm(self.first(self.conv(images).mean((2, 3)))))
        hidden = self.second(hidden)
        if step % 2:
            hidden = hidden + self.sometimes(hidden)
        return self.frozen(hidden)


def build(kind, seed=1, optimizer=torch.optim.AdamW, options=None, rate=0.01, **wrapped):
    torch.manual_seed(seed)
    model = DistributedDataParallel(Net(), **wrapped)
    hook = everstep.compress(model, kind, **(KINDS[kind] if options is None else options))
    trained = [p for p in model.parameters() if p.requires_grad]
    chosen = optimizer(trained, lr=rate) if callable(optimizer) else optimizer
    return {"model": model, "optimizer": chosen, "compression": hook}


def backward(state, step=1, scale=1.0):
    loss = state["model"](torch.randint(0, 50, (8,)), step).square().mean()
    (loss * scale).backward()
    return loss.item()


def train(state, step=1):
    state["optimizer"].zero_grad()
    loss = backward(state)
    state["optimizer"].step()
    return loss.hex()


def said(store, step):
    """What the record of a step says of compressed gradients: names by form."""
    manifest = Store(store).manifest(step)
    if not manifest.records:
        return None
    groups = [g for call in manifest.records[0].calls for g in call.get("compressed", ())]
    return {group["form"]: group["names"] for group in groups}


def gradient_bytes(store, step):
    """What the own tensors of a record take, before they are packed."""
    part = Store(store).manifest(step).records[0].part
    table = catalog.read_table(Disk(store), part)
    return sum(
        piece.size
        for name, entry in table.tensors.items()
        if name.startswith("@")
        for piece in entry.pieces
    )


# ---- exact, and smaller ------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.parametrize("buckets_mb", [25, 0.01])
def test_every_step_comes_back_from_compressed_records(store, kind, is_view, buckets_mb):
    wrapped = {"gradient_as_bucket_view": is_view, "bucket_cap_mb": buckets_mb}
    state = build(kind, **wrapped)
    frozen = run_logged(store, state, train, steps=9)
    assert kinds(store) == "brrrrrrrr"
    dense = sum(p.nbytes for p in state["model"].parameters() if p.requires_grad)
    for step in range(5, 10):
        assert said(store, step)
        assert gradient_bytes(store, step) <= SHARE[kind] * dense
    check_steps(store, build(kind, 2, **wrapped), frozen)


@each_kind
@pytest.mark.parametrize("buckets_mb", [25, 0.01])
def test_goes_on_as_if_nothing_had_been(stores, kind, buckets_mb):
    """Other buckets in the first iteration of a process, and the hook's memory fits them."""
    straight = build(kind, bucket_cap_mb=buckets_mb)
    expected = [train(straight) for _ in range(12)]
    ends = snapshot(straight)
    for last in (2, 3, 4, 7):  # before PowerSGD begins, at its first step, and after it
        path = stores(last)
        state = build(kind, bucket_cap_mb=buckets_mb)
        run_logged(path, state, train, steps=last)
        again = build(kind, 2, bucket_cap_mb=buckets_mb)
        with logged(path, again) as saver:
            assert saver.restore() == last
            losses = []
            for step in range(last + 1, 13):
                losses.append(train(again))
                saver.step(step)
        assert losses == expected[last:]
        assert difference(snapshot(again), ends) is None
        assert restore(path, build(kind, 3, bucket_cap_mb=buckets_mb)) == 12


@each_kind
@pytest.mark.parametrize("clips", [False, True])
def test_a_state_that_is_spread(store, kind, clips):
    """Whose records have only some of the gradients."""

    def step(state):
        state["optimizer"].zero_grad()
        backward(state)
        if clips:
            everstep.clip_grad_norm_(state["model"].parameters(), 0.001)
        state["optimizer"].step()

    state, frozen = build(kind), {}
    with checkpointer(store, state, strategy="spread", every=4, window=4) as saver:
        for number in range(1, 13):
            step(state)
            saver.step(number)
            frozen[number] = snapshot(state)
    records = Store(store).manifest(12).records
    assert len(records) == 3
    assert all(call["compressed"] for record in records for call in record.calls)
    assert check_steps(store, build(kind, 2), frozen) == [4, 8, 12]


@each_kind
@pytest.mark.parametrize("audit", ["sample", "full"])
def test_bases_that_are_spread_over_the_log(store, kind, audit):
    options = {"base_every": 5, "window": 3, "audit": audit}
    frozen = run_logged(store, build(kind), train, steps=13, **options)
    assert said(store, 12)
    check_steps(store, build(kind, 2), frozen)


# ---- what is not the hook's any more -----------------------------------------------------------


def rewrite(change):
    """A training step with a change of the gradients before the update."""

    def step(state, number):
        state["optimizer"].zero_grad()
        backward(state)
        change(state, [p for p in state["model"].parameters() if p.grad is not None])
        state["optimizer"].step()

    return step


def unscale(state, parameters):
    """As GradScaler.unscale_: no version counter tells of it."""
    gradients = [parameter.grad for parameter in parameters]
    inverse = torch.full((), 0.5)
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, torch.zeros(1), inverse)


def by_data(state, parameters):
    for parameter in parameters:
        parameter.grad.data.mul_(0.5)


def by_numpy(state, parameters):
    for parameter in parameters:
        array = parameter.grad.numpy()
        array *= 0.5


def one_of_them(state, parameters):
    parameters[1].grad.add_(parameters[1].detach(), alpha=0.1)


def another_tensor(state, parameters):
    for parameter in parameters:
        parameter.grad = parameter.grad * 0.5


CHANGES = {
    "clip by torch": lambda state, parameters: nn.utils.clip_grad_norm_(parameters, 0.001),
    "unscale": unscale,
    "data": by_data,
    "numpy": by_numpy,
    "one": one_of_them,
    "another": another_tensor,
}


@two_kinds
@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_gradient_that_was_changed_is_recorded_dense(store, kind, change, is_view):
    state = build(kind, gradient_as_bucket_view=is_view)
    changing, plain = rewrite(CHANGES[change]), rewrite(lambda state, parameters: None)

    def step(state, number):
        (changing if number % 2 else plain)(state, number)

    frozen = run_logged(store, state, step, steps=8)
    assert kinds(store) == "brrrrrrr"
    changed = [name for names in said(store, 7).values() for name in names]
    whole = [name for names in said(store, 8).values() for name in names]
    assert whole
    if change == "one" and not is_view:
        assert set(whole) - set(changed) <= {"model.conv.weight"}
    else:
        assert not changed
    check_steps(store, build(kind, 2, gradient_as_bucket_view=is_view), frozen)


@each_kind
@pytest.mark.parametrize("is_view", [False, True])
def test_clipping_by_everstep_keeps_the_compressed_form(store, kind, is_view):
    def step(state, number):
        state["optimizer"].zero_grad()
        backward(state)
        norm = everstep.clip_grad_norm_(state["model"].parameters(), 0.001, foreach=is_view)
        assert norm > 0.001
        state["optimizer"].step()

    state = build(kind, gradient_as_bucket_view=is_view)
    frozen = run_logged(store, state, step, steps=8)
    call = Store(store).manifest(8).records[0].calls[0]
    assert call["compressed"]
    assert call["clips"]
    dense = sum(p.nbytes for p in state["model"].parameters() if p.requires_grad)
    assert gradient_bytes(store, 8) <= SHARE[kind] * dense
    check_steps(store, build(kind, 2, gradient_as_bucket_view=is_view), frozen)


@each_kind
def test_unscaled_before_clipping(store, kind):
    def change(state, parameters):
        unscale(state, parameters)
        everstep.clip_grad_norm_(parameters, 0.001)

    frozen = run_logged(store, build(kind), rewrite(change), steps=7)
    assert kinds(store) == "brrrrrr"
    assert not said(store, 7)
    check_steps(store, build(kind, 2), frozen)


@two_kinds
@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.parametrize("order", ["no_sync first", "no_sync last", "both"])
def test_accumulation(store, kind, order, is_view):
    def step(state, number):
        state["optimizer"].zero_grad()
        for micro in range(2):
            if (order == "no_sync first") == (micro == 0) and order != "both":
                with state["model"].no_sync():
                    backward(state)
            else:
                backward(state)
        state["optimizer"].step()

    frozen = run_logged(store, build(kind, gradient_as_bucket_view=is_view), step, steps=8)
    assert kinds(store) == "brrrrrrr"
    assert bool(said(store, 8)) == (order != "no_sync last")
    check_steps(store, build(kind, 2, gradient_as_bucket_view=is_view), frozen)


@each_kind
def test_parameters_of_all_shapes(store, kind):
    """Scalars, none at all, and one with strides that no memory has without gaps."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.empty = nn.Parameter(torch.ones(0, 3))
            self.gaps = nn.Parameter(torch.randn(20, 80)[:, ::2])
            self.wide = nn.Parameter(torch.randn(40, 30, dtype=torch.bfloat16))
            self.long = nn.Parameter(torch.randn(40, 20).t())

        def forward(self):
            product = (self.gaps * self.long) @ self.wide.float()
            return product.square().mean() * self.scale + self.empty.sum()

    def build_odd(seed):
        torch.manual_seed(seed)
        model = Odd()
        wrapped = DistributedDataParallel(model)
        hook = everstep.compress(wrapped, kind, **KINDS[kind])
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-4)
        return {"model": wrapped, "optimizer": optimizer, "compression": hook}

    def step(state, number):
        state["optimizer"].zero_grad()
        (state["model"]() * torch.randn(())).backward()
        state["optimizer"].step()

    frozen = run_logged(store, build_odd(1), step, steps=7)
    assert said(store, 7)
    check_steps(store, build_odd(2), frozen)


@each_kind
def test_a_static_graph(store, kind):
    frozen = run_logged(store, build(kind, static_graph=True), train, steps=8)
    assert kinds(store) == "brrrrrrr"
    assert said(store, 8)
    check_steps(store, build(kind, 2, static_graph=True), frozen)


@two_kinds
def test_two_models_in_turn(store, kind):
    """As a GAN: each optimizer's call has its own model's forms."""

    def both(seed):
        first, second = build(kind, seed), build("topk", seed + 10)
        return {"first": first, "second": second}

    def step(state, number):
        train(state["first"])
        train(state["second"])
        if number % 2:
            train(state["second"])

    frozen = run_logged(store, both(1), step, steps=7)
    assert kinds(store) == "brrrrrr"
    assert all(call["compressed"] for call in Store(store).manifest(7).records[0].calls)
    assert len(Store(store).manifest(7).records[0].calls) == 3
    check_steps(store, both(2), frozen)


@each_kind
@pytest.mark.parametrize("set_to_none", [False, True])
def test_parameters_that_are_not_used(store, kind, set_to_none):
    """What the hook made of them is not what the optimizer gets: their gradient, if any, stays."""

    def step(state, number):
        state["optimizer"].zero_grad(set_to_none=set_to_none)
        backward(state, number)
        state["optimizer"].step()

    frozen = run_logged(store, build(kind, find_unused_parameters=True), step, steps=10)
    assert kinds(store) == "b" + 9 * "r"
    names = [name for found in said(store, 9).values() for name in found]
    assert "model.sometimes.weight" in names
    assert "model.second.weight" in names
    names = [name for found in said(store, 10).values() for name in found]
    assert "model.second.weight" in names
    if set_to_none or kind not in ("fp16", "bf16"):  # else zeros were sent, and zeros are there
        assert "model.sometimes.weight" not in names
    check_steps(store, build(kind, 2, find_unused_parameters=True), frozen)


@two_kinds
@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_a_scaler_that_skips(store, kind, options):
    """Also one that leaves unscaling to a fused optimizer."""

    def build_scaled(seed):
        state = build(kind, seed, optimizer=lambda p, lr: torch.optim.AdamW(p, lr=lr, **options))
        state["scaler"] = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
        return state

    def step(state, number):
        state["optimizer"].zero_grad()
        loss = state["model"](torch.randint(0, 50, (8,))).square().mean()
        if number == 6:
            loss = loss * torch.inf
        state["scaler"].scale(loss).backward()
        state["scaler"].step(state["optimizer"])
        state["scaler"].update()

    frozen = run_logged(store, build_scaled(1), step, steps=9)
    assert kinds(store) == "brrrrrrrr"
    assert bool(said(store, 5)) == bool(options.get("fused"))
    check_steps(store, build_scaled(2), frozen)


# ---- the hooks themselves ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_casts_as_torch_does(kind):
    hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
    own = build(kind)
    torch.manual_seed(1)
    theirs = DistributedDataParallel(Net())
    theirs.register_comm_hook(None, lambda state, bucket: hooks[kind](state, bucket))
    optimizer = torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], lr=0.01)
    torch.manual_seed(5)
    expected = [train({"model": theirs, "optimizer": optimizer}) for _ in range(5)]
    torch.manual_seed(5)
    assert [train(own) for _ in range(5)] == expected


def test_powersgd_as_torch_does(monkeypatch):
    """From the same first Q, which torch draws by bucket; but for how kernels round."""
    own, found = build("powersgd"), []
    hook = own["compression"]._compressor
    divide = hook._divide

    def divide_and_look(bucket):
        plain, matrices = divide(bucket)
        found.append(matrices)
        return plain, matrices

    monkeypatch.setattr(hook, "_divide", divide_and_look)
    torch.manual_seed(5)
    for _ in range(8):
        train(own)
    torch.manual_seed(1)
    model, state = DistributedDataParallel(Net()), PowerSGDState(None, 2, 3)
    model.register_comm_hook(state, powerSGD_hook)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    theirs = {"model": model, "optimizer": optimizer}
    torch.manual_seed(5)
    for _ in range(3):
        train(theirs)
    by_shape = {}
    for matrix in found[0]:
        by_shape.setdefault(matrix.whole.shape, []).append(matrix)
    matrices = [matrix for same in by_shape.values() for matrix in same]
    state.q_memory_dict[0] = torch.cat(
        [hook._first_q(m.number, m.whole.shape[2] * m.rank, torch.float32) for m in matrices]
    )
    state.p_memory_dict[0] = torch.empty(sum(m.whole.shape[1] * m.rank for m in matrices))
    for _ in range(5):
        train(theirs)
    for mine, other in zip(own["model"].parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_topk_owes_what_it_does_not_send(dtype):
    model = DistributedDataParallel(nn.Linear(10, 10, bias=False))
    hook = everstep.compress(model, "topk", density=0.07, residual_dtype=dtype)
    weight, owed = model.module.weight, torch.zeros(10, 10)
    for _ in range(20):
        inputs = torch.randn(4, 10)
        (raw,) = torch.autograd.grad(model.module(inputs).square().sum(), weight)
        model.zero_grad()
        model(inputs).square().sum().backward()
        sent = weight.grad
        whole = owed + raw
        assert sent.count_nonzero() == 7
        kept = whole.flatten().abs().argsort(descending=True)[:7]
        assert set(sent.flatten().nonzero().flatten().tolist()) == set(kept.tolist())
        assert torch.equal(sent.flatten()[kept], whole.flatten()[kept])
        owed = whole - sent
        owed = owed if dtype is None else owed.to(dtype)
        residual = hook.state_dict()["tensors"]["residual"]["weight"]
        assert residual.dtype == owed.dtype
        assert torch.equal(residual, owed.flatten())
        owed = owed.float()


def test_topk_without_feedback_has_no_memory(store):
    options = {"density": 0.05, "error_feedback": False}
    frozen = run_logged(store, build("topk", options=options), train, steps=7)
    assert said(store, 7)
    fresh = build("topk", 2, options=options)
    check_steps(store, fresh, frozen)
    assert not fresh["compression"].state_dict()["tensors"]["residual"]


def test_topk_forgets_what_is_not_finite():
    model = DistributedDataParallel(nn.Linear(10, 10))
    hook = everstep.compress(model, "topk", density=0.01)
    (model(torch.randn(4, 10)) * torch.nan).sum().backward()
    for residual in hook.state_dict()["tensors"]["residual"].values():
        assert not residual.any()


def test_records_with_half_a_residual_are_smaller(stores):
    sizes = {}
    for dtype in (None, torch.bfloat16):
        options = {"density": 0.05, "residual_dtype": dtype}
        frozen = run_logged(stores(dtype), build("topk", options=options), train, steps=6)
        check_steps(stores(dtype), build("topk", 2, options=options), frozen)
        sizes[dtype] = Store(stores(dtype)).manifest(6).size
    assert sizes[torch.bfloat16] < sizes[None]


def test_nothing_is_kept_without_a_log(store):
    state = build("topk")
    with checkpointer(store, state, strategy="full") as saver:
        for step in range(1, 4):
            train(state)
            saver.step(step)
            assert not compressed._entries
    assert state["compression"]._round is None


def test_a_log_is_made_whole(store, capsys):
    frozen = run_logged(store, build("powersgd"), train, steps=8)
    assert main(["show", str(store), "8"]) == 0
    assert "5 compressed (low rank)" in capsys.readouterr().out
    disk = Disk(store)
    manifest = materialize(disk, catalog.find(disk, 8))
    assert manifest.exact
    fresh = build("powersgd", 2)
    assert restore(store, fresh, 8, only=["model", "optimizer", "compression"]) == 8
    check_same(freeze(fresh), frozen[8]["state"])


def test_what_is_refused(stores):
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        everstep.compress(nn.Linear(2, 2), "fp16")
    model = DistributedDataParallel(nn.Linear(8, 8))
    with pytest.raises(ValueError, match="knows fp16"):
        everstep.compress(model, "fp8")
    with pytest.raises(ValueError, match="density"):
        everstep.compress(model, "topk", density=0)
    with pytest.raises(ValueError, match="floating"):
        everstep.compress(model, "topk", residual_dtype=torch.int8)
    with pytest.raises(TypeError, match="warm_start"):
        everstep.compress(model, "powersgd", warm_start=False)
    with pytest.raises(ValueError, match="positive"):
        everstep.compress(model, "powersgd", matrix_approximation_rank=0)
    waves = nn.Linear(8, 8, dtype=torch.complex64)
    with pytest.raises(Unsupported, match="complex"):
        everstep.compress(DistributedDataParallel(waves), "bf16")
    run_logged(stores(1), build("topk"), train, steps=2)
    with pytest.raises(Mismatch, match="'topk', the model's is 'fp16'"):
        restore(stores(1), build("fp16"))
    run_logged(stores(2), build("powersgd"), train, steps=6)
    options = KINDS["powersgd"] | {"matrix_approximation_rank": 1}
    with pytest.raises(Mismatch, match="same options"):
        restore(stores(2), build("powersgd", options=options))


def test_the_hook_goes_when_the_model_does():
    state = build("topk")
    train(state)
    model = weakref.ref(state["model"])
    del state
    gc.collect()
    assert model() is None
    assert not kept.is_wanted()
