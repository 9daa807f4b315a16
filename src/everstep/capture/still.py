"""Which tensors seem not to change: they lie in packs of their own, and where a checkpoint before
this one has the same bytes, its files are named in place of new ones.

It is a hint for where tensors lie, and no more: by their digests alone it is decided what is
written (keeper/still.py). The keeper compares them from state to state, too, and tells what has
changed all the same, and what else has not.
"""

from collections import deque
from weakref import ref

from torch.nn import Parameter

from everstep.sharding.leaves import Leaf
from everstep.state.view import Walk

STILL_BYTES_MIN = 64 << 10
"""For less a file of its own costs more than it saves."""


class Still:
    """Parameters that no optimizer owns, until they change; and what the keeper has seen not to
    change. For the thread that trains, but for `hear`."""

    def __init__(self) -> None:
        self._still: set[str] = set()
        self._noisy: set[str] = set()
        """What was taken for still, and was not: it is not tried again."""
        self._heard: deque[tuple[bool, list[str]]] = deque()
        self._last: tuple[ref[Walk], frozenset[str]] | None = None

    def hear(self, names: list[str], *, are_still: bool) -> None:
        """The keeper has compared these entries with those of the state before. Any thread."""
        self._heard.append((are_still, names))

    def look(self, walk: Walk) -> frozenset[str]:
        """Return which of these leaves are still, by their entries."""
        if self._last and self._last[0]() is walk and not self._is_news():
            return self._last[1]
        sizes = {leaf.entry: leaf.tensor.nbytes for leaf in walk.leaves if self._is_still(leaf)}
        found = frozenset(sizes if sum(sizes.values()) >= STILL_BYTES_MIN else ())
        self._last = ref(walk), found
        return found

    def _is_news(self) -> bool:
        """Whether anything was heard that was not known."""
        known = len(self._still) + len(self._noisy)
        while self._heard:
            are_still, names = self._heard.popleft()
            (self._still if are_still else self._noisy).update(names)
        return known < len(self._still) + len(self._noisy)

    def _is_still(self, leaf: Leaf) -> bool:
        is_frozen = leaf.owner is None and isinstance(leaf.tensor, Parameter)
        is_still = (is_frozen and not leaf.tensor.requires_grad) or leaf.entry in self._still
        return is_still and leaf.entry not in self._noisy
