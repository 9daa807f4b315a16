"""Several nodes commit one checkpoint, through the storage that they share and nothing else.

    other nodes   data, table ──▶ part document ──▶ wait for the manifest ──▶ local
    rank 0's      data ──▶ wait for all part documents ──▶ check, merge ──▶ manifest ──▶ local

Invariants:
* The node of rank 0 alone creates manifests, and only of parts of one attempt: a call of a run's
  attachment. What a dead attempt left never joins.
* A node that has nothing of a step says so, with the reason: then it fails on all nodes at once.
* Every wait is bounded: by PARTS_S, and by ORPHANS_S where no trainer of this node lives.
"""

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from everstep.errors import Conflict, EverstepError, Mismatch, Unavailable
from everstep.format.document import digest_of
from everstep.format.manifest import Manifest, Part, check_table, encode_manifest
from everstep.format.merge import check_coverage, merge_optimizers
from everstep.format.node_parts import NodePart, Said
from everstep.format.tables import Table, decode_table, seal_table
from everstep.keeper.ranks.node_save import check_held, merge_numbered, objects_of
from everstep.keeper.ranks.place import Place
from everstep.keeper.writer import Writer
from everstep.store import catalog, commit, names, parts
from everstep.store.names import CheckpointName

PARTS_S = float(os.environ.get("EVERSTEP_PARTS_S", 300.0))
"""How long a node waits for another one, in seconds: for its part of a step, or its commit."""

ORPHANS_S = min(30.0, PARTS_S)
"""How long it does where no trainer of its own lives: who starts again waits for that."""

_UNTOLD_MAX = 64
_REASON_MAX = 2000
_PAUSE_S_MIN, _PAUSE_S_MAX = 0.002, 0.2
_LOOK_S = 1.0

T = TypeVar("T")

log = logging.getLogger("everstep.keeper")


class GivenUp(Unavailable):
    """The node that commits has said that it never will. `told`: what the trainers hear."""

    def __init__(self, text: str, said: NodePart) -> None:
        super().__init__(text)
        self.told = _failure(text, said)


class Mine(NamedTuple):
    """What this node has of a step: its manifest as if there were no other node, what each rank
    says, by its number, its table, and what its ranks say of a record together."""

    manifest: Manifest
    ranks: Mapping[int, Said]
    table: bytes
    record: Mapping[str, Any] | None = None

    def part(self, place: Place, attempt: str) -> NodePart:
        """For the node that commits."""
        (part,) = self.manifest.all_parts
        sets = self.manifest.hyperparameters
        record = self.record and {key: self.record[key] for key in ("previous", "calls")}
        return NodePart(attempt, place.node, None, part, sets, self.ranks, record)


def commit_own(writer: Writer, mine: Mine, attempt: str) -> tuple[Manifest, str]:
    """As the node of rank 0: wait for all others, and create the manifest of all. Returns it, and
    its digest. Raises Unavailable, Mismatch, Conflict."""
    manifest = mine.manifest
    name = CheckpointName(manifest.step, manifest.epoch)
    every = [mine.part(writer.place, attempt), *await_parts(writer, name, attempt)]
    united = unite(writer, manifest.step, every, mine.table)
    check_held(manifest.step, sorted(united.ranks.items()))
    objects, ranks = objects_of([said for _, said in sorted(united.ranks.items())])
    manifest = replace(
        manifest,
        parts=() if manifest.records else united.parts,
        records=tuple(
            replace(record, calls=united.calls, parts=united.parts) for record in manifest.records
        ),
        objects=objects,
        hyperparameters=united.hyperparameters,
        ranks=tuple(ranks),
    )
    document = encode_manifest(manifest)
    commit.publish(writer.disk, manifest, document, united.tables)
    parts.clear(writer.disk, name)
    return manifest, digest_of(document)


