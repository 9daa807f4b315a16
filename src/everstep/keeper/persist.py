"""From a sealed slot to a committed checkpoint: digest, write, ask the trainer, commit, retain."""

import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from everstep.errors import EverstepError, Missing, Unavailable, Unsupported
from everstep.format.document import digest_of
from everstep.format.manifest import (
    LEFT_OUT,
    CheckpointName,
    Manifest,
    Part,
    Previous,
    Record,
    Stream,
    encode_manifest,
)
from everstep.format.node_parts import NodePart
from everstep.keeper.data import Data
from everstep.keeper.existing import CALL, check_same
from everstep.keeper.ranks.node_save import NodeSave
from everstep.keeper.ranks.nodes import GivenUp
from everstep.keeper.still import Seen, find_kept
from everstep.keeper.writer import Outcome, Share, Writer
from everstep.store import catalog, commit, names, retain

log = logging.getLogger(__name__)

_LOOKS = 16
"""So often retention looks while a log doubles."""


def persist(
    writer: Writer, jobs: Iterable[NodeSave], announce_written: Callable[[NodeSave], None]
) -> list[tuple[NodeSave, Outcome | Exception]]:
    """Make sealed slots durable together: a chain of records, or one step of any kind. Blocks until
    they are committed, and says of each what became of it.

    The data of all is written, then synced; then each manifest is created when the one before it is
    durable: whenever this ends, those committed are the first so many. A job is taken from `jobs`
    when the one before it is written, none after one that failed.
    """
    saves: list[Save] = []
    for job in jobs:
        saves.append(Save(writer, job, saves[-1] if saves else None))
        saves[-1].attempt(lambda: saves[-1].write(announce_written))
        if saves[-1].has_failed:
            break
    for save in saves:
        save.attempt(save.sync)
    written = [save for save in saves if not save.has_failed and save.paths]
    paths = [path for save in written for path in save.paths]
    for first in written[:1]:  # where it fails, the others follow
        first.attempt(lambda: writer.disk.sync_entries(paths))
    for save in saves:
        save.hear()
    ready = [save for save in saves if not save.has_failed and save.publishes]
    directories = [os.path.dirname(names.manifest_path(save.name)) for save in ready]
    for first in ready[:1]:
        first.attempt(lambda: writer.disk.make_directories(directories))
    for save in saves:
        save.attempt(save.tell)
    for save in saves:
        save.attempt(save.publish)
    return [(save.job, save.end()) for save in saves]


