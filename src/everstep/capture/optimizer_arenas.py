"""The memory of offloaded optimizers, which the keeper has as well: after the trainer's death their
state is there, as the last update left it, and a restore reads only what differs."""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress

from everstep.errors import Unavailable
from everstep.format.document import digest_of
from everstep.keeper.arena import OPTIMIZER, Arena
from everstep.keeper.client import Client
from everstep.offload.optimizer import OffloadedOptimizer
from everstep.sharding.redundancy import inner_of
from everstep.state.view import State


class OptimizerArenas:
    """Of one Checkpointer. For the thread that trains."""

    def __init__(self, state: State, client: Client) -> None:
        self._state, self._client = state, client
        self._given: dict[str, tuple[int, int]] = {}

    def give(self) -> None:
        """Let the keeper have what it does not have yet."""
        for key, optimizer in self._optimizers():
            arena = optimizer.arena
            if arena and self._given.get(key) != arena.identity:
                self._client.release_arena(key)  # the one before it, if any
                self._client.add_arena(key, Arena(os.dup(arena.fd)))
                self._given[key] = arena.identity

    def adopt(self, arenas: Mapping[str, Arena]) -> None:
        """Let optimizers go on in those of dead trainers, by their keys. Where one cannot be had,
        the state is read."""
        for key, optimizer in self._optimizers():
            if (arena := arenas.get(key)) is None:
                continue
            own = Arena(os.dup(arena.fd))
            with suppress(Unavailable):
                if not self._client.adopt(key, arena):  # which has it from then on
                    continue
                if optimizer.adopt(own):
                    self._given[key] = own.identity
                else:
                    self._client.release_arena(key)

    def _optimizers(self) -> Iterator[tuple[str, OffloadedOptimizer]]:
        for each in self._state.optimizers:
            optimizer = inner_of(each.optimizer)
            if isinstance(optimizer, OffloadedOptimizer):
                whose = f"{each.name} of {self._state.world.rank}"
                yield f"{OPTIMIZER}{digest_of(whose.encode())[:16]}", optimizer
