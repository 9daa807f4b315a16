"""Which checkpoints stay, how one is deleted, and what nobody needs any more.

Deletion goes in the reverse of the order of writing: first the manifest (from then on the
checkpoint does not exist), then the files that no other manifest reaches. So a crash in between
leaves unreachable files, which gc sweeps, and never a manifest without its data.
"""

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from everstep.errors import Conflict, Corrupt, EverstepError, Missing
from everstep.format.manifest import CheckpointName, Manifest
from everstep.format.node_parts import decode_node_part
from everstep.store import catalog, commit, names, presence
from everstep.tiers.tier import Tier

log = logging.getLogger("everstep")

_IDLE_S = 3600.0

Names = Sequence[CheckpointName]


@dataclass(frozen=True, slots=True)
class Keep:
    """Which checkpoints to keep; what is covered by none of these is deleted after the next commit;
    in a long log, after one of the next.

    last: the newest so many of the run, and of each branch that it left behind. every: in addition,
    each step that is a multiple of this (0: none). tags: in addition, whatever a tag names.
    """

    last: int = 3
    every: int = 0
    tags: bool = True

    def __post_init__(self) -> None:
        """Raises TypeError, ValueError."""
        if [type(self.last), type(self.every), type(self.tags)] != [int, int, bool]:
            raise TypeError(f"Keep needs numbers of checkpoints and steps, and a bool, not {self}")
        if self.last < 1 or self.every < 0:
            raise ValueError(
                f"Keep needs last >= 1 and every >= 0, not last={self.last}, every={self.every}"
            )


def superfluous(
    disk: Tier, checkpoints: Names, keep: Keep, pinned: Set[CheckpointName] = frozenset()
) -> Names:
    """Of these, all of the store, those that `keep` does not cover, oldest first. `pinned`: those
    that stay until they are copied to another tier."""
    run = catalog.run_of(disk, checkpoints)
    left = sorted(set(checkpoints) - set(run), key=lambda name: (name.epoch, name.step))
    branches = (list(own) for _, own in groupby(left, lambda name: name.epoch))
    kept = {name for line in (run, *branches) for name in line[-keep.last :]} | pinned
    if keep.every:
        kept |= {name for name in checkpoints if name.step % keep.every == 0}
    if keep.tags:
        kept |= set(catalog.read_tags(disk).values())
    return [name for name in sorted(checkpoints) if name not in kept]


class Needs(NamedTuple):
    """What a manifest needs: its data files, and the checkpoint that it goes on from (its log, or
    its differences). `takes_replay`: a whole state may be made of it at any time; `ends_chain`: see
    Manifest."""

    files: frozenset[str]
    previous: CheckpointName | None
    takes_replay: bool
    ends_chain: bool


NeedsCache = dict[CheckpointName, tuple[Needs, Needs | None]]
"""Of a manifest, and of the state that was made of a log step."""


def apply(
    disk: Tier,
    keep: Keep,
    cache: NeedsCache | None = None,
    pinned: Set[CheckpointName] = frozenset(),
) -> int:
    """Delete what `keep` does not cover, nor is `pinned`. Returns the bytes freed. `cache` spares
    who does this often the reading of manifests, which never change."""
    cache = {} if cache is None else cache
    with disk.locked(exclusive=True):
        committed = catalog.committed(disk)
        free = _free(disk, committed, superfluous(disk, committed, keep, pinned), cache)
        return _delete(disk, free, cache) if free else 0


def tidy(
    disk: Tier, keep: Keep, cache: NeedsCache, pinned: Set[CheckpointName] = frozenset()
) -> None:
    """`apply`, after a commit. A failure is logged: it costs space, not a checkpoint."""
    try:
        apply(disk, keep, cache, pinned)
    except Exception:  # one of the next commits tries again
        log.exception("retention in %s", disk.root)


