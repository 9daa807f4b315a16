"""Who takes part in a bench, and in which order. Data and pure functions; no torch here."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TypeVar

BASELINE = "none"
FLOOR = "plain"
OURS = "everstep"
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
    own_process_per_interval: bool = False

    @property
    def is_installed(self) -> bool:
        """Whether its library can be imported."""
        return find_spec(self.module) is not None

    @property
    def is_durable(self) -> bool:
        """Whether what it calls finished survives a loss of power."""
        return self.syncs == "all"


CONTENDERS = {
    BASELINE: Facts("no checkpoints"),
    FLOOR: Facts("plain direct writes (floor)", syncs="all"),
    "torch.save": Facts("torch.save + fsync", syncs="all"),
    "dcp": Facts("DCP save", syncs="data in part", note=_DCP_SYNCS),
    "dcp-async": Facts("DCP async_save", syncs="data in part", note=_DCP_STAGES),
    "torchsnapshot": Facts("torchsnapshot take", "torchsnapshot", "torchsnapshot"),
    "torchsnapshot-async": Facts("torchsnapshot async_take", "torchsnapshot", "torchsnapshot"),
    "torch_checkpointing": Facts(
        "torch_checkpointing",
        "torch_checkpointing",
        "torch_checkpointing",
        note="use_direct_io=False, since its default fails on ext4",
    ),
    OURS: Facts("everstep", "everstep", "everstep", "all", own_process_per_interval=True),
}

PEERS = [name for name in CONTENDERS if name not in (BASELINE, FLOOR, OURS)]


@dataclass(frozen=True, slots=True)
class Block:
    """Some steps in a row of one contender, with a save at every `every`-th; 0: never."""

    name: str
    every: int


def chosen(only: Sequence[str]) -> list[str]:
    """Who runs: the baseline, the floor, and what was asked for (or all) and is installed."""
    if unknown := set(only) - set(CONTENDERS):
        raise ValueError(
            f"unknown contenders {sorted(unknown)}; there are {', '.join([*PEERS, OURS])}"
        )
    names = [name for name in CONTENDERS if not only or name in (BASELINE, FLOOR, *only)]
    return [name for name in names if CONTENDERS[name].is_installed]


def missing(only: Sequence[str]) -> list[str]:
    """The contenders that were asked for (all) and are not installed."""
    return [
        name
        for name, facts in CONTENDERS.items()
        if (not only or name in only) and not facts.is_installed
    ]


def round_of(names: Iterable[str], intervals: Sequence[int], number: int) -> list[Block]:
    """The blocks of a round: every contender at every interval, in an order that turns with the
    round's number, with the baseline first, last, and after every fourth block."""
    saving = [name for name in names if name != BASELINE]
    turned = rotated(saving, number)
    baseline = Block(BASELINE, 0)
    blocks = [baseline]
    pairs = [(name, every) for name in turned for every in rotated(list(intervals), number)]
    for index, (name, every) in enumerate(pairs, start=1):
        blocks.append(Block(name, every))
        if index % _BLOCKS_PER_BASELINE == 0 and index < len(pairs):
            blocks.append(baseline)
    return [*blocks, baseline]


def rotated(items: list[_T], count: int) -> list[_T]:
    """The items, beginning with the `count`-th."""
    count %= max(1, len(items))
    return items[count:] + items[:count]


def steps_of(block: Block, steps: int) -> int:
    """How many steps are timed: at least `steps`, and whole intervals."""
    every = max(1, block.every)
    return -(-steps // every) * every
