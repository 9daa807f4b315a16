"""What a strategy is: it decides at each step what is captured. There are `spread`, of which `full`
is the one whose windows have one step, and `log`; another one is a class with these six methods,
made in choice.py.

A strategy knows nothing of slots, copies and keepers, and does not count what went wrong: where it
cannot go on it raises Unsupported, and a whole state is captured in place of what it wanted
(trust.py).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from everstep.capture.copy_speed import CopySpeed
from everstep.capture.rank_agreement import RankAgreement
from everstep.capture.trust import Trust
from everstep.capture.window import Figures, Piece, why_undivided
from everstep.errors import Unsupported
from everstep.format.tables import is_own
from everstep.handle import SaveHandle
from everstep.redo.derived import Derived
from everstep.redo.recorder import Recorder
from everstep.redo.rolling_digest import Slice
from everstep.sharding.layout import local_of
from everstep.sharding.leaves import Leaf, bytes_of
from everstep.sharding.redundancy import OFFLOADED, class_of
from everstep.state.fingerprint import Fingerprint
from everstep.state.objects import references, without_tensors
from everstep.state.optimizers import OptimizerState
from everstep.state.view import Collected, Walk

RECORD_OWNER = -1
"""No optimizer: its tensors are copied lazily, and no update is held for them."""


@dataclass(frozen=True, slots=True)
class Captured:
    """What is to be captured for a step: a whole state; or the record that leads to it; or a share
    of a window (keeper/writer.py), which is some pieces and the record for those before."""

    collected: Collected
    record: dict[str, Any] | None = None
    share: dict[str, Any] | None = None
    slices: Sequence[Slice] = ()
    """What is digested meanwhile; the digests are among its leaves."""
    held: Sequence[Fingerprint] = ()
    """Of the gradients among its leaves that are the run's own memory."""
    is_awaited: bool = False
    """A whole state that is worth waiting for memory, because records go on from it."""
    turns: Mapping[str, int] = field(default_factory=dict)
    """Of what is saved in turn, by the tensors' names."""
    kept: frozenset[int] = frozenset()
    """The turns of which nothing is captured."""

    @property
    def continues(self) -> bool:
        """Whether it goes on from what was captured before, which would be in vain without it."""
        return self.record is not None or bool(self.share and self.share["calls"] is not None)

    @property
    def commits(self) -> bool:
        """Whether it is a checkpoint, and not only a share of a later one."""
        return self.record is not None or self.share is None or self.ends

    @property
    def ends(self) -> bool:
        """Whether a window ends with it."""
        return bool(self.share and self.share["ends"])


@dataclass(frozen=True, slots=True)
class Request:
    """A call of save(), or of step() where something is due or recorded. `is_asked`: by the user,
    or by the system; not by what is due. `must_wait`: for memory, where the user has not said so.
    """

    step: int
    is_asked: bool
    tag: str | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    must_wait: bool = False


def why_no_replica(optimizers: Sequence[OptimizerState], derived: Derived) -> str | None:
    """Return why no process without the program can follow this log; None where it can."""
    if derived.parts:
        return f"{derived.parts[0]!r} is derived by a rule of the program (derive=)"
    for state in optimizers:
        kind = class_of(state.optimizer)
        if not kind.removeprefix(OFFLOADED).startswith("torch.optim."):
            return f"{state.name!r} is a {kind}, and only torch's own optimizers can be built there"
        for _, name, parameter, _ in state.parameters():
            if parameter.device.type != "cpu":
                return (
                    f"{name!r} is on {parameter.device}, and an update on the CPU comes to other "
                    f"last bits"
                )
    return None


