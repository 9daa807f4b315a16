"""The jobs of one step of all ranks of a run on this node, committed as one; of one process: one.

And what arenas of dead trainers hold of such steps. A rank may have died before its part was whole,
or another one's memory may be gone: what is not there of all ranks is nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from everstep.errors import Corrupt, EverstepError
from everstep.format.document import digest_of, unseal
from everstep.format.manifest import Manifest
from everstep.format.merge import Merged, RankTable, merge
from everstep.keeper.arena import Arena, Row, SlotState
from everstep.keeper.data import Image, Parsed, gathered, parse, whole
from everstep.keeper.job import ALL, Job
from everstep.keeper.ranks.descriptions import check_held, merge_descriptions
from everstep.keeper.ranks.nodes import ALONE, Nodes, OwnPart, Place

REFERENCE = b"the manifest beside the first rank's image: "
"""Stands, with the digest of that, where a slot is a part of a state."""

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
    said: dict[str, Any] | None = None
    """What all trainers say of the step together, once it was read."""
    each: Sequence[Mapping[str, Any]] = ()
    """What each of them says."""
    _mapping: list[dict[str, list[int]]] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Bytes of the images; 0 where a row is not whole."""
        return sum(job.size for job in self.jobs)

    @property
    def is_complete(self) -> bool:
        """Whether all of all images is there."""
        return all(job.arrival.complete for job in self.jobs)

    @property
    def problem(self) -> str | None:
        """How a copy was torn, as far as the trainers have said."""
        return next((job.problem for job in self.jobs if job.problem), None)

    @property
    def written(self) -> bool:
        """Whether the trainers were asked for their word on the copies."""
        return all(job.written for job in self.jobs)

    def note_written(self) -> None:
        """They will be asked now."""
        for job in self.jobs:
            job.written = True

    def wait_for_answers(self) -> None:
        """Block until each trainer has said whether its copy is clean, or has died."""
        for job in self.jobs:
            job.answered.wait()

    @property
    def step(self) -> int:
        """The step. Raises Corrupt."""
        return self.rows()[0].step

    def rows(self) -> list[Row]:
        """The rows of all slots. Raises Corrupt."""
        rows = [job.arena.row(job.slot) for job in self.jobs]
        found = [row for row in rows if row is not None]
        if len(found) < len(rows):
            raise Corrupt(f"reading slot {self.jobs[0].slot} of the arena: its row is not whole")
        return found

    @property
    def call(self) -> int:
        """Which of the calls that save it is of; 0 where that cannot be read."""
        return int(self.each[0].get("call", 0)) if self.each else call_of(self.jobs[0])

    @property
    def commits(self) -> bool:
        """Whether the manifest is this node's to create."""
        return self.nodes is None or self.nodes.commits

    def describe(self) -> dict[str, Any]:
        """What the trainers say of this step; read once. Raises Corrupt, Mismatch."""
        if self.said is None:
            each = [
                unseal(job.arena.descriptor(job.slot, row), "a descriptor in the arena")
                for job, row in zip(self.jobs, self.rows(), strict=True)
            ]
            said = {**each[0], "own": ()}
            if not self.place.is_alone:
                check_held(self.step, zip(self.place.ranks, each, strict=True))
                said, self._mapping = merge_descriptions(each)
            self.said, self.each = said, each
        return self.said

    def image(self) -> Image:
        """All that is to be written. Raises Corrupt, Mismatch."""
        self.describe()
        rows = self.rows()
        documents = [
            bytes(job.arena.table(job.slot, row)) for job, row in zip(self.jobs, rows, strict=True)
        ]
        views = [
            job.arena.image(job.slot)[: row.image_size]
            for job, row in zip(self.jobs, rows, strict=True)
        ]
        if self.place.is_alone:
            (job,) = self.jobs
            return whole(views[0], job.arrival, documents[0], f"slot {job.slot} of the arena")
        mapping = tuple(
            tuple((name, tuple(numbers)) for name, numbers in sorted(each.items()))
            for each in self._mapping
        )
        arrivals = [job.arrival for job in self.jobs]
        merged, parsed = _merged(tuple(documents), mapping, self.place)
        return gathered(views, arrivals, merged, parsed)

    def own_part(self, manifest: Manifest, table: bytes) -> OwnPart:
        """What this node has of the step, for the others."""
        ranks = dict(zip(self.place.ranks, self.each, strict=True))
        record = self.describe().get("record")
        return OwnPart(manifest, self.call, ranks, table, record)

    def put_manifest(self, document: bytes) -> None:
        """Beside the images, from which it can be restored then: all of it with the first rank's,
        its digest with the others'. Of several nodes none has all images."""
        if self.nodes:
            return
        reference = REFERENCE + digest_of(document).encode()
        for job, row in zip(self.jobs, self.rows(), strict=True):
            job.arena.put_manifest(job.slot, row, document)
            document = reference


