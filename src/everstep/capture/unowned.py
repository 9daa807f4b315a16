"""What no optimizer owns (frozen weights, buffers, an average of the weights, a target network),
beside a base: what of it was written to since then.

A record holds what has changed since the base, and all records after it do, too. It is seen by
version counters and addresses at each step, and by a few bytes (`Fingerprint`); and since writes
around torch (`.data`, numpy) count nothing, the bytes themselves are compared with the base's while
training goes on, one block after the other. On CUDA counters and addresses are all that is looked
at.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from everstep.redo.rolling_digest import Row, digest_of
from everstep.sharding.layout import local_of
from everstep.sharding.leaves import Leaf, fills_memory
from everstep.state.fingerprint import Fingerprint

_BLOCK_BYTES = 4 << 20
_BLOCKS_MAX = 64
_BATCHES = ".num_batches_tracked"
"""Of a BatchNorm: counts its batches, where torch counts no write to its statistics."""


class Unowned:
    """These leaves, as they are in a base. For the thread that trains. The bytes of those on the
    CPU are cut into equal blocks: the digests of the pieces in each are taken now, and those of one
    block after the other later on, by a thread of their own."""

    def __init__(self, leaves: Iterable[Leaf], turn: int) -> None:
        """`turn`: other numbers look at other bytes first."""
        self._leaves = {leaf.entry: leaf.tensor for leaf in leaves}
        named = [Leaf(entry, tensor) for entry, tensor in self._leaves.items()]
        self._fingerprint = Fingerprint(named, turn, follows=True)
        self._changed: set[str] = set()
        here = [(entry, local_of(tensor).detach()) for entry, tensor in self._leaves.items()]
        here = [row for row in here if row[1].is_cpu and fills_memory(row[1])]
        self._names = [name for name, _ in here]
        self._row = Row([tensor for _, tensor in here])
        self._count = min(_BLOCKS_MAX, -(-self._row.size // _BLOCK_BYTES))
        self._known: list[list[bytes]] = []
        self._next = 0
        self._thread = ThreadPoolExecutor(1, "everstep-unowned")
        self._looking = self._begin(self._digest_all) if self._count else None

    def changed(self, leaves: Iterable[Leaf]) -> tuple[Leaf, ...]:
        """Return those of the leaves that are not shown to be as they are in the base. Also those
        that were found before, and tensors that the base does not have. Does not wait: the thread
        has looked at the next block by a later call."""
        self._changed.update(self._fingerprint.changed())
        if self._looking and self._looking.done():
            self._changed.update(self._looking.result())
            number, self._next = self._next, (self._next + 1) % self._count
            self._looking = self._begin(lambda: self._look(number))
        for entry in [each for each in self._changed if each.endswith(_BATCHES)]:
            head = entry.removesuffix(_BATCHES)
            self._changed.update((f"{head}.running_mean", f"{head}.running_var"))
        return tuple(
            leaf
            for leaf in leaves
            if leaf.entry in self._changed or self._leaves.get(leaf.entry) is not leaf.tensor
        )

    def _begin(self, work: Callable[[], list[str]]) -> Future[list[str]] | None:
        """None: the program is ending, and with it all pools."""
        try:
            return self._thread.submit(work)
        except RuntimeError:
            return None

    def _digest_all(self) -> list[str]:
        self._known = [self._digest(number) for number in range(self._count)]
        return []

    def _look(self, number: int) -> list[str]:
        spans = self._row.spans(number, self._count)
        rows = zip(spans, self._digest(number), self._known[number], strict=True)
        return [self._names[index] for (index, _, _), now, then in rows if now != then]

    def _digest(self, number: int) -> list[bytes]:
        return [digest_of([piece]) for piece in self._row.cut(number, self._count)]
