"""A checkpoint as other libraries have one: the state_dict() of each part, in one dict, or as what
torch.distributed.checkpoint (DCP) makes of that."""

import io
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from everstep.errors import Corrupt
from everstep.format import document
from everstep.interchange.dcp import nested
from everstep.interchange.tensors import reading
from everstep.interchange.torch_files import StandIn
from everstep.interchange.trees import RNG, plain
from everstep.restore.chain import objects_tensors
from everstep.restore.whole import Whole
from everstep.sharding.ranked import values_by_index
from everstep.state.objects import decode

PLANNER = "dcp.planner"
"""Among the objects of a checkpoint that DCP has saved: `data`, what its planner wants to know when
it is loaded; `streams`, the objects that are io.BytesIO; `version` and `save_id`, of its metadata.
"""


class StateDicts:
    """The state dicts of a checkpoint. In the place of each tensor they have what `stand_in` makes
    of its first name and its device. Raises Corrupt."""

    def __init__(self, whole: Whole, stand_in: Callable[[str, str], StandIn]) -> None:
        self._whole, self._make = whole, stand_in
        self.said: Mapping[str, Any] = decode(whole.manifest.objects.get(PLANNER, {}), stand_in)
        """What a planner did, where DCP has saved it."""
        if document.find_flaw(self.said, {"streams?": [str]}):
            raise Corrupt(f"reading what the planner had said: it is {self.said!r:.80}")

    def flat(self) -> tuple[dict[str, Any], Any]:
        """What DCP has: each value under one name, such as `optimizer.state.0.weight.exp_avg`; and
        where each of them was: as its planner said, or as it is in the tree."""
        whole = self._whole
        if not self.said:
            return flatten_state_dict(self.tree(by_name=True))
        found: dict[str, Any] = {}
        for key, each in whole.manifest.objects.items():
            if key != PLANNER:
                value = decode(each, self._stand_in)
                is_stream = isinstance(value, bytes) and key in self.said.get("streams", ())
                found[key] = io.BytesIO(value) if is_stream else value
        within = objects_tensors(whole.manifest)
        found |= {name: self._stand_in(name) for name in whole.firsts if name not in within}
        return found, self.said.get("data")

    def tree(self, *, by_name: bool) -> dict[str, Any]:
        """The state_dict() of each part. `by_name`: an optimizer's parameters have their names, as
        DCP has it, and not numbers, as torch has it."""
        if self.said:
            with reading(self._whole.disk.root):
                return nested(*self.flat())
        whole, tree = self._whole, dict[str, Any]()
        objects, ranks = whole.manifest.objects, whole.manifest.ranks
        models = whole.weights.keys() - objects_tensors(whole.manifest)
        for name, first in whole.firsts.items():
            if first in models:
                part, _, key = name.partition(".")
                tree.setdefault(part, {})[key] = self._stand_in(first)
        for part in tree:  # what its modules say beside their tensors
            tree[part] |= self._object(part, objects.get(part) or {})
        for name in whole.optimizers:
            tree[name] = self._optimizer(name, objects.get(name) or {}, by_name=by_name)
        tree |= {n: self._object(n, each) for n, each in objects.items() if n not in tree}
        for name in {name for own in ranks for name in own} - tree.keys():
            tree[name] = [self._object(name, each) for each in values_by_index(ranks, name)]
        return tree

    def _stand_in(self, name: str, device: str = "cpu") -> StandIn:
        """Of a tensor, by whichever of its names."""
        return self._make(self._whole.firsts[name], device)

    def _object(self, name: str, said: Any) -> Any:
        value = decode(said, self._stand_in)
        return plain(value) if name == RNG else value

    def _optimizer(self, name: str, said: Mapping[str, Any], *, by_name: bool) -> Any:
        if "state_dict" in said:  # as its class says itself
            return self._object(name, said["state_dict"])
        whole, table = self._whole, self._whole.optimizers[name]
        values, numbers = said.get("state", {}), table["groups"]
        # Names as they are in their model, if it is one; or as torch counts them, group by group.
        called = {n: n.partition(".")[2] if n in whole.weights else n for n in numbers}
        called = called if len({*called.values()}) == len(called) else {n: n for n in numbers}
        in_order = sorted(numbers, key=numbers.__getitem__)
        keys = called if by_name else {each: i for i, each in enumerate(in_order)}
        state: dict[Any, dict[str, Any]] = {}
        for each, key in keys.items():
            own = {k: self._stand_in(f"{name}.{each}.{k}") for k in table["state"].get(each, ())}
            if own := own | decode(values.get(each, {}), self._stand_in):
                state[key] = own
        groups = []
        for index, group in enumerate(whole.manifest.hyperparameters.get(name, [])):
            members = [each for each, number in numbers.items() if number == index]
            named = {"param_names": [called[each] for each in members]}
            params = {"params": [keys[each] for each in members]}
            groups.append(decode(group, self._stand_in) | named | params)
        return {"state": state, "param_groups": groups}
