"""A self-test: do the run's optimizers come to the same bits here as where a log was written?

A replay is exact by construction where torch, processor, instruction set and threads are those of
the run. Elsewhere nobody knows beforehand, so each optimizer's implementation is tried: a few
updates of small tensors, of the parameters' dtypes and dims, with the run's settings. The run keeps
what was tried and the digest of what came of it; who replays elsewhere tries it again. Equal bytes
are no proof, since sums of larger tensors may be split in other ways; different ones are.

Torch's own classes only: what else the step() of another does (count in a global, write a file) it
would do in the midst of the run.
"""

import json
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from everstep.errors import EverstepError, Unsupported
from everstep.redo.replay import _without_hooks
from everstep.sharding.leaves import dtype_name
from everstep.sharding.redundancy import class_of, inner_of, is_torchs
from everstep.state.objects import decode, encode
from everstep.state.optimizers import OptimizerState

EQUAL, DIFFERENT, NOT_RUN = "equal", "different", "not run"

_STEPS = 3
_RATE = 0.0137
"""In place of a learning rate that a schedule may have brought to 0. No power of 2: products must
be rounded, or fused multiplication and addition would not show."""
_GROUPS_MAX, _TENSORS_MAX, _DIMS_MAX = 4, 6, 16
_SHAPES: dict[int, tuple[int, ...]] = {0: (), 1: (1031,), 2: (67, 33), 3: (17, 13, 9)}
_BITS = {torch.bfloat16: 7, torch.float16: 10}
"""Of a value, so that it is the same number in each dtype."""

Recipe = dict[str, Any]
"""JSON: `class`; `groups`, each with its `set` of hyperparameters and the dtypes and dims of its
`tensors`; `digest` of the results, or the `problem` that kept the test from running."""


def record(optimizers: Iterable[OptimizerState]) -> dict[str, Recipe]:
    """Try the run's optimizers, here and now: what is kept in its logs, by optimizer. Takes some
    milliseconds each, and waits for the device."""
    found: dict[str, Recipe] = {}
    for state in optimizers:
        live = inner_of(state.optimizer)
        recipe: Recipe = {"class": class_of(state.optimizer)}
        try:
            _check_is_torchs(type(live))
            recipe["groups"] = _groups_of(live, state.optimizer.param_groups)
            recipe["digest"] = _try(recipe, live, _device_of(state.optimizer))
        except Exception as error:  # noqa: BLE001 - whatever their settings do: it was not run
            recipe["problem"] = _reason(error)
        found[state.name] = recipe
    return found


def compare(
    then: Mapping[str, Any], optimizers: Mapping[str, OptimizerState] | None = None
) -> dict[str, str]:
    """Try it again here: for each optimizer "equal", "different" or "not run: why". `then`: the
    topology of a log. `optimizers`: the live ones; None: torch's own are built, on the CPU."""
    recipes = then.get("selftest")
    found = {}
    for name, recipe in recipes.items() if isinstance(recipes, dict) else ():
        whole = optimizers[name].optimizer if optimizers and name in optimizers else None
        live = None if whole is None else inner_of(whole)
        try:
            if problem := recipe.get("problem"):
                raise Unsupported(f"in the run, {problem}")
            digest = _try(recipe, live, _device_of(whole))
            found[name] = EQUAL if digest == recipe["digest"] else DIFFERENT
        except Exception as error:  # noqa: BLE001 - as above, or no recipe
            found[name] = f"{NOT_RUN}: {_reason(error)}"
    return found


def describe(found: Mapping[str, str]) -> str:
    """As "A self-test of 'optimizer' came to equal bytes here"; "" where there was none."""
    words = {
        EQUAL: "came to equal bytes here",
        DIFFERENT: "came to DIFFERENT bytes here",
    }
    return "; ".join(
        f"a self-test of {name!r} {words.get(result, f'was {result}')}"
        for name, result in found.items()
    )


