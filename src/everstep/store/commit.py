"""The commit protocol: data, then table, then manifest; each durable before the next begins.

Invariants held here:
* A checkpoint exists if and only if its manifest does, and the manifest is created last.
* Every attempt writes files of new names; a failed one is abandoned, never repaired, and its
  files are deleted only where it is durable that no manifest names them.
* A writer whose epoch is not the newest publishes nothing.
"""

import contextlib
import logging
import os
import secrets
import socket
import uuid
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import TypeVar

from everstep.errors import Conflict, EverstepError, Missing, Unavailable, Unsupported
from everstep.format.document import digest_of, seal
from everstep.format.manifest import CheckpointName, Manifest, encode_manifest
from everstep.format.tables import FileLink
from everstep.store import catalog, names
from everstep.tiers.tier import Readable, Target, Tier

log = logging.getLogger("everstep")
T = TypeVar("T")

_UNSEEN = 1 << 20
"""Numbers of which one is taken by chance, where nobody can be asked."""


def open_store(disk: Tier, remote: Tier | None = None) -> str:
    """The run id of the store, which is made where there is none: of the run that the remote tier
    has, where it has one.

    Raises Unavailable, Unsupported, Corrupt; Conflict where that has another run.
    """
    is_there = remote and _answer(partial(remote.size, names.STORE)) is not None
    found = remote if is_there else None
    if disk.size(names.STORE) is None:
        new = {"run": uuid.uuid4().hex, "created": now()}
        disk.create(names.STORE, found.read(names.STORE) if found else seal(new))
    run = catalog.read_run(disk)
    if found and (other := catalog.read_run(found)) != run:
        raise Conflict(
            f"opening {disk.root}: it has run {run}, and {found.root} has run {other}. Choose "
            f"another place for one of them; to start from the other run's checkpoints, "
            f"restore(from_store=...)"
        )
    return run


def _answer(question: Callable[[], T]) -> T | None:
    """What another tier says; None where it does not answer."""
    try:
        return question()
    except (Missing, Unavailable, Unsupported) as error:
        log.warning("%s. Going on without that tier", error)
        return None


def claim_epoch(
    disk: Tier,
    parent: CheckpointName | None,
    attachment: str | None = None,
    remote: Tier | None = None,
) -> int:
    """Claim the next epoch by atomic create, and return its number.

    `parent`: the checkpoint that the run goes on from, None for a start from nothing; `attachment`:
    see Epoch; where it has one already, that is returned. Makes the store where there is none. The
    remote tier has the claim, too: where two writers have stores of their own, one gets the number.
    Where it does not answer, the number is one that nobody else takes, and `copy.lead` tells later
    whether another writer has gone on.
    """
    open_store(disk)
    if attachment is not None and (known := catalog.find_attachment(disk, attachment)):
        return known
    while True:
        is_told = remote and _answer(partial(learn_epochs, disk, remote)) is not None
        shared = remote if is_told else None
        skipped = secrets.randbelow(_UNSEEN) if remote and not shared else 0
        number = max(catalog.known_epochs(disk), default=0) + 1 + skipped
        claim = {
            "parent": parent and parent.epoch,
            "fork": parent.step if parent else 0,
            "created": now(),
            "writer": f"{socket.gethostname()}:{os.getpid()}",
            **({} if attachment is None else {"attachment": attachment}),
        }
        path, document = names.epoch_path(number), seal(claim)
        if not disk.create(path, document):
            continue
        if shared is None or _answer(partial(_create_there, shared, path, document)) is not False:
            return number  # who cannot be written to has no say


def _create_there(tier: Tier, path: str, document: bytes) -> bool:
    return tier.size(names.STORE) is None or tier.create(path, document)


def learn_epochs(disk: Tier, tier: Readable) -> list[int]:
    """Take over the claims of another tier; which are new. Raises Missing, Unavailable."""
    new = sorted(set(catalog.claimed(tier)) - set(catalog.claimed(disk)))
    for number in new:
        disk.create(names.epoch_path(number), tier.read(names.epoch_path(number)))
    return new


def check_epoch(disk: Readable, epoch: int, step: int) -> None:
    """Raises Conflict where a newer epoch exists (its writer has taken the store over), or this one
    does not exist any more."""
    newest = catalog.newest_epoch(disk)
    if newest < epoch:
        raise Conflict(
            f"saving step {step} to {disk.root}: this writer has epoch {epoch}, but its claim "
            f"epochs/{epoch:04d}.json is gone: the store was removed, or another was put in its "
            f"place, while it was in use. Stop this writer and start it again"
        )
    if newest > epoch:
        raise Conflict(
            f"saving step {step} to {disk.root}: this writer has epoch {epoch}, but epoch "
            f"{newest} has started since (see epochs/{newest:04d}.json for who did). Only the "
            f"newest writer may go on: stop this one, or start it again to go on from the newest "
            f"checkpoint"
        )


def discard_packs(disk: Tier, name: CheckpointName, paths: Iterable[str]) -> None:
    """Delete the packs of a failed attempt at `name`; where that exists, those that it does not
    have. What cannot be deleted now is left to gc.

    A manifest (or state.json) that was linked, but whose sync failed, may be on the medium: so it
    is read, and its absence is made durable first.
    """
    with contextlib.suppress(Exception):  # why they are discarded matters more
        named = set[str]()
        with contextlib.suppress(Missing):
            named.update(link.path for link in catalog.read_manifest(disk, name).files)
        if state := catalog.read_state(disk, name):
            named.update(link.path for link in state.files)
        disk.sync(f"{names.CHECKPOINTS}/{name}")
        for path in paths:
            if path not in named:
                disk.delete(path)


