"""Loose tensors: those met in objects, which are copied at the call."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from everstep.errors import Unsupported
from everstep.format.document import digest_of
from everstep.sharding.layout import is_dtensor
from everstep.sharding.leaves import Leaf, check_tensor, has_elements
from everstep.sharding.mapped import Mapped
from everstep.sharding.ranked import own_name, unowned
from everstep.state.objects import tensor_tags
from everstep.state.overlaps import Memory, memory_of
from everstep.state.sharing import pieces_of

_COMPARED_BYTES_MAX = 1 << 20
_SHARED = "shared"


class NestedTensors:
    """A TensorSink: gathers the tensors met in objects. One that is known already gets another
    name."""

    def __init__(
        self, names: Mapping[int, str], owners: Mapping[int, int | None], mapped: Mapped
    ) -> None:
        self._mapped = mapped
        self.leaves: dict[str, Leaf] = {}
        self.spread: list[Leaf] = []
        """Those that are DTensors, whole."""
        self.aliases: dict[str, list[str]] = {}
        self._names = names
        self._owners = owners
        self._seen: dict[
            int, tuple[str, torch.Tensor]
        ] = {}  # keeps them alive, so that ids stay theirs
        self._values: list[tuple[dict[str, Any], Memory | None]] = []

    def __call__(self, name: str, tensor: torch.Tensor) -> str:
        """Take it; raises Unsupported for one that cannot be stored."""
        key = id(tensor)
        known = self._names.get(key) or self._seen.get(key, (None,))[0]
        if known is not None:
            if known != name and name not in self.aliases.setdefault(known, []):
                self.aliases[known].append(name)
            return name
        check_tensor(name, tensor)
        if self._mapped.split(tensor) is not None:
            raise Unsupported(
                f"capturing {name!r}: it is a parameter that consists of boxes of other tensors "
                f"(layout=, FSDP), and cannot be part of an object as well"
            )
        if name in self.leaves:
            raise Unsupported(
                f"capturing {name!r}: two tensors are found under this name; rename one"
            )
        self._seen[key] = name, tensor
        whole = Leaf(name, tensor.detach(), self._owners.get(key))
        if is_dtensor(tensor):
            self.spread.append(whole)
        for leaf in pieces_of(whole):
            if has_elements(leaf):
                self.leaves[leaf.entry] = leaf
        return name

    def note_values(self, found: Iterable[tuple[dict[str, Any], torch.Tensor]]) -> None:
        """Tags of tensors in values of the user's own."""
        self._values += ((tag, memory_of(tensor)) for tag, tensor in found)

    def mark_shared(self, memories: Mapping[Memory, str]) -> None:
        """Say of the values which lie in one of these memories, by what that is called, or in
        another value's, by the first one's name."""
        counts = Counter(memory for _, memory in self._values)
        names: dict[Memory, str] = dict(memories)
        for tag, memory in self._values:
            if memory is not None and (memory in memories or counts[memory] > 1):
                tag[_SHARED] = names.setdefault(memory, tag["v"])

    def all_aliases(self, others: Mapping[str, list[str]]) -> Mapping[str, list[str]]:
        """More names of tensors, and these."""
        names = dict.fromkeys((*others, *self.aliases))
        found = {name: [*others.get(name, ()), *self.aliases.get(name, ())] for name in names}
        return found if self.aliases else others


class OfRank:
    """The same, where tensors are one rank's own, and named so."""

    def __init__(self, loose: NestedTensors, rank: int) -> None:
        self._loose = loose
        self._rank = rank
        self.note_values = loose.note_values

    def __call__(self, name: str, tensor: torch.Tensor) -> str:
        """Take it."""
        return self._loose(own_name(name, self._rank), tensor)


def shared_in(value: Any) -> dict[str, str]:
    """Of the tensors to which tagged JSON refers, by name, those that shared memory: the name of
    the first in it."""
    return {tag["v"]: tag[_SHARED] for tag in tensor_tags(value) if _SHARED in tag}


def hash_of(tensor: torch.Tensor) -> str:
    """Digest of its bytes. Blocks while it reads them."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return digest_of(plain.reshape(-1).view(torch.uint8).numpy().data)


def digests_of(leaves: Iterable[Leaf]) -> dict[str, str]:
    """Of those that are whole, no rank's own, small, and on the CPU."""
    return {
        leaf.name: hash_of(tensor)
        for leaf in leaves
        for tensor in [leaf.tensor]
        if leaf.box is None and unowned(leaf.name) == leaf.name
        if tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj()
        if tensor.nbytes <= _COMPARED_BYTES_MAX and not tensor.is_neg()
    }
