"""From a sealed slot to a committed checkpoint: digest, write, ask the trainer, commit, retain."""

import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from everstep.errors import EverstepError, Missing, Unavailable, Unsupported
from everstep.format.document import digest_of
from everstep.format.manifest import Manifest, Part, Previous, Record, encode_manifest
from everstep.keeper.data import Data
from everstep.keeper.existing import CALL, check_same
from everstep.keeper.ranks.node_save import NodeSave
from everstep.keeper.ranks.nodes import GivenUp, OwnPart
from everstep.keeper.writer import Outcome, Share, Writer
from everstep.store import catalog, commit, names, retain
from everstep.store.names import CheckpointName
from everstep.tiers.tier import Tier

log = logging.getLogger(__name__)

UNCLAIMED = "unclaimed"
"""Stands in what is said of the capture where no epoch could be claimed (never on a disk): the
manifest has the number that would have been next."""


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
        saves[-1].write(announce_written)
        if saves[-1].has_failed:
            break
    _sync(writer.disk, saves)
    for save in saves:
        save.hear()
    _make_directories(writer.disk, saves)
    for save in saves:
        save.tell()
    for save in saves:
        save.publish()
    return [(save.job, save.end()) for save in saves]


def _sync(disk: Tier, saves: list["Save"]) -> None:
    """Make the data of all durable: each file, and their entries together."""
    for save in saves:
        save.sync()
    written = [save for save in saves if not save.has_failed and save.paths]
    if written:  # where it fails for the first, the others follow
        paths = [path for save in written for path in save.paths]
        written[0].attempt(lambda: disk.sync_entries(paths))


def _make_directories(disk: Tier, saves: list["Save"]) -> None:
    """For the manifests, with one sync for all."""
    ready = [save for save in saves if not save.has_failed and save.publishes]
    if ready:
        directories = [os.path.dirname(names.manifest_path(save.name)) for save in ready]
        ready[0].attempt(lambda: disk.make_directories(directories))


