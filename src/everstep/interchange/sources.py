"""What lies at a path, and the draft of a checkpoint that it makes: the kinds of `--from`."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from everstep.errors import Corrupt, Missing, Unavailable, Unsupported
from everstep.interchange import archives, dcp, safetensors
from everstep.interchange.draft import Draft, bare, is_optimizer, is_weights
from everstep.interchange.names import find_names, with_numbers

_STEPS = ("step", "global_step", "global_steps", "iteration")
_PARTS_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Options:
    """`part`: what a model is called that has no name in the source. `names`: of an optimizer's
    parameters, in its order, where the source has numbers. `only`: of the parts these."""

    part: str = "model"
    names: Sequence[str] | None = None
    only: Sequence[str] = ()


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
    if not draft.tensors and not draft.objects:
        why = "; ".join(draft.left_out.values()) or "it is empty"
        raise Unsupported(f"importing {path}: there is nothing that can be taken: {why[:1000]}")
    return draft


# ---- a tree of state dicts: files of torch.save, DCP -------------------------------------------


def add_tree(draft: Draft, tree: Any, options: Options) -> None:
    """The parts of what people save: a model's state dict, or a dict of several things."""
    if is_weights(tree):
        draft.add_weights(options.part, bare(tree))
        return
    if not isinstance(tree, dict) or not all(type(key) is str for key in tree):
        raise Unsupported(f"importing {draft.where}: at its top there is no dict of parts")
    parts = dict(_parts(_opened(tree)))
    chosen = {
        name: each
        for name, each in parts.items()
        if not options.only or any(f"{name}.".startswith(f"{one}.") for one in options.only)
    }
    if options.only and not chosen:
        raise Missing(f"importing {draft.where}: it has no {options.only}, but {list(parts)}")
    models = [name for name, each in chosen.items() if is_weights(each)]
    for name in models:
        draft.add_weights(name, bare(chosen[name]))
    for name, each in chosen.items():
        if draft.step is None and name in _STEPS and type(each) is int:
            draft.step = each
        elif is_optimizer(each):
            add_optimizer(draft, name, each, models, options)
        elif name not in models:
            draft.try_object(name, each)


def add_optimizer(
    draft: Draft, name: str, state: Mapping[str, Any], models: Sequence[str], options: Options
) -> None:
    """One of these models' optimizers. Raises Unsupported where none fits."""
    what, state = f"importing {name!r} of {draft.where}", with_numbers(state)
    errors, twins = [], draft.twins()
    for model, but in product(models, [{}, twins] if twins else [{}]):
        try:
            found = find_names(state, draft.shapes(model, but), options.names, what)
        except Unsupported as error:
            errors.append(error)
            continue
        full = {key: draft.full_name(model, each) for key, each in found.items()}
        draft.add_optimizer(name, state, full)
        return
    raise errors[0] if errors else Unsupported(f"{what}: there is no model whose it could be")


def _opened(tree: dict[str, Any]) -> dict[str, Any]:
    """Without a dict around all others, such as of an AppState."""
    while len(tree) == 1:
        (inner,) = tree.values()
        if not isinstance(inner, dict) or is_weights(inner) or is_optimizer(inner):
            break
        if not any(is_weights(each) or is_optimizer(each) for each in inner.values()):
            break
        tree = inner
    return tree


def _parts(tree: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Lists of models and optimizers are as many parts, and of one thing that one."""
    for name, each in tree.items():
        is_several = isinstance(each, list) and bool(each) and len(each) < _PARTS_MAX
        if is_several and all(is_weights(one) or is_optimizer(one) for one in each):
            yield from (
                (name if len(each) == 1 else f"{name}.{number}", one)
                for number, one in enumerate(each)
            )
        else:
            yield name, each


def _read_torch(source: Source) -> Draft:
    draft = Draft(source.path, "torch")
    add_tree(draft, archives.load(source.path), source.options)
    return draft


def _read_dcp(source: Source) -> Draft:
    draft = Draft(source.path, "dcp")
    add_tree(draft, dcp.read_tree(source.path), source.options)
    draft.find_ties()
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


KINDS: dict[str, Kind] = {
    "dcp": Kind(lambda source: source.has(dcp.METADATA), _read_dcp),
    "hf": Kind(lambda source: safetensors.is_any(source.path), _read_hf),
    "torch": Kind(
        lambda source: source.path.is_file() and archives.is_archive(source.path), _read_torch
    ),
}


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