def write_table(disk: Target, document: bytes | memoryview) -> FileLink:
    """Store a piece table under its content's name, unless it is there."""
    link = table_link(document)
    if not disk.holds(link.path):
        disk.create(link.path, bytes(document))
    return link


def table_link(document: bytes | memoryview) -> FileLink:
    """The link by which a manifest names that table."""
    digest = digest_of(document)
    return FileLink(names.table_path(digest), len(document), digest)


def publish(
    disk: Tier,
    manifest: Manifest,
    document: bytes | None = None,
    tables: Sequence[bytes | memoryview] = (),
    node: int | None = None,
) -> None:
    """Write the tables, then create the manifest: from then on the checkpoint exists.

    Its packs must be durable; `node`: those of this one of several nodes alone lie here. The store
    is locked (shared), so that no gc takes a table away, or the packs of an epoch that has just
    been superseded, between the check and the manifest.
    """
    name = manifest.name
    with disk.locked(exclusive=False):
        check_epoch(disk, manifest.epoch, manifest.step)
        behind = manifest.behind
        if behind and not catalog.is_there(disk, behind.name):  # as nothing followed it till now
            raise Unavailable(
                f"saving step {manifest.step} to {disk.root}: {behind.name}, which it goes on "
                f"from, was deleted meanwhile. A whole state is saved next"
            )
        check_shared(disk, manifest, node)
        for table in tables:
            write_table(disk, table)
        if disk.size(names.state_path(name)) is not None:  # of one of this name that was deleted
            disk.delete(names.state_path(name))
        if not disk.create(names.manifest_path(name), document or encode_manifest(manifest)):
            raise Conflict(
                f"saving step {manifest.step} to {disk.root}: another writer of epoch "
                f"{manifest.epoch} was faster"
            )


def find_state(disk: Tier, name: CheckpointName) -> Manifest | None:
    """The whole state that was made of a log step, durably; None where there is none. Whoever made
    it may have died before its sync, and what comes before it must not go then. Raises Corrupt."""
    return catalog.read_state(disk, name) if disk.holds(names.state_path(name)) else None


def publish_state(
    disk: Tier, manifest: Manifest, log_digest: str | None, table: bytes | None = None
) -> None:
    """Put the whole state of a log step, which was made of it, or is a base that ends there, beside
    its manifest, whose digest is `log_digest`; in the place of a base that was spread over several
    steps, if there is one. Its packs must be durable. `table`: unless it is there. Raises Missing
    where the step was deleted meanwhile, Unavailable where a file was, Conflict where somebody else
    has made it whole."""
    name = manifest.name
    what = f"making {name} of {disk.root} whole"
    with disk.locked(exclusive=False):  # shortly: whoever deletes waits for it
        if not disk.holds(names.manifest_path(name)):
            raise Missing(f"{what}: it was deleted meanwhile")
        if catalog.digest_of_manifest(disk, name) != log_digest:
            raise Conflict(f"{what}: it was saved anew meanwhile")
        if table is not None:
            write_table(disk, table)
        for link in manifest.files:
            if disk.size(link.path) != link.size:
                raise Unavailable(f"{what}: {link.path} was deleted meanwhile")
        found = catalog.read_state(disk, name)
        if found and not found.is_spread:
            raise Conflict(f"{what}: another process was faster")
        if found and found.exact and not manifest.exact:  # what the log goes on from may be gone
            raise Conflict(
                f"{what}: an exact base stands there, which a state that is not exact (as on "
                f"another build or machine, or of a GPU) must not replace. Materialise a later step"
            )
        document, path = encode_manifest(manifest), names.state_path(name)
        if found:
            disk.replace(path, document)
        elif not disk.create(path, document):
            raise Conflict(f"{what}: another process was faster")


def set_tag(disk: Target, tag: str, name: CheckpointName) -> None:
    """Let `tag` name this checkpoint; a tag that exists moves."""
    disk.replace(names.tag_path(tag), seal({**name._asdict(), "created": now()}))


def note_unproven(
    disk: Tier, name: CheckpointName, unproven: Iterable[CheckpointName], problem: str
) -> None:
    """Remember, where the store can be written to, what a replay to this checkpoint has shown of
    these: they are tried last from now on."""
    checkpoints = [str(each) for each in sorted(unproven)]
    document = seal({"checkpoints": checkpoints, "problem": problem})
    try:
        disk.replace(f"{names.UNPROVEN}/{name}.json", document)
    except EverstepError as error:
        log.warning("%s. So the next restore tries them again", error)


def now() -> str:
    """The time as the format writes it: UTC, ISO 8601, milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def check_shared(disk: Tier, manifest: Manifest, node: int | None = None) -> None:
    """What it has of earlier checkpoints may have been deleted since, as nothing else had it: the
    store is locked meanwhile. `node`: see publish. Raises Unavailable."""
    name = manifest.name
    parts = [part for part in manifest.parts if node in (None, part.rank)]
    of_parts = (link for part in parts for link in part.packs)
    of_streams = (link for stream in manifest.streams.values() for link in stream.packs)
    for link in (*of_parts, *of_streams):
        if not names.is_new_in(link.path, name) and disk.size(link.path) != link.size:
            raise Unavailable(
                f"saving step {manifest.step} to {disk.root}: {link.path}, which has what has not "
                f"changed since an earlier step, was deleted meanwhile. It is written anew next"
            )
