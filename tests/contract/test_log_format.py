"""A log, read by the second reader: the chain, and each record's gradients, raw and packed."""

import pytest
import torch
from runs import bits, logged
from torch import nn

from everstep import Store
from independent_reader import Damaged, read, read_log


def draw(kind, parameter):
    values = torch.randn_like(parameter)
    return values.bfloat16().to(parameter.dtype) if kind == "packed" else values


def run(store, kind):
    """Six steps, the first of them a base; the gradients of each, and the buffers after it."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(300, 301), nn.BatchNorm1d(301), nn.Linear(301, 3).double())
    model.add_module("tied", model[0])
    optimizer = torch.optim.AdamW(model.parameters())
    seen = {}
    with logged(store, {"model": model, "optimizer": optimizer, "value": torch.zeros(3)}) as saver:
        for step in range(1, 7):
            model[:2](torch.randn(4, 300))
            gradients = {}
            for name, parameter in model.named_parameters():
                if step != 4 or not name.startswith("1."):
                    parameter.grad = draw(kind, parameter)
                    gradients[f"@0.model.{name}"] = parameter.grad.clone()
            optimizer.step()
            optimizer.zero_grad()
            saver.save(step)
            buffers = {f"model.{name}": value.clone() for name, value in model.named_buffers()}
            seen[step] = gradients, buffers
    return seen


def same(found, tensor):
    dtype, shape, data = found
    assert (f"torch.{dtype}", shape, data) == bits(tensor)[1:]


@pytest.mark.parametrize("kind", ["raw", "packed"])
def test_the_records_hold_what_was_consumed(store, kind):
    seen = run(store, kind)
    chain = read_log(store)
    assert [manifest["step"] for manifest, _ in chain] == [1, 2, 3, 4, 5, 6]
    for manifest, tensors in chain[1:]:
        step = manifest["step"]
        (record,) = manifest["records"]
        assert ("stored" in record["part"]) == (kind == "packed")
        gradients, buffers = seen[step]
        assert {name for name in tensors if name.startswith("@0.")} == gradients.keys()
        for name, tensor in {**gradients, **buffers}.items():
            same(tensors[name], tensor)
    for name, tensor in Store(store).read(1).items():
        same(chain[0][1][name], tensor)
    with pytest.raises(Damaged):
        read(store, 6)  # who cannot replay has to refuse it


@pytest.mark.parametrize("kind", ["raw", "packed"])
def test_damage_is_seen(store, kind):
    run(store, kind)
    pack = next(store.glob("data/00000003-0001-*"))
    good = pack.read_bytes()
    for at in (9, 4096, 5000, len(good) // 2, len(good) - 1):
        bad = bytearray(good)
        bad[at] ^= 1
        pack.write_bytes(bad)
        with pytest.raises(Damaged):
            read_log(store, 6)
        assert read_log(store, 2)
    pack.write_bytes(good)
    manifest = store / "checkpoints" / "00000002-0001" / "manifest.json"
    another = store / "checkpoints" / "00000003-0001" / "manifest.json"
    manifest.write_bytes(another.read_bytes())
    with pytest.raises(Damaged):
        read_log(store, 6)
