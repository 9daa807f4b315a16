"""What lies at a path, and the draft of a checkpoint that it makes: the kinds of `--from`."""

import json
from collections.abc import Callable
from pathlib import Path

from everstep.errors import Corrupt, Missing, Unsupported
from everstep.interchange import dcp, deepspeed, folders, safetensors, torch_files
from everstep.interchange.draft import Draft
from everstep.interchange.tensors import reading
from everstep.interchange.trees import Options, Saved, draft_of

_TIMES_MAX, _SPARE_BYTES = 4, 64 << 20


def read_source(path: Path, kind: str | None, options: Options) -> Draft:
    """The draft of what lies there; its tensors are read when they are written. `kind`: one of
    KINDS, None: it is recognised. Raises Missing, Corrupt, Unsupported, Unavailable."""
    if not path.exists():
        raise Missing(f"importing {path}: there is nothing")
    with reading(path):
        chosen = kind or next((name for name, (is_one, _) in KINDS.items() if is_one(path)), None)
        if chosen is None:
            raise Unsupported(
                f"importing {path}: nobody here knows what it is. Say it by --from, one of "
                f"{', '.join(KINDS)}"
            )
        _, read = KINDS[chosen]
        draft = draft_of(read(path, options.part), path, chosen, options)
    if not draft.tensors and not draft.objects:
        why = "; ".join(draft.left_out.values()) or "it is empty"
        raise Unsupported(f"importing {path}: there is nothing that can be taken: {why[:1000]}")
    files = [path] if path.is_file() else filter(Path.is_file, path.rglob("*"))
    there = sum(each.stat().st_size for each in files)
    if draft.size > _TIMES_MAX * there + _SPARE_BYTES:  # the same bytes, named until a disk is full
        raise Unsupported(f"importing {path}: {there} bytes, which say that they are {draft.size}")
    return draft


KINDS: dict[str, tuple[Callable[[Path], bool], Callable[[Path, str], Saved]]] = {
    "dcp": (dcp.is_any, lambda path, part: Saved(dcp.read_tree(path))),
    "trainer": (folders.is_trainer, folders.read_trainer),
    "accelerate": (folders.is_accelerate, folders.read_accelerate),
    "deepspeed": (lambda path: deepspeed.tag_of(path) is not None, deepspeed.read_folder),
    "hf": (safetensors.is_any, lambda path, part: Saved(safetensors.read_weights(path))),
    "lightning": (folders.is_lightning, folders.read_lightning),
    "torch": (torch_files.is_archive, lambda path, part: Saved(torch_files.load(path))),
}
"""How each is recognised, by what is recognised first, and read; what a model is called that has no
name is told."""


def read_names(path: Path) -> list[list[str]]:
    """Orders that a user has written down: a JSON list of names, or one of lists, each of which is
    a group or an optimizer. Raises Corrupt, Unavailable."""
    with reading(path):
        said = json.loads(path.read_bytes())
    rows = said if isinstance(said, list) else [None]
    names = [name for row in rows for name in (row if isinstance(row, list) else [row])]
    if not all(type(name) is str for name in names):
        raise Corrupt(f"reading {path}: it is no list of names")
    return [names, *(row for row in rows if isinstance(row, list))]
