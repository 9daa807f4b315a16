"""Who takes part in a bench, and in which order. Data and pure functions; no torch here."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal, TypeVar

from everstep.cli.strategies import STRATEGIES, WARM_SAVES, Strategy

BASELINE = "none"
FLOOR = "plain"
OURS = "everstep"
LOG = "everstep-log"
SPREAD = "everstep-spread"
_BLOCKS_PER_BASELINE = 4
_DCP_SYNCS = "fsyncs before its last buffers are flushed, and no directory"
_DCP_STAGES = "staging buffers kept and filled by a thread, which is faster than its default"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a contender before it runs; `syncs` says what it makes durable by itself."""

    label: str
    module: str = "torch"
    distribution: str = "torch"
    syncs: str = "nothing"
    note: str = ""
    strategy: Strategy | None = None
    warm_saves: int = 3
    lead_steps: int = 3
    """Before the timed ones of a block that saves at every step; the first is waited for."""
    saves_before_kept: int = 0
    with_ranks: Literal["too", "only", ""] = ""
    ranks_note: str = ""
    loads_as: str = ""
    """Who reads the same files in the same way; then only that one's loads are measured."""

    @property
    def is_installed(self) -> bool:
        """Whether its library can be imported."""
        return find_spec(self.module) is not None

    @property
    def is_ours(self) -> bool:
        """Whether it is everstep; then it has a process for each interval, an option of its own."""
        return self.strategy is not None

    @property
    def is_durable(self) -> bool:
        """Whether what it calls finished survives a loss of power."""
        return self.syncs == "all"


CONTENDERS = {
    BASELINE: Facts("no checkpoints", with_ranks="too"),
    FLOOR: Facts("plain direct writes (floor)", syncs="all"),
    "torch.save": Facts("torch.save + fsync", syncs="all"),
    "dcp": Facts("DCP save", syncs="data in part", note=_DCP_SYNCS, with_ranks="too"),
    "dcp-async": Facts(
        "DCP async_save", syncs="data in part", note=_DCP_STAGES, with_ranks="too", loads_as="dcp"
    ),
    "dcp-process": Facts(
        "DCP async_save, process",
        syncs="data in part",
        note="the same, staged in shared memory, written by a process beside each rank",
        with_ranks="only",
        loads_as="dcp",
    ),
    "torchsnapshot": Facts("torchsnapshot take", "torchsnapshot", "torchsnapshot"),
    "torchsnapshot-async": Facts("torchsnapshot async_take", "torchsnapshot", "torchsnapshot"),
    "torch_checkpointing": Facts(
        "torch_checkpointing",
        "torch_checkpointing",
        "torch_checkpointing",
        note="use_direct_io=False, since its default fails on ext4",
        with_ranks="too",
        ranks_note="use_direct_io=False; its resharder gathers what it needs by CUDA only: without "
        "CUDA it is saved without one, and cannot be loaded on other ranks",
    ),
    OURS: Facts("everstep", "everstep", "everstep", "all", strategy="full", with_ranks="too"),
    SPREAD: Facts(
        "everstep spread",
        "everstep",
        "everstep",
        "all",
        note="its window is chosen by itself, and is one step, as with full, where copies are "
        "fast; its single save and restore are of a whole state",
        strategy="spread",
    ),
    LOG: Facts(
        "everstep log",
        "everstep",
        "everstep",
        "all",
        note="figures are of records, after a base outside of what is timed; its restore is of a "
        "base and two records",
        strategy="log",
        warm_saves=WARM_SAVES,
        lead_steps=5,
        saves_before_kept=2,
    ),
}

PEERS = [
    name
    for name, facts in CONTENDERS.items()
    if name not in (BASELINE, FLOOR) and not facts.is_ours and facts.with_ranks != "only"
]


@dataclass(frozen=True, slots=True)
class Block:
    """Some steps in a row of one contender, with a save at every `every`-th; 0: never. `bases`: of
    a log, with a base at each step."""

    name: str
    every: int
    bases: bool = False


def chosen(only: Sequence[str], strategies: Sequence[Strategy] = STRATEGIES) -> list[str]:
    """Who runs: the baseline, the floor, and what was asked for (or all) and is installed."""
    return [name for name in _wanted(only, strategies) if CONTENDERS[name].is_installed]


def missing(only: Sequence[str], strategies: Sequence[Strategy] = STRATEGIES) -> list[str]:
    """The contenders that were asked for (all) and are not installed."""
    return [name for name in _wanted(only, strategies) if not CONTENDERS[name].is_installed]


def ranked(only: Sequence[str]) -> list[str]:
    """Those that are measured with several ranks: all, or the baseline and what was asked for."""
    names = [name for name, facts in CONTENDERS.items() if facts.with_ranks]
    if unknown := set(only) - set(names):
        raise ValueError(
            f"--ranks: unknown contenders {sorted(unknown)}; there are {', '.join(names[1:])}"
        )
    return [name for name in names if not only or name in (BASELINE, *only)]


def _wanted(only: Sequence[str], strategies: Sequence[Strategy]) -> list[str]:
    """`only` holds everstep under one name; which of its strategies, the other says."""
    if unknown := set(only) - {*CONTENDERS} | set(only) & {LOG, SPREAD}:
        raise ValueError(
            f"unknown contenders {sorted(unknown)}; there are {', '.join([*PEERS, OURS])} "
            f"(with --strategy)"
        )
    names = []
    for name, facts in CONTENDERS.items():
        if facts.with_ranks == "only":
            continue
        if facts.is_ours:
            is_wanted = (not only or OURS in only) and facts.strategy in strategies
        else:
            is_wanted = not only or name in (BASELINE, FLOOR, *only)
        if is_wanted:
            names.append(name)
    return names


def round_of(names: Iterable[str], intervals: Sequence[int], number: int) -> list[Block]:
    """The blocks of a round: every contender at every interval, in an order that turns with the
    round's number, with the baseline first, last, and after every fourth block."""
    saving = [name for name in names if name != BASELINE]
    baseline = Block(BASELINE, 0)
    blocks = [baseline]
    due: list[Block] = []
    for name in rotated(saving, number):
        due += [Block(name, every) for every in rotated(intervals_of(name, intervals), number)]
        if name == LOG:
            due.append(Block(name, intervals[0], bases=True))
    for index, block in enumerate(due, start=1):
        blocks.append(block)
        if index % _BLOCKS_PER_BASELINE == 0 and index < len(due):
            blocks.append(baseline)
    return [*blocks, baseline]


def intervals_of(name: str, intervals: Sequence[int]) -> list[int]:
    """At which intervals a contender is measured: a window is no longer than one."""
    chosen = [every for every in intervals if name != SPREAD or every > 1]
    return chosen or list(intervals)


def rotated(items: list[_T], count: int) -> list[_T]:
    """The items, beginning with the `count`-th."""
    count %= max(1, len(items))
    return items[count:] + items[:count]


def steps_of(block: Block, steps: int) -> int:
    """How many steps are timed: at least `steps`, and whole intervals."""
    every = max(1, block.every)
    return -(-steps // every) * every
