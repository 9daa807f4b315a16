"""The memory that an offloaded optimizer shares with the process that makes its updates: two arenas
(inner.py), which this side makes, and fills and reads as tensors of its parameters."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from everstep.errors import Unsupported
from everstep.format.packs import Spec, in_groups, lay_out
from everstep.format.tables import encode_table
from everstep.keeper.arena import Arena
from everstep.offload.inner import (
    CHUNK_BYTES,
    GRADIENT,
    MASTER,
    PROGRESS,
    UNDO,
    WEIGHTS,
    has_master,
    options_of,
)
from everstep.offload.memory import Memory
from everstep.sharding.layout import local_of, part_of, with_local
from everstep.sharding.leaves import Leaf, bytes_of, dtype_name
from everstep.sharding.topology import flushes_denormals
from everstep.state.objects import encode

if TYPE_CHECKING:
    from everstep.offload.optimizer import OffloadedOptimizer

_SAID_BYTES = 256
"""For each parameter, at most."""

_STEPS_MAX = 1 << 30
_MEMBERS_MAX = 4096
"""Parameters of one chunk: a message names them."""


class Shared:
    """The arenas of an optimizer, as the trainer sees them."""

    def __init__(
        self, optimizer: "OffloadedOptimizer", states: str | None, arena: Arena | None = None
    ) -> None:
        """`states`: a directory, None: memory. `arena`: that of the state, where it is laid out for
        this one; else another is made. Raises Unsupported."""
        self._kind = optimizer.offloaded
        groups = optimizer.param_groups
        self._parameters = [each for group in groups for each in group["params"]]
        self._groups = _ids(groups)
        self._numbers = {id(each): number for number, each in enumerate(self._parameters)}
        states_of = [_state_specs(i, each, optimizer) for i, each in enumerate(self._parameters)]
        self._keys = [[spec.name.partition(".")[2] for spec in each] for each in states_of]
        self._state = _memory([spec for each in states_of for spec in each], states, arena)
        rows = list(enumerate(map(local_of, self._parameters)))
        weights = [Leaf(WEIGHTS.format(index), local).spec for index, local in rows]
        gradients = [Leaf(GRADIENT.format(index), local).spec for index, local in rows]
        sizes = [
            spec.size + sum(each.size for each in row)
            for spec, row in zip(weights, states_of, strict=True)
        ]
        least = CHUNK_BYTES // _MEMBERS_MAX
        self.chunks = in_groups(
            ((i, max(size, least)) for i, size in enumerate(sizes)), CHUNK_BYTES
        )
        """Indices of parameters that are updated together."""
        undo = max(sum(sizes[index] for index in chunk) for chunk in self.chunks)
        own = [Spec(UNDO, "uint8", (undo,)), Spec(PROGRESS, "int64", (1,))]
        self._exchange = _memory([*weights, *gradients, *own])
        self._chunk_of = {i: number for number, chunk in enumerate(self.chunks) for i in chunk}
        self.step = 0
        self._views: dict[int, dict[str, torch.Tensor]] = {}
        """Of each parameter of which there is state, what its optimizer shows of it."""
        self._placed: set[int] = set()
        """Parameters whose weights have been put here."""
        self._said: dict[str, Any] = {}

    @property
    def fds(self) -> list[int]:
        """What the process that makes updates maps."""
        return [self._exchange.arena.fd, self.arena.fd]

    @property
    def arena(self) -> Arena:
        """Of the state."""
        return self._state.arena

    def chunk_of(self, parameter: torch.Tensor) -> tuple[int, list[torch.Tensor]]:
        """The number of the chunk that it is in, and the parameters in that."""
        number = self._chunk_of[self._numbers[id(parameter)]]
        return number, [self._parameters[index] for index in self.chunks[number]]

    def room(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The places of a parameter's state."""
        return self._view(self._numbers[id(parameter)])

    def fits(self, optimizer: Optimizer) -> bool:
        """Whether its parameters are in the same groups, and all state has its place here."""
        places = self._state.table.tensors
        return self._groups == _ids(optimizer.param_groups) and all(
            name in places and Leaf(name, local_of(value)).spec == places[name].spec
            for _, name, value in self._changed(optimizer)
        )

    def begin(self, optimizer: Optimizer) -> None:
        """An update: what is to be done, and what has changed of the state."""
        for index, name, value in list(self._changed(optimizer)):
            if name not in self._state.table.tensors:
                key = name.partition(".")[2]
                raise Unsupported(f"offloading an update: {self._kind} makes no {key!r} of a state")
            here, local = self._state.tensor(name), local_of(value)
            if here.data_ptr() != local.data_ptr():
                here.copy_(local)
            self._views.pop(index, None)
        lacking = []
        for index, parameter in enumerate(self._parameters):
            if optimizer.state.get(parameter):
                self._show(index, optimizer)
            else:
                self._views.pop(index, None)
                lacking.append(index)
        self.step = self.step % _STEPS_MAX + 1
        self._said = self._description(optimizer)
        self._exchange.say({**self._said, "lacking": lacking})

    def put(self, indices: Sequence[int]) -> list[int]:
        """Those of these parameters that have gradients, which are copied, with weights that have
        changed. Raises Unsupported."""
        given = [index for index in indices if self._parameters[index].grad is not None]
        for index in given:
            parameter = self._parameters[index]
            self._put_weights(index, parameter)
            self._exchange.tensor(GRADIENT.format(index)).copy_(gradient_of(parameter))
        return given

    def get(self, optimizer: Optimizer) -> None:
        """The new weights; and `state` shows what there is now."""
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                local_of(parameter).copy_(self._weights(index))
                self._show(index, optimizer)

    def _view(self, index: int) -> dict[str, torch.Tensor]:
        """All state of a parameter, as its optimizer shows it."""
        parameter, found = self._parameters[index], dict[str, torch.Tensor]()
        for key in self._keys[index]:
            local = self._state.tensor(f"{index}.{key}")
            is_part = local.shape == local_of(parameter).shape
            found[key] = with_local(parameter, local) if is_part else local  # else for all of it
        return found

    def _weights(self, index: int) -> torch.Tensor:
        return self._exchange.tensor(WEIGHTS.format(index))

    def _show(self, index: int, optimizer: Optimizer) -> None:
        if index not in self._views:
            self._views[index] = self._view(index)
            optimizer.state[self._parameters[index]] = dict(self._views[index])

    def _changed(self, optimizer: Optimizer) -> Iterator[tuple[int, str, torch.Tensor]]:
        """What somebody has put in place of what was shown of the state: index of the parameter,
        name of its place here, and that."""
        for index, parameter in enumerate(self._parameters):
            known = self._views.get(index, {})
            for key, value in optimizer.state.get(parameter, {}).items():
                if known.get(key) is not value:
                    yield index, f"{index}.{key}", value

    def _put_weights(self, index: int, parameter: torch.Tensor) -> None:
        weights, parameter = self._weights(index), local_of(parameter)
        is_known = index in self._placed and index in self._views  # else its master is no more
        if is_known and _is_same(weights, parameter):
            return
        self._placed.add(index)
        weights.copy_(parameter)
        if MASTER in self._keys[index]:
            master = self._state.tensor(f"{index}.{MASTER}")
            if index not in self._views or not _is_same(master.to(weights.dtype), weights):
                master.copy_(parameter)

    @property
    def is_changed(self) -> bool:
        """Whether something of the newest step was made, by a process that has ended."""
        return int(self._exchange.tensor(PROGRESS)) > self.step << 32

    def is_said(self, optimizer: Optimizer) -> bool:
        """Whether its hyperparameters are still those with which the update was begun."""
        return self._description(optimizer) == self._said

    def _description(self, optimizer: Optimizer) -> dict[str, Any]:
        tensors: dict[str, Any] = {}

        def sink(path: str, tensor: torch.Tensor) -> str:
            tensors[path] = tensor.tolist(), str(tensor.dtype).removeprefix("torch.")
            return path

        groups = optimizer.param_groups  # load_state_dict makes new ones
        return {
            "kind": self._kind,
            "count": len(self._parameters),
            "groups": [[self._numbers[id(p)] for p in group["params"]] for group in groups],
            "sets": [
                {key: encode(value, f"{n}.{key}", sink) for key, value in options_of(group).items()}
                for n, group in enumerate(groups)
            ],
            "defaults": {
                key: encode(value, f"default.{key}", sink)
                for key, value in optimizer.defaults.items()
            },
            "tensors": tensors,
            "default_dtype": dtype_name(torch.get_default_dtype()),
            "threads": torch.get_num_threads(),
            "flushes": flushes_denormals(),
        }


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    """What this rank has of it, on the CPU or elsewhere. Raises Unsupported."""
    assert parameter.grad is not None
    found = part_of(parameter.grad, parameter)
    what = None
    if found is None:
        what = "not where its parameter is"
    elif found.is_sparse:
        what = "sparse"
    elif found.dtype != parameter.dtype:
        what = f"{found.dtype}, of a parameter in {parameter.dtype}"
    if found is None or what:
        raise Unsupported(f"offloading an update: a gradient is {what}")
    return found


