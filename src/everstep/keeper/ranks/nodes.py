"""Several nodes commit one checkpoint, through the store that they share.

    other nodes   data, table ──▶ part document ──▶ wait for the manifest ──▶ local
    rank 0's      data ──▶ wait for all part documents ──▶ check, merge ──▶ manifest ──▶ local

Invariants:
* A part document (`checkpoints/00000100-0003/part-2.json`: what node 2 has of it, or why it has
  nothing) is published when every byte that it names is durable, and means nothing to readers.
* Files that one names, also those of earlier checkpoints, are not deleted where they lie, unless
  the node that commits has said that it never will: it may be about to.
* The node of rank 0 alone creates manifests, and only of parts of one attempt: a call of a run's
  attachment. What a dead attempt left never joins.
* A node that has nothing of a step says so, with the reason: then it fails on all nodes at once.
* Where each node has a store of its own, it writes to that alone. The others read it (by
  tiers/peer.py), and take over what rank 0's node has committed: each store has all tables and
  manifests, and the packs of its node.
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
from typing import Any, TypeVar

from everstep.errors import EverstepError, Mismatch, Unavailable
from everstep.format.document import digest_of
from everstep.format.global_tensors import index_of
from everstep.format.index import INDEXED_FROM_PARTS, Index
from everstep.format.manifest import CheckpointName, Manifest, Part, check_table, encode_manifest
from everstep.format.merge import renumbered, unite_optimizers, unite_tables
from everstep.format.node_parts import NodePart, encode_node_part
from everstep.format.tables import Table, decode_table, seal_table
from everstep.keeper.existing import check_same
from everstep.keeper.ranks.descriptions import check_held, merge_numbered, objects_of
from everstep.keeper.wire import Place
from everstep.keeper.writer import Writer
from everstep.store import catalog, commit, names
from everstep.tiers.peer import Peer
from everstep.tiers.tier import Tier

PARTS_S = 300.0
"""How long a node waits for another one, in seconds: for its part of a step, or its commit. A run
may choose it: EVERSTEP_PARTS_S."""

ORPHANS_S = 30.0
"""How long it does where no trainer of its own lives: who starts again waits for that."""

_LEFT_OUT_MAX = 64
_REASON_MAX = 2000
_PAUSE_S_MIN, _PAUSE_S_MAX = 0.002, 0.2
_LOOK_S = 1.0

T = TypeVar("T")

Told = tuple[NodePart, bytes]
"""What a node has of a step, and the piece table of that."""

log = logging.getLogger("everstep.keeper")


class GivenUp(Unavailable):
    """The node that commits has said that it never will. `told`: what the trainers hear."""

    def __init__(self, text: str, said: NodePart) -> None:
        super().__init__(text)
        self.told = _failure(text, said)


class Nodes:
    """The nodes of a run, seen from one of them. For the team's thread."""

    def __init__(self, writer: Writer, place: Place, is_awaited: Callable[[], bool]) -> None:
        """`is_awaited`: whether a trainer of this node lives, which wants to know."""
        self.node, self.commits = place.node, place.commits
        self._writer, self._disk, self._place = writer, writer.disk, place
        self.stores: Mapping[int, Peer] = {}
        """Those of other nodes, by number, where each has its own."""
        self._own = place.node if place.own_store else None
        """The node whose packs alone lie in this one's store."""
        self._is_awaited = is_awaited
        self._orphaned: float | None = None
        self._left_out: deque[tuple[int, NodePart]] = deque(maxlen=_LEFT_OUT_MAX)
        self._told: list[CheckpointName] = []
        self._committed = CheckpointName(0, 0)

    @property
    def first(self) -> Tier | Peer:
        """The store in which checkpoints are committed."""
        return self.stores.get(0, self._disk)

    # ---- a step ----------------------------------------------------------------------------

    def check_not_given_up(self, name: CheckpointName, call: int) -> None:
        """A keeper of this node that died may have said that there is nothing of it: others have
        believed it. Raises Unavailable."""
        said = catalog.find_part(self._disk, name, self.node, self._place.named(call))
        if said and said.failed is not None:
            raise _failure(f"saving step {name.step}: it was given up before: {said.failed}", said)

    def tell(self, manifest: Manifest, own: NodePart, table: bytes) -> None:
        """What is here, durably (its packs are): `manifest` as if there were no other node. From
        then on nobody deletes what it names of earlier checkpoints. Raises Unavailable,
        Conflict."""
        commit.check_epoch(self.first, manifest.epoch, manifest.step)
        commit.write_table(self._disk, table)
        with self._disk.locked(exclusive=False):
            commit.check_shared(self._disk, manifest)
            self._publish(manifest.name, own)

    def _publish(self, name: CheckpointName, part: NodePart) -> None:
        """Publish it durably, in place of what this node said before."""
        self._disk.replace(names.part_path(name, part.node), encode_node_part(part))

    def _clear(self, name: CheckpointName) -> None:
        """The checkpoint is there: nobody needs part documents any more. Else they are left to
        gc."""
        with contextlib.suppress(Exception):
            self._disk.forget(catalog.part_documents(self._disk, name))

    def commit(
        self, manifest: Manifest, own: NodePart, table: bytes
    ) -> tuple[Manifest, str | None]:
        """Returns the manifest of all, and its digest where it was created here; blocks. What this
        node has of it is its manifest as if there were no other node, its part, and the table of
        that. Raises GivenUp, Unavailable, Mismatch, Conflict."""
        name = manifest.name
        if self.commits:
            every = [(own, table), *self._await_parts(name, own.attempt)]
            manifest, tables = unite(self._disk, manifest, every)
            document = encode_manifest(manifest)
            commit.publish(self._disk, manifest, document, tables, self._own)
            self._clear(name)
            return manifest, digest_of(document)
        found = self._await_commit(name, own.attempt)
        if self._place.own_store:
            self._take_over(found)
        packs = {link.path for part in found.all_parts for link in part.packs}
        links = [link for part in manifest.all_parts for link in part.packs]
        if any(link.path not in packs for link in links):  # those of a keeper that died after it
            check_same(self._disk, manifest, table, node=self.node)
            new = [link.path for link in links if names.is_new_in(link.path, name)]
            commit.discard_packs(self._disk, name, new)
        self._clear(name)  # perhaps told after it
        return found, None

    def _take_over(self, found: Manifest) -> None:
        """Let this node's own store have what was committed: its packs are there."""
        name = found.name
        paths = {part.table.path for part in found.all_parts}
        tables = [self.first.read(path) for path in paths if not self._disk.holds(path)]
        document = self.first.read(names.manifest_path(name))
        commit.publish(self._disk, found, document, tables, self._own)

    # ---- what this node has nothing of -----------------------------------------------------

    def leave_out(self, step: int, call: int, reason: str, kind: str | None = None) -> None:
        """There will be nothing of this step, in this call; `tell_left_out` tells it. `kind`: of
        which error. Any thread."""
        said = NodePart(self._place.named(call), self.node, reason[:_REASON_MAX], kind=kind)
        self._left_out.append((step, said))

    def tell_left_out(self) -> None:
        """Tell the others what was left out, once there is an epoch. Also while this node waits for
        them, as they may wait for just that: a trainer announces a step while word of the one
        before is on its way."""
        while self._left_out and self._writer.epoch:
            step, said = self._left_out.popleft()
            self._tell_absence(CheckpointName(step, self._writer.epoch), said)

    def _tell_absence(self, name: CheckpointName, said: NodePart) -> None:
        """Durably, unless that step or a later one is committed."""
        if name.epoch == self._committed.epoch and name < self._committed:  # a word that came late
            return
        try:
            is_over = catalog.newest_epoch(self.first) != name.epoch
            if is_over or self.first.size(names.manifest_path(name)) is not None:
                return
            self._publish(name, said)
            self._told.append(name)
        except EverstepError as error:  # they wait until they have waited long enough
            log.warning("telling other nodes that there is nothing of %s: %s", name, error)

    def note_commit(self, name: CheckpointName) -> None:
        """All nodes are past the steps before it."""
        self._committed = name
        old = [each for each in self._told if each < name]
        self._told = [each for each in self._told if each not in old]
        with contextlib.suppress(EverstepError):
            for each in old:
                self._disk.delete(names.part_path(each, self.node))

    # ---- waiting ---------------------------------------------------------------------------

    def await_epoch(self, attachment: str) -> int:
        """The epoch that rank 0's node has claimed for this run; blocks. Raises Unavailable."""
        number = self._await(
            None,
            lambda: catalog.find_attachment(self.first, attachment),
            lambda: (
                "the epoch of this run did not appear in it. The node of rank 0 claims it: is "
                "this directory the same on all nodes?"
            ),
        )
        if self._place.own_store:
            commit.learn_epochs(self._disk, self.first)
        return number

    def _await_parts(self, name: CheckpointName, attempt: str) -> list[Told]:
        """Those of all other nodes. Raises Unavailable where one has nothing, or does not come."""
        found: dict[int, Told] = {}

        def missing() -> list[int]:
            return [node for node in range(1, self._place.nodes) if node not in found]

        def look() -> list[Told] | None:
            for node in missing():
                if told := self._hear(name, node, attempt):
                    found[node] = told
            return None if missing() else [found[node] for node in sorted(found)]

        return self._await(name, look, lambda: f"the parts of nodes {missing()} did not come")

    def _hear(self, name: CheckpointName, node: int, attempt: str) -> Told | None:
        """What another node says, if it has said anything yet. Raises as _await_parts."""
        store = self.stores.get(node, self._disk)
        try:
            is_told = names.part_path(name, node) in catalog.part_documents(store, name)
            part = catalog.find_part(store, name, node, attempt) if is_told else None
            document = store.read(part.part.table.path) if part and part.part else b""
        except Unavailable:
            if node in self.stores and self._is_awaited():  # its trainers start another keeper
                return None
            raise  # the run has ended, and its node with it
        if part and part.failed is not None:
            text = f"saving step {name.step}: node {node} has nothing: {part.failed}"
            raise _failure(text, part)
        return (part, document) if part else None

    def _await_commit(self, name: CheckpointName, attempt: str) -> Manifest:
        """The manifest, which rank 0's node creates. Raises GivenUp, Unavailable, Conflict."""
        disk = self.first
        path, directory = names.manifest_path(name), f"{names.CHECKPOINTS}/{name}"

        def look() -> Manifest | None:
            # A listing, as clients of a network file system remember longer what was not there.
            there = {f"{directory}/{file}" for file in disk.list(directory)}
            if path in there and disk.holds(path):
                return catalog.read_manifest(disk, name)
            is_told = names.part_path(name, 0) in there
            said = catalog.find_part(disk, name, 0, attempt) if is_told else None
            if said and said.failed is not None:
                text = f"saving step {name.step}: the node of rank 0 gave it up: {said.failed}"
                raise GivenUp(text, said)
            return None

        return self._await(name, look, lambda: "the node of rank 0 did not commit it")

    def _await(
        self, name: CheckpointName | None, look: Callable[[], T | None], late: Callable[[], str]
    ) -> T:
        """Look until something is there. By polling: what is shared is a file system."""
        began = looked = time.monotonic()
        parts_s = float(os.environ.get("EVERSTEP_PARTS_S", PARTS_S))
        orphans_s, pause = min(ORPHANS_S, parts_s), _PAUSE_S_MIN
        while (found := look()) is None:
            self.tell_left_out()
            now = time.monotonic()
            self._orphaned = None if self._is_awaited() else self._orphaned or now
            is_orphan = self._orphaned is not None and now - self._orphaned > orphans_s
            if is_orphan or now - began > parts_s:
                what = "claiming an epoch" if name is None else f"saving step {name.step}"
                seconds = f"within {now - began:.0f} s"
                raise Unavailable(f"{what} in {self.first.root}: {late()} ({seconds})")
            if name and now - looked > _LOOK_S:
                looked = now
                commit.check_epoch(self.first, name.epoch, name.step)
            time.sleep(pause)
            pause = min(1.5 * pause, _PAUSE_S_MAX)
        return found


