"""Which tensors seem not to change: frozen weights, buffers. They lie in packs of their own, and
where a checkpoint before this one has the same bytes, its files are named in place of new ones.

It is a hint for where tensors lie, and no more: by their digests alone it is decided what is
written (keeper/still.py). So writes that torch does not count (`.data`, numpy) do no harm.
"""

from collections.abc import Container, Sequence

from everstep.sharding.leaves import Leaf

STILL_BYTES_MIN = 64 << 10
"""For less a file of its own costs more than it saves."""
_SHARE_MIN = 1 / 16
"""Of the bytes looked at: when so many more are still, tensors are laid out anew."""


class Still:
    """What no optimizer owns, until it is written to; and what was written to neither before this
    capture nor before the last one. For the thread that trains."""

    def __init__(self) -> None:
        self._still: set[str] = set()
        self._noisy: set[str] = set()
        """What was taken for still, and was not: it is not tried again."""
        self._versions: dict[str, int] = {}
        self._quiet: set[str] = set()
        """What was not written to before it was looked at last."""

    def look(self, leaves: Sequence[Leaf]) -> frozenset[str]:
        """Return which of these are still, by their entries."""
        try:
            now = {leaf.entry: leaf.tensor._version for leaf in leaves}
        except RuntimeError:  # of inference tensors writes are not counted
            return frozenset()
        known = self._versions
        quiet = {entry for entry, version in now.items() if known.get(entry) == version}
        noisy = {entry for entry in self._still & now.keys() if entry in known} - quiet
        self._noisy |= noisy
        self._still -= noisy
        new = {leaf.entry for leaf in leaves if leaf.owner is None and leaf.entry not in known}
        self._still |= new - self._noisy
        fresh = (quiet & self._quiet) - self._still - self._noisy
        if fresh and _size(leaves, fresh) >= _SHARE_MIN * _size(leaves, now):
            self._still |= fresh
        self._quiet = self._quiet - now.keys() | quiet
        known.update(now)
        found = frozenset(self._still & now.keys())
        return found if _size(leaves, found) >= STILL_BYTES_MIN else frozenset()


def _size(leaves: Sequence[Leaf], entries: Container[str]) -> int:
    return sum(leaf.tensor.nbytes for leaf in leaves if leaf.entry in entries)
