"""What a store holds: its epochs, checkpoints, tags and documents. Reading only."""

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import Any

from everstep.errors import Corrupt, Missing
from everstep.format.document import digest_of, natural, uncollected, unseal
from everstep.format.manifest import (
    CheckpointName,
    Manifest,
    Part,
    Previous,
    Stream,
    check_follows,
    check_table,
    decode_manifest,
)
from everstep.format.node_parts import NodePart, decode_node_part
from everstep.format.streams import decode_part
from everstep.format.tables import Table, decode_table
from everstep.store import names
from everstep.store.lineage import Epoch, current
from everstep.tiers.tier import Readable

log = logging.getLogger("everstep")

_NEWEST_MAX = 16
_STORE = {"run": str, "from?": {"store": str, "run": str, "step": natural, "epoch": natural}}
_EPOCH = {
    "parent": (None, natural),
    "fork": natural,
    "created": str,
    "writer": str,
    "attachment?": (None, str),
}
_TAG = {"step": natural, "epoch": natural}
_UNPROVEN = {"checkpoints": [str], "problem": str}


def read_run(disk: Readable) -> str:
    """The run id of a store. Raises Missing where there is none, Corrupt, Unsupported."""
    return str(unseal(disk.read(names.STORE), disk.root / names.STORE, _STORE)["run"])


def read_origin(disk: Readable) -> dict[str, Any] | None:
    """The checkpoint with which the run of a store began, if that was another run's: `step`,
    `epoch`, `run`, and the `store` in which that lay. Raises as read_run."""
    return unseal(disk.read(names.STORE), disk.root / names.STORE, _STORE).get("from")


def claimed(disk: Readable) -> list[int]:
    """The numbers of the claimed epochs, rising; reads one directory, no file."""
    numbers = (name.partition(".") for name in disk.list(names.EPOCHS))
    return sorted(int(stem) for stem, _, kind in numbers if kind == "json" and stem.isdigit())


def newest_epoch(disk: Readable) -> int:
    """The highest claimed epoch, 0 where there is none."""
    return max(claimed(disk), default=0)


def known_epochs(disk: Readable, checkpoints: Iterable[str] | None = None) -> list[int]:
    """The numbers of the claimed epochs and of those that have checkpoints, rising: a claim may be
    lost. `checkpoints`: the names of their directories, where they are known."""
    checkpoints = disk.list(names.CHECKPOINTS) if checkpoints is None else checkpoints
    found = {name.rpartition("-")[2] for name in checkpoints}
    return sorted({*claimed(disk), *(int(number) for number in found if number.isdecimal())})


def read_epoch(disk: Readable, number: int) -> Epoch:
    """The claim of an epoch. Raises Missing, Corrupt."""
    path = names.epoch_path(number)
    value = unseal(disk.read(path), disk.root / path, _EPOCH)
    parent, fork, created, writer = (value[key] for key in ("parent", "fork", "created", "writer"))
    return Epoch(number, parent, fork, created, writer, value.get("attachment"))


def find_attachment(disk: Readable, attachment: str) -> int | None:
    """The epoch that this claim of a run got; None where it has none (yet)."""
    for number in reversed(claimed(disk)[-_NEWEST_MAX:]):
        with contextlib.suppress(Corrupt, Missing):
            if read_epoch(disk, number).attachment == attachment:
                return number
    return None


def read_epochs(disk: Readable, checkpoints: Iterable[str] | None = None) -> dict[int, Epoch]:
    """All epochs by number; `checkpoints`: see known_epochs. One whose claim is damaged or gone is
    told from its oldest manifest, which names the checkpoint that it goes on from, and the log says
    so."""
    epochs: dict[int, Epoch] = {}
    for number in known_epochs(disk, checkpoints):
        try:
            epochs[number] = read_epoch(disk, number)
        except (Corrupt, Missing) as error:
            log.warning("%s. It is told from the manifests of the epoch instead", error)
            epochs[number] = _epoch_from_manifests(disk, number)
    return epochs


