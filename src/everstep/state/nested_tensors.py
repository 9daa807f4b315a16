"""Loose tensors: those met in objects, which are copied at the call."""

from collections.abc import Callable, Iterable, Mapping

import torch

from everstep.errors import Unsupported
from everstep.format.document import digest_of
from everstep.sharding.layout import is_dtensor
from everstep.sharding.leaves import Leaf, bytes_of, check_tensor, has_elements, pieces_of
from everstep.sharding.mapped import Mapped
from everstep.sharding.ranked import own_name, unowned

_COMPARED_BYTES_MAX = 1 << 20


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

    def of_rank(self, rank: int) -> Callable[[str, torch.Tensor], str]:
        """The same, where tensors are one rank's own, and named so."""
        return lambda name, tensor: self(own_name(name, rank), tensor)

    def all_aliases(self, others: Mapping[str, list[str]]) -> Mapping[str, list[str]]:
        """More names of tensors, and these."""
        names = dict.fromkeys((*others, *self.aliases))
        found = {name: [*others.get(name, ()), *self.aliases.get(name, ())] for name in names}
        return found if self.aliases else others


def hash_of(tensor: torch.Tensor) -> str:
    """Digest of its bytes. Blocks while it reads them."""
    return digest_of(bytes_of(tensor).numpy().data)


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