class Save:
    """One step on its way: written, synced, confirmed, published. For the team's thread.

    What goes wrong in a phase that was attempted is kept for `end`, and there are no later ones
    then, for this save and for those that follow it.
    """

    name: CheckpointName
    _manifest: Manifest
    _share: Share | None
    _data: Data
    _part: Part
    _own: NodePart

    def __init__(self, writer: Writer, job: NodeSave, before: "Save | None") -> None:
        """`before`: the one that it follows, if that is not committed yet."""
        self.job = job
        self.digest: str | None = None
        """Of its manifest; None where it was on the disk already, perhaps as another."""
        self._writer = writer
        self._before = before
        self._encoded: bytes | None = None
        """Its manifest, where this node alone has all of it already."""
        self._began = time.monotonic()
        self._exists = self._is_begun = self._is_told = self._was_given_up = False
        self._outcome: Outcome | None = None
        self._error: Exception | None = None

    @property
    def has_failed(self) -> bool:
        """Whether this one, or one that it follows, will not be committed."""
        return self._error is not None or (self._before is not None and self._before.has_failed)

    @property
    def paths(self) -> list[str]:
        """Its new files."""
        return [link.path for link in self._data.new]

    @property
    def publishes(self) -> bool:
        """Whether it will create a manifest."""
        return not self._exists and (self._share is None or self._share.publishes)

    def attempt(self, phase: Callable[[], None]) -> None:
        """Do it, unless something has failed before; an Exception is kept."""
        if not self.has_failed:
            try:
                phase()
            except Exception as error:  # noqa: BLE001 - each reaches its handle
                self._error = error
                self._was_given_up = isinstance(error, GivenUp)

    def sync(self) -> None:
        """Make the bytes of its files durable."""
        self._data.sync()

    def hear(self) -> None:
        """Wait for the trainer's word on the copy, or its death. Also after a failure: memory must
        not offer a torn copy."""
        asked = [job for job in self.job.jobs if job.written]
        for job in asked:
            job.answered.wait()
        if problem := next((job.problem for job in asked if job.problem), None):
            self._error = Unsupported(problem)

    @property
    def is_given_up(self) -> bool:
        """Whether the node that commits will never commit it, nor what it follows."""
        return self._was_given_up or (self._before is not None and self._before.is_given_up)

    def end(self) -> Outcome | Exception:
        """What became of it. What was written in vain is deleted."""
        if self._outcome:
            return self._outcome
        if self._is_begun and (not self._is_told or self.is_given_up):
            self._data.discard(self.name)
            if self._share and self._share.ends:
                begin_window(self._writer, None)
        error, self._error = self._error, None  # its traceback holds this object
        if isinstance(error, GivenUp):
            return error.told
        return error or _lost(self._before.name if self._before else None)

    def write(self, announce_written: Callable[[NodeSave], None]) -> None:
        """Digest and write at the same time, while the image still arrives. Only then is the
        trainer asked whether the copy was clean: a torn one is never committed."""
        writer, job = self._writer, self.job
        said = job.describe()
        record, self._share = said["record"], Share.of(said)
        self._manifest = self._manifest_of(job.step, said)
        self.name = CheckpointName(job.step, self._manifest.epoch)
        begin_window(writer, self._share, self.name.epoch)
        is_record = record is not None
        is_tagged = bool(said["tag"])
        link = writer.link_bytes_per_s(job.step, goes_everywhere=is_record or is_tagged)
        is_state = not is_record and self._share is None and not job.nodes
        base = writer.base_for(job.step, is_tagged=is_tagged) if is_state else None
        image, parent = job.image(), self._manifest.parent
        kept, table = None, image.parsed.table
        if turns := {pack.turn for pack in table.packs}.intersection(said["kept"]):
            kept = find_kept(writer.disk, parent, job.place.node, image.parsed.document, table)
            self._manifest = replace(self._manifest, exact=False)
        self._data = Data(writer, image, is_record, link, base, kept, turns)
        self._is_begun = True
        try:
            self._write_data()
        except EverstepError as error:  # memory can be restored from, with the manifest beside it
            self._error = error
        self._part = self._data.part(job.step)
        if self._share is None or self._share.is_record:
            self._manifest = _with_part(self._manifest, record, self._part)
            if not job.nodes:  # else no node has all images, nor knows all of the manifest
                self._encoded = encode_manifest(self._manifest)
                job.put_manifest(self._encoded)
                self.digest = None if self._exists else digest_of(self._encoded)
        for each in job.jobs:
            each.written = True
        announce_written(job)

    def _write_data(self) -> None:
        """Unless it was committed before. Raises Unavailable where it cannot be committed, as
        something that it needs is lost."""
        writer, share = self._writer, self._share
        if share is None or share.publishes:
            self._exists = writer.disk.size(names.manifest_path(self.name)) is not None
        if share and not share.is_record and not self._exists:
            writer.window.check(share)
        commit.check_epoch(writer.disk, self.name.epoch, self.name.step)
        if self.job.nodes:
            self.job.nodes.check_not_given_up(self.name, self.job.call)
        if not self._exists:
            self._data.write(self.name)

    def _manifest_of(self, step: int, said: dict[str, Any]) -> Manifest:
        writer, record, capture = self._writer, said["record"], said["capture"]
        assert writer.epoch
        if not self.job.place.is_alone:
            capture = {**capture, CALL: self.job.call}
        left_out = list(record.get("left_out", ())) if record else []
        if left_out:
            capture = {**capture, LEFT_OUT: left_out}
        writer.run = writer.run or commit.open_store(writer.disk)
        parent = self._before.name if self._before else writer.parent
        return Manifest(
            step=step,
            epoch=writer.epoch,
            run=writer.run,
            created=commit.now(),
            parts=(),
            objects=said["objects"],
            hyperparameters=said["hyperparameters"],
            parent=parent and parent._asdict(),
            topology=said["topology"],
            capture=capture,
            metrics=said["metrics"],
            tag=said["tag"],
            ranks=tuple(said["own"]),
            streams={name: Stream.from_json(each) for name, each in said["streams"].items()},
            previous=self._previous(record["previous"], parent) if record else None,
            exact=not left_out,
        )

    def _previous(self, step: int, parent: CheckpointName | None) -> Previous:
        """What a record goes on from: a checkpoint of this epoch, the `parent` or another one.
        Raises Unavailable where it was never committed: then the chain has ended, and the trainer
        begins another with a whole state."""
        writer, before = self._writer, self._before
        name = CheckpointName(step, writer.epoch)
        digest = before.digest if before else writer.parent_digest
        if self.job.nodes and before and before.name == name:
            digest = ""  # of several nodes that of one that is not committed yet is not known
        elif parent != name or digest is None:
            try:
                digest = catalog.digest_of_manifest(writer.disk, name)
            except Missing as error:
                raise _lost(name) from error
        return Previous(*name, digest)

    def tell(self) -> None:
        """All that this node has of it is durable: where another one commits it, tell."""
        if nodes := self.job.nodes:
            self._own = self.job.own_part(self._manifest)
            self._is_told = not self._exists and not nodes.commits
        if nodes and self._is_told:
            nodes.tell(self._manifest, self._own, self._data.document)

    def publish(self) -> None:
        """All that it needs is durable: commit it."""
        writer, share, manifest = self._writer, self._share, self._manifest
        disk, document = writer.disk, self._data.document
        tables = [document]
        if share and not share.is_record and not self._exists:
            manifest = writer.window.add(share, self._part, document, manifest)
            tables = writer.window.documents
        if self._exists:
            self._settle()
        elif self.job.nodes:
            manifest, self.digest = self.job.nodes.commit(manifest, self._own, document)
        elif self.publishes:
            encoded = self._encoded or encode_manifest(manifest)
            commit.publish(disk, manifest, encoded, tables)
            self.digest = digest_of(encoded)
        is_new_state = not self._exists and (share or not manifest.previous)
        seen: Seen = self._data.note_durable() if is_new_state else {}
        warning = None
        if is_whole := share is None or share.publishes:
            place = self.job.place  # of several nodes each says it in a store of its own
            warning = self._set_tag() if place.commits or place.own_store else None
            self._extend_base()
            writer.parent, writer.parent_digest = self.name, self.digest
            writer.base = None
            if self.digest and not (share or manifest.previous or self.job.nodes):
                writer.base = self._data.base(Previous(*self.name, self.digest))
        packs = (pack for stream in manifest.streams.values() for pack in stream.packs)
        streamed = [pack for pack in packs if names.is_new_in(pack.path, self.name)]
        self._outcome = Outcome(
            self.name,
            self._data.size + sum(pack.size for pack in streamed),
            time.monotonic() - self._began,
            warning,
            is_part=not is_whole,
            takes_replay=bool(manifest.records),
            seen=seen,
        )

    def _settle(self) -> None:
        """It was committed before: its keeper died then. Raises Conflict where that is another."""
        disk, table, nodes = self._writer.disk, self._data.document, self.job.nodes
        steps = self._share.steps if self._share and not self._share.is_record else ()
        check_same(disk, self._manifest, table, steps, nodes.node if nodes else None)
        self.job.put_manifest(disk.read(names.manifest_path(self.name)))

    def _set_tag(self) -> str | None:
        """Also where the step was there: who committed it may have died before this. What
        failed."""
        if tag := self._manifest.tag:
            try:
                commit.set_tag(self._writer.disk, tag, self.name)
            except EverstepError as error:
                return f"step {self.name.step} is saved, but not tagged {tag!r}: {error}"
        return None

    def _extend_base(self) -> None:
        """A record with pieces of the next base: with the last of them the base is put beside the
        record. Where it cannot be, the log goes on from the base before. Whatever else was
        published ends the window: its files are the checkpoint's from now on."""
        share, window = self._share, self._writer.window
        if share is None or not share.is_record or self._exists:
            window.clear()
            return
        try:
            window.check(share)
            base = window.add(share, self._part, self._data.document, self._manifest)
            if share.ends:
                base = replace(base, previous=None, tag=None)
                commit.publish_state(self._writer.disk, base, self.digest)
                window.clear()
        except EverstepError as error:
            log.warning("step %s is saved, but no base beside it: %s", self.name.step, error)


