"""A draft as a checkpoint of a store, written without a Checkpointer: streamed, pack by pack.

What is committed is as after a save: packs, then the table, then the manifest (store/commit.py).
The epoch is claimed when all is durable: an import that is broken off leaves no branch behind.
"""

import mmap
import secrets
from collections.abc import Iterator
from dataclasses import replace

import xxhash

from everstep.errors import Conflict, Corrupt
from everstep.format.document import digest_of
from everstep.format.manifest import CheckpointName, Manifest, Part
from everstep.format.packs import CHUNK_BYTES, Spec, lay_out
from everstep.format.tables import FileLink, encode_table, seal_table
from everstep.interchange.draft import Draft
from everstep.keeper.data import blocks_of
from everstep.keeper.home import check_no_writer
from everstep.sharding.topology import topology
from everstep.store import catalog, commit, names
from everstep.store.copy import Copier, Progress
from everstep.store.presence import is_empty, living, shown
from everstep.tiers.files import EXTENT_BYTES
from everstep.tiers.tier import Tier


def write(
    disk: Tier,
    draft: Draft,
    step: int,
    *,
    branch: bool = False,
    progress: Progress = lambda done, total: None,
) -> CheckpointName:
    """Commit a draft as that step; blocks. `branch`: also below the latest, which stays behind as
    a branch then. Takes memory for some blocks. Raises Conflict, Corrupt and Unsupported (of the
    source), Unavailable."""
    what = f"{draft.strategy.removesuffix('e')}ing step {step} to {disk.root}"
    if disk.size(names.STORE) is None and not is_empty(disk):
        raise Conflict(f"{what}: it is no store, and there is something in it. Name another place")
    check_no_writer(disk.root, what, living(disk))
    parent = _parent(disk, step, branch, what)
    name, links = CheckpointName(step, _next_epoch(disk)), list[FileLink]()
    told = {"strategy": draft.strategy, "from": draft.kind, "source": str(draft.where)}
    with shown(disk):
        run = commit.open_store(disk)
        try:
            parts, tables = _written(disk, draft, name, links, progress)
            check_no_writer(disk.root, what)
            # The packs are named for that epoch.
            if _next_epoch(disk) != name.epoch or commit.claim_epoch(disk, parent) != name.epoch:
                raise Conflict(f"{what}: somebody else has begun epoch {name.epoch}. Try again")
            manifest = Manifest(
                step=step,
                epoch=name.epoch,
                run=run,
                created=commit.now(),
                parts=parts,
                objects=draft.objects,
                hyperparameters=draft.hyperparameters,
                parent=parent and parent._asdict(),
                topology=draft.like.topology if draft.like else topology(max(1, len(draft.ranks))),
                capture=told,
                ranks=tuple(draft.ranks),
                exact=draft.exact,
            )
            commit.publish(disk, manifest, tables=tables)
        except BaseException:
            commit.discard_packs(disk, name, [link.path for link in links])
            raise
    return name


def _parent(disk: Tier, step: int, branch: bool, what: str) -> CheckpointName | None:
    """What the step goes on from."""
    line = catalog.lineage(disk)
    before = [name for name in line if name.step < step]
    if len(before) < len(line) and not branch:
        raise Conflict(
            f"{what}: its newest step is {line[-1].step}. Import it as a later one, or with "
            f"--branch, which leaves the steps from {step} on behind as a branch"
        )
    return before[-1] if before else None


def _next_epoch(disk: Tier) -> int:
    return max(catalog.known_epochs(disk), default=0) + 1


def _written(
    disk: Tier, draft: Draft, name: CheckpointName, links: list[FileLink], progress: Progress
) -> tuple[tuple[Part, ...], list[bytes]]:
    """Write the packs, durably, and have those that are borrowed; the parts and their tables.
    `links`: gets each file that is written."""
    packs, token = _Packs(draft, progress), secrets.token_hex(4)
    aligned = iter(lambda: memoryview(mmap.mmap(-1, EXTENT_BYTES)), None)  # for direct writes
    for number, pack in enumerate(packs.layout.packs):
        link = FileLink(names.pack_path(name, token, number), pack.size)
        disk.stream(link.path, blocks_of(packs.pieces(number), aligned), pack.size)
        links.append(link)
    shared = list[FileLink]()
    tables = [encode_table(packs.layout, draft.aliases, {}, draft.optimizers)]
    made = Part(0, commit.table_link(tables[0]), tuple(links), tuple(packs.digests), name.step)
    parts = [made]
    for number, (tier, part, table) in enumerate(draft.borrowed, 1):
        shared += Copier(tier, disk, are_shared=True).bring_packs(part)
        tables.append(seal_table(table))
        link = commit.table_link(tables[-1])
        parts.append(replace(part, rank=number, table=link, steps=name.step))
    disk.sync_entries([link.path for link in shared])
    draft.bytes_shared = sum(link.size for link in shared)
    return tuple(parts), tables


class _Packs:
    """The bytes of the packs of a draft, in their order, and the digests, once they have passed."""

    def __init__(self, draft: Draft, progress: Progress) -> None:
        self._draft, self._progress = draft, progress
        self._total, self._done = draft.size, 0
        self._rows = [
            (Spec(name, found.dtype, found.shape, part.box), part.blocks)
            for name, found in draft.tensors.items()
            for part in found.parts
        ]
        self.layout = lay_out([spec for spec, _ in self._rows])
        self.digests = [""] * self.layout.digest_count

    def pieces(self, number: int) -> Iterator[bytes | memoryview]:
        """Those of a pack. Raises Corrupt where the source has other bytes than it said."""
        pack, header = self.layout.packs[number], self.layout.headers[number]
        self.digests[pack.digest] = digest_of(header)
        yield header
        at = pack.header
        rows = zip(self.layout.pieces, self._rows, strict=True)
        own = (row for row in rows if row[0].pack == number)
        for piece, (spec, blocks) in sorted(own, key=lambda row: (row[0].offset, row[0].size)):
            yield bytes(piece.offset - at)
            digest, done = xxhash.xxh3_128(), 0
            for block in blocks():
                view = block
                while view:
                    share = view[: CHUNK_BYTES - done % CHUNK_BYTES]
                    digest.update(share)
                    view, done = view[len(share) :], done + len(share)
                    if done % CHUNK_BYTES == 0 or done == piece.size:
                        self.digests[piece.digest + (done - 1) // CHUNK_BYTES] = digest.hexdigest()
                        digest.reset()
                self._done += len(block)
                self._progress(self._done, self._total)
                yield block
            if done != piece.size:
                where = self._draft.where
                raise Corrupt(f"reading {where}: {spec.name!r} has other than {piece.size} bytes")
            if not done:
                self.digests[piece.digest] = digest.hexdigest()
            at = piece.offset + piece.size
        yield bytes(pack.size - at)