@dataclass(frozen=True, slots=True)
class Run:
    """What strategies have in common; one of each for a Checkpointer."""

    optimizers: list[OptimizerState]
    recorder: Recorder
    trust: Trust
    pace: CopySpeed
    ranks: RankAgreement
    in_bases_alone: Sequence[str] = ()
    """Parts whose tensors records may do without."""
    coupling: str | None = None
    """Why no optimizer's pieces can be told apart."""

    def why_undivided(self) -> str | None:
        """Why a state is copied at one step now, and not over a window. Of several ranks the same
        on all of them, once the state was collected."""
        lost = self.trust.lost or self.coupling
        return lost or why_undivided(self.optimizers) or self.ranks.why_whole()

    def figures(self, walk: Walk, pieces: list[Piece]) -> Figures:
        """By which a window of these pieces is chosen, as this process has measured them."""
        ranks, (bytes_per_s, overlap_s) = self.ranks.world.size, self.pace.steady()
        whole = ranks * sum(leaf.tensor.nbytes for leaf in walk.leaves)
        rest = max(0, whole - sum(piece.size for piece in pieces))
        return Figures(rest, ranks * bytes_per_s, overlap_s)


class Strategy(Protocol):
    """For the thread that trains."""

    def wants(self, step: int) -> bool:
        """Whether something of this step, which is not due, is captured all the same."""

    def choose(self, request: Request, collected: Collected) -> Captured | None:
        """Return what is captured for it; None: nothing. What has a tag is a whole state. Raises
        Unsupported where the chain of what was captured before cannot go on."""

    def begun(self, captured: Captured, handle: SaveHandle) -> None:
        """This is being captured: what was chosen, or a whole state in its place."""

    def break_off(self) -> None:
        """Nothing can follow what was captured last: the next is a whole state."""

    def current(self, step: int, collect: Callable[[], Collected]) -> SaveHandle | None:
        """Return the handle of the last save, if it is of this step and of just this state: it was
        recorded at a step() that was not due."""

    def describe(self) -> dict[str, Any]:
        """Return what `everstep show` prints of the choice."""


def part_of(
    collected: Collected, leaves: Iterable[Leaf], loose: tuple[Leaf, ...], slices: Sequence[Slice]
) -> Collected:
    """Those leaves, and the digests, as a state of their own, and of those in objects these."""
    all_leaves = (*leaves, *(leaf for each in slices for leaf in each.leaves))
    kept = {leaf.name for leaf in (*all_leaves, *loose)}
    aliases = {name: found for name, found in collected.aliases.items() if name in kept}
    sharded = tuple(leaf for leaf in collected.walk.sharded if leaf.name in kept)
    walk = Walk(all_leaves, {}, {}, collected.walk.optimizers, sharded)
    return replace(collected, walk=walk, loose=loose, aliases=aliases)


def without(collected: Collected, parts: Sequence[str]) -> tuple[list[str], Collected]:
    """The state without the tensors of these parts; which of them have any."""
    objects, own = collected.objects, collected.own
    found = [part for part in parts if references([objects.get(part), own.get(part)])]
    if not found:
        return [], collected
    gone = set(references([each.get(part) for each in (objects, own) for part in found]))
    rest = [
        {part: without_tensors(value) if part in found else value for part, value in each.items()}
        for each in (objects, own)
    ]
    loose = tuple(leaf for leaf in collected.loose if leaf.name not in gone)
    return found, replace(collected, loose=loose, objects=rest[0], own=rest[1])


class Last:
    """What was captured last, to tell later whether the state is still just that."""

    def __init__(
        self,
        handle: SaveHandle,
        walk: Walk,
        captured: Captured,
        owned: Iterable[Leaf] = (),
        *,
        is_alone: bool,
    ) -> None:
        """`walk`: of the state that it is of. `owned`: what optimizers own, where no recorder
        watches that. Of several ranks each has others of the tensors that none owns, and they would
        not agree: there these are not looked at."""
        collected = captured.collected
        self.handle = handle
        self._walk = walk
        self._said = collected.objects, collected.hyperparameters
        beside = _beside(collected) if is_alone else []
        self._tensors = {leaf.entry: leaf.tensor for leaf in beside}
        self._fingerprint = Fingerprint((*owned, *beside), follows=True)

    def current(self, step: int, collect: Callable[[], Collected]) -> SaveHandle | None:
        """See Strategy. May wait for a device."""
        handle = self.handle
        is_there = handle.step == step and handle.error is None
        return handle if is_there and self._is_still(collect()) else None

    def _is_still(self, collected: Collected) -> bool:
        now = {leaf.entry: leaf.tensor for leaf in _beside(collected)}
        return (
            self._walk is collected.walk
            and self._said == (collected.objects, collected.hyperparameters)
            and not self._fingerprint.changed()
            and all(
                name in now and _are_equal(tensor, now[name])
                for name, tensor in self._tensors.items()
            )
        )


