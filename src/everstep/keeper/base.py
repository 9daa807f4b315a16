"""The state that was saved before, as the base of differences.

It is read where it still lies in memory. Nobody keeps it there: the trainer may capture another
state in its slot at any moment. So who has read of it compares that with its digest afterwards. A
base that is gone costs bytes, and no time.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from everstep.codecs import difference
from everstep.format.document import digest_of
from everstep.format.manifest import Previous
from everstep.format.tables import Extent

View = Callable[[Extent], memoryview]


@dataclass(frozen=True, slots=True)
class Base:
    """A state that is committed. `document`: its table; `contents`: the digests of its chunks' raw
    bytes, but of those that are rounded; `depth`: how many differences it takes to read it."""

    name: Previous
    document: bytes
    view: View
    contents: Mapping[int, str]
    depth: int

    def encode(self, chunk: Extent, raw: memoryview) -> bytes | None:
        """The difference of a chunk; None where it is not worth it, or the base is gone."""
        if (known := self.contents.get(chunk.digest)) is None:
            return None
        before = self.view(chunk)
        found = difference.encode(raw, before, chunk.item_size)
        return found if found is None or digest_of(before) == known else None

    def has(self, chunk: Extent) -> bool:
        """Whether it is there still."""
        return digest_of(self.view(chunk)) == self.contents.get(chunk.digest)
