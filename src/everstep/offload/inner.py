"""The optimizer's side of the work: torch's own optimizer on masters, a chunk at a time.

    exchange   slot 0: gradients, and what is said of a step    slot 1: weights, as parameters are
    state      masters of weights in half precision, moments
    undo       what one chunk had before its update; how far a step is

All three are arenas that the trainer made, and both map. So this process owns nothing: where it
dies in the midst of a step, the next one puts back the chunk that was being changed, and goes on.
"""

import ctypes
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from everstep.errors import Unsupported
from everstep.format.document import unseal
from everstep.keeper.arena import Arena
from everstep.offload.memory import Memory
from everstep.sharding.layout import local_of, part_of, with_local
from everstep.state.objects import decode
from everstep.state.optimizers import install

MASTER = "master"
"""The key under which the state of a parameter has it in float32."""

CHUNK_BYTES = 24 << 20
"""Of weights and state that are updated together, unless those of one parameter are more."""

_FLAGS_AT = 8

GRADIENTS, WEIGHTS = 0, 1


def has_master(dtype: torch.dtype) -> bool:
    """Whether weights of this kind are updated in float32."""
    return dtype in (torch.bfloat16, torch.float16)


def step_here(optimizer: Optimizer, kind: Callable[..., Optimizer]) -> None:
    """Make the same update in this process, in place."""
    rows: list[tuple[torch.Tensor, torch.Tensor]] = []
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        state, weights = optimizer.state.get(parameter, {}), local_of(parameter)
        is_apart = has_master(parameter.dtype)
        source = local_of(state.get(MASTER, weights.float() if is_apart else weights))
        master = source.detach().requires_grad_()
        if parameter.grad is not None:
            master.grad = gradient_of(parameter).to(master.dtype)
        rows.append((parameter, master))
    masters = dict(rows)
    inner = kind(
        [
            {**options_of(group), "params": [masters[each] for each in group["params"]]}
            for group in optimizer.param_groups
        ]
    )
    for parameter, master in rows:
        if state := optimizer.state.get(parameter):
            inner.state[master] = {key: local_of(state[key]) for key in state if key != MASTER}
    inner.step()
    for parameter, master in rows:
        if parameter.grad is not None:
            state, made = optimizer.state.setdefault(parameter, {}), inner.state.get(master, {})
            if has_master(parameter.dtype):
                made = {**made, MASTER: master.detach()}
                local_of(parameter).copy_(master)
            for key, value in made.items():
                if key not in state or local_of(state[key]).data_ptr() != value.data_ptr():
                    state[key] = shown(parameter, value)


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    """What this rank has of it, on the CPU or elsewhere. Raises Unsupported."""
    assert parameter.grad is not None
    found = part_of(parameter.grad, parameter)
    if found is None or found.is_sparse:
        what = "sparse" if found is not None else "not where its parameter is"
        raise Unsupported(f"offloading an update: a gradient is {what}")
    return found