def _epoch_from_manifests(disk: Readable, number: int) -> Epoch:
    own = [name for name in committed(disk) if name.epoch == number]
    if own:
        parent = read_manifest(disk, own[0]).parent
        if parent is None:
            return Epoch(number, None, 0)
        if parent["epoch"] != number:
            return Epoch(number, parent["epoch"], parent["step"])
    # Its first checkpoints are gone, or it wrote none: then it went on from the epoch before it.
    before = max((other for other in claimed(disk) if other < number), default=None)
    fork = max((name.step for name in committed(disk) if name.epoch == before), default=0)
    return Epoch(number, before, min(fork, own[0].step - 1) if own else fork)


def committed(disk: Readable) -> list[CheckpointName]:
    """Every checkpoint of the store, on whichever branch: those whose manifest exists."""
    there = disk.holders(names.CHECKPOINTS, names.MANIFEST)
    return [name for name in map(names.parse_checkpoint, there) if name]


def lineage(disk: Readable) -> list[CheckpointName]:
    """The checkpoints of the run as it is now, by rising step."""
    return run_of(disk, committed(disk))


def run_of(disk: Readable, checkpoints: Iterable[CheckpointName]) -> list[CheckpointName]:
    """Which of these, all of the store, belong to the run as it is now; by rising step."""
    epochs = read_epochs(disk, map(str, checkpoints))
    return [*current(epochs, sorted(checkpoints, reverse=True))][::-1]


def newest_first(disk: Readable) -> Iterator[CheckpointName]:
    """The same as `lineage`, by falling step; listed when the first is asked for, and each looked
    for when it is: a log may have thousands, of which a restore wants one."""
    listed = disk.list(names.CHECKPOINTS)
    if len({*map(len, listed)}) > 1:  # then they are not sorted by their numbers
        listed.sort(key=lambda name: names.parse_checkpoint(name) or (0, 0))
    epochs = read_epochs(disk, listed)
    found = filter(None, map(names.parse_checkpoint, reversed(listed)))
    yield from current(epochs, (name for name in found if is_there(disk, name)))


def is_there(disk: Readable, name: CheckpointName) -> bool:
    """Whether there is, at this moment, a checkpoint of this name."""
    return disk.size(names.manifest_path(name)) is not None


def read_manifest(disk: Readable, name: CheckpointName) -> Manifest:
    """Raises Missing, Corrupt, Unsupported."""
    return read_manifest_document(disk, name)[1]


def read_chain(disk: Readable, name: CheckpointName) -> list[Manifest]:
    """A checkpoint and what it follows: a state first, then the logs that go on from it, and the
    one asked for last. Raises Missing where that one is not there, Corrupt where another is not, or
    is not the one that was followed."""
    return list(followed(disk, name))[::-1]


def followed(
    disk: Readable, name: CheckpointName, *, with_bases: bool = False
) -> Iterator[Manifest]:
    """The same from the last to the first, and then what differences are to, if that is wanted;
    raises what there is to raise when it comes to it."""
    manifest: Manifest | None = _whole(disk, read_manifest(disk, name))
    while manifest is not None:
        yield manifest
        behind = check_previous(disk, manifest)
        manifest = behind if manifest.previous or with_bases else None


def check_previous(disk: Readable, manifest: Manifest) -> Manifest | None:
    """What a log goes on from, or what differences are to; None for a state without. Raises Corrupt
    where it is not there, or not what it was."""
    name = manifest.name
    check_follows(manifest, name)
    return _whole(disk, read_behind(disk, manifest.behind, name)) if manifest.behind else None


def read_behind(disk: Readable, behind: Previous, later: object) -> Manifest:
    """A checkpoint that a `later` one needs. Raises Corrupt as check_previous."""
    name = behind.name
    try:
        document, found = read_manifest_document(disk, name)
    except Missing as error:
        raise Corrupt(f"{error}, but {later} goes on from it") from error
    if digest_of(document) != behind.digest:
        raise Corrupt(f"reading {disk.root}: {name} is not the checkpoint that {later} follows")
    return found


