"""Where a team stands among all ranks of its run."""

from dataclasses import dataclass
from typing import Any

from everstep.keeper import wire

LOCAL_RANKS_MAX = 128
NODES_MAX = 1 << 20
_ID_LENGTH_MAX = 64


@dataclass(frozen=True, slots=True)
class Place:
    """One run's attachment (`id`; None: of one process), the numbers of its ranks on this node, by
    local number, and which of its nodes this is: 0 is that of rank 0, which commits."""

    id: str | None = None
    ranks: tuple[int, ...] = (0,)
    node: int = 0
    nodes: int = 1

    @classmethod
    def of(cls, said: Any) -> "Place":
        """From a greeting; of one process where it has none. Raises ValueError, KeyError,
        TypeError."""
        if said is None:
            return cls()
        here, node, nodes = (wire.number(said[key]) for key in ("here", "node", "nodes"))
        ranks = tuple(map(wire.number, said["ranks"]))
        if not 1 <= here <= LOCAL_RANKS_MAX or len(set(ranks)) != here:
            raise ValueError(f"a team of {here}, ranks {ranks}")
        if not node < nodes <= NODES_MAX or (node == 0) != (0 in ranks):
            raise ValueError(f"node {node} of {nodes} with ranks {ranks}")
        if type(said["id"]) is not str or not 0 < len(said["id"]) <= _ID_LENGTH_MAX:
            raise ValueError(f"a team called {said['id']!r}")
        return cls(said["id"], ranks, node, nodes)

    @property
    def is_alone(self) -> bool:
        """Whether the run is one process."""
        return self.id is None

    @property
    def commits(self) -> bool:
        """Whether manifests are this node's to create."""
        return self.node == 0

    def attachment(self, number: int) -> str:
        """What the document of an epoch says of whose it is: claim `number` of this run."""
        return f"{self.id}.{number}"

    def attempt(self, call: int) -> str:
        """What the part documents of a save say of whose they are: call `call` of this run."""
        return f"{self.id}.{call}"


ALONE = Place()
