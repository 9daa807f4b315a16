"""The optimizer's side of the work: torch's own optimizer on masters, a chunk at a time.

    python -m everstep.offload.inner     the worker (keeper/workers.py) that makes it

    exchange   gradients, weights as parameters are, what is said of a step; what one chunk had
               before its update, and how far the step is
    state      masters of weights in half precision, moments

Both are arenas that the trainer made, and both map. So this process owns nothing: where it dies in
the midst of a step, the next one puts back the chunk that was being changed, and goes on.
"""

import fcntl
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from everstep.errors import Unsupported
from everstep.keeper import wire
from everstep.keeper.arena import Arena
from everstep.keeper.workers import Sent, serve
from everstep.offload.memory import Memory
from everstep.state.objects import decode
from everstep.state.optimizers import install

MASTER = "master"
"""The key under which the state of a parameter has it in float32."""

CHUNK_BYTES = 24 << 20
"""Of weights and state that are updated together, unless those of one parameter are more."""

GRADIENT, WEIGHTS = "gradient.{}", "weights.{}"
UNDO, PROGRESS = "undo", "progress"
"""Tensors in the exchange, of which the last is a number (see Inner.update)."""


def has_master(dtype: torch.dtype) -> bool:
    """Whether weights of this kind are updated in float32."""
    return dtype in (torch.bfloat16, torch.float16)


