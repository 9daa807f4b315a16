"""OffloadedOptimizer: a torch.optim.Optimizer whose moments lie in shared memory, and whose updates
another process makes.

    step()   gradients ──▶ exchange ──▶ the worker: torch's own optimizer, in place, on masters
             weights   ◀── exchange ◀──

What a whole state of it would be is in arenas (inner.py), of which `state` shows the tensors: who
reads them reads what the worker has written, and nothing is copied to the trainer for that.
"""

import fcntl
import logging
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch.optim import Optimizer

from everstep.errors import Unavailable, Unsupported
from everstep.format.document import seal
from everstep.format.packs import Spec, lay_out
from everstep.format.tables import encode_table
from everstep.keeper import wire
from everstep.keeper.arena import Arena, Row, SlotState
from everstep.keeper.data import parse
from everstep.offload.inner import (
    GRADIENTS,
    MASTER,
    WEIGHTS,
    Marks,
    chunks_of,
    gradient_of,
    has_master,
    kind_of,
    options_of,
    shown,
    step_here,
    undo_bytes,
)
from everstep.offload.memory import Memory
from everstep.sharding.layout import is_dtensor, local_of
from everstep.sharding.leaves import Leaf, bytes_of
from everstep.sharding.redundancy import is_torchs
from everstep.sharding.topology import flushes_denormals
from everstep.state.objects import encode

log = logging.getLogger("everstep")

_LEFT_S = 10.0
DEATHS_MAX = 3
"""Of workers, one after another, in one step."""
_DOCUMENTS_BYTES = 1 << 20
_STEPS_MAX = 1 << 31


