"""The writer of a run on this node: what it knows from one checkpoint to the next.

A spread checkpoint is written step by step, and committed by the last of them.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from everstep.errors import Unavailable
from everstep.format.manifest import CheckpointName, Manifest, Part, Record
from everstep.keeper.copies import RemoteCopies
from everstep.keeper.encoder import THREADS, Base, Encoder
from everstep.keeper.measured import Traffic
from everstep.keeper.still import Seen, StillPacks
from everstep.store import retain
from everstep.store.names import manifest_path
from everstep.tiers.tier import Tier

DIFFERENCES_MAX = 4
"""One after another: then comes a whole version. Eight, which readers take, would save 3% more of
the bytes, and let restores take twice as long."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a commit cost: bytes written, seconds until durable. `warning`: what failed after it.
    `is_part`: durable, but committed by a later one. `takes_replay`: it is no whole state. `seen`:
    what of it does not change. `is_routed`: it is in the remote tier, and was never in the
    store."""

    name: CheckpointName
    bytes: int
    seconds: float
    warning: str | None = None
    is_part: bool = False
    takes_replay: bool = False
    seen: Seen = field(default_factory=dict)
    is_routed: bool = False


@dataclass(frozen=True, slots=True)
class Share:
    """What one step of a window adds: pieces, and what the optimizers consumed in this step for
    the pieces before (None at the first). `steps`: of the window so far, this one last. `ends`: no
    other one follows. `is_record`: it is part of a record, and so of a checkpoint of its own."""

    steps: tuple[int, ...]
    calls: tuple[Any, ...] | None
    ends: bool
    is_record: bool

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> "Share | None":
        """From a descriptor; None for one that is no part of a window."""
        share, record = said["share"], said["record"]
        if share is None:
            return None
        steps = tuple(share["steps"])
        calls = record["calls"] if record and len(steps) > 1 else share["calls"]
        calls = None if calls is None else tuple(calls)
        return cls(steps, calls, share["ends"], record is not None)

    @property
    def publishes(self) -> bool:
        """Whether there is a manifest with it."""
        return self.ends or self.is_record


@dataclass(slots=True)
class Window:
    """What is durable of the window under way. It lives in the keeper's memory only: where the
    keeper dies, the checkpoint fails, and the trainer saves a whole state next. For the session's
    thread."""

    epoch: int | None = None
    """Of the parts: whoever restores saves the same steps again, in another one."""
    steps: tuple[int, ...] = ()
    parts: list[Part] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    documents: list[bytes] = field(default_factory=list)
    """The parts' piece tables."""
    is_log: bool = False
    """Whether the parts are records, too, which are checkpoints of their own."""

    def begin(self, share: Share | None, epoch: int | None) -> list[Part]:
        """The next job belongs to this window, or to none. Returns the parts of another one, of
        which nothing will come any more."""
        if share and self.steps and (self.steps, self.epoch) == (share.steps[:-1], epoch):
            return []
        stale = [] if self.is_log else self.parts
        self.clear()
        self.epoch, self.is_log = epoch, bool(share and share.is_record)
        return stale

    def check(self, share: Share) -> None:
        """Raises Unavailable where a step before this one was lost on the way."""
        if self.steps != share.steps[:-1]:
            raise Unavailable(
                f"saving step {share.steps[-1]}: the parts of the steps {list(share.steps[:-1])} "
                f"belong to it, and only those of {list(self.steps)} were written"
            )

    def add(self, share: Share, part: Part, document: bytes, manifest: Manifest) -> Manifest:
        """The part is durable. Returns the manifest with all parts and records so far."""
        self.steps = share.steps
        self.parts.append(part)
        self.documents.append(document)
        if share.calls is not None:
            self.records.append(Record(share.steps[-1], share.calls, (part,)))
        return replace(manifest, parts=tuple(self.parts), records=tuple(self.records))

    def clear(self) -> None:
        """Nothing is under way."""
        self.steps = ()
        self.parts, self.records, self.documents = [], [], []


@dataclass(slots=True)
class Writer:
    """Who writes: one attachment of a trainer. `parent` is the newest checkpoint of its line."""

    disk: Tier
    keep: retain.Keep | None
    epoch: int = 0
    """0: none is claimed yet, and nothing is persisted."""
    parent: CheckpointName | None = None
    parent_digest: str | None = None
    run: str | None = None
    cache: retain.NeedsCache = field(default_factory=dict)
    records: int = 0
    """How many the log has since the last whole state; ..."""
    unlooked: int = 0
    """... and how many of them came since retention last looked."""
    traffic: Traffic = field(init=False)
    """To the disk."""
    encoder: Encoder = field(default_factory=Encoder)
    still: StillPacks = field(default_factory=StillPacks)
    base: Base | None = None
    """The last state, if it was committed here."""
    window: Window = field(default_factory=Window)
    remote: RemoteCopies | None = None
    """What goes on from the store to the remote tier."""
    hasher: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(THREADS, "everstep-digest")
    )

    def __post_init__(self) -> None:
        self.traffic = Traffic(self.disk.level, str(self.disk.root))

    def link_bytes_per_s(self, step: int, *, goes_everywhere: bool) -> float | None:
        """The slowest tier that a step goes to, as far as that was measured; None where the store
        was not yet. `goes_everywhere`: it is tagged, or a record, which the next due step needs."""
        own, remote = self.traffic.bytes_per_s, self.remote
        is_due = remote and (goes_everywhere or remote.takes(step))
        there = remote.traffic.bytes_per_s if remote and is_due else None
        return min(own, there) if own and there else own

    def base_for(self, step: int, *, is_tagged: bool) -> Base | None:
        """What a step may have differences to: the last checkpoint, where it is in each tier that
        this one goes to, and is not too many differences away from a whole one. None for a step
        that stays long, with which others would have to stay."""
        base, every = self.base, self.keep.every if self.keep else 0
        if base is None or base.depth >= DIFFERENCES_MAX:
            return None
        name = CheckpointName(base.name.step, base.name.epoch)
        stays = is_tagged or (every > 0 and step % every == 0)
        remote = self.remote
        is_everywhere = not remote or remote.takes(name.step) or not remote.takes(step)
        is_last = self.parent == name and self.disk.size(manifest_path(name)) is not None
        return base if is_everywhere and is_last and not stays else None