def shown(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """State of a parameter in its own form: of a sharded one a DTensor, where it has its shape."""
    is_part = local.shape == local_of(parameter).shape
    return with_local(parameter, local) if is_part else local


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """All of a group but its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def kind_of(name: str) -> Callable[..., Optimizer]:
    """The class of that module and name. Raises Unsupported."""
    module, _, attribute = name.rpartition(".")
    try:
        kind = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise Unsupported(f"importing the optimizer {name}: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise Unsupported(f"importing the optimizer {name}: it is none")
    found: Callable[..., Optimizer] = kind
    return found


class Marks:
    """In the undo arena's documents: how far a step is, and of which parameters there is state."""

    def __init__(self, arena: Arena) -> None:
        start, _ = arena.range(0)
        memory = arena.memory[start : start + arena.documents_size]
        self._place = ctypes.c_uint64.from_buffer(memory)  # one store: all of it, or nothing
        self.has_state = torch.frombuffer(memory, dtype=torch.bool, offset=_FLAGS_AT)
        """Of each parameter, whether there is state."""

    @staticmethod
    def size(count: int) -> int:
        """Bytes, for so many parameters."""
        return _FLAGS_AT + count

    @property
    def place(self) -> tuple[int, int, bool]:
        """Step, position in it, and whether undo holds what was there before."""
        value = self._place.value
        return value >> 32, (value & 0xFFFFFFFF) >> 1, bool(value & 1)

    def set_place(self, step: int, position: int, *, is_saved: bool) -> None:
        """What comes next, and what is there to begin it anew."""
        self._place.value = step << 32 | position << 1 | is_saved


class Inner:
    """For one thread."""

    def __init__(self, exchange: Arena, state: Arena, undo: Arena) -> None:
        """Maps what the trainer made. Raises Corrupt, Unsupported."""
        self._exchange = exchange
        self._gradients, self._weights = (Memory(exchange, slot) for slot in (GRADIENTS, WEIGHTS))
        self._state = Memory(state, 0)
        self._undo = torch.frombuffer(undo.image(0), dtype=torch.uint8)
        self._marks = Marks(undo)
        said = self.said()
        self._keys: dict[int, list[str]] = {index: [] for index in range(said["count"])}
        for name in self._state.table.tensors:
            index, _, key = name.partition(".")
            self._keys[int(index)].append(key)
        self._masters = [self._master(index) for index in range(said["count"])]
        self._optimizer = self._made(said)
        self._step = 0

    def said(self) -> dict[str, Any]:
        """What the trainer says of the step."""
        row = self._exchange.row(GRADIENTS)
        assert row
        return unseal(self._exchange.descriptor(GRADIENTS, row), "a step of the optimizer")

    def update(self, step: int, position: int, given: Sequence[int]) -> None:
        """Update these parameters, whose gradients are there: a chunk, or what of one has some.
        `position`: in what the trainer asks for in its step; what is done is not done again."""
        if step != self._step:
            self._install(self.said())
            self._step = step
        begun, done, is_saved = self._marks.place
        if begun == step and position < done:
            return
        if begun == step and is_saved:
            self._put_back(given)
        else:
            self._save(given)
        self._marks.set_place(step, position, is_saved=True)
        self._update(given)
        if self._state.arena.is_spill:
            self._drop(given)
        self._marks.set_place(step, position + 1, is_saved=False)

    def _master(self, index: int) -> torch.Tensor:
        name = f"{index}.{MASTER}"
        is_apart = name in self._state.table.tensors
        found = self._state.tensor(name) if is_apart else self._weights.tensor(str(index))
        return found.requires_grad_()

    def _made(self, said: dict[str, Any]) -> Optimizer:
        groups = [{"params": [self._masters[i] for i in row]} for row in said["groups"]]
        made = kind_of(said["kind"])(groups)
        for index in range(said["count"]):
            if self._marks.has_state[index]:
                self._attach(made, index)
        return made

    def _attach(self, optimizer: Optimizer, index: int) -> None:
        optimizer.state[self._masters[index]] = {
            key: self._state.tensor(f"{index}.{key}") for key in self._keys[index] if key != MASTER
        }

    def _install(self, said: dict[str, Any]) -> None:
        torch.set_num_threads(said["threads"])

        def tensor(name: str, _: str) -> torch.Tensor:
            value, dtype = said["tensors"][name]
            return torch.tensor(value, dtype=getattr(torch, dtype))

        for group, values in zip(self._optimizer.param_groups, said["sets"], strict=True):
            install(group, decode(values, tensor))

    def _update(self, indices: Sequence[int]) -> None:
        masters = self._masters
        for index in indices:
            master, gradient = masters[index], self._gradients.tensor(str(index))
            master.grad = gradient.to(master.dtype)
        self._optimizer.step()
        for index in indices:
            masters[index].grad = None
            self._keep(index)

    def _keep(self, index: int) -> None:
        """What the update made lies in shared memory from now on."""
        master = self._masters[index]
        for key, value in self._optimizer.state[master].items():
            if isinstance(value, torch.Tensor):
                self._state.take(f"{index}.{key}", value)
        self._marks.has_state[index] = True
        if f"{index}.{MASTER}" in self._state.table.tensors:
            self._weights.tensor(str(index)).copy_(master.detach())

    def _drop(self, indices: Sequence[int]) -> None:
        """State in a file: not more than a chunk of it is in memory."""
        for index in indices:
            for key in self._keys[index]:
                self._state.drop(f"{index}.{key}")

    # ---- undo ------------------------------------------------------------------------------

    def _spans(self, indices: Sequence[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """All bytes that an update of these changes, and their places in undo."""
        at = 0
        for index in indices:
            rows = [self._state.bytes(f"{index}.{key}") for key in self._keys[index]]
            flag = self._marks.has_state[index : index + 1].view(torch.uint8)
            for row in (self._weights.bytes(str(index)), *rows, flag):
                yield row, self._undo[at : at + len(row)]
                at += len(row)

    def _save(self, indices: Sequence[int]) -> None:
        for row, saved in self._spans(indices):
            saved.copy_(row)

    def _put_back(self, indices: Sequence[int]) -> None:
        for row, saved in self._spans(indices):
            row.copy_(saved)
        for index in indices:
            self._optimizer.state.pop(self._masters[index], None)
            if self._marks.has_state[index]:
                self._attach(self._optimizer, index)


def undo_bytes(chunks: Sequence[Sequence[int]], sizes: Sequence[int]) -> int:
    """Of the largest chunk, where an update of each parameter changes so many bytes."""
    return max(sum(sizes[index] + 1 for index in chunk) for chunk in chunks)
