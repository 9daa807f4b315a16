"""The hooks that compress gradients: as torch's, what they keep, and what is refused."""

import gc
import weakref

import pytest
import torch
from hooked import Net, build, one_rank, train
from runs import check_same, check_steps, checkpointer, freeze, restore, run_logged
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import everstep
from everstep import Mismatch, Store, Unsupported
from everstep.cli.main import main
from everstep.redo import clipping
from everstep.restore.materialize import materialize
from everstep.store import catalog
from everstep.tiers.disk import Disk


@pytest.fixture(autouse=True)
def _group(tmp_path):
    with one_rank(tmp_path):
        yield


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


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_topk_owes_what_it_does_not_send(dtype):
    model = DistributedDataParallel(nn.Linear(10, 10, bias=False))
    hook = everstep.compress(model, "topk", ratio=0.07, residual_dtype=dtype)
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


def test_topk_forgets_what_is_not_finite():
    model = DistributedDataParallel(nn.Linear(10, 10))
    hook = everstep.compress(model, "topk", ratio=0.01)
    (model(torch.randn(4, 10)) * torch.nan).sum().backward()
    for residual in hook.state_dict()["tensors"]["residual"].values():
        assert not residual.any()


def test_records_with_half_a_residual_are_smaller(stores):
    sizes = {}
    for dtype in (None, torch.bfloat16):
        options = {"ratio": 0.05, "residual": "records", "residual_dtype": dtype}
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
            assert not clipping._origins


def test_a_log_is_made_whole(store, capsys):
    frozen = run_logged(store, build("topk"), train, steps=8)
    assert main(["show", str(store), "8"]) == 0
    assert "11 compressed (sparse)" in capsys.readouterr().out
    disk = Disk(store)
    manifest = materialize(disk, catalog.find(disk, 8))
    assert manifest.exact
    fresh = build("topk", 2)
    assert restore(store, fresh, 8, only=["model", "optimizer", "compression"]) == 8
    check_same(freeze(fresh), frozen[8]["state"])


def test_what_is_refused(stores):
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        everstep.compress(nn.Linear(2, 2), "fp16")
    model = DistributedDataParallel(nn.Linear(8, 8))
    with pytest.raises(ValueError, match="knows fp16"):
        everstep.compress(model, "fp8")
    with pytest.raises(ValueError, match="ratio"):
        everstep.compress(model, "topk", ratio=0)
    with pytest.raises(ValueError, match="residual must be"):
        everstep.compress(model, "topk", residual="nowhere")
    with pytest.raises(ValueError, match="floating"):
        everstep.compress(model, "topk", residual_dtype=torch.int8)
    for kind in ("fp16", "topk"):
        with pytest.raises(TypeError, match="warm_start"):
            everstep.compress(model, kind, warm_start=False)
    waves = nn.Linear(8, 8, dtype=torch.complex64)
    with pytest.raises(Unsupported, match="complex"):
        everstep.compress(DistributedDataParallel(waves), "bf16")
    run_logged(stores(1), build("topk"), train, steps=2)
    with pytest.raises(Mismatch, match="'topk', the model's is 'fp16'"):
        restore(stores(1), build("fp16"))


def test_the_hook_goes_when_the_model_does():
    state = build("topk")
    train(state)
    model = weakref.ref(state["model"])
    del state
    gc.collect()
    assert model() is None
    assert not clipping.is_recording()