def _beside(collected: Collected) -> list[Leaf]:
    return [*unowned(collected.walk.leaves), *collected.loose]


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether it is the same memory, or has the same bytes."""
    if (one.dtype, one.shape, one.stride()) != (other.dtype, other.shape, other.stride()):
        return False
    return local_of(one).data_ptr() == local_of(other).data_ptr() or torch.equal(
        bytes_of(one), bytes_of(other)
    )


class Chain:
    """What records go on from: a whole state, or the begin of a window. The tensors that optimizers
    own have to stay what and where they are. The others may be made anew at each step
    (`self.mean = ...`): records hold them whole, or rules derive them."""

    def __init__(self, collected: Collected, derived: Any = None) -> None:
        """`derived`: what rules derive (Derived.shape)."""
        self.walk = collected.walk
        self._shape = _shape_of(collected.walk)
        self._names = _owned_aliases(collected), derived
        self._reserved = _reserved(collected.walk.leaves)

    def goes_on(self, collected: Collected, derived: Any = None) -> bool:
        """Whether it does with this state: not where optimizers have more or fewer tensors, as
        after their first update, or where tensors have other names. Raises Unsupported where
        somebody else moved them, which is a surprise."""
        if collected.walk is not self.walk:
            *others, leaves = _shape_of(collected.walk)
            *others_before, before = self._shape
            if others != others_before:
                return False
            if found := sorted({spec.name for spec, *_ in before ^ leaves}):
                raise Unsupported(
                    f"{', '.join(map(repr, found[:5]))} {'are' if len(found) > 1 else 'is'} "
                    f"another tensor, or in other memory, than before (by `.data = ...` or "
                    f"load_state_dict(), perhaps), which no record tells. Write into what is there"
                )
            self.walk = collected.walk
        if taken := (*self._reserved, *_reserved(collected.loose)):
            raise Unsupported(f"{taken[0]!r} is a name that records use. Rename it")
        return self._names == (_owned_aliases(collected), derived)


def _shape_of(walk: Walk) -> tuple[Any, ...]:
    """To be compared: which tensors, and where those of optimizers lie."""
    leaves = {
        (
            leaf.spec,
            leaf.strides,
            leaf.tensor.device,
            leaf.owner,
            None if leaf.owner is None else (id(leaf.tensor), local_of(leaf.tensor).data_ptr()),
        )
        for leaf in walk.leaves
    }
    return walk.aliases, walk.optimizers, leaves


def _owned_aliases(collected: Collected) -> dict[str, list[str]]:
    """More names of what optimizers own: a record has none of it, so that only a base can say."""
    if not collected.aliases:
        return {}
    owned = {leaf.name for leaf in collected.walk.leaves if leaf.owner is not None}
    return {name: found for name, found in collected.aliases.items() if name in owned}


def _reserved(leaves: Iterable[Leaf]) -> list[str]:
    """Names that a record could not tell from its own."""
    return [leaf.name for leaf in leaves if not leaf.name or is_own(leaf.name)]


def unowned(leaves: Iterable[Leaf]) -> list[Leaf]:
    """What no optimizer owns."""
    return [leaf for leaf in leaves if leaf.owner is None]


def size_of(collected: Collected) -> int:
    """Bytes of a whole state."""
    return sum(leaf.tensor.nbytes for leaf in (*collected.walk.leaves, *collected.loose))
