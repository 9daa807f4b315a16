"""Which checkpoints stay, how one is deleted, and what nobody needs any more.

Deletion goes in the reverse of the order of writing: first the manifest (from then on the
checkpoint does not exist), then the files that no other manifest reaches. So a crash in between
leaves unreachable files, which gc sweeps, and never a manifest without its data.
"""

import time
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

from everstep.errors import Conflict, Corrupt, EverstepError, Missing
from everstep.store import catalog, names
from everstep.store.lineage import branches, current
from everstep.store.names import CheckpointName
from everstep.tiers.disk import Disk

_IDLE_S = 3600.0


@dataclass(frozen=True, slots=True)
class Keep:
    """Which checkpoints to keep; what is covered by none of these is deleted after the next commit.

    last: the newest so many of the run, and of each branch that it left behind. every: in addition,
    each step that is a multiple of this (0: none). tags: in addition, whatever a tag names.
    """

    last: int = 3
    every: int = 0
    tags: bool = True

    def __post_init__(self) -> None:
        if self.last < 1 or self.every < 0:
            raise ValueError(
                f"Keep needs last >= 1 and every >= 0, not last={self.last}, every={self.every}"
            )

    def to_json(self) -> dict[str, Any]:
        """As it goes to the keeper."""
        return {"last": self.last, "every": self.every, "tags": self.tags}


def superfluous(disk: Disk, keep: Keep) -> list[CheckpointName]:
    """The checkpoints that `keep` does not cover, oldest first."""
    checkpoints = catalog.committed(disk)
    epochs = catalog.read_epochs(disk)
    lines = [current(epochs, checkpoints), *branches(epochs, checkpoints).values()]
    kept = {name for line in lines for name in line[-keep.last :]}
    if keep.every:
        kept |= {name for name in checkpoints if name.step % keep.every == 0}
    if keep.tags:
        kept |= set(catalog.read_tags(disk).values())
    return [name for name in sorted(checkpoints) if name not in kept]


@dataclass(frozen=True, slots=True)
class Needs:
    """What a checkpoint needs: its data files, and the checkpoint that its log goes on from.
    `takes_replay`: a whole state may have been made of it since."""

    files: frozenset[str]
    previous: CheckpointName | None
    takes_replay: bool


NeedsCache = dict[CheckpointName, Needs]


def apply(disk: Disk, keep: Keep, cache: NeedsCache | None = None) -> int:
    """Delete what `keep` does not cover. Returns the bytes freed."""
    cache = {} if cache is None else cache
    if not _free(disk, superfluous(disk, keep), cache):
        return 0
    with disk.locked(exclusive=True):  # decided again: a tag may have been set meanwhile
        return _delete(disk, _free(disk, superfluous(disk, keep), cache), cache)


def delete(disk: Disk, doomed: Sequence[CheckpointName], cache: NeedsCache | None = None) -> int:
    """Delete checkpoints and the files that only they needed. Returns the bytes freed.

    `cache` spares a caller that deletes often the reading of manifests, which never change. Raises
    Conflict, and deletes nothing, where a log that stays goes on from one of them.
    """
    if not doomed:
        return 0
    cache = {} if cache is None else cache
    with disk.locked(exclusive=True):
        if needed := sorted(set(doomed) - set(_free(disk, doomed, cache))):
            logs = [
                name
                for name in catalog.committed(disk)
                if name not in doomed and _previous(disk, name, cache) in doomed
            ]
            raise Conflict(
                f"deleting {', '.join(map(str, needed))} from {disk.root}: "
                f"{', '.join(map(str, logs))} is a log that goes on from there. Delete what "
                f"follows first, the newest first"
            )
        return _delete(disk, doomed, cache)


def _free(disk: Disk, doomed: Sequence[CheckpointName], cache: NeedsCache) -> list[CheckpointName]:
    """Those that no checkpoint outside of `doomed` goes on from."""
    held = set()
    for name in set(catalog.committed(disk)) - set(doomed):
        behind = _previous(disk, name, cache)
        while behind and behind not in held:
            held.add(behind)
            behind = _previous(disk, behind, cache)
    return [name for name in doomed if name not in held]


def _previous(disk: Disk, name: CheckpointName, cache: NeedsCache) -> CheckpointName | None:
    """What a checkpoint's log goes on from. One that is gone, or that none can read, goes on from
    nothing any more."""
    try:
        return _needs(disk, name, cache).previous
    except (Missing, Corrupt):
        return None