def delete(disk: Tier, doomed: Names) -> int:
    """Delete checkpoints and the files that only they needed. Returns the bytes freed.

    Raises Conflict, and deletes nothing, where a log that stays goes on from one of them.
    """
    if not doomed:
        return 0
    presence.check_alone(disk, f"deleting {', '.join(map(str, doomed))} from")
    cache: NeedsCache = {}
    with disk.locked(exclusive=True):
        if stays := [n for n in cut_off(disk, doomed.__contains__, cache) if n not in doomed]:
            asked = [f"{name.step}-{name.epoch}" for name in doomed]
            raise Conflict(
                f"deleting {', '.join(asked)} from {disk.root}: what follows (steps "
                f"{stays[0].step} to {stays[-1].step}) goes on from there, and could not be "
                f"restored any more. To delete that, too: everstep rm {disk.root} "
                f"{' '.join(asked)} --following"
            )
        return _delete(disk, doomed, cache)


def cut_off(
    disk: Tier, is_lost: Callable[[CheckpointName], bool], cache: NeedsCache | None = None
) -> dict[CheckpointName, None]:
    """The checkpoints of which a restore would read, beside themselves, one that is lost; rising.
    What cannot be read goes on from nothing that could be told."""
    found: dict[CheckpointName, None] = {}
    cache = {} if cache is None else cache
    for name in sorted(catalog.committed(disk)):  # each after what is behind it
        with contextlib.suppress(EverstepError):
            behind = _needs(disk, name, cache).previous
            if behind and (behind in found or is_lost(behind)):
                found[name] = None
    return found


def _free(disk: Tier, committed: Names, doomed: Names, cache: NeedsCache) -> Names:
    """Those that no checkpoint outside of `doomed` goes on from. What cannot be read goes on from
    nothing that could be told: as long as it is there, nothing is deleted."""
    stays = set[CheckpointName | None](committed).difference(doomed)
    for name in sorted(committed, reverse=True):  # a log before what it goes on from
        if name in stays:
            with contextlib.suppress(Missing, Corrupt):
                stays.add(_needs(disk, name, cache).previous)
    return [name for name in doomed if name not in stays]


def _delete(disk: Tier, doomed: Names, cache: NeedsCache) -> int:
    committed = catalog.committed(disk)  # again: a bucket is not locked
    needed = _reachable(disk, [name for name in committed if name not in doomed], cache)
    needed |= _told(disk, set(committed))
    files: set[str] = set()
    for name in doomed:
        with contextlib.suppress(EverstepError):  # where none can tell any more, gc frees them
            files |= _needs(disk, name, cache).files
    for tag, name in catalog.read_tags(disk).items():
        if name in doomed:
            disk.delete(names.tag_path(tag))
    _settle_absent(disk, set(catalog.committed(disk)), catalog.newest_epoch(disk))
    for name in sorted(doomed, reverse=True):  # a log before what it goes on from
        disk.delete(names.manifest_path(name))
        if disk.size(names.state_path(name)) is not None:  # last: the log may need it
            disk.delete(names.state_path(name))
        cache.pop(name, None)
    freed = 0
    for path in sorted(files - needed):
        if not path.startswith(names.TABLES):
            freed += disk.size(path) or 0
            disk.delete(path)
    return freed


def sweep(disk: Tier) -> tuple[int, int]:
    """Delete what no manifest reaches: files of attempts that failed, drafts, tables out of use.

    What the newest epoch wrote is left alone, since its writer may be about to commit it; older
    epochs can publish nothing that counts. Returns (files, bytes) freed.
    """
    presence.check_alone(disk, "deleting what nobody needs from")
    with disk.locked(exclusive=True):
        live = catalog.newest_epoch(disk)
        committed = catalog.committed(disk)
        needed = _reachable(disk, committed, {}) | _told(disk, set(committed), live)
        _settle_absent(disk, set(committed), live)
        doomed = {
            f"{names.DATA}/{pack}"
            for pack in disk.list(names.DATA)
            if (of := names.writer_of(pack)) and of.epoch < live
        }
        if not disk.is_directory:  # somebody may just be copying them here
            doomed &= _idle(disk, names.DATA)
        doomed |= _idle(disk, names.TABLES)
        doomed -= needed
        if not disk.is_directory:  # somebody may have begun to write since
            doomed -= _reachable(disk, catalog.committed(disk), {})
        there = set(committed)  # of older epochs, or what was committed, no part comes any more
        doomed.update(_part_documents(disk, lambda n: n in there or n.epoch < live))
        doomed |= _idle(disk, names.WRITERS) | _idle(disk, names.PROBES)
        directories = ["", names.EPOCHS, names.TAGS, names.DATA, names.TABLES]
        directories += [f"{names.CHECKPOINTS}/{name}" for name in disk.list(names.CHECKPOINTS)]
        for directory in directories:
            doomed |= {path for path in _idle(disk, directory) if path.endswith(".tmp")}
        freed = sum(disk.size(path) or 0 for path in doomed)
        for path in sorted(doomed):
            disk.delete(path)
        return len(doomed), freed


