"""What arenas of dead trainers hold: the jobs that ended, those of one step of all ranks together.

A rank may have died before its part of a step was whole, or another one's memory may be gone: what
is not there of all ranks is nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from everstep.errors import EverstepError
from everstep.format.document import digest_of, unseal
from everstep.keeper.arena import Arena, Row, SlotState
from everstep.keeper.data import Image
from everstep.keeper.job import ALL, Job
from everstep.keeper.ranks.node_save import PLACE, REFERENCE, Joint
from everstep.keeper.ranks.place import ALONE, Place


@dataclass(frozen=True, slots=True)
class EndedJoint:
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
        return Joint(self.jobs, several if len(self.jobs) > 1 else ALONE).image()


def ended_joints(arenas: Sequence[Arena]) -> Iterator[EndedJoint]:
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
            yield EndedJoint(found, document)


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