def _failure(text: str, said: NodePart) -> EverstepError:
    """What a node has told. That ranks came apart is the same error for all of them: they count
    these."""
    return (Mismatch if said.kind == Mismatch.__name__ else Unavailable)(text)


def unite(
    disk: Tier, manifest: Manifest, told: Sequence[Told]
) -> tuple[Manifest, tuple[bytes, ...]]:
    """The manifest of what all nodes have, by number, made of that of the first; and all its
    tables. Raises Mismatch where they do not fit, or leave a hole, Corrupt."""
    every = [found for found, _ in told]
    for found, document in told:
        if not found.part or digest_of(document) != found.part.table.digest:
            raise Unavailable(
                f"saving step {manifest.step}: the piece table of node {found.node} is not what it "
                f"wrote. A file system whose caches are this late cannot hold a store of several "
                f"nodes"
            )
    said = [{"hyperparameters": each.hyperparameters, "record": each.record} for each in every]
    hyperparameters, calls, mapping = merge_numbered(said, [sorted(e.ranks or ()) for e in every])
    documents = tuple(document for _, document in told)
    tables, renumbered, index = _united(documents, hashable(mapping))
    done = []
    for found, table, document in zip(every, tables, renumbered, strict=True):
        assert found.part
        part = replace(found.part, rank=found.node, table=commit.table_link(document))
        check_table(table, part, part.table.path)
        done.append(part)
    ranks = sorted((rank, said) for each in every for rank, said in (each.ranks or {}).items())
    check_held(manifest.step, ranks)
    objects, differing = objects_of([said for _, said in ranks])
    previous = manifest.previous
    if previous and not previous.digest:  # committed by now
        previous = replace(previous, digest=catalog.digest_of_manifest(disk, previous.name))
    united = replace(
        manifest,
        exact=manifest.exact and _are_due(manifest.step, done, tables),
        parts=() if manifest.records else tuple(done),
        records=tuple(
            replace(record, calls=tuple(calls), parts=tuple(done)) for record in manifest.records
        ),
        objects=objects,
        hyperparameters=hyperparameters,
        ranks=tuple(differing),
        previous=previous,
        index=None if manifest.records else index,
    )
    return united, renumbered


