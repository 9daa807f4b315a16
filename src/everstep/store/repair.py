"""Mending: what digests prove to be damaged is taken from another store that has it: a tier of the
same run, or of what has a digest that of a fork or its origin.

Nothing is written to in place. A file of the same name, whose bytes are verified, takes the place
of the damaged one at once: who reads meanwhile, reads the one or the other.
"""

from collections.abc import Callable

from everstep.errors import Corrupt, Missing
from everstep.format.manifest import CheckpointName, Part
from everstep.store import catalog, names, read
from everstep.store.copy import Copier, check_run
from everstep.tiers.tier import Tier


class Mender:
    """Mends one store from another. Blocks; for one thread. What it does raises what is the matter
    with the other one's copy, where that is bad or gone, too."""

    def __init__(self, tier: Tier, source: Tier) -> None:
        """Raises Missing where there is no source."""
        catalog.read_run(source)
        self._tier, self._source = tier, source
        self.mended: list[str] = []
        """What was bad, and is right now: paths in the store."""

    def mend(self, name: CheckpointName) -> None:
        """Mend a checkpoint: its documents, tables and packs; and what it goes on from, where that
        is gone."""
        if not catalog.is_there(self._tier, name):  # deleted since
            return
        self._mend_document(names.manifest_path(name), catalog.read_manifest, name)
        manifest, state = catalog.read_manifest(self._tier, name), None
        if self._tier.size(names.state_path(name)) is not None:
            self._mend_document(names.state_path(name), catalog.read_state, name)
            state = catalog.read_state(self._tier, name)
        for part in (*manifest.all_parts, *(state.all_parts if state else ())):
            self._mend_part(part)
        for stream in manifest.streams.values():
            self._mend_document(stream.part.path, catalog.read_stream, stream)
            self._mend_part(catalog.read_stream(self._tier, stream))
        behind = None if state and state.ends_chain else manifest.behind
        if behind and not catalog.is_there(self._tier, behind.name):
            found = Copier(self._source, self._tier).copy(behind.name).checkpoints
            self.mended += map(names.manifest_path, found)

    def mend_claims_and_tags(self) -> None:
        """Mend what names checkpoints."""
        for number in catalog.known_epochs(self._tier):
            self._mend_document(names.epoch_path(number), catalog.read_epoch, number)
        for tag in catalog.tags(self._tier):
            self._mend_document(names.tag_path(tag), catalog.read_tag, tag)

    def _mend_part(self, part: Part) -> None:
        self._mend_document(part.table.path, catalog.read_table, part)
        table = catalog.read_table(self._tier, part)
        for index, link in enumerate(part.packs):
            check = read.PackCheck(part, index, table)
            if not check.is_passed_by(self._tier):
                with read.opened(self._source, link) as reader:
                    self._tier.stream(link.path, check.checked(reader), link.size)
                self.mended.append(link.path)

    def _mend_document(self, path: str, read: Callable[..., object], what: object) -> None:
        """`read(tier, what)` raises what is wrong with it."""
        try:
            read(self._tier, what)
        except (Corrupt, Missing):
            if not path.startswith(names.DATA):  # another run's may mean something else
                check_run(self._source, self._tier)
            read(self._source, what)
            self._tier.replace(path, self._source.read(path))
            self.mended.append(path)
