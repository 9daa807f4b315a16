"""Whether what came back is what was there, bit for bit."""

from collections.abc import Mapping
from pathlib import Path

import torch

from everstep import Store


def check_equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """The same tensors under the same names."""
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(_bytes(found[name]), _bytes(tensor)), name


def check_stored(store: Path, state: Mapping[str, torch.Tensor], step: int | None = None) -> None:
    """What is on the disk, read without any rank; `state`: as the zoo's full states,
    "blocks.0.q.weight" or "blocks.0.q.weight:exp_avg"."""
    assert Store(store).verify().ok
    stored = Store(store).read(step)
    for name, tensor in state.items():
        assert torch.equal(_bytes(stored[stored_name(name)]), _bytes(tensor)), name


def stored_name(name: str) -> str:
    """What a tensor of the zoo's full states is called in a store."""
    parameter, _, key = name.partition(":")
    return f"optimizer.model.{parameter}.{key}" if key else f"model.{parameter}"


def kinds(store: Path) -> str:
    """A letter for each step of the run: b for a whole state, r for a record."""
    manifests = [Store(store).manifest(step) for step in Store(store).steps()]
    return "".join("b" if manifest.previous is None else "r" for manifest in manifests)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