def _are_due(step: int, parts: Sequence[Part], tables: Sequence[Table]) -> bool:
    """Whether all that is saved in turn is of this step. Raises Unavailable where nodes are at
    other turns (see merge_descriptions): a tensor that is cut into pieces over them would be of two
    steps."""
    turns = {
        (pack.turn, of)
        for part, table in zip(parts, tables, strict=True)
        for pack, of in zip(table.packs, names.pack_steps(table, part.packs, step), strict=True)
    }
    if len(turns) > len({turn for turn, _ in turns}):
        raise Unavailable(
            f"saving step {step}: of what is saved in turn, nodes have other steps than others "
            f"(turn, step: {sorted(turns)}). All save all next"
        )
    return all(of == step for _, of in turns)


def hashable(mapping: Sequence[Mapping[str, Sequence[int]]]) -> tuple[Any, ...]:
    """How each numbers its hyperparameter sets in the united ones, as a key of a cache."""
    return tuple(tuple((name, tuple(own)) for name, own in sorted(e.items())) for e in mapping)


@lru_cache(maxsize=4)
def _united(
    documents: tuple[bytes, ...], mapping: tuple[Any, ...]
) -> tuple[tuple[Table, ...], tuple[bytes, ...], Index | None]:
    """The tables, and their documents, with the numbers of the united hyperparameter sets, and the
    index of many; they change rarely. Raises Mismatch."""
    tables = [decode_table(document, "the table of a node") for document in documents]
    united = [renumbered(table, dict(sets)) for table, sets in zip(tables, mapping, strict=True)]
    told = [(f"part {node}", table) for node, table in enumerate(united)]
    unite_optimizers(told)
    unite_tables(told, are_all=True)
    sealed = (
        document if again == table else seal_table(again)
        for again, table, document in zip(united, tables, documents, strict=True)
    )
    index = index_of(united) if len(united) >= INDEXED_FROM_PARTS else None
    return tuple(united), tuple(sealed), index