def _delete(disk: Disk, doomed: Sequence[CheckpointName], cache: NeedsCache) -> int:
    needed = _reachable(
        disk, [name for name in catalog.committed(disk) if name not in doomed], cache
    )
    files = {path for name in doomed for path in _files(disk, name, cache)}
    for tag, name in catalog.read_tags(disk).items():
        if name in doomed:
            disk.delete(names.tag_path(tag))
    freed = 0
    _settle_absent(disk, set(catalog.committed(disk)), catalog.newest_epoch(disk))
    for name in sorted(doomed, reverse=True):  # a log before what it goes on from
        if disk.size(names.state_path(name)) is not None:
            disk.delete(names.state_path(name))
        disk.delete(names.manifest_path(name))
        cache.pop(name, None)
    for path in sorted(files - needed):
        if not path.startswith(names.TABLES):
            freed += disk.size(path) or 0
            disk.delete(path)
    return freed


def sweep(disk: Disk) -> tuple[int, int]:
    """Delete what no manifest reaches: files of attempts that failed, drafts, tables out of use.

    What the newest epoch wrote is left alone, since its writer may be about to commit it; older
    epochs can publish nothing that counts. Returns (files, bytes) freed.
    """
    with disk.locked(exclusive=True):
        live = catalog.newest_epoch(disk)
        committed = catalog.committed(disk)
        needed = _reachable(disk, committed, {})
        _settle_absent(disk, set(committed), live)
        packs = [f"{names.DATA}/{name}" for name in disk.list(names.DATA)]
        doomed = {
            path for path in packs if (names.epoch_of_pack(path.rpartition("/")[2]) or live) < live
        }
        doomed.update(_idle(disk, names.TABLES))
        doomed -= needed
        directories = ["", names.EPOCHS, names.TAGS, names.DATA, names.TABLES]
        directories += [f"{names.CHECKPOINTS}/{name}" for name in disk.list(names.CHECKPOINTS)]
        for directory in directories:
            doomed.update(path for path in _idle(disk, directory) if path.endswith(".tmp"))
        freed = sum(disk.size(path) or 0 for path in doomed)
        for path in sorted(doomed):
            disk.delete(path)
        return len(doomed), freed


def _settle_absent(disk: Disk, committed: Set[CheckpointName], live: int) -> None:
    """Make it durable that there is no manifest where none is seen.

    Whoever unlinked it may have died before its sync: then a power cut would bring back a
    manifest whose files are gone. Directories that no writer will use any more go, too.
    """
    for directory in disk.list(names.CHECKPOINTS):
        name = names.parse_checkpoint(directory)
        if name and name not in committed:
            if name.epoch < live:
                disk.delete(f"{names.CHECKPOINTS}/{directory}/manifest.json")
            else:
                disk.sync(f"{names.CHECKPOINTS}/{directory}")


def _idle(disk: Disk, directory: str) -> list[str]:
    """Files that nobody touched for an hour: a document is published within seconds."""
    prefix = f"{directory}/" if directory else ""
    found = []
    for name in disk.list(directory):
        path = disk.root / directory / name
        try:
            if path.is_file() and time.time() - path.stat().st_mtime > _IDLE_S:
                found.append(f"{prefix}{name}")
        except FileNotFoundError:
            continue
    return found


def _files(disk: Disk, name: CheckpointName, cache: NeedsCache) -> frozenset[str]:
    """What a doomed checkpoint needed; nothing where none can tell any more (gc frees it then)."""
    try:
        return _needs(disk, name, cache).files | _state_files(disk, name)
    except EverstepError:
        return frozenset()


def _state_files(disk: Disk, name: CheckpointName) -> frozenset[str]:
    """Of the whole state that was made of a log step; never cached, since it comes later."""
    state = catalog.read_state(disk, name)
    return frozenset(link.path for link in state.files) if state else frozenset()


def _needs(disk: Disk, name: CheckpointName, cache: NeedsCache) -> Needs:
    if name not in cache:
        manifest = catalog.read_manifest(disk, name)
        behind = manifest.previous
        cache[name] = Needs(
            frozenset(link.path for link in manifest.files),
            CheckpointName(behind.step, behind.epoch) if behind else None,
            bool(manifest.records),
        )
    return cache[name]


def _reachable(disk: Disk, checkpoints: Iterable[CheckpointName], cache: NeedsCache) -> set[str]:
    """Every data file that a checkpoint needs.

    A manifest that cannot be read protects everything: raises Corrupt.
    """
    needed: set[str] = set()
    for name in checkpoints:
        try:
            needs = _needs(disk, name, cache)
            needed |= needs.files | (
                _state_files(disk, name) if needs.takes_replay else frozenset()
            )
        except Corrupt as error:
            raise Corrupt(
                f"{error}. Nothing more is deleted while it is unknown which files this checkpoint "
                f"needs; remove it with: everstep rm {name}"
            ) from error
    return needed
