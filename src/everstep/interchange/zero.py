"""DeepSpeed's folders: ZeRO 1, 2 and 3, and universal checkpoints.

A rank has a row of fp32 numbers for each group of parameters, of which each parameter has a
stretch: in stages 1 and 2 one of the stretch of all ranks together, in stage 3 an equal share of
each parameter. Their state lies likewise. So each stretch is a few boxes of its tensor, and nothing
is put together here.

The parts are those of everstep.integrations.deepspeed: any stage and number of ranks takes them.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from everstep.errors import Corrupt, Missing, Unsupported
from everstep.interchange import archives
from everstep.interchange.draft import Draft, Options
from everstep.interchange.pickles import Inert
from everstep.interchange.tensors import Found, Part
from everstep.interchange.trees import add_optimizer

LATEST = ("latest", "latest_universal")
_TAG = re.compile(r"[\w-][\w.-]{0,199}")
_OPTIMIZER = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_optim_states\.pt"
)
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_WEIGHT = "fp32"


def tag_of(folder: Path) -> Path | None:
    """The folder of a tag: that one, or the one in it that DeepSpeed calls the latest."""
    for latest in LATEST:
        if (folder / latest).is_file():
            name = (folder / latest).read_bytes()[:256].decode(errors="replace").strip()
            if not _TAG.fullmatch(name):
                raise Corrupt(f"reading {folder / latest}: it names a folder {name!r:.80}")
            if not (folder / name).is_dir():
                raise Missing(f"reading {folder / latest}: {name}, which it names, is not there")
            return folder / name
    is_one = any(folder.glob("*_model_states.pt")) and any(
        folder.glob(kind)
        for kind in ("*_optim_states.pt", "mp_rank_00_*", "zero/optimizer_state.pt")
    )
    return folder if is_one else None


@dataclass(slots=True)
class _Reader:
    """Brings into a draft what the ranks have of parameters: by name its shape and group, and by
    key of the state ("fp32": itself) its parts, or the one number of all."""

    draft: Draft
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)
    parts: dict[str, dict[str, list[Part]]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, name: str, row: Mapping[str, Any], start: int, at: int, count: int) -> None:
        """From a rank's rows: `count` of its elements from `start` on lie at `at`."""
        for key, value in row.items():
            if isinstance(value, Found) and len(value.shape) == 1:
                parts = value.flat(self.shapes[name], start, at, count)
                self.parts.setdefault(name, {}).setdefault(key, []).extend(parts)
                if self.dtypes.setdefault(key, value.dtype) != value.dtype:
                    raise ValueError(f"{key} is of two dtypes")
            else:
                self.numbers.setdefault(name, {})[key] = value

    def tensor(self, name: str, key: str) -> Found:
        parts = self.parts[name][key]
        return Found(self.dtypes[key], self.shapes[name], parts, (name, key))

    def add_partitions(self, ranks: Sequence[Any], states: Sequence[Any]) -> None:
        own = [each["optimizer_state_dict"] for each in ranks]
        stage = own[0]["zero_stage"]
        stage = stage.args[0] if isinstance(stage, Inert) else stage
        shapes = [dict(each) for each in states[0]["param_shapes"]]
        count = own[0]["partition_count"]
        if (max(count) if isinstance(count, list) else count) != len(own):
            raise Corrupt(
                f"importing {self.draft.where}: it is of {count} ranks, and has {len(own)} files"
            )
        read = self._read_stage3 if stage == 3 else self._read_stages_1_and_2
        read(own, shapes)
        base = own[0]["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
        groups = base["param_groups"]
        self._set_groups(shapes, groups)
        self._add_module(states)
        self._add_state(groups)
        self._add_engine(states[0], own[0])

    def _read_stages_1_and_2(self, ranks: Sequence[Any], shapes: Sequence[Any]) -> None:
        for group, own in enumerate(shapes):
            self.shapes |= {name: tuple(shape) for name, shape in own.items()}
            done = dict.fromkeys(own, 0)
            for rank in ranks:
                row = {_WEIGHT: rank["single_partition_of_fp32_groups"][group]}
                state = rank["base_optimizer_state"]
                if not isinstance(state, dict):
                    raise Unsupported("reading ZeRO's elastic checkpoints: save without them")
                row |= state["state"].get(group, {})
                for name, address in rank["param_slice_mappings"][group].items():
                    at, count = address.get("start"), address.get("numel")
                    self.add(name, row, done[name], at, count)
                    done[name] += count

    def _read_stage3(self, ranks: Sequence[Any], shapes: Sequence[Any]) -> None:
        for group, own in enumerate(shapes):
            at = 0
            for name, shape in own.items():
                self.shapes[name] = tuple(shape)
                size = prod(shape)
                share = -(-size // len(ranks))
                for rank, said in enumerate(ranks):
                    row = {_WEIGHT: said["fp32_flat_groups"][group]}
                    row |= said["optimizer_state_dict"]["state"].get(group, {})
                    start = min(rank * share, size)
                    self.add(name, row, start, at, min(share, size - start))
                at += share

    def _set_groups(self, shapes: Sequence[Any], groups: Sequence[Any]) -> None:
        """A group's numbers are those of rows; of stage 3 it may have several."""
        of = {row: index for index, group in enumerate(groups) for row in group["params"]}
        for row, own in enumerate(shapes):
            self.groups |= dict.fromkeys(own, of[row])

    def _add_module(self, states: Sequence[Any]) -> None:
        """The fp32 weights, and from the module what no optimizer has: frozen ones and buffers."""
        weights = {name: self.tensor(name, _WEIGHT) for name in self.parts}
        weights |= dict(self._rest(states))
        self.draft.add_weights(self.draft.options.part, weights)
        shared = states[0].get("shared_params") or {}
        for name, of in shared.items():
            if of in weights and name not in weights:
                first = self.draft.full_name(self.draft.options.part, of)
                self.draft.aliases.setdefault(first, []).append(f"{self.draft.options.part}.{name}")

    def _rest(self, states: Sequence[Any]) -> Iterator[tuple[str, Found]]:
        said, shared = states[0], states[0].get("shared_params") or {}
        fragments = [each.get("frozen_param_fragments") or {} for each in states]
        for name, shape in (said.get("frozen_param_shapes") or {}).items():
            rows, size = [each[name] for each in fragments], prod(shape)
            if len(rows[0].shape) != 1 or len(states) == 1:
                yield name, rows[0]
                continue
            parts, share = [], rows[0].shape[0]
            for rank, row in enumerate(rows):
                start = min(rank * share, size)
                parts += row.flat(tuple(shape), start, 0, min(share, size - start))
            yield name, Found(rows[0].dtype, tuple(shape), parts, name)
        buffers = set(said.get("buffer_names") or ())
        for name, tensor in (said.get("module") or {}).items():
            if name in buffers and name not in self.shapes and name not in shared:
                yield name, tensor

    def _add_state(self, groups: Sequence[Mapping[str, Any]]) -> None:
        if not self.draft.options.wants("optimizer"):
            return
        state: dict[str, dict[str, Any]] = {}
        for name, keys in self.parts.items():
            state[name] = {key: self.tensor(name, key) for key in keys if key != _WEIGHT}
            state[name] |= self.numbers.get(name, {})
        members: list[list[str]] = [[] for _ in groups]
        for name, index in self.groups.items():
            members[index].append(name)
        named = [{**group, "params": own} for group, own in zip(groups, members, strict=True)]
        names = {name: self.draft.full_name(self.draft.options.part, name) for name in self.groups}
        self.draft.add_optimizer("optimizer", {"state": state, "param_groups": named}, names)

    def _add_engine(self, state: Mapping[str, Any], optimizer: Mapping[str, Any]) -> None:
        """What the engine counts. Micro-steps are counted from one update to the next."""
        if not self.draft.options.wants("engine"):
            return
        scaler = optimizer.get("loss_scaler")
        known = scaler.state if isinstance(scaler, Inert) and isinstance(scaler.state, dict) else {}
        plain = {key: each for key, each in known.items() if type(each) in (int, float, bool)}
        said = {name: state.get(name, 0) for name in _COUNTERS} | {"micro_steps": 0}
        self.draft.add_object(
            "engine", said | {"lr_scheduler": state.get("lr_scheduler"), "loss_scaler": plain}
        )

    def add_universal(self, tag: Path, state: Mapping[str, Any]) -> None:
        """Each parameter has a folder, of a file for itself and for each tensor of its state: made
        of stage 3, each is a row of numbers."""
        said = archives.load(tag / "zero" / "optimizer_state.pt")
        shapes = [dict(each) for each in state["param_shapes"]]
        common = (said.get("optimizer_state_dict") or {}).get("state") or {}
        for row, own in enumerate(shapes):
            numbers = {
                k: v for k, v in common.get(row, {}).items() if getattr(v, "shape", ()) == ()
            }
            for name, shape in own.items():
                if not _TAG.fullmatch(name):
                    raise Corrupt(f"importing {tag}: it has a parameter {name!r:.80}")
                self.shapes[name] = tuple(shape)
                self.numbers[name] = dict(numbers)
                for path in sorted((tag / "zero" / name).glob("*.pt")):
                    value = archives.load(path)
                    value = value["param"] if isinstance(value, dict) else value
                    if isinstance(value, Found) and path.stem != "step":
                        in_a_row = replace(value, shape=(prod(value.shape),))
                        self.add(name, {path.stem: in_a_row}, 0, 0, prod(shape))
                    else:
                        self.numbers[name][path.stem] = value
        self._set_groups(shapes, said["param_groups"])
        self._add_module([state])
        self._add_state(said["param_groups"])
        self._add_engine(state, said)

    def add_plain(self, state: Mapping[str, Any]) -> None:
        """Of an engine without ZeRO."""
        self.draft.add_weights(self.draft.options.part, state["module"])
        if state.get("optimizer") and self.draft.options.wants("optimizer"):
            add_optimizer(self.draft, "optimizer", state["optimizer"], [self.draft.options.part])
        if state.get("lr_scheduler"):
            self.draft.try_object("scheduler", state["lr_scheduler"])


def read_zero(folder: Path, options: Options) -> Draft:
    """Raises Missing, Corrupt, Unsupported."""
    tag = tag_of(folder)
    if tag is None:
        raise Missing(f"importing {folder}: it is no folder of DeepSpeed's")
    is_universal = (tag / "zero" / "optimizer_state.pt").is_file()
    draft = Draft(tag, "ucp" if is_universal else "deepspeed", options)
    models = sorted(tag.glob("*_model_states.pt"))
    states = [archives.load(path) for path in models if "_expert_" not in path.name]
    if len(states) != len(models) or not states:
        raise Unsupported(f"importing {tag}: experts of DeepSpeed's own are not known here")
    reader, files = _Reader(draft), _files(tag)
    if is_universal:
        reader.add_universal(tag, states[0])
    elif files:
        reader.add_partitions([archives.load(path) for path in files], states)
    else:
        reader.add_plain(states[0])
    draft.step = states[0].get("global_steps")
    return draft


def _files(tag: Path) -> list[Path]:
    """Of the ranks' optimizers, in their order."""
    found: dict[int, Path] = {}
    for path in tag.glob("*_optim_states.pt"):
        name = _OPTIMIZER.fullmatch(path.name)
        if not name or int(name[2]):
            raise Unsupported(f"importing {tag}: {path.name} is of a model in parallel parts")
        found[int(name[1])] = path
    if sorted(found) != list(range(len(found))):
        raise Corrupt(f"importing {tag}: files of some ranks are not there")
    return [found[rank] for rank in sorted(found)]
