"""Replicas: what several ranks hold, of which one writes it. Are the others' bytes the same?

They lie behind what is written, in packs of their own, and are digested and not written.
"""

from collections.abc import Sequence
from concurrent.futures import Executor, Future

import xxhash

from everstep.errors import Mismatch
from everstep.format.boxes import Box
from everstep.format.merge import VANISHED, Merged
from everstep.format.node_parts import Elsewhere
from everstep.format.packs import box_text, chunk_count, pack_starts
from everstep.format.tables import Extent, Table
from everstep.keeper.arrival import Arrival

_SHARE_BYTES = 16 << 20


class Replicas:
    """Those of one step on one node. For the team's thread."""

    def __init__(
        self,
        step: int,
        ranks: Sequence[int],
        merged: Merged,
        tables: Sequence[Table],
        extents: Sequence[Sequence[Extent]],
        views: Sequence[memoryview],
        arrivals: Sequence[Arrival],
    ) -> None:
        """`ranks`: their numbers; `tables`, `extents`, `views`, `arrivals`: of each one's slot, by
        position."""
        self._step = step
        self._ranks = ranks
        self._merged = merged
        self._views = views
        self._arrivals = arrivals
        self._tables = tables
        self._extents = extents
        self._shares: list[Future[dict[tuple[int, int], str]]] = []

    def begin(self, pool: Executor) -> None:
        """Digest what is not digested anyway, while it arrives."""
        wanted = self._wanted()
        share: list[tuple[int, int, Extent]] = []
        size = 0
        for position, start, extent in wanted:
            share.append((position, start, extent))
            size += extent.size
            if size >= _SHARE_BYTES:
                self._shares.append(pool.submit(self._digest, share))
                share, size = [], 0
        if share:
            self._shares.append(pool.submit(self._digest, share))

    def check(self, digests: Sequence[str]) -> list[Elsewhere]:
        """Compare with what was written here, whose digests these are; blocks until all is there.
        Returns what only another node can compare. Raises Mismatch, Unsupported."""
        own = {at: digest for share in self._shares for at, digest in share.result().items()}
        merged = self._merged

        def of(position: int, index: int) -> str:
            known = merged.digests[position][index]
            return own[position, index] if known == VANISHED else digests[known]

        for replica in merged.replicas:
            kept = [of(replica.kept, index) for index in replica.kept_digests]
            if kept != [of(replica.other, index) for index in replica.other_digests]:
                one, two = self._ranks[replica.kept], self._ranks[replica.other]
                raise different(self._step, replica.name, replica.box, f"rank {one}", f"rank {two}")
        return [
            Elsewhere(name, box, self._ranks[position], tuple(of(position, index) for index in at))
            for (name, box, position), at in zip(merged.alone, self._alone(), strict=True)
        ]

    def _alone(self) -> list[range]:
        """The digests of `merged.alone` in the lists of their ranks."""
        found = []
        for name, box, position in self._merged.alone:
            pieces = self._tables[position].tensors[name].pieces
            piece = next(piece for piece in pieces if piece.box == box)
            found.append(range(piece.digest, piece.digest + chunk_count(piece.size)))
        return found

    def _wanted(self) -> list[tuple[int, int, Extent]]:
        """What has to be digested, in the order of each image: position, start of its pack."""
        wanted: dict[int, set[int]] = {}
        for replica in self._merged.replicas:
            wanted.setdefault(replica.kept, set()).update(replica.kept_digests)
            wanted.setdefault(replica.other, set()).update(replica.other_digests)
        for (_, _, position), digests in zip(self._merged.alone, self._alone(), strict=True):
            wanted.setdefault(position, set()).update(digests)
        found = []
        for position, indices in wanted.items():
            known = self._merged.digests[position]
            starts = pack_starts(pack.size for pack in self._tables[position].packs)
            found += [
                (position, starts[extent.pack], extent)
                for extent in self._extents[position]
                if extent.digest in indices and known[extent.digest] == VANISHED
            ]
        return found

    def _digest(self, share: Sequence[tuple[int, int, Extent]]) -> dict[tuple[int, int], str]:
        found = {}
        for position, start, extent in share:
            at, end = start + extent.offset, start + extent.offset + extent.size
            self._arrivals[position].wait(end)
            view = self._views[position][at:end]
            found[position, extent.digest] = xxhash.xxh3_128_hexdigest(view)
        return found


def different(step: int, name: str, box: Box, kept: str, other: str) -> Mismatch:
    """Two replicas that are none."""
    return Mismatch(
        f"saving step {step}: {name}{box_text(box)} has other bytes on {other} than on "
        f"{kept}, which writes it. Make them equal (something changed one of them, or they began "
        f"differently), or give different tensors different names"
    )
