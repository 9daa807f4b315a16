"""What lies at a path, and the draft of a checkpoint that it makes: the kinds of `--from`."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from everstep.errors import Corrupt, Missing, Unavailable, Unsupported
from everstep.interchange import archives, dcp, folders, safetensors, zero
from everstep.interchange.draft import Draft
from everstep.interchange.trees import Options, add_tree

_NONSENSE = (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError)
_TIMES_MAX, _SPARE_BYTES = 4, 64 << 20


@dataclass(frozen=True, slots=True)
class Source:
    """A path that is to be imported."""

    path: Path
    options: Options

    def has(self, *patterns: str) -> bool:
        """Whether there are files of these kinds in it."""
        return all(any(self.path.glob(pattern)) for pattern in patterns)


def read_source(path: Path, kind: str | None, options: Options) -> Draft:
    """The draft of what lies there; its tensors are read when they are written. `kind`: one of
    KINDS, None: it is recognised. Raises Missing, Corrupt, Unsupported, Unavailable."""
    if not path.exists():
        raise Missing(f"importing {path}: there is nothing")
    source = Source(path, options)
    try:
        chosen = kind or next((name for name, row in KINDS.items() if row.is_one(source)), None)
        if chosen is None:
            raise Unsupported(
                f"importing {path}: nobody here knows what it is. Say it by --from, one of "
                f"{', '.join(KINDS)}"
            )
        draft = KINDS[chosen].read(source)
    except OSError as error:
        raise Unavailable(f"reading {path}: {error.strerror or error}") from error
    except _NONSENSE as error:
        what = f"{type(error).__name__}: {error}"
        raise Corrupt(f"reading {path}: it makes no sense: {what[:200]}") from error
    if not draft.tensors and not draft.objects:
        why = "; ".join(draft.left_out.values()) or "it is empty"
        raise Unsupported(f"importing {path}: there is nothing that can be taken: {why[:1000]}")
    _check_size(draft, path)
    return draft


def _check_size(draft: Draft, path: Path) -> None:
    """Raises Unsupported where the same bytes are named so often that they fill a disk."""
    files = [path] if path.is_file() else filter(Path.is_file, path.rglob("*"))
    there, wanted = (
        sum(each.stat().st_size for each in files),
        sum(found.size for found in draft.tensors.values()),
    )
    if wanted > _TIMES_MAX * there + _SPARE_BYTES:
        raise Unsupported(f"importing {path}: {there} bytes, which say that they are {wanted}")


def _read_torch(source: Source) -> Draft:
    draft = Draft(source.path, "torch")
    add_tree(draft, archives.load(source.path), source.options)
    return draft


def _read_dcp(source: Source) -> Draft:
    draft = Draft(source.path, "dcp")
    add_tree(draft, dcp.read_tree(source.path), source.options)
    return draft


# ---- Hugging Face's folders ----------------------------------------------------------------------


def _read_hf(source: Source) -> Draft:
    draft = Draft(source.path, "hf")
    draft.add_weights(source.options.part, safetensors.read_weights(source.path))
    return draft


@dataclass(frozen=True, slots=True)
class Kind:
    """How it is recognised, and read."""

    is_one: Callable[[Source], bool]
    read: Callable[[Source], Draft]


def _of(read: Callable[[Path, Options], Draft]) -> Callable[[Source], Draft]:
    return lambda source: read(source.path, source.options)


def _is_file_of_torch(source: Source) -> bool:
    return source.path.is_file() and archives.is_archive(source.path)


KINDS: dict[str, Kind] = {
    "dcp": Kind(lambda source: source.has(dcp.METADATA), _read_dcp),
    "trainer": Kind(
        lambda source: source.has(folders.TRAINER_STATE, "rng_state*"),
        _of(folders.read_trainer),
    ),
    "accelerate": Kind(
        lambda source: source.has(folders.RANDOM_STATES), _of(folders.read_accelerate)
    ),
    "deepspeed": Kind(
        lambda source: source.path.is_dir() and zero.tag_of(source.path) is not None,
        _of(zero.read_zero),
    ),
    "hf": Kind(lambda source: safetensors.is_any(source.path), _read_hf),
    "lightning": Kind(
        lambda source: _is_file_of_torch(source) and folders.is_lightning(source.path),
        _of(folders.read_lightning),
    ),
    "torch": Kind(_is_file_of_torch, _read_torch),
}
"""By what is recognised first."""


def read_names(path: Path) -> list[str]:
    """Names that a user has written down: a JSON list, or one of lists. Raises Corrupt."""
    try:
        said = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"reading {path}: it is no JSON: {error}") from error
    rows = [name for row in said for name in (row if isinstance(row, list) else [row])]
    if not isinstance(said, list) or not all(type(name) is str for name in rows):
        raise Corrupt(f"reading {path}: it is no list of names")
    return rows