class OffloadedOptimizer(Optimizer):
    """An optimizer of the class `kind`, whose state is not in this process's memory.

    Its updates have the bits of the same class on tensors on the CPU, with float32 masters of
    weights in bfloat16 or float16. For the thread that trains.
    """

    def __init__(
        self,
        kind: type[Optimizer],
        params: Iterable[Any],
        *,
        states: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        """`states`: a directory, for a file that holds the state and is scratch; None: memory.
        `options`: of `kind`. Raises Unsupported for a class or parameters that cannot be."""
        self._worker: _Worker | None = None
        self._shared: _Shared | None = None
        self._states = None if states is None else os.path.abspath(states)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if kind_of(name) is not kind or kind.__name__ in _REFUSED:
            raise Unsupported(f"offloading a {name}: another process cannot make its updates")
        defaults = kind([torch.zeros(1, 1, requires_grad=True)], **options).defaults
        if defaults.get("differentiable") or defaults.get("capturable"):
            raise Unsupported(f"offloading a {name}: differentiable or capturable updates")
        self.offloaded = name
        self.in_process = False
        """Whether updates are made here, in place: at a replay."""
        self.has_adopted = False
        """Whether its memory had been that of one before it."""
        super().__init__(params, defaults)
        self.register_load_state_dict_pre_hook(_keep_loaded)
        self.register_load_state_dict_post_hook(_put_loaded)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update; returns with the new weights in place. Raises Unsupported for gradients that
        are sparse, Unavailable where the worker cannot make it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.in_process:
            step_here(self, kind_of(self.offloaded))
            return loss
        shared = self._share()
        if shared.put(self):
            self.close()
        self._worker = self._worker or _Worker(shared)
        self._worker.step()
        shared.get(self)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, before the first update. Raises Unsupported."""
        if self._shared:
            raise Unsupported("adding parameters to an OffloadedOptimizer after its first update")
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if problem := _problem_of(parameter, self.offloaded):
                shape = tuple(parameter.shape)
                raise Unsupported(f"offloading a parameter {shape} {problem}")

    def room(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Where the state of a parameter is to lie, by its keys: who restores reads into it."""
        return {} if self.in_process else self._share().room(parameter)

    @property
    def arena(self) -> Arena | None:
        """Of the state; None before there is one."""
        return self._shared.state if self._shared else None

    @property
    def is_on_disk(self) -> bool:
        """Whether that is a file."""
        return self._states is not None

    def adopt(self, arena: Arena) -> bool:
        """Go on in the memory of an optimizer whose process has died, which has what its last
        update made of it; owns `arena` then. Blocks while an update is still made there. False
        where it does not fit, or this one has its own."""
        if self._shared or not _is_left(arena.fd):
            return False
        shared = _Shared(self, self._states, arena)
        self._shared = shared if shared.state is arena else None
        self.has_adopted = self._shared is not None
        return self.has_adopted

    def close(self) -> None:
        """End the worker; the next step starts another."""
        if self._worker:
            self._worker.close()
            self._worker = None

    def _share(self) -> "_Shared":
        if self._shared is None or not self._shared.fits(self):
            self.close()
            self._shared = _Shared(self, self._states)
        return self._shared

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_worker": None, "_shared": None}


def class_behind(optimizer: Optimizer) -> Any:
    """That of what makes its updates."""
    if isinstance(optimizer, OffloadedOptimizer):
        return kind_of(optimizer.offloaded)
    return type(optimizer)


_REFUSED = ("LBFGS", "SparseAdam")
_OF_WHOLE_TENSORS = ("Adafactor", "Muon")


def _problem_of(parameter: torch.Tensor, kind: str) -> str | None:
    """Why it cannot be."""
    if not parameter.is_floating_point():
        return f"of {parameter.dtype}"
    if is_dtensor(parameter):
        found = cast(type[Optimizer], kind_of(kind))
        if found.__name__ in _OF_WHOLE_TENSORS or not is_torchs(found):
            return f"that is sharded over ranks: {found.__name__} may need all of it at once"
    elif _ranks() > 1:
        return "that each rank updates whole, as in DDP. Shard the model (FSDP2)"
    return None


def _ranks() -> int:
    ranks = torch.distributed
    return ranks.get_world_size() if ranks.is_available() and ranks.is_initialized() else 1


def _keep_loaded(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    optimizer._everstep_loaded = state_dict["state"]  # type: ignore[attr-defined]


def _put_loaded(optimizer: Optimizer) -> None:
    """As it was saved: torch has cast it to the parameters' dtype."""
    loaded = optimizer.__dict__.pop("_everstep_loaded")
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for index, values in loaded.items():
        optimizer.state[parameters[index]] = {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in values.items()
        }


class _Shared:
    """The arenas, as the trainer sees them."""

    def __init__(
        self, optimizer: OffloadedOptimizer, states: str | None, arena: Arena | None = None
    ) -> None:
        """`arena`: that of the state, where it is laid out for this one; else another is made."""
        groups = optimizer.param_groups
        self._parameters = [each for group in groups for each in group["params"]]
        specs = [Leaf(str(i), local_of(each)).spec for i, each in enumerate(self._parameters)]
        states_of = [_state_specs(i, each, optimizer) for i, each in enumerate(self._parameters)]
        self._keys = [[spec.name.partition(".")[2] for spec in each] for each in states_of]
        self.exchange = _arena(specs, 2)
        table = _table_of(self.exchange)
        self._gradients = Memory(self.exchange, GRADIENTS, table)
        self._weights = Memory(self.exchange, WEIGHTS, table)
        self.state = _arena([spec for each in states_of for spec in each], 1, states, arena)
        self._state = Memory(self.state, 0, _table_of(self.state))
        sizes = [
            spec.size + sum(each.size for each in row)
            for spec, row in zip(specs, states_of, strict=True)
        ]
        chunks = chunks_of([_master_bytes(each) for each in self._parameters])
        count = len(self._parameters)
        self.undo = Arena.create(1, Marks.size(count), undo_bytes(chunks, sizes))
        self._marks = Marks(self.undo)
        self._step = 0
        self._views: dict[int, dict[str, torch.Tensor]] = {}

    def room(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The places of a parameter's state."""
        index = next(i for i, each in enumerate(self._parameters) if each is parameter)
        return self._view(index)

    def fits(self, optimizer: OffloadedOptimizer) -> bool:
        """Whether all state has its place here."""
        for index, parameter in enumerate(self._parameters):
            for key, value in optimizer.state.get(parameter, {}).items():
                if key not in self._keys[index]:
                    return False
                spec = self._state.table.tensors[f"{index}.{key}"].spec
                if Leaf(spec.name, local_of(value)).spec != spec:
                    return False
        return True

    def put(self, optimizer: OffloadedOptimizer) -> bool:
        """Gradients, what has changed of weights and state, and what is to be done. Whether of
        other parameters than before there is state."""
        given, before = [], self._marks.flags
        for index, parameter in enumerate(self._parameters):
            self._put_state(index, optimizer.state.get(parameter, {}))
            self._put_weights(index, parameter)
            if parameter.grad is not None:
                self._gradients.tensor(str(index)).copy_(gradient_of(parameter))
                given.append(index)
        self._step = (self._step + 1) % _STEPS_MAX
        self._say(optimizer, given)
        return self._marks.flags != before

    def get(self, optimizer: OffloadedOptimizer) -> None:
        """The new weights; and `state` shows what there is now."""
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                local_of(parameter).copy_(self._weights.tensor(str(index)))
            if self._marks.has_state(index) and index not in self._views:
                self._views[index] = self._view(index)
                optimizer.state[parameter] = dict(self._views[index])

    def _view(self, index: int) -> dict[str, torch.Tensor]:
        """All state of a parameter, as its optimizer shows it."""
        rows = ((key, self._state.tensor(f"{index}.{key}")) for key in self._keys[index])
        return {key: shown(self._parameters[index], local) for key, local in rows}

    def _put_state(self, index: int, state: dict[str, Any]) -> None:
        known = self._views.get(index, {})
        if not state and known:
            self._marks.set_state(index, there=False)
            del self._views[index]
        for key, value in state.items():
            if known.get(key) is not value:
                here, local = self._state.tensor(f"{index}.{key}"), local_of(value)
                if here.data_ptr() != local.data_ptr():
                    here.copy_(local)
                self._marks.set_state(index, there=True)
                self._views.pop(index, None)

    def _put_weights(self, index: int, parameter: torch.Tensor) -> None:
        weights, parameter = self._weights.tensor(str(index)), local_of(parameter)
        master = self._master(index)
        if self._step and _is_same(weights, parameter):
            return
        weights.copy_(parameter)
        has_moved = not self._marks.has_state(index) or master is None
        if master is not None and (has_moved or not _is_same(master.to(weights.dtype), weights)):
            master.copy_(parameter)

    def _master(self, index: int) -> torch.Tensor | None:
        return self._state.tensor(f"{index}.{MASTER}") if MASTER in self._keys[index] else None

    def _say(self, optimizer: OffloadedOptimizer, given: list[int]) -> None:
        tensors: dict[str, Any] = {}

        def sink(path: str, tensor: torch.Tensor) -> str:
            tensors[path] = tensor.tolist(), str(tensor.dtype).removeprefix("torch.")
            return path

        groups = optimizer.param_groups  # load_state_dict makes new ones
        numbers = {id(each): index for index, each in enumerate(self._parameters)}
        said = {
            "step": self._step,
            "kind": optimizer.offloaded,
            "count": len(self._parameters),
            "groups": [[numbers[id(each)] for each in group["params"]] for group in groups],
            "sets": [_encoded(group, number, sink) for number, group in enumerate(groups)],
            "tensors": tensors,
            "given": given,
            "threads": torch.get_num_threads(),
        }
        row = self.exchange.row(GRADIENTS)
        assert row
        table = bytes(self.exchange.table(GRADIENTS, row))
        _seal(self.exchange, table, said)


def _encoded(group: dict[str, Any], number: int, sink: Any) -> dict[str, Any]:
    return {key: encode(value, f"{number}.{key}", sink) for key, value in options_of(group).items()}


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Byte by byte."""
    return torch.equal(bytes_of(one), bytes_of(other))


def _master_bytes(parameter: torch.Tensor) -> int:
    size = 4 if has_master(parameter.dtype) else parameter.element_size()
    return local_of(parameter).numel() * size


def _state_specs(index: int, parameter: torch.Tensor, optimizer: OffloadedOptimizer) -> list[Spec]:
    """What an update makes of state of such a parameter: known by an update of zeros. Raises
    Unsupported where that is more than tensors."""
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    dtype = torch.float32 if has_master(parameter.dtype) else parameter.dtype
    shape = tuple(local_of(parameter).shape)
    master = torch.zeros(shape, dtype=dtype, device="cpu", requires_grad=True)
    kind = kind_of(optimizer.offloaded)
    made = kind([{**options_of(group), "params": [master]}])
    master.grad = torch.zeros_like(master)
    made.step()
    state = made.state.get(master, {})
    if odd := [key for key, value in state.items() if not isinstance(value, torch.Tensor)]:
        raise Unsupported(f"offloading a {kind.__name__}: its state has {odd[0]!r}, no tensor")
    found = [Leaf(f"{index}.{key}", value).spec for key, value in state.items()]
    if has_master(parameter.dtype):
        found.append(Leaf(f"{index}.{MASTER}", master).spec)
    return found


def _arena(
    specs: list[Spec], slots: int, directory: str | None = None, there: Arena | None = None
) -> Arena:
    """In memory; or in a file there, which has one slot. `there`: that one, where it is like
    it."""
    layout = lay_out(specs)
    table = encode_table(layout, {}, {}, {})
    row = there.row(0) if there and there.is_spill == (directory is not None) else None
    if there and row and bytes(there.table(0, row)) == table:
        return there
    room = len(table) + _DOCUMENTS_BYTES + 256 * len(specs)
    if directory is None:
        arena = Arena.create(slots, room, layout.size)
    else:
        arena = Arena.create_file(directory, room, layout.size)
    for slot in range(slots):
        arena.set_state(slot, SlotState.CAPTURING)
    _seal(arena, table, {"layout": 1})
    for slot in range(slots):
        arena.set_state(slot, SlotState.FREE)  # nothing in it is to be saved
    return arena


def _is_left(fd: int) -> bool:
    """Whether no process makes updates in an arena, soon: one whose trainer has died ends when it
    has made the last."""
    deadline = time.monotonic() + _LEFT_S
    while True:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        else:
            fcntl.lockf(fd, fcntl.LOCK_UN)
            return True


def _seal(arena: Arena, table: bytes, said: dict[str, Any]) -> None:
    descriptor = seal(said)
    arena.seal(0, Row(1, 0, arena.image_size, len(table), len(descriptor)), table, descriptor)


def _table_of(arena: Arena) -> Any:
    row = arena.row(0)
    assert row
    return parse(bytes(arena.table(0, row))).table


class _Worker:
    """The process, and the next one where it dies."""

    def __init__(self, shared: _Shared) -> None:
        self._shared = shared
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """Its process, where there is one."""
        return self._process.pid if self._process else None

    def step(self) -> None:
        """Make it; blocks. Raises Unavailable."""
        for _ in range(DEATHS_MAX):
            try:
                answer = self._ask()
            except OSError as error:
                answer = None
                log.warning("the optimizer's process: %s", error)
            if answer is None:
                log.warning("the optimizer's process has died; another one goes on")
                self.close()
                continue
            if answer["type"] == "done":
                return
            self.close()
            raise Unavailable(f"making an update in another process: {answer['message']}")
        raise Unavailable(f"making an update: {DEATHS_MAX} processes for it have died")

    def _ask(self) -> wire.Message | None:
        if self._connection:
            wire.send(self._connection, {"type": "step"})
        else:
            self._process, self._connection = wire.start_worker("everstep.offload.worker")
            shared = self._shared
            fds = [shared.exchange.fd, shared.state.fd, shared.undo.fd]
            said = {"type": "open", "flushes": flushes_denormals()}
            said |= {"on_disk": shared.state.is_spill, "trainer": os.getpid()}
            wire.send(self._connection, said, fds)
        received = wire.receive(self._connection)
        return received and received[0]

    def close(self) -> None:
        """End it."""
        if self._connection:
            self._connection.close()
            self._connection = None
        if self._process:
            self._process.wait()
            self._process = None

    def __del__(self) -> None:
        self.close()
