"""Where things lie in a store (docs/format.md), as functions from nouns to paths."""

import re
from collections.abc import Sequence

from everstep.format.manifest import CheckpointName
from everstep.format.tables import FileLink, Table

STORE = "everstep.json"
EPOCHS = "epochs"
CHECKPOINTS = "checkpoints"
DATA = "data"
TABLES = "data/tables"
TAGS = "tags"
UNPROVEN = "unproven"
WRITERS = "writers"
PROBES = "probes"
MANIFEST = "manifest.json"

_CHECKPOINT = re.compile(r"(\d{1,18})-(\d{1,9})")
_DATA = re.compile(rf"(?:{DATA}/)?(\d{{8,18}}-\d{{4,9}})-[0-9a-f]+-\d+\.safetensors")
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def parse_checkpoint(name: str) -> CheckpointName | None:
    """The inverse of str(CheckpointName); leading zeros may be left out. None for other names."""
    found = _CHECKPOINT.fullmatch(name)
    return CheckpointName(int(found[1]), int(found[2])) if found else None


def manifest_path(name: CheckpointName) -> str:
    """The commit point of a checkpoint."""
    return f"{CHECKPOINTS}/{name}/{MANIFEST}"


def state_path(name: CheckpointName) -> str:
    """The manifest of the whole state that was made of a log step later."""
    return f"{CHECKPOINTS}/{name}/state.json"


def part_path(name: CheckpointName, node: int) -> str:
    """What one of several nodes has of a checkpoint, before it is committed."""
    return f"{CHECKPOINTS}/{name}/part-{node}.json"


def epoch_path(epoch: int) -> str:
    """The claim of an epoch."""
    return f"{EPOCHS}/{epoch:04d}.json"


def pack_path(name: CheckpointName, token: str, index: int) -> str:
    """A data file; `token` makes its name new, so that no attempt writes into another's file."""
    return f"{DATA}/{name}-{token}-{index}.safetensors"


def is_new_in(path: str, name: CheckpointName) -> bool:
    """Whether a data file was written for this checkpoint, and not for one before it."""
    return path.startswith(f"{DATA}/{name}-")


def writer_of(path: str) -> CheckpointName | None:
    """The checkpoint for which a data file was written; None for names that are not packs'."""
    found = _DATA.fullmatch(path)
    return parse_checkpoint(found[1]) if found else None


def pack_steps(table: Table, packs: Sequence[FileLink], step: int) -> list[int]:
    """The step that the tensors of each pack are of: this one, or that of the file where they are
    saved in turn (everstep.Full(thin=...))."""
    writers = (writer_of(pack.path) for pack in packs)
    rows = zip(table.packs, writers, strict=True)
    return [writer.step if shape.turn and writer else step for shape, writer in rows]


def table_path(digest: str) -> str:
    """A piece table, named by its content."""
    return f"{TABLES}/{digest}.json"


def tag_path(tag: str) -> str:
    """Raises ValueError for a tag that makes no safe file name or could be taken for a step."""
    if (
        not isinstance(tag, str)
        or not _TAG.fullmatch(tag)
        or tag.isdigit()
        or parse_checkpoint(tag)
        or tag == "latest"
    ):
        raise ValueError(
            f"{tag!r} cannot be a tag: it needs a letter or digit first, then at most 99 letters, "
            f"digits, '_', '.', '-', and must not look like a step, nor be 'latest', which is none"
        )
    return f"{TAGS}/{tag}.json"