def _ids(groups: Sequence[dict[str, Any]]) -> list[list[int]]:
    return [[id(each) for each in group["params"]] for group in groups]


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Byte by byte."""
    return torch.equal(bytes_of(one), bytes_of(other))


def _state_specs(
    index: int, parameter: torch.Tensor, optimizer: "OffloadedOptimizer"
) -> list[Spec]:
    """What an update makes of state of such a parameter: known by an update of zeros. Raises
    Unsupported where that is more than tensors."""
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    dtype = torch.float32 if has_master(parameter.dtype) else parameter.dtype
    shape = tuple(local_of(parameter).shape)
    master = torch.zeros(shape, dtype=dtype, device="cpu", requires_grad=True)
    made = optimizer.kind([{**options_of(group), "params": [master]}])
    master.grad = torch.zeros_like(master)
    made.step()
    state = made.state.get(master, {})
    if odd := [key for key, value in state.items() if not isinstance(value, torch.Tensor)]:
        raise Unsupported(
            f"offloading a {optimizer.offloaded}: its state has {odd[0]!r}, no tensor"
        )
    found = [Leaf(f"{index}.{key}", value).spec for key, value in state.items()]
    if has_master(parameter.dtype):
        found.append(Leaf(f"{index}.{MASTER}", master).spec)
    return found


def _memory(specs: list[Spec], directory: str | None = None, there: Arena | None = None) -> Memory:
    """In memory, or in a file there. `there`: where it is like that, it is this one."""
    layout = lay_out(specs)
    document = encode_table(layout, {}, {}, {})
    row = there.row(0) if there and there.is_file == (directory is not None) else None
    if there and row and bytes(there.table(0, row)) == document:
        return Memory(there)
    return Memory.create(layout, document, directory, _SAID_BYTES * len(specs))
