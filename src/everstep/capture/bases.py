"""Who makes a log's bases: the process that trains, by copies; or the replica, while it lives."""

from collections.abc import Sequence

from everstep.redo.derived import Derived
from everstep.sharding.redundancy import OFFLOADED, class_of
from everstep.state.optimizers import OptimizerState


class Bases:
    """Of one Checkpointer. Any thread: a flag each."""

    def __init__(self, *, by_replica: bool, is_alone: bool) -> None:
        """`is_alone`: of one process. Of several ranks nobody knows when the others hear of a
        failure, so that they go by numbers of steps alone."""
        self.by_replica = by_replica
        self._is_alone = is_alone
        self.is_wanted = False
        """Whether the next step is to be a base, whatever was planned."""

    @property
    def is_planned(self) -> bool:
        """Whether this process makes bases from time to time."""
        return not (self.by_replica and self._is_alone)

    def note_failure(self, *, wants_base: bool, is_end: bool) -> None:
        """The replica can go on from a base alone, or will not any more."""
        self.is_wanted |= wants_base and self._is_alone
        self.by_replica &= not (is_end and self._is_alone)


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