def tell_part(writer: Writer, mine: Mine, attempt: str) -> None:
    """As any other: tell what is here, durably (its packs are). Raises Unavailable, Conflict."""
    manifest, disk = mine.manifest, writer.disk
    name = CheckpointName(manifest.step, manifest.epoch)
    commit.check_epoch(disk, name.epoch, name.step)
    commit.write_table(disk, mine.table)
    parts.publish(disk, name, mine.part(writer.place, attempt))


def commit_elsewhere(writer: Writer, mine: Mine, attempt: str) -> Manifest:
    """Wait for the manifest of all, which has been told of. Raises GivenUp, Unavailable,
    Conflict."""
    manifest, disk = mine.manifest, writer.disk
    name = CheckpointName(manifest.step, manifest.epoch)
    found = await_commit(writer, name, attempt)
    packs = {link.path for part in found.all_parts for link in part.packs}
    links = [link for part in manifest.all_parts for link in part.packs]
    if any(link.path not in packs for link in links):  # those of a keeper that died after it
        check_same(writer, mine, found)
        commit.discard_packs(disk, name, links)
        disk.forget([names.part_path(name, writer.place.node)])  # perhaps told after the commit
    return found


def find_committed(writer: Writer, mine: Mine) -> Manifest:
    """The step is on the disk already, as its keeper died after the commit. Raises Conflict where
    that is another."""
    name = CheckpointName(mine.manifest.step, mine.manifest.epoch)
    found = catalog.read_manifest(writer.disk, name)
    check_same(writer, mine, found)
    if not writer.disk.holds(names.manifest_path(name)):
        raise Conflict(f"saving step {name.step}: {name} was deleted at the same time")
    if writer.place.commits:
        parts.clear(writer.disk, name)
    return found


def check_not_given_up(writer: Writer, name: CheckpointName, attempt: str) -> None:
    """A keeper of this node that died may have said that there is nothing of it: others have
    believed it. Raises Unavailable."""
    said = parts.find(writer.disk, name, writer.place.node, attempt)
    if said and said.failed is not None:
        raise _failure(f"saving step {name.step}: it was given up before: {said.failed}", said)


def _failure(text: str, said: NodePart) -> EverstepError:
    """What a node has told. That ranks came apart is the same error for all of them: they count
    these (capture/log.py)."""
    return (Mismatch if said.kind == Mismatch.__name__ else Unavailable)(text)


