"""Which parameter each number in an optimizer's state_dict is.

Told by the source (`param_names`, names in place of numbers), or by the user (`--names`), or by how
people make groups: all of model.parameters() in their order; matrices first, then the rest; what
decays first, then biases and norms, as transformers' Trainer has it. What a rule comes to is taken
where the shape of all state fits, and no other rule fits in another way.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from everstep.errors import Unsupported
from everstep.interchange.tensors import Found

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
        found = _by_rules(state, keys, shapes)
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


def with_numbers(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A state_dict whose numbers DCP has made texts, as it was."""
    known = {each for group in state["param_groups"] for each in group["params"]}
    own = {
        int(key) if key not in known and _NUMBER.fullmatch(str(key)) else key: each
        for key, each in state["state"].items()
    }
    return {**state, "state": own}


def _known(name: str, shapes: Shapes, what: str) -> str:
    """A weight by what an optimizer calls it."""
    for each in (name, name.removeprefix("module.")):
        if each in shapes:
            return each
    raise Unsupported(f"{what}: it has state of {name!r}, which is no weight of the model")


def _by_rules(state: Mapping[str, Any], keys: Sequence[Any], shapes: Shapes) -> list[list[str]]:
    """None of them where nothing can be compared."""
    own = state["state"].values()
    if not any(key in each for each in own for key in _ELEMENTWISE):
        return []
    parameters = [name for name in shapes if not _BUFFERS.search(name)]
    counts = [len(group["params"]) for group in state["param_groups"]]
    found = []
    for groups in (
        [parameters],
        _divided(parameters, lambda name: len(shapes[name]) > 1),
        _divided(parameters, lambda name: not _NO_DECAY.search(name)),
    ):
        is_alike = len(groups) == 1 or [len(each) for each in groups] == counts
        if is_alike and sum(map(len, groups)) == len(keys):
            found.append([name for group in groups for name in group])
    return found


def _fits(state: Mapping[str, Any], names: Mapping[Any, str], shapes: Shapes) -> bool:
    """Whether what is kept of each has its shape."""
    for key, own in state["state"].items():
        if key in names:
            tensors = (own[each] for each in _ELEMENTWISE if isinstance(own.get(each), Found))
            if any(each.shape != shapes.get(names[key]) for each in tensors):
                return False
    return all(name in shapes for name in names.values())


def _divided(names: Sequence[str], is_first: Callable[[str], bool]) -> list[list[str]]:
    return [[n for n in names if is_first(n)], [n for n in names if not is_first(n)]]
