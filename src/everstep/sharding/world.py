"""The ranks of a run, which of them share a node and with it a keeper, and how they come to agree:
through the torch.distributed.Store, without a collective.

Invariant: all ranks make the same calls in the same order. Where one does not come, the others are
told which, after a while; nobody waits for ever.
"""

import contextlib
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from everstep.errors import KINDS, EverstepError, Unavailable, kind_of
from everstep.keeper.home import node
from everstep.keeper.wire import ALONE, Place
from everstep.store.names import PROBES
from everstep.tiers.tier import Tier, name_of

log = logging.getLogger("everstep")

AGREE_S = 600.0
TELL_S = 10.0
"""After that long a wait the ranks that have not come are told."""
_PAUSE_S_MIN, _PAUSE_S_MAX = 0.0005, 0.05

T = TypeVar("T")


def group_size() -> int:
    """Ranks of torch's default process group; 1 where there is none."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class World:
    """This process among those that train together. For the thread that trains."""

    def __init__(self, rank: int, size: int, store: Any = None) -> None:
        """`store`: a torch.distributed.Store that all ranks share; None for one alone."""
        self.rank = rank
        self.size = size
        self.local: tuple[int, ...] = (rank,)
        """The ranks on this node, as far as is known."""
        self._store = store
        self._prefix = "everstep"
        if store is not None:  # one more of this rank's; the others count theirs
            self._prefix += f"/{store.add(f'everstep/{rank}', 1)}"
        self._calls = 0

    @classmethod
    def current(cls) -> "World":
        """That of the default process group; alone where there is none."""
        if (size := group_size()) > 1:
            # Its own connection to what torchrun or init_process_group set up; torch has no public
            # way.
            store = dist.distributed_c10d._get_default_store()
            return cls(dist.get_rank(), size, store)
        has_group = dist.is_available() and dist.is_initialized()
        if not has_group and os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1"):  # torchrun's
            log.warning(
                "WORLD_SIZE is %s, but there is no process group yet: this Checkpointer takes its "
                "process for a run of its own. Make it after "
                "torch.distributed.init_process_group(), or with alone=True",
                os.environ["WORLD_SIZE"],
            )
        return cls(0, 1)

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody to agree with."""
        return self.size == 1

    @property
    def number(self) -> int | None:
        """The rank, of one of several."""
        return None if self.is_alone else self.rank

    def gather(self, what: str, value: Any) -> list[Any]:
        """What each rank says, by rank; `value` is JSON. Blocks until all have come.

        Raises Unavailable, which names the ranks that did not come within AGREE_S.
        """
        if self.is_alone:
            return [value]
        store = self._store
        assert store is not None
        call, self._calls = self._calls, self._calls + 1
        keys = [f"{self._prefix}/{call}/{rank}" for rank in range(self.size)]
        try:
            store.set(keys[self.rank], json.dumps([what, value]))
            self._await(
                what,
                lambda: bool(store.check(keys)),
                lambda: [rank for rank, key in enumerate(keys) if not store.check([key])],
                AGREE_S,
            )
            said = [json.loads(store.get(key)) for key in keys]
            if call > 1:  # all have come to this call, so all are through with the one before
                store.delete_key(f"{self._prefix}/{call - 2}/{self.rank}")
        except RuntimeError as error:  # also of a store that is gone with its process
            raise Unavailable(f"{what}: the ranks' store does not answer: {error}") from error
        for rank, (theirs, _) in enumerate(said):
            if theirs != what:
                raise Unavailable(
                    f"{what}: rank {rank} is at {theirs!r}. All ranks must make the same calls of "
                    f"their Checkpointer in the same order"
                )
        return [value for _, value in said]

    def decide(self, what: str, value: int | None = None) -> int | None:
        """What the first rank that said something has decided; with a `value`, that may be this
        one. Does not wait for others; a round trip to the store. Raises Unavailable."""
        assert self._store is not None
        key = f"{self._prefix}/{what}"
        try:
            if value is not None:
                return int(self._store.compare_set(key, "", str(value)))
            return int(self._store.get(key)) if self._store.check([key]) else None
        except RuntimeError as error:
            raise Unavailable(f"{what}: the ranks' store does not answer: {error}") from error

    def together(self, what: str, work: Callable[[], T]) -> T:
        """Do it on each rank, and go on when all have: what one of them raises is raised on all,
        as Unavailable there where it is no error of everstep's (of a user's function)."""
        if self.is_alone:
            return work()
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001  the others are told, or would wait for long
            failure = error
        kind = kind_of(failure) if failure else ""
        message = str(failure or "")
        if failure and not isinstance(failure, EverstepError):
            message = f"{what}: {failure!r}"
        outcomes = self.gather(what, [kind, message])
        if failure:
            raise failure
        for rank, (theirs, message) in enumerate(outcomes):
            if theirs:
                raise KINDS[theirs](f"rank {rank}: {message}")
        return result

    def tell(self, what: str, value: Any) -> None:
        """Say something to the other ranks, for whom it may concern: JSON, under a name of its own.
        Where the store is gone nobody hears it."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set(f"{self._prefix}/said/{what}", json.dumps(value))

    def hear_all(self, what: str, is_new: Callable[[Any], bool], timeout: float) -> list[Any]:
        """What each rank has told under `what/rank`, once that is new on all. Blocks.

        Raises Unavailable, which names the ranks that have not told within `timeout` seconds.
        """
        said: dict[int, Any] = {}

        def missing() -> list[int]:
            for rank in set(range(self.size)) - said.keys():
                if (told := self.heard(f"{what}/{rank}")) is not None and is_new(told):
                    said[rank] = told
            return sorted(set(range(self.size)) - said.keys())

        self._await(what, lambda: not missing(), missing, timeout)
        return [said[rank] for rank in range(self.size)]

    def heard(self, what: str) -> Any:
        """What was told under this name; None where nothing has come yet. Does not wait."""
        if self._store is None:
            return None
        key = f"{self._prefix}/said/{what}"
        with contextlib.suppress(RuntimeError):
            if self._store.check([key]):
                return json.loads(self._store.get(key))
        return None

    def _await(
        self,
        what: str,
        is_done: Callable[[], bool],
        missing: Callable[[], list[int]],
        timeout: float,
    ) -> None:
        """By polling: a blocking get would hold a lock that others of this process need."""
        began, pause, is_told = time.monotonic(), _PAUSE_S_MIN, False
        while not is_done():
            waited = time.monotonic() - began
            if waited > timeout:
                raise Unavailable(
                    f"{what}: of {self.size} ranks {missing()} did not come within {timeout:.0f} "
                    f"s. All ranks make the same calls, and a state changes on all of them at the "
                    f"same step"
                )
            if waited > TELL_S and not is_told:
                is_told = True
                log.warning(
                    "%s: rank %s waits for ranks %s. All ranks of a process group make a "
                    "Checkpointer, and the same calls of it; one rank for itself takes alone=True",
                    what,
                    self.rank,
                    missing(),
                )
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE_S_MAX)


def form_team(world: World, store: Tier, alike: Mapping[str, Any]) -> Place:
    """This rank's place among those of its node, and of the run. All ranks call it.

    `alike`: what else all ranks have to say alike, as JSON: lists of names, and single settings.
    Raises ValueError where ranks of a node save to different stores, or differ in that; Unavailable
    where one does not come.
    """
    if world.is_alone:
        return ALONE
    here = f"{socket.gethostname()} {_boot()} {node()}"
    mine = [secrets.token_hex(8), here, name_of(store.root), dict(alike)]
    said = world.gather("attaching", mine)
    for rank, (_, where, name, _) in enumerate(said):
        first = next(each for each in said if each[1] == where or not store.is_directory)
        if name != first[2]:
            raise ValueError(
                f"rank {rank} saves to {name}, rank {said.index(first)} to {first[2]}: all ranks "
                f"of a node save to one store"
            )
    for what in alike:
        _check_alike(what, [each[3].get(what) for each in said])
    nodes = list(dict.fromkeys(each[1] for each in said))
    local = tuple(rank for rank, each in enumerate(said) if each[1] == here)
    own = local.index(world.rank)
    own_store = len(nodes) > 1 and not _see_one_store(world, store, said[0][0])
    return Place(said[0][0], local, nodes.index(here), len(nodes), own, own_store)


def _see_one_store(world: World, store: Tier, token: str) -> bool:
    """Whether all ranks find in their stores what rank 0 puts into its own."""
    if not store.is_directory:
        return True
    path = f"{PROBES}/{token}"
    own = [path] if world.rank == 0 else []
    try:
        world.together("looking at the stores", lambda: [store.create(p, b"") for p in own])
        return all(world.gather("comparing the stores", store.size(path) is not None))
    finally:
        store.forget(own)


def _check_alike(what: str, said: Sequence[Any]) -> None:
    """What would fail at each save, or only when it is to be restored. Raises ValueError."""
    first = said[0]
    if isinstance(first, list):  # in whatever order
        said = [sorted(each) for each in said]
    other = next((rank for rank, each in enumerate(said) if each != said[0]), None)
    if other is None:
        return
    if not isinstance(first, list):
        raise ValueError(
            f"{what} is {first!r} on rank 0, {said[other]!r} on rank {other}: all ranks of a run "
            f"give the same"
        )
    here, there = sorted(set(first) - set(said[other])), sorted(set(said[other]) - set(first))
    raise ValueError(
        f"{what}: {here or 'nothing'} only on rank 0, {there or 'nothing'} only on rank {other}. "
        f"All ranks of a run give the same names; where a rank does not have a part, the value is "
        f"None"
    )


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