class Absences:
    """What this node has nothing of: told to the others, which wait for it. For the team's
    thread."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._untold: deque[tuple[int, int, str, str | None]] = deque(maxlen=_UNTOLD_MAX)
        self._told: list[CheckpointName] = []
        self._committed = CheckpointName(0, 0)

    def tell(self, step: int, call: int, reason: str, kind: str | None = None) -> None:
        """There is nothing of this step, in this call: durably, unless it or a later one is
        committed, or there is no epoch yet. `kind`: of which error."""
        writer = self._writer
        if writer.epoch is None:
            self._untold.append((step, call, reason, kind))
            return
        name = CheckpointName(step, writer.epoch)
        if name.epoch == self._committed.epoch and name < self._committed:  # a word that came late
            return
        try:
            is_over = catalog.newest_epoch(writer.disk) != writer.epoch
            if is_over or writer.disk.size(names.manifest_path(name)) is not None:
                return
            place = writer.place
            said = NodePart(place.attempt(call), place.node, reason[:_REASON_MAX], kind=kind)
            parts.publish(writer.disk, name, said)
            self._told.append(name)
        except EverstepError as error:  # they wait until they have waited long enough
            log.warning("telling other nodes that there is nothing of %s: %s", name, error)

    def claimed(self) -> None:
        """There is an epoch now."""
        untold = list(self._untold)
        self._untold.clear()
        for said in untold:
            self.tell(*said)

    def clear(self, name: CheckpointName) -> None:
        """A later step is committed: all nodes are past those before it."""
        self._committed = name
        old = [each for each in self._told if each < name]
        self._told = [each for each in self._told if each not in old]
        with contextlib.suppress(EverstepError):
            for each in old:
                self._writer.disk.delete(names.part_path(each, self._writer.place.node))


def await_parts(writer: Writer, name: CheckpointName, attempt: str) -> list[NodePart]:
    """Those of all other nodes; blocks. Raises Unavailable where one has nothing, or does not
    come."""
    found: dict[int, NodePart] = {}
    missing = dict.fromkeys(range(1, writer.place.nodes))

    def look() -> list[NodePart] | None:
        there = set(parts.listed(writer.disk, name))
        for node in [node for node in missing if names.part_path(name, node) in there]:
            part = parts.find(writer.disk, name, node, attempt)
            if part is None:
                continue
            if part.failed is not None:
                text = f"saving step {name.step}: node {node} has nothing: {part.failed}"
                raise _failure(text, part)
            found[node] = part
            del missing[node]
        return None if missing else [found[node] for node in sorted(found)]

    def late(seconds: float) -> str:
        return f"the parts of nodes {list(missing)} did not come within {seconds:.0f} s"

    return _await(writer, name, look, late)


def await_commit(writer: Writer, name: CheckpointName, attempt: str) -> Manifest:
    """The manifest, which rank 0's node creates; blocks. Raises GivenUp, Unavailable, Conflict."""
    disk, path = writer.disk, names.manifest_path(name)
    directory = f"{names.CHECKPOINTS}/{name}"

    def look() -> Manifest | None:
        # A listing, as clients of a network file system remember longer what was not there.
        there = {f"{directory}/{file}" for file in disk.list(directory)}
        if path in there and disk.holds(path):
            return catalog.read_manifest(disk, name)
        if names.part_path(name, 0) not in there:
            return None
        said = parts.find(disk, name, 0, attempt)
        if said and said.failed is not None:
            text = f"saving step {name.step}: the node of rank 0 gave it up: {said.failed}"
            raise GivenUp(text, said)
        return None

    return _await(
        writer,
        name,
        look,
        lambda seconds: f"the node of rank 0 did not commit it within {seconds:.0f} s",
    )


def await_epoch(writer: Writer, attachment: str) -> int:
    """The epoch that rank 0's node has claimed for this run; blocks. Raises Unavailable."""
    seen: set[int] = set()
    return _await(
        writer,
        None,
        lambda: catalog.find_attachment(writer.disk, attachment, seen),
        lambda seconds: (
            f"the epoch of this run did not appear in it within {seconds:.0f} s. The node of rank "
            f"0 claims it: is this directory the same on all nodes?"
        ),
    )


class United(NamedTuple):
    """What a manifest says of all nodes, and the documents of its tables."""

    parts: tuple[Part, ...]
    tables: tuple[bytes, ...]
    hyperparameters: dict[str, Any]
    calls: tuple[Any, ...]
    ranks: dict[int, Said]


def unite(writer: Writer, step: int, every: Sequence[NodePart], own: bytes) -> United:
    """All nodes' parts, by number, as those of one checkpoint; `own`: the first one's table. Raises
    Mismatch where they do not fit, or leave a hole, Corrupt."""
    documents = [own]
    for found in every[1:]:
        assert found.part
        documents.append(writer.disk.read(found.part.table.path))
        if digest_of(documents[-1]) != found.part.table.digest:
            raise Unavailable(
                f"saving step {step}: the piece table of node {found.node} is not what it wrote. "
                f"A file system whose caches are this late cannot hold a store of several nodes"
            )
    said = [{"hyperparameters": each.hyperparameters, "record": each.record} for each in every]
    hyperparameters, calls, mapping = merge_numbered(said, [sorted(e.ranks or ()) for e in every])
    numbers = tuple(
        tuple((name, tuple(indices)) for name, indices in sorted(each.items())) for each in mapping
    )
    tables, renumbered = _united(tuple(documents), numbers)
    done = []
    for found, table, document in zip(every, tables, renumbered, strict=True):
        assert found.part
        part = replace(found.part, rank=found.node, table=commit.table_link(document))
        check_table(table, part, part.table.path)
        done.append(part)
    ranks = {rank: said for found in every for rank, said in (found.ranks or {}).items()}
    return United(tuple(done), renumbered, hyperparameters, tuple(calls), ranks)


