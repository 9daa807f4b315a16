"""The tripwire: was a tensor written to between the call and the end of its copy?

Version counters are read, and a few bytes of each CPU tensor compared, because some writes (fused
optimizers, `.data`, numpy) do not count. It is a tripwire, not a proof: docs/guarantees.md says
what the user has to leave alone. On CUDA only the counters are read: bytes would cost a
synchronisation.
"""

import ctypes
from collections.abc import Sequence
from operator import attrgetter

import torch

from everstep.sharding.leaves import Leaf, fills_memory

_SAMPLE_BYTES = 16
_SAMPLES_MAX = 32  # cold memory is slow to look at; of more tensors, others at each step
_STRIDE = 0x9E3779B1  # Fibonacci hashing: each step looks elsewhere
_peek = ctypes.string_at
_version = attrgetter("_version")


class Tripwire:
    """The versions and samples of some leaves at the moment of construction. Trainer's thread."""

    __slots__ = ("_leaves", "_samples", "_tensors", "_versions")

    def __init__(
        self,
        leaves: Sequence[Leaf],
        tensors: Sequence[torch.Tensor],
        places: Sequence[tuple[int, int, int]],
        step: int,
    ) -> None:
        """`tensors`: those of the leaves. `places`: (address, bytes to sample from, index of the
        leaf) of contiguous CPU tensors."""
        self._leaves = leaves
        self._tensors = tensors
        self._versions = list(map(_version, self._tensors))
        self._samples = []
        turn = step * _STRIDE
        first = step * _SAMPLES_MAX % max(1, len(places))
        chosen = (*places[first : first + _SAMPLES_MAX], *places[:first])[:_SAMPLES_MAX]
        for address, size, index in chosen:
            at = address + (turn % (size - _SAMPLE_BYTES) if size > _SAMPLE_BYTES else 0)
            length = min(size, _SAMPLE_BYTES)
            self._samples.append((at, length, _peek(at, length), index))

    def changed(self) -> list[str]:
        """The names of the tensors that were written to since."""
        found: list[str] = []
        versions = list(map(_version, self._tensors))
        if versions != self._versions:
            rows = zip(self._leaves, versions, self._versions, strict=True)
            found += [leaf.name for leaf, version, known in rows if version != known]
        found += [
            self._leaves[index].name
            for at, length, sample, index in self._samples
            if _peek(at, length) != sample
        ]
        return sorted(set(found))


def sample_places(leaves: Sequence[Leaf]) -> list[tuple[int, int, int]]:
    """Where bytes of these leaves can be looked at without a copy or a synchronisation."""
    places = []
    for index, leaf in enumerate(leaves):
        tensor: torch.Tensor = leaf.tensor
        size = tensor.nbytes
        if tensor.is_cpu and size and fills_memory(tensor):
            places.append((tensor.data_ptr(), size, index))
    return places


def describe(step: int, changed: Sequence[str]) -> str:
    """What the handle's error says of a torn copy."""
    shown = ", ".join(map(repr, changed[:5])) + (
        f" and {len(changed) - 5} more" if len(changed) > 5 else ""
    )
    return (
        f"saving step {step}: {shown} changed while the copy was being made, outside of "
        f"optimizer.step(), so that "
        f"the copy was thrown away. Between checkpointer.step() and the next optimizer.step() "
        f"nothing may write "
        f"to what an optimizer owns; call checkpointer.wait('captured') before you do"
    )