def read_state(disk: Readable, name: CheckpointName) -> Manifest | None:
    """The state beside a log step, which was made of it, or is a base that ended there; None where
    there is none. Raises Corrupt."""
    path = names.state_path(name)
    try:
        found = decode_manifest(disk.read(path), disk.root / path)
    except Missing:
        return None
    check_follows(found, name)
    if found.name != name or not found.parts:
        raise Corrupt(f"reading {disk.root / path}: it is not the whole state of {name}")
    return found


def read_whole(disk: Readable, name: CheckpointName) -> Manifest | None:
    """A whole state, or what was made of a log step, be it exact or not; None where it takes a
    replay. Raises Missing, Corrupt."""
    manifest = read_manifest(disk, name)
    state = read_state(disk, name) if manifest.records else manifest
    return None if state is None or state.records else state


def _whole(disk: Readable, manifest: Manifest) -> Manifest:
    """A step that takes a replay as the state that was made of it, where one stands for it: nothing
    is before it."""
    if not manifest.records:
        return manifest
    found = read_state(disk, manifest.name)
    return found if found and found.ends_chain else manifest


def digest_of_manifest(disk: Readable, name: CheckpointName) -> str:
    """By which a log names the checkpoint that it follows. Raises Missing, Corrupt."""
    return digest_of(read_manifest_document(disk, name)[0])


def read_manifest_document(disk: Readable, name: CheckpointName) -> tuple[bytes, Manifest]:
    """A manifest, with its bytes. Raises as read_manifest."""
    path = names.manifest_path(name)
    document = disk.read(path)
    manifest = decode_manifest(document, disk.root / path)
    if manifest.name != name:
        raise Corrupt(
            f"reading {disk.root / path}: it is the manifest of {manifest.name}, moved or copied "
            f"here"
        )
    return document, manifest


def read_table(disk: Readable, part: Part) -> Table:
    """The piece table of a part, checked against the manifest's digest, packs and digests."""
    return read_table_document(disk, part)[1]


@uncollected
def read_table_document(disk: Readable, part: Part) -> tuple[bytes, Table]:
    """The same, with its bytes."""
    path = part.table.path
    document = _needed(disk, path)
    table = decode_table(document, disk.root / path)
    if digest_of(document) != part.table.digest:
        raise Corrupt(
            f"reading {disk.root / path}: it is another piece table than the manifest names"
        )
    check_table(table, part, disk.root / path)
    return document, table


def read_stream(disk: Readable, stream: Stream) -> Part:
    """The part of a stream. Raises Corrupt."""
    path = stream.part.path
    document = _needed(disk, path)
    part = decode_part(document, disk.root / path)
    said = digest_of(document), part.table, part.packs
    if said != (stream.part.digest, stream.table, stream.packs):
        raise Corrupt(f"reading {disk.root / path}: it is another stream than the manifest names")
    return part


def _needed(disk: Readable, path: str) -> bytes:
    try:
        return disk.read(path)
    except Missing as error:
        raise Corrupt(f"{error}, but a manifest needs it") from error


def added_bytes(manifest: Manifest) -> int:
    """The bytes of the files that were written for a checkpoint, and not for one before it."""
    steps = {manifest.step, *(part.steps for part in manifest.all_parts)}
    own = {CheckpointName(step, manifest.epoch) for step in steps}
    packs = {link.path: link.size for link in manifest.files}
    return sum(size for path, size in packs.items() if names.writer_of(path) in own)


def tags(disk: Readable) -> list[str]:
    """Every tag; reads one directory, no file."""
    found = (file_name.rpartition(".") for file_name in disk.list(names.TAGS))
    return [stem for stem, _, kind in found if kind == "json"]


