"""A tree of state dicts, as people save it, and the parts of a checkpoint in it."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from everstep.errors import Missing, Unsupported
from everstep.interchange.draft import Draft
from everstep.interchange.tensors import Found
from everstep.sharding.leaves import canonical
from everstep.state.stateful import python_state_of
from everstep.state.view import is_in

_STEPS = ("step", "global_step", "global_steps", "iteration")
_PARTS_MAX = 10_000
_FLAT = {"state", "param_groups"}
RNG, _GENERATORS = "rng", ("python", "numpy", "torch", "cuda")

Shapes = Mapping[str, tuple[int, ...]]
_NUMBER = re.compile(r"[0-9]{1,9}")
_BUFFERS = re.compile(r"(^|\.)(running_mean|running_var|num_batches_tracked)$")
_NO_DECAY = re.compile(
    r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)|(?:^|\.)ln(?:_|\d|\.|$)",
    re.IGNORECASE,
)
_ELEMENTWISE = ["exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg", "sum", "max_exp_avg_sq"]
_ELEMENTWISE += ["acc_delta", "grad_avg", "exp_inf", "ax", "prev"]
_ADVICE = (
    "Write the names of its parameters into a file, as a JSON list in the order of its groups (of "
    "several optimizers a list of such lists), and "
    "give it by --names: json.dump([names[p] for g in optimizer.param_groups for p in g['params']])"
)


@dataclass(frozen=True, slots=True)
class Options:
    """`part`: what a model is called that has no name in the source. `orders`: in which the
    parameters of an optimizer may be, where the source has numbers (None: as Saved says). `only`:
    of the parts these (none: all)."""

    part: str = "model"
    orders: Sequence[Sequence[str]] | None = None
    only: Sequence[str] = ()


class ByRank(tuple[Any, ...]):
    """What each rank has for itself of a part."""


class Saved(NamedTuple):
    """What another library has saved, as state dicts in which each tensor is a `Found`: a dict of
    several things, or a model's. `step`: as it says; `orders`: in which the parameters of an
    optimizer may be (None: as weights are, or by how people group)."""

    tree: Any
    step: int | None = None
    orders: Sequence[Sequence[str]] | None = None


def draft_of(saved: Saved, where: object, kind: str, options: Options) -> Draft:
    """A draft with the parts of that. Raises Missing, Corrupt, Unsupported."""
    step = saved.step if type(saved.step) is int else None
    draft = Draft(where, kind, step)
    orders = saved.orders if options.orders is None else options.orders
    if not isinstance(saved.tree, dict) or not all(type(key) is str for key in saved.tree):
        raise Unsupported(
            f"importing {where}: at its top there is no dict of parts, such as state_dict() returns"
        )
    tree = _with_model(_opened(saved.tree), options.part)
    parts = {name: _unflattened(each) for name, each in _parts(tree)}
    only = options.only
    chosen = {name: each for name, each in parts.items() if not only or is_in(name, only)}
    if only and not chosen:
        raise Missing(f"importing {where}: it has no {only}, but {[*parts]}")
    models = [name for name, each in chosen.items() if _is_weights(each)]
    for name in models:
        own = _bare(chosen[name])
        draft.add_weights(name, {key: each for key, each in own.items() if not _is_extra(key)})
        if extra := {key: each for key, each in own.items() if _is_extra(key)}:
            draft.add_object(name, extra)
    for name, each in chosen.items():
        if draft.step is None and name in _STEPS and type(each) is int:
            draft.step = each
        elif _is_optimizer(each):
            _add_optimizer(draft, name, each, models, orders)
        elif isinstance(each, ByRank):
            draft.add_by_rank(name, each)
        elif name not in models:
            is_ours = name == RNG and isinstance(each, dict) and {"python", "torch"} <= each.keys()
            draft.add_object(name, each | global_generators(each) if is_ours else each)
    draft.find_ties()
    return draft


def _add_optimizer(
    draft: Draft,
    name: str,
    state: Mapping[str, Any],
    models: Sequence[str],
    orders: Sequence[Sequence[str]] | None,
) -> None:
    """One of these models' optimizers. Raises Unsupported where none fits."""
    what = f"importing {name!r} of {draft.where}"
    known = {each for group in state["param_groups"] for each in group["params"]}
    rows = state["state"].items()  # whose numbers DCP has made texts
    own = {int(k) if k not in known and _NUMBER.fullmatch(str(k)) else k: v for k, v in rows}
    state = {**state, "state": own}
    errors, twins = [], draft.twins()
    for model, but in product(models, [{}, twins] if twins else [{}]):
        try:
            found = find_names(state, draft.shapes(model, but), orders, what)
        except Unsupported as error:
            errors.append(error)
            continue
        draft.add_optimizer(name, state, {key: f"{model}.{each}" for key, each in found.items()})
        return
    raise errors[0] if errors else Unsupported(f"{what}: there is no model whose it could be")


