"""Who takes part in a bench, and what is done in which order: contenders train in turn.

Every contender lives in processes of its own, with the same model and text. A round is a block of
steps of each, in an order that turns from round to round, with blocks without checkpoints between
them; a block is compared with these neighbours. Code of before stands next to the present code.
"""

import argparse
import contextlib
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.figures import Samples, slowdowns
from benchmarks.gang import Gang, WorkerFailed
from benchmarks.machine import version

SECTIONS = ("training", "restore", "recovery", "calls")
BEFORE = "@before"
BLOCKS_PER_BASELINE = 3
SETTLE_S = 0.3
BASE_EVERY = 12
"""Steps from base to base in the row of a log with bases: about what the library chooses for AdamW
in float32."""
WARM_SAVES = 6
LEAD_STEPS = 5
"""Untimed, at the start of a block; the first one's save is waited for. A log copies the first
records after a base eagerly."""
CALLS_PER_ROUND = 20
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Contender:
    """What is known of a contender before it runs."""

    name: str
    label: str
    note: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    """Of everstep: its strategy, and the steps between bases."""
    is_durable: bool = False
    """Whether what it calls finished survives a loss of power."""
    knows_ranks: bool = False
    saves_alone: bool = True
    restores: bool = True
    code: str | None = None
    """The directory that everstep is imported from; None: the present code."""

    @property
    def is_everstep(self) -> bool:
        """Whether it is a strategy of everstep."""
        return "strategy" in self.options

    @property
    def kind(self) -> str:
        """Which class saves its runs, see contenders.KINDS."""
        return "everstep" if self.is_everstep else self.name

    @property
    def module(self) -> str:
        """What has to be installed."""
        own = ("everstep", "torchsnapshot", "torch_checkpointing")
        return self.kind if self.kind in own else "torch"


def _everstep(words: str, note: str = "", base_every: int | None = None, **facts: Any) -> Contender:
    name, options = "everstep-" + words.replace(" ", "-"), {"strategy": words.split(maxsplit=1)[0]}
    if base_every:
        options |= {"base_every": base_every}
    always = {"is_durable": True, "knows_ranks": True, "options": options}
    return Contender(name, f"everstep {words}", note, **always, **facts)


BASELINE = Contender("none", "no checkpoints", knows_ranks=True)
PLAIN = Contender("plain", "plain direct writes (floor)", is_durable=True)
FULL = _everstep("full")
LOG = _everstep(
    "log", "only records: each block begins with a base, and no other comes", restores=False
)
ALL = (
    BASELINE,
    PLAIN,
    Contender("torch.save", "torch.save + fsync", is_durable=True),
    Contender("dcp", "DCP save", knows_ranks=True),
    Contender(
        "dcp-async",
        "DCP async_save",
        "its staging buffers are kept and filled by a thread, which is faster than its default; "
        "restores are those of DCP",
        knows_ranks=True,
        restores=False,
    ),
    Contender("torchsnapshot", "torchsnapshot async"),
    Contender(
        "torch_checkpointing",
        "torch_checkpointing",
        "use_direct_io=False, since its default fails on ext4; without CUDA it cannot be loaded "
        "on another number of ranks",
        knows_ranks=True,
    ),
    FULL,
    _everstep("spread", "at every step it has one step to spread over", restores=False),
    LOG,
    _everstep(
        "log with bases",
        f"a base in every {BASE_EVERY} steps; its blocks have that many",
        base_every=BASE_EVERY,
        saves_alone=False,
        restores=False,
    ),
    _everstep("auto", "as it had chosen by then", saves_alone=False, restores=False),
)


def chosen(
    only: Sequence[str], ranks: int, against: str | None
) -> tuple[list[Contender], list[str]]:
    """Who runs, and the labels of those who were asked for and are not installed.

    `only` names contenders; "everstep" is all of its strategies. The baseline always runs, and the
    floor on one rank. With `against`, each of everstep is followed by the same of that code.
    """
    kinds = [one for one in ALL if ranks == 1 or one.knows_ranks]
    names = {one.name for one in kinds}
    if unknown := set(only) - names - {"everstep"}:
        raise ValueError(f"unknown contenders {sorted(unknown)}; there are {', '.join(names)}")
    wanted = [
        one
        for one in kinds
        if not only
        or one in (BASELINE, PLAIN)
        or one.name in only
        or (one.is_everstep and "everstep" in only)
    ]
    missing = [one.label for one in wanted if find_spec(one.module) is None]
    found = []
    for one in wanted:
        if one.label not in missing:
            found.append(one)
            if one.is_everstep and against:
                label = f"{one.label}, before"
                found.append(replace(one, name=one.name + BEFORE, label=label, code=against))
    return found, missing


def turned(items: Sequence[T], number: int) -> list[T]:
    """The items, beginning with the `number`-th, and in every other round backwards: so that of two
    neighbours each comes first as often."""
    start = number % max(1, len(items))
    found = [*items[start:], *items[:start]]
    return found[::-1] if number % 2 else found


