"""What a strategy is: it decides at each step what is captured. There are `spread`, of which `full`
is the one whose windows have one step, and `log`; another one is a class with these six methods,
made in choice.py.

A strategy knows nothing of slots, copies and keepers, and does not count what went wrong: where it
cannot go on it raises Unsupported, and a whole state is captured in place of what it wanted
(trust.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from everstep.capture.captured import Captured
from everstep.capture.copy_speed import CopySpeed
from everstep.capture.rank_agreement import RankAgreement
from everstep.capture.trust import Trust
from everstep.capture.window import Figures, Piece
from everstep.handle import SaveHandle
from everstep.redo.recorder import Recorder
from everstep.state.optimizers import OptimizerState
from everstep.state.view import Collected, Walk


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


@dataclass(frozen=True, slots=True)
class Run:
    """What strategies have in common; one of each for a Checkpointer."""

    optimizers: list[OptimizerState]
    recorder: Recorder
    trust: Trust
    pace: CopySpeed
    ranks: RankAgreement

    def figures(self, walk: Walk, pieces: list[Piece]) -> Figures:
        """By which a window of these pieces is chosen, as this process has measured them."""
        ranks, pace = self.ranks.world.size, self.pace
        whole = ranks * sum(leaf.tensor.nbytes for leaf in walk.leaves)
        rest = max(0, whole - sum(piece.size for piece in pieces))
        return Figures(rest, ranks * pace.bytes_per_s, pace.overlap_s)


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
