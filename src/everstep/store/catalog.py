"""What a store holds: its epochs, checkpoints, tags and documents. Reading only."""

from everstep.errors import Missing
from everstep.format.document import unseal
from everstep.format.manifest import (
    Manifest,
    Part,
    Table,
    check_table,
    decode_manifest,
    decode_table,
)
from everstep.store import names
from everstep.store.lineage import Epoch, current
from everstep.store.names import CheckpointName
from everstep.tiers.disk import Disk


def read_epochs(disk: Disk) -> dict[int, Epoch]:
    """All epochs by number."""
    epochs: dict[int, Epoch] = {}
    for file_name in disk.list(names.EPOCHS):
        stem, dot, kind = file_name.partition(".")
        if kind == "json" and stem.isdigit():
            path = f"{names.EPOCHS}/{file_name}"
            value = unseal(disk.read(path), disk.root / path)
            epochs[int(stem)] = Epoch(
                int(stem), value["parent"], value["fork"], value["created"], value["writer"]
            )
    return epochs


def newest_epoch(disk: Disk) -> int:
    """The highest claimed epoch, 0 where there is none; reads one directory."""
    numbers = (name.partition(".") for name in disk.list(names.EPOCHS))
    return max(
        (int(stem) for stem, _, kind in numbers if kind == "json" and stem.isdigit()), default=0
    )


def committed(disk: Disk) -> list[CheckpointName]:
    """Every checkpoint of the store, on whichever branch: those whose manifest exists."""
    found = (names.parse_checkpoint(name) for name in disk.list(names.CHECKPOINTS))
    return [name for name in found if name and (disk.root / names.manifest_path(name)).exists()]


def lineage(disk: Disk) -> list[CheckpointName]:
    """The checkpoints of the run as it is now, by rising step."""
    return current(read_epochs(disk), committed(disk))


def read_manifest(disk: Disk, name: CheckpointName) -> Manifest:
    """Raises Missing, Corrupt, Unsupported."""
    path = names.manifest_path(name)
    return decode_manifest(disk.read(path), disk.root / path)


def read_table(disk: Disk, part: Part) -> Table:
    """The piece table of a part, checked against the part's packs and digests."""
    path = part.table.path
    table = decode_table(disk.read(path), disk.root / path)
    check_table(table, part, disk.root / path)
    return table


def read_tags(disk: Disk) -> dict[str, CheckpointName]:
    """Each tag and the checkpoint that it names."""
    tags: dict[str, CheckpointName] = {}
    for file_name in disk.list(names.TAGS):
        stem, dot, kind = file_name.rpartition(".")
        if kind == "json":
            path = f"{names.TAGS}/{file_name}"
            value = unseal(disk.read(path), disk.root / path)
            tags[stem] = CheckpointName(value["step"], value["epoch"])
    return tags


def find(disk: Disk, reference: int | str | None) -> CheckpointName:
    """The checkpoint meant by a step of the run as it is now, a tag, a full name such as
    "120-3" (step-epoch, on any branch), or None: the newest. Raises Missing, and says what there is."""
    everything = committed(disk)
    run = current(read_epochs(disk), everything)
    if reference is None:
        if run:
            return run[-1]
        raise Missing(f"there is no checkpoint in {disk.root}")
    if isinstance(reference, str) and not reference.isdigit():
        name = names.parse_checkpoint(reference) or read_tags(disk).get(reference)
        if name in everything:
            return name
        raise Missing(
            f"there is no checkpoint or tag {reference!r} in {disk.root}; its tags are {sorted(read_tags(disk))}"
        )
    step = int(reference)
    for name in run:
        if name.step == step:
            return name
    elsewhere = [f"{name.step}-{name.epoch}" for name in everything if name.step == step]
    hint = (
        f" (step {step} exists on a branch left behind: ask for {elsewhere[-1]!r})"
        if elsewhere
        else ""
    )
    steps = [name.step for name in run]
    has = f"it has {len(steps)} from {steps[0]} to {steps[-1]}" if steps else "it has none"
    raise Missing(f"there is no checkpoint of step {step} in {disk.root}: {has}{hint}")