def step_here(optimizer: Optimizer, kind: Callable[..., Optimizer]) -> None:
    """Make the same update in this process, in place; of whole tensors on the CPU."""
    masters: dict[torch.Tensor, torch.Tensor] = {}
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        weights = parameter.float() if has_master(parameter.dtype) else parameter
        master = optimizer.state.get(parameter, {}).get(MASTER, weights).detach()
        masters[parameter] = master.requires_grad_()
        if parameter.grad is not None:
            master.grad = parameter.grad.to(master.dtype)
    inner = kind(
        [
            {**options_of(group), "params": [masters[each] for each in group["params"]]}
            for group in optimizer.param_groups
        ]
    )
    inner.defaults.update(optimizer.defaults)  # Adagrad looks there
    for parameter, master in masters.items():
        if state := optimizer.state.get(parameter):
            inner.state[master] = {key: state[key] for key in state if key != MASTER}
    inner.step()
    for parameter, master in masters.items():
        if parameter.grad is not None:
            state = optimizer.state.setdefault(parameter, {})
            state |= inner.state.get(master, {})
            if has_master(parameter.dtype):
                state.setdefault(MASTER, master.detach())
                parameter.copy_(master)


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """All of a group but its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def kind_of(name: str) -> Any:
    """The class of that module and name. Raises Unsupported."""
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise Unsupported(f"importing the optimizer {name}: {error}") from error


class Inner:
    """For one thread."""

    def __init__(self, exchange: Memory, state: Memory) -> None:
        """Of the trainer. Raises Corrupt, Unsupported."""
        self._exchange, self._state = exchange, state
        self._undo = exchange.bytes(UNDO)
        self._progress = exchange.tensor(PROGRESS).numpy()  # one store: all of it, or nothing
        said = exchange.said
        self._keys: dict[int, list[str]] = {index: [] for index in range(said["count"])}
        for name in state.table.tensors:
            index, _, key = name.partition(".")
            self._keys[int(index)].append(key)
        self._masters = [self._master(index) for index in range(said["count"])]
        groups = [{"params": [self._masters[i] for i in row]} for row in said["groups"]]
        self._optimizer = kind_of(said["kind"])(groups)
        self._step = 0

    def update(self, step: int, position: int, given: Sequence[int]) -> None:
        """Update these parameters, whose gradients are there: a chunk, or what of one has some.
        `position`: in what the trainer asks for in its step; what is done is not done again."""
        if step != self._step:
            self._install(self._exchange.said)
            self._step = step
        begun = step << 32 | position << 1
        is_saved, is_done = begun | 1, begun + 2
        progress = int(self._progress[0])
        if is_done <= progress < (step + 1) << 32:
            return
        if progress == is_saved:
            for row, saved in self._spans(given):
                row.copy_(saved)
        else:
            for row, saved in self._spans(given):
                saved.copy_(row)
        self._progress[0] = is_saved
        try:
            self._update(given)
        except BaseException:
            for row, saved in self._spans(given):
                row.copy_(saved)
            self._progress[0] = begun
            raise
        if self._state.arena.is_file:  # not more than a chunk of it is in memory
            for name in (f"{index}.{key}" for index in given for key in self._keys[index]):
                self._state.drop(name)
        self._progress[0] = is_done

    def _master(self, index: int) -> torch.Tensor:
        is_apart = MASTER in self._keys[index]
        found = self._state.tensor(f"{index}.{MASTER}") if is_apart else self._weights(index)
        return found.requires_grad_()

    def _weights(self, index: int) -> torch.Tensor:
        return self._exchange.tensor(WEIGHTS.format(index))

    def _install(self, said: dict[str, Any]) -> None:
        """What the trainer says of a step: hyperparameters, and of which parameters there is no
        state yet, or any more."""
        torch.set_num_threads(said["threads"])
        torch.set_flush_denormal(bool(said["flushes"]))
        torch.set_default_dtype(getattr(torch, said["default_dtype"]))

        def tensor(name: str, _: str) -> torch.Tensor:
            value, dtype = said["tensors"][name]
            return torch.tensor(value, dtype=getattr(torch, dtype))

        defaults = {key: decode(value, tensor) for key, value in said["defaults"].items()}
        self._optimizer.defaults.update(defaults)
        for index, values in enumerate(said["sets"]):
            install(self._optimizer, index, decode(values, tensor))
        lacking, state = set(said["lacking"]), self._optimizer.state
        for index, master in enumerate(self._masters):
            if index in lacking:
                state.pop(master, None)
            elif master not in state:
                rows = ((key, f"{index}.{key}") for key in self._keys[index] if key != MASTER)
                state[master] = {key: self._state.tensor(name) for key, name in rows}

    def _update(self, indices: Sequence[int]) -> None:
        """What it makes lies in shared memory from now on."""
        for index in indices:
            master, gradient = self._masters[index], self._exchange.tensor(GRADIENT.format(index))
            master.grad = gradient.to(master.dtype)
        self._optimizer.step()
        for index in indices:
            master = self._masters[index]
            master.grad = None
            for key, value in self._optimizer.state[master].items():
                if key not in self._keys[index]:
                    raise Unsupported(f"its state has {key!r} now, which it had not at the begin")
                if isinstance(value, torch.Tensor):
                    self._state.take(f"{index}.{key}", value)
            if MASTER in self._keys[index]:
                self._weights(index).copy_(master.detach())

    def _spans(self, indices: Sequence[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """All bytes that an update of these changes, and their places in undo."""
        at = 0
        for index in indices:
            rows = [self._state.bytes(f"{index}.{key}") for key in self._keys[index]]
            for row in (self._exchange.bytes(WEIGHTS.format(index)), *rows):
                yield row, self._undo[at : at + len(row)]
                at += len(row)


class Updates:
    """Of one optimizer. Its trainer sends `open` with two arenas, then `update` for some parameters
    after others, which are in the arenas, and `end` after the last of a step. To that it answers
    `done`."""

    _inner: Inner

    def answer(self, message: wire.Message, fds: list[int]) -> Sent | None:
        """To `end`, which comes when all is done that came before. Raises what torch and the
        optimizer do."""
        match message:
            case {"type": "open", "trainer": trainer}:
                exchange, state = fds
                fcntl.lockf(state, fcntl.LOCK_SH)  # goes with this process
                if os.getppid() != trainer:  # what it asked for is not wanted
                    sys.exit()
                self._inner = Inner(Memory(Arena(exchange)), Memory(Arena(state)))
            case {"type": "update", "step": step, "position": position, "given": given}:
                self._inner.update(step, position, given)
            case _:
                return {"type": "done"}, []
        return None


if __name__ == "__main__":
    sys.exit(serve(Updates().answer))