def _told(disk: Tier, committed: Set[CheckpointName], since: int = 0) -> set[str]:
    """The packs that part documents name, of epochs from `since` on: of several nodes with stores
    of their own, another one commits what has them, perhaps just now."""
    found: set[str] = set()
    for path in _part_documents(disk, lambda n: n not in committed and n.epoch >= since):
        with contextlib.suppress(Missing, Corrupt):  # of one that is lost nothing comes
            part = decode_node_part(disk.read(path), path).part
            found |= {link.path for link in part.packs} if part else set()
    return found


def _part_documents(disk: Tier, is_wanted: Callable[[CheckpointName], bool]) -> Iterator[str]:
    for name in map(names.parse_checkpoint, disk.list(names.CHECKPOINTS)):
        if name and is_wanted(name):
            yield from catalog.part_documents(disk, name)


def _settle_absent(disk: Tier, committed: Set[CheckpointName], live: int) -> None:
    """Make it durable that there is no manifest where none is seen.

    Whoever unlinked it may have died before its sync: then a power cut would bring back a
    manifest whose files are gone. Directories that no writer will use any more go, too, and a state
    that was made of what is not there any more.
    """
    for directory in disk.list(names.CHECKPOINTS):
        name = names.parse_checkpoint(directory)
        if name and name not in committed:
            if disk.size(names.state_path(name)) is not None:
                disk.delete(names.state_path(name))
            if name.epoch < live:
                disk.delete(f"{names.CHECKPOINTS}/{directory}/manifest.json")
            else:
                disk.sync(f"{names.CHECKPOINTS}/{directory}")


def _idle(disk: Tier, directory: str) -> set[str]:
    """The files in it that nobody touched for an hour: a document is published within seconds."""
    prefix, files = f"{directory}/" if directory else "", disk.files(directory).items()
    since = disk.now() - _IDLE_S if files else 0.0
    return {f"{prefix}{name}" for name, (_, at) in files if at < since}


def _needs(disk: Tier, name: CheckpointName, cache: NeedsCache) -> Needs:
    """What a checkpoint needs, and the state that was made of a log step, which may come at any
    time, and then stays: nothing before it is needed where it stands for the log."""
    own, state = cache.get(name) or (_needs_of(catalog.read_manifest(disk, name)), None)
    if own.takes_replay and (state is None or state.takes_replay):  # else another may come
        found = commit.find_state(disk, name)
        state = _needs_of(found) if found else None
    cache[name] = own, state
    if state is None:
        return own
    previous = None if state.ends_chain else own.previous
    return own._replace(files=own.files | state.files, previous=previous)


def _needs_of(manifest: Manifest) -> Needs:
    files = frozenset(link.path for link in manifest.files)
    previous = manifest.behind.name if manifest.behind else None
    return Needs(files, previous, bool(manifest.records), manifest.ends_chain)


def _reachable(disk: Tier, checkpoints: Iterable[CheckpointName], cache: NeedsCache) -> set[str]:
    """Every data file that a checkpoint needs.

    A manifest that cannot be read protects everything: raises Corrupt.
    """
    needed: set[str] = set()
    for name in checkpoints:
        try:
            needed |= _needs(disk, name, cache).files
        except Corrupt as error:
            raise Corrupt(
                f"{error}. Nothing more is deleted while it is unknown which files this checkpoint "
                f"needs; remove it with: everstep rm {disk.root} {name}"
            ) from error
    return needed
