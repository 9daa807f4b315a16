"""A checkpoint as the state dicts that torch's own classes have: a tree with a `StandIn` for each
tensor, of its first name; what reads it is `Whole`.

{"model": {name: tensor}, "optimizer": {"state": ..., "param_groups": ...}, "scheduler": ...}
"""

from collections.abc import Callable
from typing import Any

from everstep.interchange.generators import RNG, plain
from everstep.interchange.tensors import StandIn
from everstep.restore.whole import Whole
from everstep.sharding.ranked import values_by_index
from everstep.state.objects import decode

StandsIn = Callable[[str], StandIn]
"""Makes that of a tensor."""

_Decode = Callable[[Any], Any]


def tree_of(
    whole: Whole, stand_in: StandsIn, *, by_name: bool, left_out: list[str]
) -> dict[str, Any]:
    """All parts. `by_name`: of optimizers parameters have their names, as DCP has it, and not the
    numbers of torch's own. What has no state dict is added to `left_out`."""

    def decoded(value: Any) -> Any:
        return decode(value, lambda name, device: stand_in(whole.firsts[name]))

    manifest = whole.manifest
    tree: dict[str, Any] = {}
    for part in sorted({name.partition(".")[0] for name in whole.weights}):
        names = whole.part(part)
        own = {key: stand_in(name) for key, name in names.items()}
        for key, name in names.items():
            for alias in whole.entries[name].aliases:
                own.setdefault(alias.removeprefix(f"{part}."), own[key])
        tree[part] = own
    for name in whole.optimizers:
        if "state_dict" in (manifest.objects.get(name) or {}):
            left_out.append(f"{name!r}: its class says itself what its state is")
        else:
            tree[name] = _optimizer(whole, stand_in, decoded, name, by_name=by_name)
    for name, value in manifest.objects.items():
        if name not in tree:
            tree[name] = plain(decoded(value)) if name == RNG else decoded(value)
    for name in {name for own in manifest.ranks for name in own} - tree.keys():
        values = list(map(decoded, values_by_index(manifest.ranks, name)))
        tree[name] = list(map(plain, values)) if name == RNG else values
    return tree


def _optimizer(
    whole: Whole, stand_in: StandsIn, decoded: _Decode, name: str, *, by_name: bool
) -> dict[str, Any]:
    manifest, table = whole.manifest, whole.optimizers[name]
    plain = (manifest.objects.get(name) or {}).get("state", {})
    numbers = table["groups"]
    # Names as they are in their model; or as torch counts them, group by group.
    called = {each: each.partition(".")[2] if each in whole.weights else each for each in numbers}
    in_order = sorted(numbers, key=numbers.__getitem__)
    keys = called if by_name else {each: i for i, each in enumerate(in_order)}
    state: dict[Any, dict[str, Any]] = {}
    for each, key in keys.items():
        own: dict[str, Any] = {
            one: stand_in(f"{name}.{each}.{one}") for one in table["state"].get(each, ())
        }
        own |= decoded(plain.get(each, {}))
        if own:
            state[key] = own
    groups = []
    for index, values in enumerate(manifest.hyperparameters.get(name, [])):
        members = [each for each, group in numbers.items() if group == index]
        named = {} if by_name else {"param_names": [called[each] for each in members]}
        group = decoded(values) | named
        groups.append(group | {"params": [keys[each] for each in members]})
    return {"state": state, "param_groups": groups}