def read_tag(disk: Readable, tag: str) -> CheckpointName:
    """What it names. Raises Missing, Corrupt."""
    path = f"{names.TAGS}/{tag}.json"
    value = unseal(disk.read(path), disk.root / path, _TAG)
    return CheckpointName(value["step"], value["epoch"])


def read_tags(disk: Readable, *, are_all_needed: bool = True) -> dict[str, CheckpointName]:
    """Each tag and the checkpoint that it names. Raises Corrupt, unless the others will do."""
    found: dict[str, CheckpointName] = {}
    ignored = (Missing,) if are_all_needed else (Missing, Corrupt)
    for tag in tags(disk):
        with contextlib.suppress(*ignored):  # deleted meanwhile
            found[tag] = read_tag(disk, tag)
    return found


def find_part(disk: Readable, name: CheckpointName, node: int, attempt: str) -> NodePart | None:
    """What one of several nodes says of a checkpoint before the commit, in this attempt; None where
    it has said nothing yet. Raises Corrupt."""
    path = names.part_path(name, node)
    try:
        found = decode_node_part(disk.read(path), disk.root / path)
    except Missing:
        return None
    return found if (found.attempt, found.node) == (attempt, node) else None


def part_documents(disk: Readable, name: CheckpointName) -> list[str]:
    """The paths of all of these."""
    directory = f"{names.CHECKPOINTS}/{name}"
    found = disk.list(directory)
    return [f"{directory}/{n}" for n in found if n.startswith("part-") and n.endswith(".json")]


def read_unproven(disk: Readable) -> dict[CheckpointName, str]:
    """The checkpoints of which a replay has come to other bytes than the run had, or may have; and
    what was wrong. A document that cannot be read says nothing."""
    found: dict[CheckpointName, str] = {}
    for file_name in disk.list(names.UNPROVEN):
        path = f"{names.UNPROVEN}/{file_name}"
        try:
            value = unseal(disk.read(path), disk.root / path, _UNPROVEN)
        except (Corrupt, Missing) as error:
            log.warning("%s", error)
            continue
        known = map(names.parse_checkpoint, value["checkpoints"])
        found |= {name: value["problem"] for name in known if name}
    return found


def find(disk: Readable, reference: int | str | None) -> CheckpointName:
    """The checkpoint meant by a reference; raises Missing, and says what there is.

    A reference is a step of the run as it is now, a tag, a full name such as "120-3" (step-epoch,
    on any branch), or None: the newest. Full names and tags need no epoch to be readable. Raises
    ValueError where it is none of these.
    """
    if reference is None:
        if newest := next(newest_first(disk), None):
            return newest
        raise Missing(f"there is no checkpoint in {disk.root}")
    if type(reference) not in (int, str):
        raise ValueError(f"step must be a step, a tag or 'step-epoch', not {reference!r}")
    everything = committed(disk)
    if isinstance(reference, str) and not reference.isdecimal():
        named = names.parse_checkpoint(reference) or read_tags(disk).get(reference)
        if named in everything:
            return named
        there = [each for each in everything if named and each.step == named.step]
        known = ", ".join(f"{each.step}-{each.epoch}" for each in there)
        hint = f"of that step it has {known}" if there else f"its tags are {tags(disk)}"
        raise Missing(f"there is no checkpoint or tag {reference!r} in {disk.root}; {hint}")
    run = run_of(disk, everything)
    step = int(reference)
    if chosen := next((name for name in run if name.step == step), None):
        return chosen
    has = "it has none"
    if run:
        nearest = min(run, key=lambda name: abs(name.step - step)).step
        has = f"it has {len(run)} from {run[0].step} to {run[-1].step}, the nearest is {nearest}"
    left = [f"{name.step}-{name.epoch}" for name in everything if name.step == step]
    branch = f" (step {step} exists on a branch left behind: ask for {left[-1]!r})" if left else ""
    raise Missing(f"there is no checkpoint of step {step} in {disk.root}: {has}{branch}")