def begin_window(writer: Writer, share: Share | None, epoch: int | None = None) -> None:
    """What comes next is this share, of that epoch. Of a window that another one follows, or none,
    nothing was published: its files are deleted."""
    window = writer.window
    last = CheckpointName(max(window.steps, default=0), window.epoch or 0)
    for stale in window.begin(share, epoch):
        of = CheckpointName(stale.steps, last.epoch)
        own = [link.path for link in stale.packs if names.is_new_in(link.path, of)]
        commit.discard_packs(writer.disk, last, own)


def apply_retention(writer: Writer, records: int = 0) -> None:
    """Delete what `keep` does not cover. `records`: so many were committed, and nothing else. They
    free little, and a look at a long log takes long: so retention waits until the log has grown by
    a sixteenth."""
    writer.records = writer.records + records if records else 0
    writer.unlooked += records
    if writer.keep and writer.unlooked * _LOOKS >= writer.records:
        writer.unlooked = 0
        waiting = writer.remote.pinned if writer.remote else frozenset[CheckpointName]()
        retain.tidy(writer.disk, writer.keep, writer.cache, waiting)


def is_plain(job: NodeSave) -> bool:
    """Whether it is a record and nothing else: such ones are committed in groups."""
    try:
        said = job.describe()
    except Exception:  # noqa: BLE001 - told when its turn comes
        return False
    return bool(said["record"]) and not said["share"] and not said["tag"]


def _lost(name: CheckpointName | None) -> Unavailable:
    return Unavailable(f"saving a record: {name}, which it follows, was not saved")


def _with_part(manifest: Manifest, said: dict[str, Any] | None, part: Part) -> Manifest:
    if said is None:
        return replace(manifest, parts=(part,))
    record = Record(manifest.step, tuple(said["calls"]), (part,), said.get("derived", {}))
    return replace(manifest, records=(record,))
