"""Still packs: what seems not to change, and which files of the store have just these bytes.

A pack whose size and digests are those of one that is durable is named, and not written again. The
name is that of the file that has the bytes, never of another reference; retention and gc go by what
manifests reach, and a manifest appears only while all files that it names are there (commit.py).
"""

import logging
from collections.abc import Iterable, Mapping, Sequence, Set
from operator import eq
from typing import NamedTuple

from everstep.errors import EverstepError, Unavailable
from everstep.format.document import digest_of
from everstep.format.manifest import CheckpointName, Part
from everstep.format.packs import chunk_count, entry_name
from everstep.format.tables import Extent, FileLink, Table, extents
from everstep.store import catalog
from everstep.tiers.tier import Tier

log = logging.getLogger(__name__)

_KNOWN_MAX = 512
_TABLES_MAX = 16
_SHARE_MIN = 1 / 16
"""Of a part's bytes: where so many more do not change, tensors are laid out anew."""

Content = tuple[int | str, ...]
"""Size of a pack, and its digests: that of its header, then one for each 4 MiB of its pieces."""


Seen = Mapping[str, bool]
"""What digests have told of some tensors, by their entries. True: they have not changed, twice in a
row, and lie in no still pack; False: they have, and lie in one."""


class _Last(NamedTuple):
    """Of the last part that had a table: its digests, and what had not changed before it."""

    digests: Sequence[str]
    quiet: Set[str]


def find_kept(
    disk: Tier, parent: Mapping[str, int] | None, node: int, document: bytes, table: Table
) -> Part:
    """That of the checkpoint before, whose packs are named in place of those that are not due in a
    thinned state. Raises Unavailable where it lies in other packs: the next save writes all."""
    try:
        before = catalog.read_manifest(disk, CheckpointName(**parent)).parts if parent else ()
        for part in before:
            # Of several nodes, the hyperparameters of one may be numbered anew in its table.
            if part.table.digest == digest_of(document) or (
                part.rank == node and table.has_layout_of(catalog.read_table(disk, part))
            ):
                return part
        raise Unavailable(f"{parent or 'no checkpoint'} has not got it. All is written next")
    except EverstepError as error:
        raise Unavailable(f"looking for what is not due at this save: {error}") from error


class StillPacks:
    """Those that a writer knows of. For the team's thread."""

    def __init__(self) -> None:
        self._known: dict[Content, FileLink] = {}
        self._has_learned = False
        self._last: dict[bytes, _Last] = {}
        """By table."""

    def compare(self, document: bytes, table: Table, digests: Sequence[str]) -> Seen:
        """Look what of a part has changed since the last one with that table."""
        last = self._last.pop(document, None)
        self._last[document] = _Last(digests, frozenset())
        for oldest in list(self._last)[:-_TABLES_MAX]:
            del self._last[oldest]
        if last is None:
            return {}
        same = list(map(eq, last.digests, digests))
        headers = {pack.digest for pack in table.packs}  # which are always the same
        has_same = any(each and number not in headers for number, each in enumerate(same))
        if not (has_same or any(pack.still for pack in table.packs)):
            return {}
        noisy, fresh, quiet = dict[str, bool](), dict[str, bool](), set[str]()
        fresh_size, size = 0, sum(pack.size for pack in table.packs)
        for name, entry in table.tensors.items():
            for piece in entry.pieces:
                is_still = table.packs[piece.pack].still
                if not is_still and not same[piece.digest]:  # as mostly
                    continue
                called = entry_name(name, entry.spec.shape, piece.box)
                if all(same[piece.digest : piece.digest + chunk_count(piece.size)]):
                    quiet.add(called)
                    if not is_still and called in last.quiet:
                        fresh[called] = True
                        fresh_size += piece.size
                elif is_still:
                    noisy[called] = False
        self._last[document] = _Last(digests, quiet)
        return noisy | fresh if fresh_size >= _SHARE_MIN * size else noisy

    def note(self, found: Mapping[int, Content], packs: Mapping[int, FileLink]) -> None:
        """These files have it, by the numbers of packs."""
        for number, content in found.items():
            self._known.pop(content, None)
            self._known[content] = packs[number]
        for oldest in list(self._known)[:-_KNOWN_MAX]:
            del self._known[oldest]

    def find(self, disk: Tier, content: Content, parent: CheckpointName | None) -> FileLink | None:
        """A file that has it, and is there. `parent`: the checkpoint that the writer goes on
        from, whose files are looked at once."""
        if not self._has_learned:
            self._has_learned = True
            if parent:
                self._learn(disk, parent)
        link = self._known.get(content)
        return link if link and disk.size(link.path) == link.size else None

    def _learn(self, disk: Tier, name: CheckpointName) -> None:
        try:
            base = catalog.read_chain(disk, name)[0]
            tables = [catalog.read_table(disk, part) for part in base.parts]
        except EverstepError as error:  # then all is written
            log.info("looking for what has not changed since %s: %s", name, error)
            return
        for part, table in zip(base.parts, tables, strict=True):
            found = contents(table, extents(table), part.digests)
            self.note(found, dict(enumerate(part.packs)))


def contents(table: Table, rows: Iterable[Extent], digests: Sequence[str]) -> dict[int, Content]:
    """Of the still packs of a part, whose extents are `rows`, by their numbers; not of those that
    are saved in turn, whose files' names tell the steps that they are of."""
    found: dict[int, Content] = {
        number: (pack.size,)
        for number, pack in enumerate(table.packs)
        if pack.still and not pack.turn
    }
    if found:
        for extent in rows:
            if extent.pack in found:
                found[extent.pack] = (*found[extent.pack], digests[extent.digest])
    return found
