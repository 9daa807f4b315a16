"""A checkpoint in the making, out of what another library has saved.

models          name.weight                       tensors
optimizers      optimizer.name.weight.exp_avg     tensors, groups, hyperparameters
all else        scheduler, rng, ...               tagged JSON, tensors in it under their paths
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from everstep.errors import Corrupt, Unsupported
from everstep.format.document import digest_of
from everstep.format.manifest import Manifest, Part
from everstep.format.tables import Table
from everstep.format.tiling import find_flaw
from everstep.interchange.tensors import Found
from everstep.sharding.ranked import Share, own_name
from everstep.state.objects import Json, encode
from everstep.tiers.tier import Tier


class Borrowed(NamedTuple):
    """A part of another checkpoint, whose packs this one has, too, as `table` says."""

    tier: Tier
    part: Part
    table: Table


@dataclass(slots=True)
class Draft:
    """What is imported. `where`: it comes from, for messages; `kind`: as `--from` says it. `step`:
    what the source says, None where it does not."""

    where: object
    kind: str
    step: int | None = None
    strategy: str = "import"
    tensors: dict[str, Found] = field(default_factory=dict)
    aliases: dict[str, list[str]] = field(default_factory=dict)
    optimizers: dict[str, Any] = field(default_factory=dict)
    """As a piece table has them: groups, and keys of the state, by parameter."""
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    objects: dict[str, Json] = field(default_factory=dict)
    ranks: Sequence[dict[str, Any]] = ()
    borrowed: list[Borrowed] = field(default_factory=list)
    bytes_shared: int = 0
    """Of what is borrowed: in files that are there without a copy, once it is written."""
    like: Manifest | None = None
    """Whose topology it has."""
    exact: bool = True
    left_out: dict[str, str] = field(default_factory=dict)
    """By path what was not taken, and why."""
    _owners: dict[Found, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of all tensors that are not borrowed."""
        return sum(found.size for found in self.tensors.values())

    def add_tensor(self, name: str, found: Found, aliases: Sequence[str] = ()) -> None:
        """Raises Corrupt for one that is there, or is not all there."""
        if name in self.tensors:
            raise Corrupt(f"reading {self.where}: two tensors are called {name!r}")
        boxes = [part.box for part in found.parts]
        for box in boxes:
            rows = zip(box.offsets, box.lengths, found.shape, strict=True)
            if any(at + length > size for at, length, size in rows):
                raise Corrupt(f"reading {self.where}: a piece of {name!r} lies outside of it")
        if flaw := find_flaw(found.shape, boxes):
            problem = "two pieces overlap" if flaw.members else "no piece has the elements"
            raise Corrupt(f"reading {self.where}: of {name!r} {problem} at {flaw.box}")
        self.tensors[name], self.aliases[name] = found, list(aliases)

    def add_weights(self, part: str, weights: Mapping[str, Found]) -> None:
        """Those of a model, which may be tied."""
        for key, found in weights.items():
            name = f"{part}.{key}"
            first = self._owners.setdefault(found, name) if found.size else name
            if first == name:
                self.add_tensor(name, found)
            else:
                self.aliases.setdefault(first, []).append(name)

    def twins(self) -> dict[str, str]:
        """Matrices of models that have the bytes of an earlier one → that one: where a source has
        each by itself, they may be tied. Reads a little of each."""
        known: dict[object, str] = {}
        found = {}
        for name in self._owners.values():
            own = self.tensors[name]
            first = bytes(next(own.parts[0].blocks(), b"")) if len(own.shape) > 1 else b""
            if first.count(first[:1]) < len(first):  # and not all zeros
                other = known.setdefault((own.dtype, own.shape, digest_of(first)), name)
                if other != name and own.has_bytes_of(self.tensors[other]):
                    found[name] = other
        return found

    def find_ties(self) -> None:
        """Let twins be one of which optimizers have only one."""
        trained = {name for table in self.optimizers.values() for name in table["groups"]}
        for twin, first in self.twins().items():
            if (twin in trained) != (first in trained):
                name, other = (twin, first) if first in trained else (first, twin)
                del self.tensors[name]
                self.aliases.setdefault(other, []).append(name)

    def add_object(self, name: str, value: Any) -> None:
        """A value; or say why it was left out, where nobody here knows a part of it."""
        tensors = dict(self.tensors)
        try:
            self.objects[name] = self.encoded(name, value)
        except Unsupported as error:
            self.tensors = tensors
            self.left_out[name] = str(error)

    def add_by_rank(self, name: str, values: Sequence[Any]) -> None:
        """What each of several ranks has for itself; of one, a plain object. Raises Unsupported
        for what nobody here knows."""
        if len(values) == 1:
            self.add_object(name, values[0])
            return
        before = self.ranks or [{} for _ in values]
        shares = (Share(rank, len(values)) for rank in range(len(values)))
        self.ranks = [
            {**own, name: share.to_json(self.encoded(name, value, rank))}
            for rank, (own, share, value) in enumerate(zip(before, shares, values, strict=True))
        ]

    def encoded(self, path: str, value: Any, rank: int | None = None) -> Json:
        """Tagged JSON, whose tensors are the draft's, under their paths."""

        def sink(found_at: str, tensor: Any) -> str:
            called = found_at if rank is None else own_name(found_at, rank)
            self.add_tensor(called, tensor)
            return called

        return encode(value, path, sink)

    def add_optimizer(self, name: str, state: Mapping[str, Any], names: Mapping[Any, str]) -> None:
        """The state_dict of a torch optimizer. `names`: of the tensor that each of its parameters
        is, by what stands for it there."""
        rows = (*state["param_groups"], *state["state"].values())
        if not all(type(key) is str for row in rows for key in row):
            raise Corrupt(f"reading {self.where}: {name!r} has something whose name is no text")
        table: dict[str, Any] = {"groups": {}, "state": {}}
        self.optimizers[name], self.hyperparameters[name] = table, []
        plain: dict[str, Any] = {}
        for index, group in enumerate(state["param_groups"]):
            table["groups"] |= {names[each]: index for each in group["params"]}
            path = f"{name}.param_groups.{index}"
            own = {k: each for k, each in group.items() if k not in ("params", "param_names")}
            encoded = {k: self.encoded(f"{path}.{k}", each) for k, each in own.items()}
            self.hyperparameters[name].append(encoded)
        for each, own in state["state"].items():
            if each not in names:
                continue
            full = names[each]
            for key, value in own.items():
                if isinstance(value, Found):
                    self.add_tensor(f"{name}.{full}.{key}", value)
                    table["state"].setdefault(full, []).append(key)
                else:
                    plain.setdefault(full, {})[key] = value
        if plain:
            values = {full: self.encoded(f"{name}.{full}", each) for full, each in plain.items()}
            self.objects[name] = {"state": values, "other": {}}

    def shapes(self, part: str, but: Container[str] = ()) -> dict[str, tuple[int, ...]]:
        """Of the weights of a part, by their names in it; tied ones once."""
        prefix = f"{part}."
        return {
            name.removeprefix(prefix): found.shape
            for name, found in self.tensors.items()
            if name.startswith(prefix) and name not in but
        }
