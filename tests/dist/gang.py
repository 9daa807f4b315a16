"""A few ranks on gloo that stay up, and call functions of the tests: start-up is most of the time.

    def saves(folder):  # of the test module; called in each rank, with the process group up
        assert dist.get_world_size() == 4
        return dist.get_rank()

    def test_saves(gang, tmp_path):  # `gang` of conftest.py: four ranks, for all tests of a file
        assert gang.run(saves, tmp_path) == [0, 1, 2, 3]
        assert gang.run(only_two, tmp_path, size=2) == [0, 1]

A function is sent by reference, what it takes and returns as pickles (tensors too). Each call gets
a new process group with nothing in its store, a new seed, the environment of the test (and RANK,
WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, … as torchrun sets them), and the working directory of the
test; nothing is kept from one call to the next, but module globals: use them for nothing.

`run` gives what the ranks returned, or raises GangError: what each rank raised, the first one
first, how it died, or, where it hung, the stacks of all its threads; with what it printed. An
exception that nobody sees (of a thread, of `__del__`) and a warning of everstep's are failures too.
`outcomes` raises nothing, and says the same of each rank. Ranks that are to die:

    outcomes = gang.outcomes(dies_at, 7)  # rank 1 calls os.kill(os.getpid(), signal.SIGKILL)
    assert outcomes[1].killed and outcomes[0].value == …

    gang.start(trains, tmp_path)  # or from outside, at any moment
    wait_until(...)
    gang.kill(1)  # or gang.kill(): all
    outcomes = gang.finish()

After a failure or a death the next call starts all ranks anew (0.3 s). The store (a TCPStore) is
served by the test's process, as torchrun's agent does: it outlives all ranks. Ranks are forked from
one process that has imported torch, so they share its hash seed: what depends on the order of a set
shows with `Gang(4, method="spawn")`, which is slower.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

import gang_rank
import torch.distributed as dist
from gang_rank import Call

import forked

TIMEOUT_S = 60.0
GRACE_S = 2.0
"""How long the other ranks may take to an end, in `run`, once one has failed."""

STACKS_S = 3.0
PRINTED_CHARACTERS_MAX = 1500
"""Of the beginning, and of the end: who died by a signal said at first which thread it was in."""


class GangError(AssertionError):
    """A call did not end well on all ranks."""


@dataclass(slots=True)
class Outcome:
    """What became of a call on one rank: returned, raised, died or hung."""

    rank: int
    kind: str = "hung"
    value: Any = None
    text: str = ""
    """A traceback, the signal or status of a death, or stacks."""

    exitcode: int | None = None
    after_s: float = float("inf")

    @property
    def killed(self) -> bool:
        """Whether SIGKILL ended the rank."""
        return self.kind == "died" and self.exitcode == -signal.SIGKILL


class Gang:
    """`size` ranks. Not for several threads; one call at a time."""

    def __init__(self, size: int, method: str = "forkserver") -> None:
        self.size = size
        self._context = multiprocessing.get_context(method)
        self._folder = tempfile.TemporaryDirectory(prefix="gang-")
        self._ranks: list[_Rank] = []
        self._store: dist.TCPStore | None = None
        self._calls = 0
        self._running: tuple[str, list[_Rank], float] | None = None

    def __enter__(self) -> "Gang":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        function: Callable,
        *args: object,
        size: int | None = None,
        timeout: float = TIMEOUT_S,
        **keywords: object,
    ) -> list:
        """Call `function` so on the first `size` ranks; what they return, by rank."""
        name, outcomes = "", list[Outcome]()
        for _ in range(2):
            self.start(function, *args, size=size, timeout=timeout, **keywords)
            assert self._running
            name = self._running[0]
            outcomes = self.finish(timeout, GRACE_S)
            if not any(map(self._was_gloo, outcomes)):
                break
        if any(outcome.kind != "returned" for outcome in outcomes):
            raise GangError(self._described(name, outcomes))
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self,
        function: Callable,
        *args: object,
        size: int | None = None,
        timeout: float = TIMEOUT_S,
        **keywords: object,
    ) -> list[Outcome]:
        """Like `run`, but what became of each rank; waits for all that are alive."""
        self.start(function, *args, size=size, timeout=timeout, **keywords)
        return self.finish(timeout)

    def start(
        self,
        function: Callable,
        *args: object,
        size: int | None = None,
        timeout: float = TIMEOUT_S,
        **keywords: object,
    ) -> None:
        """Begin a call; `finish` ends it."""
        size = size or self.size
        assert size <= self.size, f"a gang of {self.size} has no {size} ranks"
        if self._running or not self._ranks or not all(rank.alive for rank in self._ranks):
            self._start_ranks()
        assert self._store
        self._calls += 1
        call = Call(
            function=pickle.dumps((function, args, keywords)),
            size=size,
            name=f"call-{self._calls}",
            timeout_s=timeout + 30,  # it is the gang that finds who hangs, not gloo
            environ={**os.environ, **forked.QUIET, "MASTER_PORT": str(self._store.port)},
            folder=os.getcwd(),
            path=list(sys.path),
        )
        ranks = self._ranks[:size]
        name = f"{function.__module__}.{function.__qualname__}"
        self._running = name, ranks, time.monotonic()
        for rank in ranks:
            rank.begin(call)

    def finish(self, timeout: float = TIMEOUT_S, grace: float | None = None) -> list[Outcome]:
        """Wait until the call ends on all ranks; no longer than `grace` after a failure."""
        assert self._running, "finish() without start()"
        _, ranks, began = self._running
        outcomes = [Outcome(rank.number) for rank in ranks]
        waiting = set(ranks)
        end = time.monotonic() + timeout
        while waiting and (left := end - time.monotonic()) > 0:
            ready = connection.wait([rank.connection for rank in waiting], left)
            for rank in [rank for rank in waiting if rank.connection in ready]:
                waiting.remove(rank)
                outcome = outcomes[rank.number]
                rank.answer(outcome)
                outcome.after_s = time.monotonic() - began
                if grace is not None and outcome.kind != "returned":
                    end = min(end, time.monotonic() + grace)
        for rank in waiting:
            rank.ask_for_stacks()
        for rank in waiting:
            outcomes[rank.number].text = rank.stacks()
        if all(outcome.kind == "returned" for outcome in outcomes):
            self._running = None  # else the ranks are started anew
        return outcomes

    def kill(self, *ranks: int) -> None:
        """SIGKILL to `ranks`, or to all, and wait until they are gone."""
        for number in ranks or range(self.size):
            self._ranks[number].kill()

    def pid(self, rank: int) -> int:
        """The process of a rank of the call that runs."""
        return self._ranks[rank].process.pid

    def close(self) -> None:
        """End all ranks."""
        if not self._running:
            for rank in self._ranks:
                rank.leave()
        self._stop_ranks()
        self._folder.cleanup()

    def _start_ranks(self) -> None:
        self._stop_ranks()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._calls += 1
        if self._context.get_start_method() == "forkserver":
            forked.start_server()
        for number in range(self.size):
            prefix = Path(self._folder.name, f"{self._calls}.{number}")
            self._ranks.append(_Rank(self._context, number, self._store.port, prefix))

    def _stop_ranks(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.connection.close()
        self._ranks.clear()
        self._store = self._running = None

    def _was_gloo(self, outcome: Outcome) -> bool:
        """Whether it died in torch's own collectives, which once in some 10^5 of them end in a
        SIGSEGV (torch 2.13, without any Checkpointer): in a call of theirs, or in one of gloo's
        threads, which are the only ones without Python in a rank."""
        if outcome.exitcode != -signal.SIGSEGV:
            return False
        stacks = self._ranks[outcome.rank].printed(whole=True)
        return "/_functional_collectives.py" in stacks or "Current thread" not in stacks

    def _described(self, name: str, outcomes: list[Outcome]) -> str:
        size = len(outcomes)
        texts = []
        said: dict[str, int] = {}
        for outcome in sorted(outcomes, key=lambda outcome: outcome.after_s):
            if outcome.kind != "returned":
                text = outcome.text
                if (first := said.setdefault(text, outcome.rank)) != outcome.rank:
                    text = f"the same as rank {first}"
                texts.append(f"rank {outcome.rank} of {size} {outcome.kind}: {text}")
                if printed := self._ranks[outcome.rank].printed():
                    texts.append(f"rank {outcome.rank} printed:\n{printed}")
        well = [str(outcome.rank) for outcome in outcomes if outcome.kind == "returned"]
        texts.append(f"returned: rank {', '.join(well)}" if well else "no rank returned")
        return f"{name} on {size} ranks:\n" + "\n\n".join(texts)


class _Rank:
    """One process, seen from the test."""

    def __init__(self, context: Any, number: int, port: int, prefix: Path) -> None:
        self.number = number
        self._printed = prefix.with_name(prefix.name + ".printed")
        self._stacks = prefix.with_name(prefix.name + ".stacks")
        self._printed_before = 0
        self.connection, far = context.Pipe()
        self.process = context.Process(
            target=gang_rank.main,
            args=(number, os.getpid(), port, far, str(self._printed), str(self._stacks)),
            name=f"rank {number}",
            daemon=True,
        )
        self.process.start()
        far.close()

    @property
    def alive(self) -> bool:
        return self.process.is_alive()

    def begin(self, call: Call) -> None:
        self._printed_before = len(_read(self._printed))
        with contextlib.suppress(OSError):  # it died: `answer` tells
            self.connection.send_bytes(pickle.dumps(call))

    def answer(self, outcome: Outcome) -> None:
        """Read what came: its answer, or the end of the stream."""
        try:
            kind, content = pickle.loads(self.connection.recv_bytes())  # noqa: S301
        except (EOFError, OSError):
            self.process.join()
            outcome.kind, outcome.exitcode = "died", self.process.exitcode
            outcome.text = _exit_reason(self.process.exitcode)
            return
        outcome.kind = kind
        if kind == "returned":
            outcome.value = pickle.loads(content)  # noqa: S301
        else:
            outcome.text = content

    def ask_for_stacks(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, gang_rank.STACKS_SIGNAL)

    def stacks(self) -> str:
        """What it does: asked for before; it may take a moment to say."""
        end = time.monotonic() + STACKS_S
        text = ""
        while gang_rank.MAIN_THREAD not in text and self.alive and time.monotonic() < end:
            time.sleep(0.02)
            text = _read(self._stacks)
        return f"it was at\n{text}" if text else "it did not even show its stacks"

    def printed(self, whole: bool = False) -> str:
        """What it printed in this call; if it is long and not `whole`, its begin and its end."""
        text = _read(self._printed)[self._printed_before :].strip()
        if whole or len(text) <= 2 * PRINTED_CHARACTERS_MAX:
            return text
        return f"{text[:PRINTED_CHARACTERS_MAX]}\n…\n{text[-PRINTED_CHARACTERS_MAX:]}"

    def leave(self) -> None:
        """Ask it to end, and wait a while."""
        with contextlib.suppress(OSError):
            self.connection.send_bytes(pickle.dumps(None))
        self.process.join(GRACE_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def _exit_reason(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"signal {signal.Signals(-exitcode).name}"
    return f"status {exitcode}"


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