def _is_optimizer(value: Any) -> bool:
    """Whether it is what state_dict() of a torch optimizer returned."""
    return isinstance(value, dict) and value.keys() >= {"state", "param_groups"}


def _is_weights(value: Any) -> bool:
    """Whether it is a model's: tensors by names, and what its modules say beside them."""
    return (
        isinstance(value, dict)
        and any(isinstance(each, Found) for each in value.values())
        and all(type(key) is str and _is_weight(key, each) for key, each in value.items())
    )


def _is_weight(name: str, value: Any) -> bool:
    return isinstance(value, Found) or _is_extra(name)


def _is_extra(name: str) -> bool:
    """Whether it is what get_extra_state() of a module returned."""
    return name.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX


def _bare(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Their names without what DistributedDataParallel and others put before or into them."""
    names = [canonical(name) for name in weights]
    prefix = "module."
    if all(name.startswith(prefix) for name in names):
        names = [name.removeprefix(prefix) for name in names]
    return dict(zip(names, weights.values(), strict=True))


def _opened(tree: dict[str, Any]) -> dict[str, Any]:
    """Without a dict around all others, such as of an AppState."""
    while len(tree) == 1:
        (inner,) = tree.values()
        if not isinstance(inner, dict) or _is_weights(inner) or _is_optimizer(inner):
            break
        if not any(_is_weights(each) or _is_optimizer(each) for each in inner.values()):
            break
        tree = inner
    return tree


def _with_model(tree: dict[str, Any], part: str) -> dict[str, Any]:
    """Where a model's weights lie at the top, beside other parts (as torchtitan has them) or
    alone, they are one."""
    loose = {name: each for name, each in tree.items() if _is_weight(name, each)}
    if not loose or any(_is_weights(each) for each in tree.values()):
        return tree
    return {part: loose, **{name: each for name, each in tree.items() if name not in loose}}


def _unflattened(value: Any) -> Any:
    """An optimizer's state dict that was flattened (`flatten_optimizer_state_dict`): there each
    parameter has hyperparameters of its own, and those of equal ones are a group here."""
    if not isinstance(value, dict) or _is_optimizer(value):
        return value
    if {str(key).partition(".")[0] for key in value} != _FLAT:
        return value
    found: dict[str, dict[str, dict[str, Any]]] = {kind: {} for kind in _FLAT}
    for path, each in value.items():
        kind, _, rest = path.partition(".")
        name, _, key = rest.rpartition(".")
        found[kind].setdefault(name, {})[key] = each
    groups: dict[str, dict[str, Any]] = {}
    for name, own in found["param_groups"].items():
        groups.setdefault(repr(own), {**own, "params": []})["params"].append(name)
    return {"state": found["state"], "param_groups": list(groups.values())}


def _parts(tree: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Lists of models and optimizers are as many parts."""
    for name, each in tree.items():
        is_several = isinstance(each, list) and bool(each) and len(each) < _PARTS_MAX
        if is_several and all(_is_weights(one) or _is_optimizer(one) for one in each):
            yield from numbered(name, each).items()
        else:
            yield name, each


def numbered(name: str, found: Sequence[Any]) -> dict[str, Any]:
    """As many parts, as a Checkpointer has them of a list; of one thing that one."""
    return {name if len(found) == 1 else f"{name}.{n}": each for n, each in enumerate(found)}


# ---- which parameter each number in an optimizer's state_dict is: docs/interchange.md ------------


def find_names(
    state: Mapping[str, Any], shapes: Shapes, given: Sequence[Sequence[str]] | None, what: str
) -> dict[Any, str]:
    """What stands for a parameter in the state_dict → its name. `shapes`: of the model's weights,
    in their order; `given`: in which orders they may be (None: that, or by rules). Raises
    Unsupported, with what to do; and what nonsense comes to (tensors.reading)."""
    groups = state["param_groups"]
    keys: list[Any] = [each for group in groups for each in group["params"]]
    if all(type(each) is str for each in keys):
        return {key: _known(key, shapes, what) for key in keys}
    if all(len(g.get("param_names") or ()) == len(g["params"]) for g in groups):
        found = [[_known(name, shapes, what) for g in groups for name in g["param_names"]]]
    elif given is not None:
        found = [list(names) for names in given]
    else:
        found = _by_rules(state, shapes)
    fitting = [
        names
        for names in found
        if len(names) == len(keys) and _fits(state, dict(zip(keys, names, strict=True)), shapes)
    ]
    if not fitting:
        said = f"{what}: none of {len(shapes)} weights is known to be the parameter of a number"
        raise Unsupported(f"{said}, or their shapes do not fit. {_ADVICE}")
    if any(names != fitting[0] for names in fitting):
        raise Unsupported(f"{what}: its groups may be of several kinds. {_ADVICE}")
    return dict(zip(keys, fitting[0], strict=True))


def _known(name: str, shapes: Shapes, what: str) -> str:
    """A weight by what an optimizer calls it."""
    for each in (name, name.removeprefix("module.")):
        if each in shapes:
            return each
    raise Unsupported(f"{what}: it has state of {name!r}, which is no weight of the model")


def _by_rules(state: Mapping[str, Any], shapes: Shapes) -> list[list[str]]:
    """None of them where nothing can be compared."""
    own = state["state"].values()
    if not any(key in each for each in own for key in _ELEMENTWISE):
        return []
    parameters = [name for name in shapes if not _BUFFERS.search(name)]
    counts = [len(group["params"]) for group in state["param_groups"]]
    vectors = {name: len(shapes[name]) < 2 for name in parameters}
    without_decay = {name: bool(_NO_DECAY.search(name)) for name in parameters}
    found = [parameters]
    for is_later in (vectors, without_decay):
        if counts == [len(parameters) - sum(is_later.values()), sum(is_later.values())]:
            found.append(sorted(parameters, key=is_later.__getitem__))
    return found


def _fits(state: Mapping[str, Any], names: Mapping[Any, str], shapes: Shapes) -> bool:
    """Whether what is kept of each has its shape."""
    for key, own in state["state"].items():
        if key in names:
            tensors = (own[each] for each in _ELEMENTWISE if isinstance(own.get(each), Found))
            if any(each.shape != shapes.get(names[key]) for each in tensors):
                return False
    return all(name in shapes for name in names.values())


# ---- the global random generators ----------------------------------------------------------------


def global_generators(
    said: Mapping[str, Any], names: Sequence[str] = _GENERATORS
) -> dict[str, Any]:
    """As everstep has them (state/stateful.py). `names`: in `said` of python's, numpy's, torch's
    and CUDA's: a list, or of one GPU; None of what there is not."""
    of_python, of_numpy, of_torch, of_cuda = names
    version, words, gauss = said[of_python]
    found = {"python": (version, np.array(words, np.uint32), gauss), "torch": said[of_torch]}
    if (numpy := said.get(of_numpy)) is not None:
        kind, own, *rest = numpy
        found["numpy"] = (kind, np.array(own, np.uint32), *rest)
    if isinstance(cuda := said.get(of_cuda), list):
        found["cuda"] = cuda
    elif cuda is not None:
        found |= {"cuda": [cuda], "cuda_current": 0}
    return found


def plain(said: Any) -> Any:
    """What random.setstate() and numpy.random.set_state() take."""
    if not isinstance(said, dict) or "python" not in said:
        return said
    found = said | {"python": python_state_of(said)}
    if "numpy" in said:
        kind, own, *rest = said["numpy"]
        found["numpy"] = (kind, own.tolist(), *rest)
    return found