def call_of(job: Job) -> int:
    """What a trainer says: which of the calls that save. 0 where that cannot be read."""
    row = job.arena.row(job.slot)
    try:
        return int(unseal(job.arena.descriptor(job.slot, row), "").get("call", 0)) if row else 0
    except EverstepError:
        return 0


@lru_cache(maxsize=4)
def _merged(
    documents: tuple[bytes, ...], mapping: tuple[Any, ...], place: Place
) -> tuple[Merged, Parsed]:
    """Of so many ranks' tables; they change rarely."""
    tables = [parse(document).table for document in documents]
    merged = merge(
        [
            RankTable(rank, table, dict(sets))
            for rank, table, sets in zip(place.ranks, tables, mapping, strict=True)
        ],
        are_all=place.nodes == 1,
    )
    return merged, Parsed.of(merged.document, merged.table)


@dataclass(frozen=True, slots=True)
class EndedSave:
    """A step that has a manifest beside it, committed or not."""

    jobs: Sequence[Job]
    document: bytes
    """The manifest."""

    @property
    def is_committed(self) -> bool:
        """Whether it is on the disk."""
        return all(job.arena.state(job.slot) is SlotState.DONE for job in self.jobs)

    def image(self) -> Image:
        """Its packs. Raises Corrupt, Mismatch."""
        several = Place("ended", tuple(range(len(self.jobs))))
        return NodeSave(self.jobs, several if len(self.jobs) > 1 else ALONE).image()


def ended_saves(arenas: Sequence[Arena]) -> Iterator[EndedSave]:
    """All that are there of all their ranks."""
    firsts: list[tuple[Job, Row, bytes]] = []
    others: dict[tuple[bytes, int], Job] = {}
    for arena in arenas:
        for slot in range(arena.slot_count):
            row = arena.row(slot)
            if arena.state(slot) not in (SlotState.DONE, SlotState.FAILED) or row is None:
                continue
            job = Job(arena, slot, row.sequence)
            job.arrival.advance(ALL)
            document = bytes(arena.manifest(slot, row))
            if not document.startswith(REFERENCE):
                firsts.append((job, row, document))
            elif place := _place(job, row):
                others[document, place[0]] = job
    for job, row, document in firsts:
        local, here = _place(job, row) or (-1, 0)
        reference = REFERENCE + digest_of(document).encode() if here > 1 else b""
        jobs = [job, *(others.get((reference, rank)) for rank in range(1, here))]
        found = [each for each in jobs if each]
        if local == 0 and len(found) == here:
            yield EndedSave(found, document)


def place_of(arena: Arena) -> tuple[int, int] | None:
    """Of the trainer that filled an arena: its local rank, of how many; None for one in which no
    slot is whole."""
    for slot in range(arena.slot_count):
        row = arena.row(slot)
        if row and (place := _place(Job(arena, slot, row.sequence), row)):
            return place
    return None


def _place(job: Job, row: Row) -> tuple[int, int] | None:
    try:
        said = unseal(job.arena.descriptor(job.slot, row), "a descriptor in the arena")
        local, here = said.get(PLACE, (0, 1))
        return int(local), int(here)
    except (EverstepError, TypeError, ValueError):
        return None
