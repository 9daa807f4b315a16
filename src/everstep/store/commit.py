"""The commit protocol: data, then table, then manifest; each durable before the next begins.

Invariants held here:
* A checkpoint exists if and only if its manifest does, and the manifest is created last.
* Every attempt writes files of new names; a failed one is abandoned, never repaired.
* A writer whose epoch is not the newest publishes nothing.
"""

import os
import secrets
import socket
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from everstep.errors import Conflict, Corrupt, Missing
from everstep.format.document import FORMAT_VERSION, digest_of, seal, unseal
from everstep.format.manifest import FileLink, Manifest, content_of, encode_manifest
from everstep.store import catalog, names
from everstep.store.names import CheckpointName
from everstep.tiers.disk import Disk


def open_store(disk: Disk) -> str:
    """The run id of the store, which is made where there is none. Raises Unavailable, Unsupported, Corrupt."""
    try:
        return _run_of(disk)
    except Missing:
        document = seal({"format": FORMAT_VERSION, "run": uuid.uuid4().hex, "created": now()})
        disk.create(names.STORE, document)
        return _run_of(disk)


def claim_epoch(disk: Disk, parent: int | None, fork: int) -> int:
    """Claim the next epoch by atomic create, and return its number. `parent` and `fork` say where the run
    goes on from: the epoch and step that were restored, or None and 0 for a start from nothing."""
    while True:
        number = catalog.newest_epoch(disk) + 1
        claim = {
            "format": FORMAT_VERSION,
            "parent": parent,
            "fork": fork,
            "created": now(),
            "writer": f"{socket.gethostname()}:{os.getpid()}",
        }
        if disk.create(names.epoch_path(number), seal(claim)):
            return number


def check_epoch(disk: Disk, epoch: int, step: int) -> None:
    """Raises Conflict where a newer epoch exists: its writer has taken the store over."""
    newest = catalog.newest_epoch(disk)
    if newest > epoch:
        raise Conflict(
            f"saving step {step} to {disk.root}: this writer has epoch {epoch}, but epoch {newest} has "
            f"started since (see epochs/{newest:04d}.json for who did). Only the newest writer may go on: stop "
            f"this one, or start it again to go on from the newest checkpoint"
        )


def write_packs(
    disk: Disk, name: CheckpointName, packs: Sequence[memoryview]
) -> tuple[FileLink, ...]:
    """Write each pack to a new file; returns when all are durable."""
    token = secrets.token_hex(4)
    links = []
    try:
        for index, pack in enumerate(packs):
            path = names.pack_path(name, token, index)
            disk.write(path, [pack])
            links.append(FileLink(path, len(pack)))
    except BaseException:
        discard_packs(disk, links)
        raise
    return tuple(links)


def discard_packs(disk: Disk, links: Sequence[FileLink]) -> None:
    """Delete packs that no manifest will name. What cannot be deleted now is left to gc."""
    for link in links:
        try:
            disk.delete(link.path)
        except Exception:  # noqa: BLE001 - the reason why they are discarded matters more
            return


def write_table(disk: Disk, document: bytes | memoryview) -> FileLink:
    """Store a piece table under its content's name, unless it is there."""
    link = table_link(document)
    if not (disk.root / link.path).exists():
        disk.create(link.path, bytes(document))
    return link


def table_link(document: bytes | memoryview) -> FileLink:
    """The link by which a manifest names that table."""
    digest = digest_of(document)
    return FileLink(names.table_path(digest), len(document), digest)


def find_same(disk: Disk, manifest: Manifest) -> bool:
    """Whether this step of this epoch is committed already with equal content; raises Conflict where with other."""
    name = CheckpointName(manifest.step, manifest.epoch)
    try:
        existing = catalog.read_manifest(disk, name)
    except Missing:
        return False
    if _content(existing) == _content(manifest):
        return True
    raise Conflict(
        f"saving step {manifest.step} to {disk.root}: this step is saved already with other content. A step is "
        f"written once: save under the next step, or delete the old one first (everstep rm {name})"
    )


def publish(disk: Disk, manifest: Manifest, document: bytes | None = None) -> None:
    """Create the manifest: the moment at which the checkpoint begins to exist. Its data must be durable."""
    check_epoch(disk, manifest.epoch, manifest.step)
    name = CheckpointName(manifest.step, manifest.epoch)
    if not disk.create(names.manifest_path(name), document or encode_manifest(manifest)):
        raise Conflict(
            f"saving step {manifest.step} to {disk.root}: another writer of the same epoch was faster"
        )


def set_tag(disk: Disk, tag: str, name: CheckpointName) -> None:
    """Let `tag` name this checkpoint; a tag that exists moves."""
    path = names.tag_path(tag)
    document = seal(
        {"format": FORMAT_VERSION, "step": name.step, "epoch": name.epoch, "created": now()}
    )
    disk.delete(path)
    disk.create(path, document)


def now() -> str:
    """The time as the format writes it: UTC, ISO 8601, milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _run_of(disk: Disk) -> str:
    value = unseal(disk.read(names.STORE), disk.root / names.STORE)
    if not isinstance(value.get("run"), str):
        raise Corrupt(f"reading {disk.root / names.STORE}: it names no run")
    return value["run"]


def _content(manifest: Manifest) -> tuple[Any, ...]:
    return (
        [content_of(part) for part in manifest.parts],
        manifest.objects,
        manifest.hyperparameters,
    )
