"""Part documents: what one of several nodes has of a checkpoint, before the commit.

The node of rank 0 waits for those of all others, and makes one manifest of them. Nobody reads them
afterwards, and they are no checkpoint.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from everstep.format.document import anything, natural, seal, unseal
from everstep.format.manifest import CALL, PART, Part, part_from_json

_SHARED = ("objects", "digests", "held")
_ATTEMPT = {"attempt": str, "node": natural}
_FAILED = {**_ATTEMPT, "failed": str, "kind?": str}
_RANK = {
    "rank": natural,
    "own": {str: {"index": natural, "count": natural, "value": anything}},
    "objects?": {str: anything},
    "digests?": {str: str},
    "held?": {str: str},
}
_NODE_PART = {
    **_ATTEMPT,
    "part": PART,
    "hyperparameters": {str: [{str: anything}]},
    "ranks": [_RANK],
    "record?": {"previous": natural, "calls": [CALL]},
}
Said = Mapping[str, Any]
"""What one rank says of a step: `objects` that it has, `own` ones of it alone, as tagged JSON,
`digests` of tensors that all ranks must have alike, and of those (and boxes) that it holds, by
entry, which whoever `held` them must have alike."""


@dataclass(frozen=True, slots=True)
class NodePart:
    """What a node has. `attempt`: of which call of which run; parts of two never go together.

    `failed`: why there is nothing of it, and `kind` of which error that is; then the rest says
    nothing. `hyperparameters`: the sets that its table counts. `ranks`: what each of its ranks
    says, by its number. `record`: of a record, the step that it goes on from (`previous`) and the
    optimizer `calls` of the node's ranks together.
    """

    attempt: str
    node: int
    failed: str | None = None
    part: Part | None = None
    hyperparameters: Mapping[str, Sequence[Any]] | None = None
    ranks: Mapping[int, Said] | None = None
    record: Mapping[str, Any] | None = None
    kind: str | None = None


def encode_node_part(found: NodePart) -> bytes:
    """The sealed document."""
    members: dict[str, Any] = {"failed": found.failed or "", "kind": found.kind}
    if found.part is not None:
        members = {
            "part": found.part,
            "hyperparameters": found.hyperparameters,
            "ranks": _short(found.ranks or {}),
            "record": found.record,
        }
    said = {key: value for key, value in members.items() if value is not None}
    return seal({"attempt": found.attempt, "node": found.node, **said})


def decode_node_part(data: bytes | memoryview, path: object) -> NodePart:
    """Parse and check one; raises Corrupt, or Unsupported for another format version."""
    value = unseal(data, path, (_NODE_PART, _FAILED))
    attempt, node = value["attempt"], value["node"]
    if "part" not in value:
        return NodePart(attempt, node, value["failed"], kind=value.get("kind"))
    return NodePart(
        attempt,
        node,
        None,
        part_from_json(value["part"]),
        value["hyperparameters"],
        _long(value["ranks"]),
        value.get("record"),
    )


def _short(ranks: Mapping[int, Said]) -> list[dict[str, Any]]:
    """What a rank has all as the first of them stands there only."""
    first = next(iter(ranks.values()), {})
    # Texts: 1, 1.0 and true are different values.
    return [
        {"rank": rank, "own": said["own"]}
        | {
            key: said[key]
            for key in _SHARED
            if said is first or json.dumps(said[key]) != json.dumps(first[key])
        }
        for rank, said in ranks.items()
    ]


def _long(rows: Sequence[Mapping[str, Any]]) -> dict[int, Said]:
    shared = {key: rows[0].get(key, {}) for key in _SHARED} if rows else {}
    return {
        row["rank"]: {**shared, **{key: row[key] for key in row if key != "rank"}} for row in rows
    }