def _groups_of(live: Optimizer, groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The different kinds of groups: settings, and which tensors."""
    found: dict[str, dict[str, Any]] = {}
    for group in groups:
        kinds = {
            (dtype_name(parameter.dtype), parameter.dim())
            for parameter in group["params"]
            if parameter.requires_grad
        }
        values = {
            key: value
            for key, value in group.items()
            if key not in ("params", "param_names") and key in live.defaults
        }
        if "lr" in values:
            values["lr"] = _RATE
        row = {
            "set": encode(values, "settings", _refuse),
            "rate_is_tensor": isinstance(group.get("lr"), torch.Tensor),
            "tensors": [list(kind) for kind in sorted(kinds)[:_TENSORS_MAX]],
        }
        if kinds:
            found.setdefault(json.dumps(row, sort_keys=True), row)
    return list(found.values())[:_GROUPS_MAX]


def _refuse(path: str, _: torch.Tensor) -> str:
    raise Unsupported(f"{path} is a tensor")


def _try(recipe: Recipe, live: Optimizer | None, device: torch.device) -> str:
    """The digest of what the updates came to."""
    groups, parameters = [], []
    for number, row in enumerate(recipe["groups"][:_GROUPS_MAX]):
        values = decode(row["set"], lambda name, _: _missing(name))
        if row["rate_is_tensor"]:
            values["lr"] = torch.tensor(_RATE, device="cpu")
        made = [
            _values(getattr(torch, dtype), _shape(dim), 100 * number + index).to(device)
            for index, (dtype, dim) in enumerate(row["tensors"][:_TENSORS_MAX])
        ]
        parameters += [tensor.requires_grad_() for tensor in made]
        groups.append({**values, "params": made})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = _build(recipe["class"], groups, live)
        with _without_hooks(optimizer):
            for step in range(_STEPS):
                for index, parameter in enumerate(parameters):
                    turn = 1000 * (step + 1) + index
                    gradient = _values(parameter.dtype, tuple(parameter.shape), turn)
                    parameter.grad = gradient.to(device)
                optimizer.step()
    return OptimizerState("selftest", optimizer, 0).digest()


def _build(kind: str, groups: list[dict[str, Any]], live: Optimizer | None) -> Optimizer:
    """An optimizer over these groups. Raises Unsupported where that cannot be had."""
    cls: Any = getattr(torch.optim, kind.rpartition(".")[2], None) if live is None else type(live)
    _check_is_torchs(cls)
    if f"{cls.__module__}.{cls.__qualname__}" != kind:
        raise Unsupported(f"it was a {kind}")
    made: Optimizer = cls(groups)  # every one of torch's takes groups alone
    return made


def _check_is_torchs(cls: Any) -> None:
    if not (isinstance(cls, type) and issubclass(cls, Optimizer) and is_torchs(cls)):
        raise Unsupported("only torch's own optimizers are tried")


def _device_of(live: Optimizer | None) -> torch.device:
    parameters = [p for group in (live.param_groups if live else ()) for p in group["params"]]
    return parameters[0].device if parameters else torch.device("cpu")


def _shape(dim: int) -> tuple[int, ...]:
    return _SHAPES.get(dim, (5, 5, 5, 5)[:dim] + (1,) * (min(dim, _DIMS_MAX) - 4))


def _values(dtype: torch.dtype, shape: Sequence[int], turn: int) -> torch.Tensor:
    """Numbers between -1 and 1 that are equal on all machines: by integers alone, each a multiple
    of a power of 2 that the dtype holds."""
    if dtype.is_complex:
        pair = _values(torch.float32, (2, *shape), turn)
        return torch.complex(pair[0], pair[1]).to(dtype)
    bits = _BITS.get(dtype, 23)
    whole = torch.arange(math.prod(shape), dtype=torch.int64, device="cpu") + 1_000_003 * (turn + 1)
    for factor, shift in ((0x1E3779B97F4A7C15, 31), (0x3F58476D1CE4E5B9, 29)):
        whole = whole * factor
        whole = whole ^ (whole >> shift)
    signed = (whole >> (61 - bits)) % 2 ** (bits + 1) - 2**bits
    numbers: torch.Tensor = signed.to(torch.float64) * 2.0**-bits
    return numbers.to(dtype).view(tuple(shape))


def _missing(name: str) -> torch.Tensor:
    raise Unsupported(f"{name} is a tensor")


def _reason(error: Exception) -> str:
    text = str(error) if isinstance(error, EverstepError) else repr(error)
    return text if len(text) < 200 else f"{text[:199]}…"