class Save:
    """One step on its way: written, synced, confirmed, published. For the team's thread.

    Its phases raise no Exception. What goes wrong in one is kept for `end`, and there are no later
    ones then, for this save and for those that follow it.
    """

    name: CheckpointName
    _manifest: Manifest
    _record: dict[str, Any] | None
    _share: Share | None
    _pieces: Share | None
    _data: Data
    _own: OwnPart

    def __init__(self, writer: Writer, job: NodeSave, before: "Save | None") -> None:
        """`before`: the one that it follows, if that is not committed yet."""
        self.job = job
        self.digest: str | None = None
        """Of its manifest; None where it was on the disk already, perhaps as another."""
        self._writer = writer
        self._before = before
        self._began = time.monotonic()
        self._exists = self._is_begun = self._is_told = self._is_given_up = False
        self._outcome: Outcome | None = None
        self._error: Exception | None = None

    @property
    def has_failed(self) -> bool:
        """Whether this one, or one that it follows, will not be committed."""
        return self._error is not None or (self._before is not None and self._before.has_failed)

    @property
    def paths(self) -> list[str]:
        """Its files."""
        return [link.path for link in self._data.links]

    @property
    def publishes(self) -> bool:
        """Whether it will create a manifest."""
        return not self._exists and (self._share is None or self._share.ends)

    def attempt(self, phase: Callable[[], None]) -> None:
        """Do it, unless something has failed before; an Exception is kept."""
        if not self.has_failed:
            try:
                phase()
            except Exception as error:  # noqa: BLE001 - each reaches its handle
                self._error = error

    def write(self, announce_written: Callable[[NodeSave], None]) -> None:
        """Digest and write at the same time, while the image still arrives. Only then is the
        trainer asked whether the copy was clean: a torn one is never committed."""
        self.attempt(lambda: self._write(announce_written))

    def sync(self) -> None:
        """Make the bytes of its files durable."""
        self.attempt(lambda: self._data.sync())

    def hear(self) -> None:
        """Wait for the trainer's word on the copy, or its death. Also after a failure: memory must
        not offer a torn copy."""
        asked = [job for job in self.job.jobs if job.written]
        for job in asked:
            job.answered.wait()
        if problem := next((job.problem for job in asked if job.problem), None):
            self._error = Unsupported(problem)

    def tell(self) -> None:
        """All that this node has of it is durable: where another one commits it, tell."""
        if self.job.nodes:
            self.attempt(self._tell)

    def publish(self) -> None:
        """All that it needs is durable: commit it."""
        self.attempt(self._publish)
        given_up = isinstance(self._error, GivenUp)
        self._is_given_up = given_up or bool(self._before and self._before._is_given_up)

    def end(self) -> Outcome | Exception:
        """What became of it. What was written in vain is deleted."""
        if self._outcome:
            return self._outcome
        if self._is_begun and (not self._is_told or self._is_given_up):
            self._data.discard(self.name, self._writer.window.end(self._share))
        error, self._error = self._error, None  # its traceback holds this object
        if isinstance(error, GivenUp):
            return error.told
        return error or _lost(self._before.name if self._before else None)

    def _write(self, announce_written: Callable[[NodeSave], None]) -> None:
        writer, job = self._writer, self.job
        said = job.describe()
        self._manifest = self._manifest_of(job.step, said)
        self._record, share = said.get("record"), Share.of(said.get("share"))
        self.name = CheckpointName(job.step, self._manifest.epoch)
        self._pieces, self._share = _begin_window(writer, self.name, share, self._record)
        self._data = Data(writer, job.image(), is_record=self._record is not None)
        self._is_begun = True
        try:
            self._write_data()
        except EverstepError as error:  # memory can be restored from, with the manifest beside it
            self._error = error
        part = self._data.part(job.step)
        if self._share is None:
            self._manifest = _with_part(self._manifest, self._record, part)
            if not job.nodes:  # else no node has all images, nor knows all of the manifest
                document = encode_manifest(self._manifest)
                job.put_manifest(document)
                self.digest = None if self._exists else digest_of(document)
        for each in job.jobs:
            each.written = True
        announce_written(job)

    def _write_data(self) -> None:
        """Unless it was committed before."""
        if self._writer.epoch is None:
            raise Unavailable(self._writer.unclaimed)
        self._exists = _is_there(self._writer, self.name, self._share)
        commit.check_epoch(self._writer.disk, self.name.epoch, self.name.step)
        if self.job.nodes:
            self.job.nodes.check_not_given_up(self.name, self.job.call)
        if not self._exists:
            self._data.write(self.name)

    def _manifest_of(self, step: int, said: dict[str, Any]) -> Manifest:
        """The manifest as far as it is known before the data is written."""
        writer, before = self._writer, self._before
        parent, digest = writer.parent, writer.parent_digest
        if before:
            parent, digest = before.name, before.digest
        capture = said["capture"]
        if writer.epoch is None:
            capture = {**capture, UNCLAIMED: True}
        if not self.job.place.is_alone:
            capture = {**capture, CALL: self.job.call}
        writer.run = writer.run or commit.open_store(writer.disk)
        record = said.get("record")
        return Manifest(
            step=step,
            epoch=writer.epoch or catalog.newest_epoch(writer.disk) + 1,
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
            previous=self._previous(record["previous"], parent, digest) if record else None,
        )

    def _previous(self, step: int, parent: CheckpointName | None, digest: str | None) -> Previous:
        """See below. Of several nodes the digest of one that is not committed yet is not known."""
        before, epoch = self._before, self._writer.epoch
        if self.job.nodes and before and epoch and before.name == (step, epoch):
            return Previous(step, epoch, "")
        return _previous(self._writer, step, parent, digest)

    def _tell(self) -> None:
        assert self.job.nodes
        self._own = self.job.own_part(self._manifest, bytes(self._data.document))
        if not self._exists and not self.job.commits:
            self._is_told = True
            self.job.nodes.tell(self._own)

    def _publish(self) -> None:
        writer, share, manifest = self._writer, self._share, self._manifest
        if share and not self._exists:
            manifest = self._add_to_window(share)
            if not share.ends:
                self._outcome = Outcome(self.name, self._data.size, self._seconds, is_part=True)
                return
        if self._exists:
            self._settle()
        elif self.job.nodes:
            manifest, self.digest = self.job.nodes.commit(self._own)
        else:
            tables = writer.window.documents if share else [self._data.document]
            document = encode_manifest(manifest)
            commit.publish(writer.disk, manifest, document, tables)
            self.digest = digest_of(document)
            if share:  # from now on its files are the checkpoint's
                writer.window.clear()
        warning = _set_tag(writer, manifest) if self.job.commits else None
        pieces = None if self._exists else self._pieces
        warning = _extend_base(writer, pieces, manifest, self._data) or warning
        writer.parent, writer.parent_digest = self.name, self.digest
        takes_replay = self._record is not None or bool(manifest.records)
        size, squeezed = self._data.size, self._data.squeezed
        self._outcome = Outcome(
            self.name, size, self._seconds, squeezed, warning, takes_replay=takes_replay
        )

    def _settle(self) -> None:
        """It was committed before: its keeper died then. Raises Conflict where that is another."""
        disk, table, nodes = self._writer.disk, bytes(self._data.document), self.job.nodes
        steps = self._share.steps if self._share else ()
        check_same(disk, self._manifest, table, steps, nodes.node if nodes else None)
        self.job.put_manifest(disk.read(names.manifest_path(self.name)))

    def _add_to_window(self, share: Share) -> Manifest:
        part, document = self._data.part(self._manifest.step), bytes(self._data.document)
        return self._writer.window.add(share, part, document, self._manifest)

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._began


