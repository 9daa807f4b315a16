"""A draft as a checkpoint of a store, written without a Checkpointer: streamed, pack by pack.

What is committed is as after a save: packs, then the table, then the manifest (store/commit.py).
The epoch is claimed when all is durable: an import that is broken off leaves no branch behind.
"""

import mmap
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace

import xxhash

from everstep.errors import Conflict, Corrupt
from everstep.format.document import digest_of
from everstep.format.manifest import CheckpointName, Manifest, Part
from everstep.format.packs import CHUNK_BYTES, Layout, Piece, Spec, lay_out
from everstep.format.tables import FileLink, encode_table, seal_table
from everstep.interchange import tensors
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
    what = f"importing step {step} to {disk.root}"
    is_new = disk.size(names.STORE) is None
    if is_new and not is_empty(disk):
        raise Conflict(f"{what}: it is no store, and there is something in it. Name another place")
    check_no_writer(disk.root, what, living(disk))
    parent = None if is_new else _parent(disk, step, branch, what)
    epoch = 1 if is_new else max(catalog.known_epochs(disk), default=0) + 1
    name = CheckpointName(step, epoch)
    with shown(disk):
        _write(disk, draft, name, parent, what, progress)
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


def _write(
    disk: Tier,
    draft: Draft,
    name: CheckpointName,
    parent: CheckpointName | None,
    what: str,
    progress: Progress,
) -> None:
    run = commit.open_store(disk)
    packs = _Packs(draft, progress)
    token, links = secrets.token_hex(4), list[FileLink]()
    try:
        for number, pack in enumerate(packs.layout.packs):
            link = FileLink(names.pack_path(name, token, number), pack.size)
            disk.stream(link.path, blocks_of(packs.blocks(number), _buffers()), pack.size)
            links.append(link)
        shared = list[FileLink]()
        for each in draft.borrowed:
            shared += Copier(each.tier, disk, are_shared=True).bring_packs(each.part)
        disk.sync_entries([link.path for link in shared])
        draft.bytes_shared = sum(link.size for link in shared)
        own = encode_table(packs.layout, draft.aliases, {}, draft.optimizers)
        tables = [own, *(seal_table(each.table) for each in draft.borrowed)]
        made = Part(0, commit.table_link(own), tuple(links), tuple(packs.digests), name.step)
        every = zip((made, *(each.part for each in draft.borrowed)), tables, strict=True)
        parts = [
            replace(part, rank=number, table=commit.table_link(table), steps=name.step)
            for number, (part, table) in enumerate(every)
        ]
        check_no_writer(disk.root, what)
        _claim(disk, name, parent, what)
        commit.publish(disk, _manifest(draft, name, parent, run, parts), tables=tables)
    except BaseException:
        commit.discard_packs(disk, name, [link.path for link in links])
        raise


def _claim(disk: Tier, name: CheckpointName, parent: CheckpointName | None, what: str) -> None:
    """The epoch for which the packs are named. Raises Conflict where another has come to be."""
    is_next = max(catalog.known_epochs(disk), default=0) + 1 == name.epoch
    if not is_next or commit.claim_epoch(disk, parent) != name.epoch:
        raise Conflict(f"{what}: somebody else has begun epoch {name.epoch} meanwhile. Try again")


def _manifest(
    draft: Draft,
    name: CheckpointName,
    parent: CheckpointName | None,
    run: str,
    parts: Sequence[Part],
) -> Manifest:
    said = {"strategy": draft.strategy, "from": draft.kind, "source": str(draft.where)}
    return Manifest(
        step=name.step,
        epoch=name.epoch,
        run=run,
        created=commit.now(),
        parts=tuple(parts),
        objects=draft.objects,
        hyperparameters=draft.hyperparameters,
        parent=parent and parent._asdict(),
        topology=draft.like.topology if draft.like else topology(max(1, len(draft.ranks))),
        capture=said,
        ranks=tuple(draft.ranks),
    )


class _Packs:
    """The bytes of the packs of a draft, in their order, and the digests, once they have passed."""

    def __init__(self, draft: Draft, progress: Progress) -> None:
        rows = [
            (Spec(name, found.dtype, found.shape, part.box), part.blocks)
            for name, found in draft.tensors.items()
            for part in found.parts
        ]
        self.layout: Layout = lay_out([spec for spec, _ in rows])
        self.digests = [""] * self.layout.digest_count
        self._draft, self._progress = draft, progress
        self._total, self._done = sum(spec.size for spec, _ in rows), 0
        self._members: list[list[tuple[Piece, tensors.Blocks, str]]] = [
            [] for _ in self.layout.packs
        ]
        for piece, (spec, blocks) in zip(self.layout.pieces, rows, strict=True):
            self._members[piece.pack].append((piece, blocks, spec.name))

    def blocks(self, number: int) -> Iterator[memoryview]:
        """Those of a pack. Raises Corrupt where the source has other bytes than it said."""
        pack, header = self.layout.packs[number], self.layout.headers[number]
        self.digests[pack.digest] = digest_of(header)
        yield memoryview(header)
        at = pack.header
        for piece, blocks, name in sorted(
            self._members[number], key=lambda row: (row[0].offset, row[0].size)
        ):
            yield memoryview(bytes(piece.offset - at))
            yield from self._piece(piece, blocks, name)
            at = piece.offset + piece.size
        yield memoryview(bytes(pack.size - at))

    def _piece(self, piece: Piece, blocks: tensors.Blocks, name: str) -> Iterator[memoryview]:
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
            raise Corrupt(
                f"reading {self._draft.where}: {name!r} has other than {piece.size} bytes"
            )
        if not done:
            self.digests[piece.digest] = digest.hexdigest()


def _buffers() -> Iterator[memoryview]:
    """Page-aligned, for direct writes."""
    while True:
        yield memoryview(mmap.mmap(-1, EXTENT_BYTES))
