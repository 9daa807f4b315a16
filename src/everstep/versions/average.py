"""The mean of the weights of several checkpoints, as a checkpoint of its own, without optimizer
state (as after a stable phase in place of a decay: Hägele et al., 2024)."""

from collections.abc import Sequence

import torch

from everstep.errors import Mismatch
from everstep.format.manifest import CheckpointName
from everstep.interchange.draft import Draft
from everstep.interchange.tensors import Found
from everstep.interchange.write import write
from everstep.restore.load import Loader
from everstep.restore.whole import Whole, kind_of
from everstep.store.copy import Progress
from everstep.tiers.tier import Tier
from everstep.versions.merge import found_in, new_store


def average(
    disk: Tier,
    chosen: Sequence[CheckpointName],
    shares: Sequence[float],
    to: str,
    progress: Progress = lambda done, total: None,
) -> CheckpointName:
    """Write the mean of the models' tensors, with these `shares`, to the new store `to`, as the
    newest step; blocks. Sums are in float64 (complex128), in the order of `chosen`, and rounded
    once; of what are no floating-point numbers the last one's count. Takes memory for a block of
    each, and of a log's step for its state. Raises Mismatch where they differ in what they have,
    Conflict where something is there, Missing, Corrupt, Unavailable, Unsupported."""
    target = new_store(to, "averaging")
    with Loader() as loader:
        wholes = [Whole(disk, name, loader) for name in chosen]
        kinds = [{n: kind_of(each) for n, each in whole.weights.items()} for whole in wholes]
        for name, kind in zip(chosen, kinds, strict=True):
            if odd := sorted({n for n, _ in kind.items() ^ kinds[-1].items()}):
                raise Mismatch(
                    f"averaging steps of {disk.root}: {name} and {chosen[-1]} do not have the same "
                    f"tensors: {', '.join(odd[:8])}"
                )
        told = ", ".join(f"{s:g} × {n}" for n, s in zip(chosen, shares, strict=True))
        draft = Draft(str(disk.root), told, strategy="average", like=wholes[-1].manifest)
        for weight, entry in wholes[-1].weights.items():
            draft.add_tensor(weight, _mean(wholes, shares, weight), entry.aliases)
        if not draft.tensors:
            raise Mismatch(f"averaging steps of {disk.root}: they have no weights")
        return write(target, draft, max(name.step for name in chosen), progress=progress)


def _mean(wholes: Sequence[Whole], shares: Sequence[float], name: str) -> Found:
    dtype: torch.dtype = getattr(torch, wholes[-1].entries[name].spec.dtype)
    if not dtype.is_floating_point and not dtype.is_complex:
        return found_in(wholes[-1:], name)
    high = torch.complex128 if dtype.is_complex else torch.float64

    def joined(tensors: list[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros_like(tensors[0], dtype=high)
        for tensor, share in zip(tensors, shares, strict=True):
            total += tensor.to(high) * share
        return (total / sum(shares)).to(dtype)

    return found_in(wholes, name, joined)