def _extend_base(writer: Writer, share: Share | None, manifest: Manifest, data: Data) -> str | None:
    """A record with pieces of the next base (`share`): with the last of them the base is put beside
    the record. Returns what went wrong."""
    if share is None:
        writer.window.clear()
        return None
    (record,) = manifest.records
    first = len(share.steps) == 1  # its pieces are of after this record
    added = replace(share, calls=None if first else record.calls)
    try:
        writer.window.check(added)
        base = writer.window.add(added, record.part, bytes(data.document), manifest)
        if share.ends:
            commit.publish_base(writer.disk, replace(base, previous=None, tag=None))
            writer.window.clear()
    except EverstepError as error:
        return f"step {manifest.step} is saved, but no base beside it: {error}"
    return None


def _begin_window(
    writer: Writer, name: CheckpointName, share: Share | None, record: dict[str, Any] | None
) -> tuple[Share | None, Share | None]:
    """What a record, or what a spread checkpoint, has of a window. Of a window that another one
    follows, nothing was published: its files are deleted."""
    for stale in writer.window.begin(share, name.epoch, is_log=record is not None):
        commit.discard_packs(writer.disk, name, stale.packs)
    return (None, share) if record is None else (share, None)


def end_window(writer: Writer) -> None:
    """Nothing more comes from this trainer: what it wrote of a checkpoint that it has not ended is
    deleted."""
    for stale in writer.window.begin(None, None, is_log=False):
        at = CheckpointName(stale.steps, writer.epoch or 0)
        commit.discard_packs(writer.disk, at, stale.packs)


def _is_there(writer: Writer, name: CheckpointName, share: Share | None) -> bool:
    """Whether it was committed before. Raises Unavailable where it cannot be, as something that it
    needs is lost."""
    found = writer.disk.size(names.manifest_path(name)) is not None
    if share and not (found and share.ends):
        writer.window.check(share)
        return False
    return found


def _set_tag(writer: Writer, manifest: Manifest) -> str | None:
    """Also where the step was there: who committed it may have died before this. What failed."""
    if not manifest.tag:
        return None
    try:
        commit.set_tag(writer.disk, manifest.tag, CheckpointName(manifest.step, manifest.epoch))
    except EverstepError as error:
        return f"step {manifest.step} is saved, but not tagged {manifest.tag!r}: {error}"
    return None


def apply_retention(writer: Writer) -> None:
    """Delete what `keep` does not cover. A failure is logged: it costs space, not a checkpoint."""
    if writer.keep is None:
        return
    try:
        retain.apply(writer.disk, writer.keep, writer.cache)
    except Exception:  # the next commit tries again
        log.exception("retention in %s", writer.disk.root)


def is_plain(job: NodeSave) -> bool:
    """Whether it is a record and nothing else: such ones are committed in groups."""
    try:
        said = job.describe()
    except Exception:  # noqa: BLE001 - told when its turn comes
        return False
    return bool(said.get("record")) and not said.get("share") and not said.get("tag")


def _previous(
    writer: Writer, step: int, parent: CheckpointName | None, digest: str | None
) -> Previous:
    """What a record goes on from: a checkpoint of this epoch, the `parent` with that digest, or
    another one. Raises Unavailable where it was never committed: then the chain has ended, and the
    trainer begins another with a whole state."""
    if writer.epoch is None:
        raise Unavailable(writer.unclaimed)
    name = CheckpointName(step, writer.epoch)
    if parent != name or digest is None:
        try:
            digest = catalog.digest_of_manifest(writer.disk, name)
        except Missing as error:
            raise _lost(name) from error
    return Previous(step, writer.epoch, digest)


def _lost(name: CheckpointName | None) -> Unavailable:
    return Unavailable(f"saving a record: {name}, which it follows, was not saved")


def _with_part(manifest: Manifest, said: dict[str, Any] | None, part: Part) -> Manifest:
    if said is None:
        return replace(manifest, parts=(part,))
    record = Record(manifest.step, tuple(said["calls"]), (part,), said.get("derived", {}))
    return replace(manifest, records=(record,))
