"""What several ranks say of a step, as one: their objects, hyperparameters, and optimizer calls."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from everstep.errors import Mismatch, Unavailable
from everstep.format.manifest import FORMS
from everstep.format.merge import merge_sets


def merge_descriptions(
    each: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What several ranks say, as one, and how their hyperparameter sets are numbered in it. Raises
    Mismatch; Unavailable where they are at other turns of a thinned state: by a failure that one
    has heard of before the others. All have all in the saves after this one, and go on alike."""
    hyperparameters, calls, mapping = merge_numbered(each, [(n,) for n in range(len(each))])
    objects, ranks = objects_of(each)
    record, share = each[0].get("record"), each[0].get("share")
    if record and any(said["record"].get("derived") != record.get("derived") for said in each):
        raise Mismatch(
            "saving: the ranks derive different parts (derive=). Give all the same rules"
        )
    if any(said.get("kept") != each[0].get("kept") for said in each):
        raise Unavailable("saving: the ranks have other parts of the state due. All save all next")
    if share and share["calls"] is not None:
        share = {**share, "calls": calls}
    return {
        **each[0],
        "objects": objects,
        "hyperparameters": hyperparameters,
        "own": ranks,
        "record": record and {**record, "calls": calls},
        "share": share,
    }, mapping


def objects_of(each: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The objects that all ranks have alike, and those of each: its own, and what differs. Raises
    Mismatch."""
    ranks = [dict(said.get("own", {})) for said in each]
    objects = {}
    for name in dict.fromkeys(name for said in each for name in said["objects"]):
        values = [said["objects"].get(name) for said in each]
        if all(value == values[0] for value in values):
            objects[name] = values[0]
            continue
        is_optimizer = any(name in said.get("hyperparameters", {}) for said in each)
        if is_optimizer and (united := _united(values)) is not None:
            objects[name] = united
            continue
        if any(_has_tensors(value) for value in values):
            raise _differs(name)
        for index, (own, value) in enumerate(zip(ranks, values, strict=True)):
            own[name] = {"index": index, "count": len(ranks), "value": value}
    digests = [said.get("digests", {}) for said in each]
    for name in dict.fromkeys(name for own in digests for name in own):
        if len({own.get(name) for own in digests}) > 1:
            raise _differs(name)
    return objects, ranks


def check_held(step: int, each: Iterable[tuple[int, Mapping[str, Any]]]) -> None:
    """Compare what several ranks, by their numbers, hold under one name. Raises Mismatch."""
    first: dict[str, tuple[int, str]] = {}
    for rank, said in each:
        for entry, digest in said.get("held", {}).items():
            other, known = first.setdefault(entry, (rank, digest))
            if known != digest:
                raise Mismatch(
                    f"saving step {step}: {entry} has other bytes on rank {rank} than on rank "
                    f"{other}. Make them equal (something changed one of them, or they began "
                    f"differently), or give different tensors different names"
                )


def _differs(name: str) -> Mismatch:
    return Mismatch(
        f"saving {name!r}: it differs between the ranks, and is or has a tensor, of which only the "
        f"first rank's would be kept. Tell that each rank has its own: by_rank={{name: 'exact'}}, "
        f"with the name of that part of the state"
    )


def merge_numbered(
    each: Sequence[Mapping[str, Any]], ranks: Sequence[Sequence[int]]
) -> tuple[dict[str, Any], list[Any], list[dict[str, list[int]]]]:
    """The hyperparameters of now and those of a record's calls, by the same numbers; the calls; and
    how the sets of each were numbered. `ranks`: the numbers of those that speak in each. Raises
    Mismatch."""
    calls = _calls(each)
    rows = [
        {
            name: [
                [values, [call["sets"][number] for call in own if call["optimizer"] == name]]
                for number, values in enumerate(sets)
            ]
            for name, sets in said["hyperparameters"].items()
        }
        for said, own in zip(each, calls, strict=True)
    ]
    merged, mapping = merge_sets(rows)
    hyperparameters = {name: [now for now, _ in sets] for name, sets in merged.items()}
    seen: dict[str, int] = {}
    together = []
    for row in zip(*calls, strict=True):
        name = row[0]["optimizer"]
        number = seen[name] = seen.get(name, -1) + 1
        sets = [then[number] for _, then in merged[name]]
        together.append(_merge_call(row, ranks, sets))
    return hyperparameters, together, mapping


def _calls(each: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """The calls of each rank's record, or of its share of a window; nothing for whole states.
    Raises Mismatch where ranks have different things to save."""
    known = ((said.get("record") or said.get("share") or {}).get("calls") for said in each)
    calls = [None if own is None else list(own) for own in known]
    kinds = [
        (
            said.get("record") and said["record"]["previous"],
            said.get("share") and [list(said["share"]["steps"]), bool(said["share"]["ends"])],
            own if own is None else [call["optimizer"] for call in own],
        )
        for said, own in zip(each, calls, strict=True)
    ]
    if any(kind != kinds[0] for kind in kinds):
        raise Mismatch(
            "saving: the ranks have different things for this step (some a record, some a whole "
            "state, or records of different updates, or shares of different windows). Something "
            "surprised one of them: its log says"
        )
    return [own or [] for own in calls]


def _merge_call(
    row: Sequence[Mapping[str, Any]], ranks: Sequence[Sequence[int]], sets: list[Any]
) -> dict[str, Any]:
    each = _of_ranks(row, ranks)
    keys = dict.fromkeys(key for call in each for key in call)
    same = {key for key in keys if all(call.get(key) == each[0].get(key) for call in each)}
    merged: dict[str, Any] = {key: each[0][key] for key in keys if key in same and key in each[0]}
    merged["sets"] = sets
    if same != keys.keys():
        merged["ranks"] = [
            {key: value for key, value in call.items() if key not in same} for call in each
        ]
    for form in FORMS:  # each rank says it of what it has written
        if rows := [said for call in row for said in call.get(form, ())]:
            merged[form] = rows
    return merged


def _of_ranks(
    row: Sequence[Mapping[str, Any]], ranks: Sequence[Sequence[int]]
) -> list[dict[str, Any]]:
    """What each rank, by rising number, says of a call that several may have told together; but for
    the hyperparameters, and the forms of gradients."""
    found: dict[int, dict[str, Any]] = {}
    for call, numbers in zip(row, ranks, strict=True):
        common = {k: v for k, v in call.items() if k not in ("sets", "ranks", *FORMS)}
        own = call.get("ranks") or [{}] * len(numbers)
        for number, said in zip(numbers, own, strict=True):
            found[number] = {**common, **said}
    return [found[number] for number in sorted(found)]


def _united(values: Sequence[Any]) -> dict[str, Any] | None:
    """What ranks keep of their own parameters of an optimizer beside tensors, by parameter; None
    where they differ in what they have in common."""
    united: dict[str, Any] = {}
    other = None
    for value in values:
        if value is None:
            continue
        if value.keys() != {"state", "other"} or other not in (None, value["other"]):
            return None
        other = value["other"]
        if any(united.setdefault(name, own) != own for name, own in value["state"].items()):
            return None
    return {"state": united, "other": other}


def _has_tensors(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_has_tensors, value))
    if not isinstance(value, dict):
        return False
    return value.get("$") == "tensor" or any(map(_has_tensors, value.values()))
