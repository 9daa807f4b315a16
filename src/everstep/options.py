"""What a user may choose: how checkpoints are taken, and what several ranks have of their own.

An option stands beside what it configures: that of a log in `Log`, that of many ranks in `Ranks`.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NoReturn

import torch

from everstep.sharding.mapped import Layout
from everstep.sharding.ranked import ByRank
from everstep.store.retain import Keep
from everstep.tiers.objects import Url
from everstep.tiers.tier import Tier, Union, name_of, tier_at

_PATIENCE_S = 10.0
"""With a tier beside the store, while training or a restore waits for it."""


@dataclass(frozen=True, slots=True)
class Full:
    """Whole states, each of one step.

    thin: of these modules a checkpoint has the newest that was saved of them, which may be of an
        earlier step: by names or patterns ("model.blocks.*": a star is one name between dots), to
        a factor n. Each save writes about the n-th part of what a pattern matches, module by module
        in turn, with the optimizer state of these parameters; all else each time. The first save,
        one after a restore or after a failure, and a tagged one write all. What is restored is not
        exact then.
    """

    thin: Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        """Raises ValueError, TypeError."""
        check_names("thin", self.thin)
        for pattern, factor in (self.thin or {}).items():
            _check_count(f"thin[{pattern!r}]", factor or 0, "saves")


@dataclass(frozen=True, slots=True)
class Spread:
    """Whole states, each copied over several steps up to the due one, with the gradients that bring
    its pieces to that step: restore() replays them.

    window: so many steps; None: as many as this run's copies need.
    """

    window: int | None = None

    def __post_init__(self) -> None:
        """Raises ValueError."""
        _check_count("window", self.window, "steps")


@dataclass(frozen=True, slots=True)
class Log:
    """A whole state now and then (a base), and of every step between the gradients that led there.

    base_every: steps from one base to the next; None: when the log has grown to as many bytes as
        four states.
    verify: how a record proves that its replay comes to the same bytes. "rolling": by a part of
        them in each, so that some steps together have looked at all. "full": by all of them in
        each, a pass over the whole state before and after each update, and again at replay.
    replica: a process beside the keeper holds the newest state, brought on by each record. A
        recovery is a copy of it, however long the log is; and it writes the bases, so that training
        copies a whole state once only. It takes memory for a state and some gradients, and what
        processor time training leaves. For torch's optimizers, on the CPU, of one node.
    layerwise: copy gradients into the next record while backward still runs, so that a GPU needs no
        memory for copies of them. What torch changes after backward (clipping) is copied again; do
        not write to gradients past torch, by `.grad.data` or numpy. It is for one process.
    pre_clip: record gradients as they were before `everstep.clip_grad_norm_`. They take fewer bytes
        on the disk where they came out of arithmetic in bfloat16, and memory until the update.
    optimizers: classes of optimizers beside torch's that you know to change their state in place.
    """

    base_every: int | None = None
    verify: Literal["rolling", "full"] = "rolling"
    replica: bool = False
    layerwise: bool = False
    pre_clip: bool = False
    optimizers: Sequence[type[torch.optim.Optimizer]] = ()

    def __post_init__(self) -> None:
        """Raises ValueError, TypeError."""
        _check_count("base_every", self.base_every, "steps")
        _check_flag("replica", self.replica)
        _check_flag("layerwise", self.layerwise)
        _check_choice("verify", self.verify, ("rolling", "full"))
        _check_flag("pre_clip", self.pre_clip)
        kinds = tuple(self.optimizers) if isinstance(self.optimizers, (list, tuple)) else (None,)
        if not all(isinstance(kind, type) for kind in kinds):
            raise TypeError(f"optimizers must be classes in a list, not {self.optimizers!r}")
        object.__setattr__(self, "optimizers", kinds)


@dataclass(frozen=True, slots=True)
class Ranks:
    """What ranks have of their own, and how they are taken together.

    by_rank: names of parts of the state of which each rank has its own (a sampler's position), to
        what becomes of them with another number of ranks: "exact" (they cannot be restored),
        "replicate", or a function of (values of all ranks, this rank, ranks). (rule, number, count)
        where not each rank has its own, but each data-parallel one, say. Loaders are "exact" unless
        named here; generators are exact with as many ranks, else derived anew.
    layout: what this rank's memory is globally, where DTensors do not say it: a function of
        (name, tensor), called for each parameter and buffer when they are others than before. It
        returns None (what its name says), a str (its name in the whole model: of a stage's layers,
        of experts), or a sequence of `Shard`s, the boxes of global tensors of which its memory
        consists: fused matrices, flat partitions (`Shard.flat`). Optimizer state goes with its
        parameter. FSDP1's own flat parameters are known without it.
    alone: save this process for itself, to a store of its own, though a process group is up.
    check: compare what several ranks hold (in whole states, not in what a log has between them):
        different bytes under one name make the save fail on all ranks, with Mismatch. Costs time:
        each rank digests all that it holds within the call.
    """

    by_rank: Mapping[str, ByRank] | None = None
    layout: Layout | None = None
    alone: bool = False
    check: bool = False

    def __post_init__(self) -> None:
        """Raises TypeError."""
        check_names("by_rank", self.by_rank)
        if self.layout is not None and not callable(self.layout):
            raise TypeError(f"layout must be a function of (name, tensor), not {self.layout!r}")
        _check_flag("alone", self.alone)
        _check_flag("check", self.check)


@dataclass(frozen=True, slots=True)
class Tiers:
    """What lies around the store: where else checkpoints are held, in the same format.

    remote: another store, to which checkpoints are copied while training goes on: a bucket's URL
        (s3://, gs://, az://), or a directory that lies elsewhere. It is read without this one, too.
    remote_every: each step that is saved and a multiple of it goes there, and each tagged one, with
        what it goes back to. Where the link is slower than that, the newest go first, and of the
        untagged the oldest are given up.
    peers: how many other nodes hold each node's newest checkpoint in their memory: 0 or 1.
    spill: a second, slower memory, a directory on DAX, tmpfs or a disk: captures go there when
        memory_bytes are full and earlier ones are still being written.
    spill_bytes: how much of it may be used, by all ranks of a node. None: half of what is free.
    route: where a step becomes durable first. "local": in the store. "auto": in the one of store
        and remote tier that is expected to have it sooner, by the speeds that were measured;
        "remote": in the remote tier. Of one process, for whole states without a tag, in a run that
        keeps no log; what goes to the remote tier first is never in the store.
    codecs: "auto": tensors are encoded, without loss, where by what is measured a step is durable
        sooner so, on processor cores that training leaves; "raw": never. Needs no other tier.
    """

    remote: str | os.PathLike[str] | None = None
    remote_every: int = 1
    peers: int = 0
    spill: str | os.PathLike[str] | None = None
    spill_bytes: int | None = None
    route: Literal["local", "auto", "remote"] = "local"
    codecs: Literal["auto", "raw"] = "auto"

    def __post_init__(self) -> None:
        """Raises ValueError, TypeError."""
        for name, value in (("remote", self.remote), ("spill", self.spill)):
            if value is not None and not (isinstance(value, str | os.PathLike) and str(value)):
                raise TypeError(f"{name} must be a directory or a URL, not {value!r}")
        _check_count("remote_every", self.remote_every, "steps")
        _check_count("spill_bytes", self.spill_bytes, "bytes")
        if type(self.peers) is not int or self.peers not in (0, 1):
            raise ValueError(f"peers must be 0 or 1, not {self.peers!r}")
        _check_choice("codecs", self.codecs, ("auto", "raw"))
        _check_choice("route", self.route, ("local", "auto", "remote"))
        if self.route != "local" and self.remote is None:
            raise ValueError(f"route={self.route!r} needs remote=, the tier to route to")

    def remote_of(self, store: Tier) -> Tier | None:
        """The remote tier of a store, where there is one; where it does not answer once, nothing
        else waits for it for a while. Raises ValueError where it is none."""
        if self.remote is None:
            return None
        if isinstance(store.root, Url):
            raise ValueError(f"remote={str(self.remote)!r}: the store is a bucket already")
        if name_of(self.remote) == name_of(store.root):
            raise ValueError(f"remote={str(self.remote)!r} is the store itself")
        return Union([tier_at(self.remote, patience_s=_PATIENCE_S)])

    def to_json(self) -> dict[str, Any]:
        """As it goes to the keeper."""
        named = {"remote": self.remote, "spill": self.spill}
        places = {key: None if at is None else name_of(at) for key, at in named.items()}
        return asdict(self) | places


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments of Checkpointer that have these names, checked. strategy: of "auto" None."""

    every: int
    strategy: Full | Spread | Log | None
    memory_bytes: int | None
    when_full: str

    @classmethod
    def of(
        cls, every: int, strategy: object, keep: object, memory: int | None, when_full: str
    ) -> "Options":
        """Of what a user gave. Raises ValueError, TypeError."""
        named = {"auto": None, "full": Full(), "spread": Spread(), "log": Log()}
        chosen = named.get(strategy, strategy) if isinstance(strategy, str) else strategy
        if not isinstance(chosen, Full | Spread | Log | None):
            raise ValueError(
                f"strategy must be 'auto', 'full', 'spread', 'log', or an everstep.Full, Spread or "
                f"Log, not {strategy!r}"
            )
        if every is None:
            raise ValueError("every must be a positive number of steps, not None")
        _check_count("every", every, "steps")
        _check_count("memory_bytes", memory, "bytes")
        _check_choice("when_full", when_full, ("wait", "skip"))
        if keep is not None and not isinstance(keep, Keep):
            raise TypeError(f"keep must be an everstep.Keep, not {keep!r}")
        return cls(every, chosen, memory, when_full)


_RENAMED = {
    "recovery_budget": "give strategy=everstep.Log(base_every=...), or leave it out",
    "audit": "say strategy=everstep.Log(verify='full') for audit='full'",
    "base_every": "say strategy=everstep.Log(base_every=...)",
    "catch_up": "say strategy=everstep.Log(replica=True)",
    "replica": "say strategy=everstep.Log(replica=True)",
    "window": "say strategy=everstep.Spread(window=...)",
    "keep_exact": "leave it out: the log stays what restore() takes",
    "group_commit": "leave it out: what waits anyway is committed together",
    "under_pressure": "say when_full=...",
    "memory_budget": "say memory_bytes=...",
    "rng": "leave it out: generators are always captured",
    "by_rank": "say ranks=everstep.Ranks(by_rank=...)",
    "layout": "say ranks=everstep.Ranks(layout=...)",
    "alone": "say ranks=everstep.Ranks(alone=...)",
    "check_replicas": "say ranks=everstep.Ranks(check=...)",
}


def refuse_unknown(name: str) -> NoReturn:
    """Raises TypeError for an argument that Checkpointer does not have, with the one that it has in
    its place."""
    if name in _RENAMED:
        raise TypeError(f"Checkpointer has no argument {name!r} any more: {_RENAMED[name]}")
    raise TypeError(f"Checkpointer has no argument {name!r}")


def check_names(name: str, value: object) -> None:
    """Raises TypeError for what is no dict by parts of the state, nor None."""
    if value is not None and not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dict by names of parts of the state, not {value!r}")


def _check_count(name: str, value: object, unit: str) -> None:
    if value is not None and (type(value) is not int or value < 1):
        raise ValueError(f"{name} must be a positive number of {unit}, not {value!r}")


def _check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        known = " or ".join(map(repr, choices))
        raise ValueError(f"{name} must be {known}, not {value!r}")


def _check_flag(name: str, value: object) -> None:
    if type(value) is not bool:
        raise TypeError(f"{name} must be True or False, not {value!r}")