@lru_cache(maxsize=4)
def _united(
    documents: tuple[bytes, ...], mapping: tuple[Any, ...]
) -> tuple[tuple[Table, ...], tuple[bytes, ...]]:
    """The tables, and their documents, with the numbers of the united hyperparameter sets; they
    change rarely. Raises Mismatch."""
    tables = [decode_table(document, "the table of a node") for document in documents]
    rows = [
        (node, table.optimizers, dict(sets))
        for node, (table, sets) in enumerate(zip(tables, mapping, strict=True))
    ]
    merge_optimizers(rows)
    check_coverage(tables)
    found = []
    for row, table, document in zip(rows, tables, documents, strict=True):
        optimizers = merge_optimizers([row])
        if optimizers == table.optimizers:
            found.append((table, document))
        else:
            again = replace(table, optimizers=optimizers)
            found.append((again, seal_table(again)))
    return tuple(table for table, _ in found), tuple(document for _, document in found)


def _await(
    writer: Writer,
    name: CheckpointName | None,
    look: Callable[[], T | None],
    late: Callable[[float], str],
) -> T:
    """Look until something is there. By polling: what is shared is a file system."""
    began = looked = time.monotonic()
    pause = _PAUSE_S_MIN
    while (found := look()) is None:
        now = time.monotonic()
        writer.orphaned = None if writer.is_awaited() else writer.orphaned or now
        is_orphan = writer.orphaned is not None and now - writer.orphaned > ORPHANS_S
        if is_orphan or now - began > PARTS_S:
            what = "claiming an epoch" if name is None else f"saving step {name.step}"
            raise Unavailable(f"{what} in {writer.disk.root}: {late(now - began)}")
        if name and now - looked > _LOOK_S:
            looked = now
            commit.check_epoch(writer.disk, name.epoch, name.step)
        time.sleep(pause)
        pause = min(1.5 * pause, _PAUSE_S_MAX)
    return found


def check_same(writer: Writer, mine: Mine, found: Manifest) -> None:
    """Whether what this node has of a step is what was committed. Raises Conflict."""
    has_same = _has_record if mine.record else _has_state
    is_same = has_same(writer, mine, found) and all(
        value == found.objects.get(key, found.ranks[rank].get(key, {}).get("value"))
        for rank, said in mine.ranks.items()
        for key, value in said["objects"].items()
    )
    if not is_same:
        raise Conflict(
            f"saving step {found.step} to {writer.disk.root}: this step is saved already with "
            f"other content. A step is written once: save under the next step, or restore() before "
            f"you begin again"
        )


def _has_state(writer: Writer, mine: Mine, found: Manifest) -> bool:
    digests = [part.digests for part in found.parts if part.rank == writer.place.node]
    return digests == [part.digests for part in mine.manifest.parts]


def _has_record(writer: Writer, mine: Mine, found: Manifest) -> bool:
    """Not by digests, as another keeper may have packed it in another way; nor by its table's, in
    which the hyperparameters may have other numbers."""
    assert mine.record
    own = decode_table(mine.table, "the table of a record")
    for record in found.records:
        for part in record.parts:
            if part.rank == writer.place.node:
                table = catalog.read_table(writer.disk, part)
                return (
                    found.previous is not None
                    and found.previous.step == mine.record["previous"]
                    and (table.packs, table.tensors) == (own.packs, own.tensors)
                    and [call["optimizer"] for call in record.calls]
                    == [call["optimizer"] for call in mine.record["calls"]]
                )
    return False
