"""Still packs: what seems not to change, and which files of the store have just these bytes.

A pack whose size and digests are those of one that is durable is named, and not written again. The
name is that of the file that has the bytes, never of another reference; retention and gc go by what
manifests reach, and a manifest appears only while all files that it names are there (commit.py).
"""

import logging
from collections.abc import Sequence

from everstep.errors import EverstepError
from everstep.format.tables import FileLink, Table, extents
from everstep.store import catalog
from everstep.store.names import CheckpointName
from everstep.tiers.tier import Tier

log = logging.getLogger(__name__)

_KNOWN_MAX = 64

Content = tuple[int | str, ...]
"""Size of a pack, and its digests: that of its header, then one for each 4 MiB of its pieces."""


class StillPacks:
    """Those that a writer knows of. For the team's thread."""

    def __init__(self) -> None:
        self._known: dict[Content, FileLink] = {}
        self._has_learned = False

    def note(self, content: Content, link: FileLink) -> None:
        """This file has it."""
        self._known.pop(content, None)
        self._known[content] = link
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
            parts = [part for part in base.parts if part.stored is None]
            tables = [catalog.read_table(disk, part) for part in parts]
        except EverstepError as error:  # then all is written
            log.info("looking for what has not changed since %s: %s", name, error)
            return
        for part, table in zip(parts, tables, strict=True):
            for number, content in contents(table, part.digests).items():
                self.note(content, part.packs[number])


def contents(table: Table, digests: Sequence[str]) -> dict[int, Content]:
    """Of the still packs of a part, by their numbers."""
    found: dict[int, Content] = {
        number: (pack.size,) for number, pack in enumerate(table.packs) if pack.still
    }
    if found:
        for extent in extents(table):
            if extent.pack in found:
                found[extent.pack] = (*found[extent.pack], digests[extent.digest])
    return found
