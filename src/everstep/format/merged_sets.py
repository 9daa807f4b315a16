"""Hyperparameter sets of many ranks: what each calls by an index of its own, under common indices.

Ranks may hold other parameters of one optimizer, and number its groups differently.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from everstep.errors import Mismatch

Sets = Mapping[str, Sequence[Any]]


def merge_sets(ranks: Sequence[Sets]) -> tuple[dict[str, list[Any]], list[dict[str, list[int]]]]:
    """All sets of all ranks (tagged JSON, by optimizer), and each rank's indices into them.

    Those of the first keep their indices. Another's set keeps its index where an equal set or none
    has it; else it gets that of the first equal set, or a new one.
    """
    merged: dict[str, list[Any]] = {}
    texts: dict[str, list[str]] = {}
    indices: list[dict[str, list[int]]] = []
    for rank in ranks:
        own: dict[str, list[int]] = {}
        for optimizer, sets in rank.items():
            values, known = merged.setdefault(optimizer, []), texts.setdefault(optimizer, [])
            own[optimizer] = []
            for index, value in enumerate(sets):
                # Texts: 1, 1.0 and true are different values.
                text = json.dumps(value, sort_keys=True)
                if index < len(known) and known[index] != text:
                    index = known.index(text) if text in known else len(known)
                if index == len(known):
                    known.append(text)
                    values.append(value)
                own[optimizer].append(index)
        indices.append(own)
    return merged, indices


def merge_optimizers(
    ranks: Sequence[tuple[int, Mapping[str, Mapping[str, Any]], Mapping[str, Sequence[int]]]],
) -> dict[str, dict[str, Any]]:
    """The `optimizers` of a merged table, from each rank's number, its own, and its indices into
    the merged sets. Raises Mismatch where two ranks have one parameter in different sets."""
    merged: dict[str, dict[str, Any]] = {}
    first: dict[tuple[str, str], int] = {}
    for rank, optimizers, indices in ranks:
        for optimizer, table in optimizers.items():
            found = merged.setdefault(optimizer, {**table, "groups": {}, "state": {}})
            new = indices.get(optimizer)
            groups, state = found["groups"], found["state"]
            for name, own in table["groups"].items():
                index = own if new is None else new[own]
                if groups.setdefault(name, index) != index:
                    raise Mismatch(
                        f"merging the optimizers of all ranks: in {optimizer!r} the parameter "
                        f"{name!r} has other hyperparameters on rank {rank} (set {index}) than on "
                        f"rank {first[optimizer, name]} (set {groups[name]}). Set them alike"
                    )
                first.setdefault((optimizer, name), rank)
            for name, keys in table["state"].items():
                known = state.get(name)
                if known != keys:
                    state[name] = list(dict.fromkeys([*(known or ()), *keys]))
    return merged
