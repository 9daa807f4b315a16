"""The jobs of one step of all ranks of a run on this node, committed as one; of one process: one.

And what arenas of dead trainers hold of such steps. A rank may have died before its part was whole,
or another one's memory may be gone: what is not there of all ranks is nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from everstep.errors import EverstepError
from everstep.format.document import digest_of
from everstep.format.manifest import Manifest
from everstep.format.merge import Merged, merge, renumbered
from everstep.format.node_parts import NodePart
from everstep.keeper.arena import Arena, Row, SlotState
from everstep.keeper.data import Image, Parsed, gathered, parse, whole
from everstep.keeper.job import ALL, Job
from everstep.keeper.ranks.descriptions import check_held, merge_descriptions
from everstep.keeper.ranks.nodes import Nodes, hashable
from everstep.keeper.wire import ALONE, Place

REFERENCE = b"the manifest beside the first rank's image: "
"""Stands, with the digest of that, where a slot is a part of a state."""

REPLICA = "replica"
"""In what a manifest in memory says of its capture: it is of a replica, made of the log step whose
manifest has this digest."""

PLACE = "place"
"""In what a trainer says of a step: its local rank, and how many there are."""


@dataclass(slots=True)
class NodeSave:
    """Jobs by local rank, all of the same step. For the team's thread.

    `nodes`: where the ranks of other nodes have the rest of it.
    """

    jobs: Sequence[Job]
    place: Place = ALONE
    nodes: Nodes | None = None
    each: Sequence[Mapping[str, Any]] = ()
    """What each of the trainers says of the step, once it was read."""
    _said: dict[str, Any] | None = None
    _mapping: list[dict[str, list[int]]] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Bytes of the images. Raises Corrupt."""
        return sum(job.row.image_size for job in self.jobs)

    @property
    def step(self) -> int:
        """The step. Raises Corrupt."""
        return self.jobs[0].row.step

    @property
    def is_committed(self) -> bool:
        """Whether it is on the disk."""
        return all(job.state is SlotState.DONE for job in self.jobs)

    @property
    def call(self) -> int:
        """Which of the calls that save it is of; 0 where that cannot be read."""
        return self.jobs[0].call

    def take(self) -> None:
        """It is this one's turn: its images stay where they are from now on."""
        for job in self.jobs:
            job.take()

    def describe(self) -> dict[str, Any]:
        """What the trainers say of this step together; read once. Raises Corrupt, Mismatch."""
        if self._said is None:
            self.each = [job.said for job in self.jobs]
            said = {**self.each[0], "own": ()}
            if not self.place.is_alone:
                check_held(self.step, zip(self.place.ranks, self.each, strict=True))
                said, self._mapping = merge_descriptions(self.each)
            self._said = {"record": None, "share": None, "streams": {}, "kept": [], **said}
        return self._said

    def image(self) -> Image:
        """All that is to be written. Raises Corrupt, Mismatch."""
        self.describe()
        if self.place.is_alone:
            return whole(self.jobs[0])
        documents = tuple(job.table for job in self.jobs)
        merged, parsed = _merged(documents, hashable(self._mapping), self.place)
        return gathered(self.jobs, merged, parsed)

    def own_part(self, manifest: Manifest) -> NodePart:
        """What this node has of the step, for the others."""
        (part,) = manifest.all_parts
        ranks = dict(zip(self.place.ranks, self.each, strict=True))
        record = self.describe()["record"]
        record = record and {key: record[key] for key in ("previous", "calls")}
        attempt, sets = self.place.named(self.call), manifest.hyperparameters
        return NodePart(attempt, self.place.node, None, part, sets, ranks, record)

    def put_manifest(self, document: bytes) -> None:
        """Beside the images, from which it can be restored then: all of it with the first rank's,
        its digest with the others'. Of several nodes none has all images."""
        if self.nodes:
            return
        reference = REFERENCE + digest_of(document).encode()
        for job in self.jobs:
            job.arena.put_manifest(job.slot, job.row, document)
            document = reference


@lru_cache(maxsize=4)
def _merged(
    documents: tuple[bytes, ...], mapping: tuple[Any, ...], place: Place
) -> tuple[Merged, Parsed]:
    """Of so many ranks' tables; they change rarely."""
    tables = [parse(document).table for document in documents]
    rows = zip(place.ranks, tables, mapping, strict=True)
    numbered = [(f"rank {rank}", renumbered(table, dict(sets))) for rank, table, sets in rows]
    merged = merge(numbered, are_all=place.nodes == 1)
    return merged, Parsed.of(merged.document, merged.table)


def ended_saves(arenas: Sequence[Arena]) -> Iterator[tuple[bytes, NodeSave]]:
    """The steps that have a manifest beside them, committed or not, and are there of all their
    ranks; the manifest with each."""
    documents: dict[bytes, bytes] = {}
    found: dict[bytes, dict[int, Job]] = {}
    for row, job in (each for arena in arenas for each in _whole_jobs(arena)):
        document = bytes(job.arena.manifest(job.slot, row))
        digest = document.removeprefix(REFERENCE)
        if digest == document:
            digest = digest_of(document).encode()
            documents[digest] = document
        if (place := _place(job)) and job.state in (SlotState.DONE, SlotState.FAILED):
            found.setdefault(digest, {})[place[0]] = job
    for digest, document in documents.items():
        jobs = found.get(digest, {})
        ranks = tuple(range(len(jobs)))
        if tuple(sorted(jobs)) == ranks and 0 in jobs and _place(jobs[0]) == (0, len(jobs)):
            several = Place("ended", ranks) if len(jobs) > 1 else ALONE
            yield document, NodeSave([jobs[local] for local in ranks], several)


def place_of(arena: Arena) -> tuple[int, int] | None:
    """Of the trainer that filled an arena: its local rank, of how many; None for one in which no
    slot is whole."""
    return next(filter(None, (_place(job) for _, job in _whole_jobs(arena))), None)


def _whole_jobs(arena: Arena) -> Iterator[tuple[Row, Job]]:
    for slot in range(arena.slot_count):
        if row := arena.row(slot):
            job = Job(arena, slot, row.sequence)
            job.advance(ALL)
            yield row, job


def _place(job: Job) -> tuple[int, int] | None:
    try:
        local, here = job.said.get(PLACE, (0, 1))
        return int(local), int(here)
    except (EverstepError, TypeError, ValueError):
        return None