def round_of(contenders: Sequence[Contender], number: int) -> list[Contender]:
    """The order of a round: the baseline first, last, and after every few blocks."""
    order = [BASELINE]
    saving = turned([one for one in contenders if one != BASELINE], number)
    for index, one in enumerate(saving, start=1):
        order.append(one)
        if index % BLOCKS_PER_BASELINE == 0 and index < len(saving):
            order.append(BASELINE)
    return [*order, BASELINE]


class Bench:
    """One run. What a contender fails at is noted in `failed`, and the others go on."""

    def __init__(
        self,
        options: argparse.Namespace,
        contenders: Sequence[Contender],
        root: Path,
        tell: Callable[[str], None],
    ) -> None:
        """`options`: of the command line, see __main__."""
        self.samples = Samples()
        self.failed: dict[str, str] = {}
        self.versions = {one.name: version(one.module) for one in contenders}
        self.homes: dict[str, str] = {}
        """Of each contender of everstep: the file that was imported."""
        self._options = options
        self._contenders = list(contenders)
        self._root = root
        self._tell = tell
        self._section = ""
        self._gangs: dict[str, Gang] = {}
        self._kept: dict[str, dict[str, Any]] = {}

    def run(self) -> None:
        """Measure every section that was asked for."""
        sections = {
            "training": self._training,
            "restore": self._restores,
            "recovery": self._recovery,
            "calls": self._calls,
        }
        for section in self._options.sections:
            self._section = section
            try:
                sections[section]()
            finally:
                self._stop()

    # Training with checkpoints beside it, and single saves

    def _training(self) -> None:
        for one in self._contenders:
            self._try(one, self._start)
        for number in range(self._options.rounds):
            self._tell(f"round {number + 1} of {self._options.rounds}")
            blocks: list[tuple[str, float]] = []
            for one in round_of(self._contenders, number):
                self._try(one, self._block, number, blocks)
            for name, slowdown in slowdowns(blocks, BASELINE.name):
                self.samples.add(name, "slowdown", number, [slowdown])
            for one in turned(self._contenders, number):
                if one != BASELINE and one.saves_alone:
                    self._try(one, self._alone, number)

    def _start(self, one: Contender) -> None:
        self._tell(f"starting {one.label}")
        gang = self._gangs[one.name] = self._gang(one, self._options.ranks)
        reply = gang.ask("start", saves=WARM_SAVES if one != BASELINE else 0)
        self.samples.add(one.name, "state_bytes", 0, [reply["state_bytes"]])
        if one.is_everstep:
            self.homes[one.name] = reply["everstep"]

    def _block(self, one: Contender, number: int, blocks: list[tuple[str, float]]) -> None:
        whole = max(one.options.get("base_every", 1), self._options.every)
        steps = -(-self._options.steps // whole) * whole
        lead = LEAD_STEPS if self._options.every == 1 else 1
        reply = self._gangs[one.name].ask_watched("block", steps=steps, lead=lead)
        reply["memory_bytes"] = [reply["memory_bytes"]]
        for figure, values in reply.items():
            self.samples.add(one.name, figure, number, values)
        blocks.append((one.name, reply["step_s"][0]))

    def _alone(self, one: Contender, number: int) -> None:
        reply = self._gangs[one.name].ask("alone")
        durable_s = reply["finished_s"] + (0 if one.is_durable else reply["sync_s"])
        self.samples.add(one.name, "durable_s", number, [durable_s])
        if not one.is_everstep:  # its blocks have told
            self.samples.add(one.name, "bytes", number, [reply["bytes"]])

    # Restores, each by processes that did nothing before

    def _restores(self) -> None:
        saving = [one for one in self._contenders if one.restores and one != BASELINE]
        for one in saving:
            self._try(one, self._keep)
        for number in range(self._options.restores):
            self._tell(f"restores, round {number + 1}")
            for one in turned(saving, number):
                self._try(one, self._restore, number)
                if one.is_everstep:
                    self._try(one, self._restore_from_memory, number)

    def _keep(self, one: Contender) -> None:
        self._tell(f"{one.label}: a save to restore")
        with self._lent(one, self._options.ranks) as gang:
            gang.ask("start", saves=0)
            self._kept[one.name] = gang.ask("keep")

    def _restore(self, one: Contender, number: int) -> None:
        with self._lent(one, self._options.onto) as gang:
            self._restored(one, gang, "restore_s", number, cold=True, **self._asked(one.name))

    def _restore_from_memory(self, one: Contender, number: int) -> None:
        """The trainer saves a step and dies; its keeper has the state, and the next one comes."""
        dies = self._gang(one, self._options.ranks)
        try:
            dies.ask("start", saves=0)
            self._kept[one.name] = dies.ask("keep")
        finally:
            dies.kill()
        with self._lent(one, self._options.ranks) as gang:
            asked = self._asked(one.name)
            self._restored(one, gang, "memory_restore_s", number, cold=False, **asked)

    def _asked(self, name: str) -> dict[str, Any]:
        return {key: self._kept[name][key] for key in ("step", "expected")}

    def _restored(
        self, one: Contender, gang: Gang, figure: str, number: int, **request: Any
    ) -> None:
        reply = gang.ask("restore", **request)
        if not reply["equal"]:
            raise WorkerFailed(f"{figure}: what was restored DIFFERS from what was saved")
        self.samples.add(one.name, figure, number, [reply["seconds"]])

    # Recovery of a log: its base and so many records, beside what that cannot do without

    def _recovery(self) -> None:
        logs = [one for one in self._contenders if one.name.split("@")[0] == LOG.name]
        counts = [0, *self._options.records]
        for one in logs:
            self._try(one, self._write_log)
        for number in range(self._options.restores):
            self._tell(f"recovery, round {number + 1}")
            for count in turned(counts, number):
                for one in turned(logs, number):
                    self._try(one, self._recover, count, number)
            for one in turned(logs, number):
                self._try(one, self._bound, number)

    def _write_log(self, one: Contender) -> None:
        self._tell(f"{one.label}: a base and {max(self._options.records)} records")
        with self._lent(one, 1) as gang:
            self._kept[one.name] = gang.ask("write_log", records=list(self._options.records))
        for figure in ("base_bytes", "record_bytes"):
            self.samples.add(one.name, figure, 0, [self._kept[one.name][figure]])

    def _recover(self, one: Contender, records: int, number: int) -> None:
        expected = self._kept[one.name]["expected"][str(records)]
        with self._lent(one, 1) as gang:
            request = {"step": records + 1, "expected": expected, "cold": True}
            self._restored(one, gang, f"recover_{records}_s", number, **request)

    def _bound(self, one: Contender, number: int) -> None:
        """A restore of the base, and a plain read and an update for each record: the first of a
        process, whose memory is new, and the median of those after it."""
        with self._lent(one, 1) as gang:
            reply = gang.ask("parts_of_log", records=max(self._options.records))
        base_s = self.samples.rounds(one.name, "recover_0_s")[number][0]
        parts = [reply["read_s"], reply["update_s"]]
        first_s = sum(part[0] for part in parts)
        later_s = sum(statistics.median(part[1:] or part) for part in parts)
        for figure in ("read_s", "update_s"):
            self.samples.add(one.name, figure, number, reply[figure])
        for count in self._options.records:
            bound_s = base_s + first_s + (count - 1) * later_s
            self.samples.add(one.name, f"bound_{count}_s", number, [bound_s])

    # The call, by the number of tensors

    def _calls(self) -> None:
        measured = [one for one in self._contenders if one.is_everstep and one.saves_alone]
        for tensors in self._options.tensors:
            for number in range(self._options.rounds):
                self._tell(f"calls with {tensors} tensors, round {number + 1}")
                for one in turned(measured, number):
                    self._try(one, self._count_calls, tensors, number)
            self._stop()

    def _count_calls(self, one: Contender, tensors: int, number: int) -> None:
        if one.name not in self._gangs:
            self._gangs[one.name] = self._gang(one, 1, params="tiny")
        request = {"tensors": tensors, "saves": CALLS_PER_ROUND}
        reply = self._gangs[one.name].ask("calls", strategy=one.options["strategy"], **request)
        for figure, values in reply.items():
            self.samples.add(one.name, f"{tensors}_tensors_{figure}", number, values)

    # Gangs

    def _gang(self, one: Contender, ranks: int, **changed: Any) -> Gang:
        settings = {
            "kind": one.kind,
            "params": self._options.params,
            "every": self._options.every,
            "parallel": self._options.parallel,
            **one.options,
            **changed,
        }
        return Gang(self._root / self._section / one.name, settings, ranks, one.code)

    @contextlib.contextmanager
    def _lent(self, one: Contender, ranks: int) -> Iterator[Gang]:
        """A gang for one task."""
        gang = self._gang(one, ranks)
        try:
            yield gang
        finally:
            gang.stop()

    def _stop(self) -> None:
        for gang in self._gangs.values():
            gang.stop()
        self._gangs.clear()
        shutil.rmtree(self._root / self._section, ignore_errors=True)

    def _try(self, one: Contender, action: Callable[..., None], *rest: Any) -> None:
        """Do something with a contender that has not failed in this section."""
        key = f"{one.label}, {self._section}"
        if key in self.failed:
            return
        try:
            action(one, *rest)
        except WorkerFailed as error:
            if one in (BASELINE, PLAIN):
                raise
            self.failed[key] = str(error)
            self._tell(f"{key} failed at {error}")
        time.sleep(SETTLE_S)
