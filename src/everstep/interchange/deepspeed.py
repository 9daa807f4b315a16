"""DeepSpeed's folders: ZeRO 1, 2 and 3, and universal checkpoints.

A rank has a row of fp32 numbers for each group of parameters, of which each parameter has a
stretch: in stages 1 and 2 one of the stretch of all ranks together, in stage 3 an equal share of
each parameter. Their state lies likewise. So each stretch is a few boxes of its tensor, and nothing
is put together here. A universal checkpoint has for each parameter a folder, in it a file for its
fp32 weights and one for each tensor of its state; and what the engine counts.

    global_step120/zero/net.0.weight/{fp32,exp_avg,exp_avg_sq,step}.pt
    global_step120/zero/optimizer_state.pt, global_step120/mp_rank_00_model_states.pt

The parts are those of everstep.integrations.deepspeed: any stage and number of ranks takes them.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from everstep.errors import Corrupt, Missing, Unsupported
from everstep.interchange import torch_files
from everstep.interchange.pickles import Inert
from everstep.interchange.tensors import NAME, Found, Part, lengths, named
from everstep.interchange.torch_files import Read, StandIn, write_torch
from everstep.interchange.trees import Saved
from everstep.restore.whole import Whole

LATEST = ("latest", "latest_universal")
_OPTIMIZER = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_optim_states\.pt"
)
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_WEIGHT = "fp32"
_VERSION = "0.19.8"
"""Of DeepSpeed, whose universal format is written."""


def tag_of(folder: Path) -> Path | None:
    """The folder of a tag: that one, or the one in it that DeepSpeed calls the latest."""
    for latest in LATEST:
        if (folder / latest).is_file():
            name = (folder / latest).read_bytes()[:256].decode(errors="replace").strip()
            return named(folder, name, folder / latest)
    return folder if any(folder.glob("*mp_rank_00_model_states.pt")) else None


class _Rows:
    """What the ranks have of parameters, whose shapes `groups` tell: by name, and by key of the
    state ("fp32": itself), its parts, or the one number of all."""

    def __init__(self, groups: Sequence[Any]) -> None:
        self.groups = [{name: lengths(shape) for name, shape in own.items()} for own in groups]
        self.shapes = {name: shape for own in self.groups for name, shape in own.items()}
        self.parts: dict[str, dict[str, list[Part]]] = {}
        self.dtypes: dict[str, str] = {}
        self.numbers: dict[str, dict[str, Any]] = {}

    def _add(self, name: str, row: Mapping[str, Any], start: int, at: int, count: int) -> None:
        """From a rank's rows: `count` of its elements from `start` on lie at `at`."""
        for key, value in row.items():
            if isinstance(value, Found) and len(value.shape) == 1:
                parts = value.flat(self.shapes[name], start, at, count)
                self.parts.setdefault(name, {}).setdefault(key, []).extend(parts)
                if self.dtypes.setdefault(key, value.dtype) != value.dtype:
                    raise ValueError(f"{key} is of two dtypes")
            else:
                self.numbers.setdefault(name, {})[key] = value

    def read_partitions(self, tag: Path, ranks: Sequence[Any]) -> Any:
        """Returns the groups of parameters."""
        stage, count = ranks[0]["zero_stage"], ranks[0]["partition_count"]
        stage = stage.args[0] if isinstance(stage, Inert) else stage
        if (max(count) if isinstance(count, list) else count) != len(ranks):
            raise Corrupt(f"importing {tag}: it is of {count} ranks, and has {len(ranks)} files")
        (self._read_stage3 if stage == 3 else self._read_stages_1_and_2)(ranks)
        base = ranks[0]["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
        return base["param_groups"]

    def _read_stages_1_and_2(self, ranks: Sequence[Any]) -> None:
        for group, own in enumerate(self.groups):
            done = dict.fromkeys(own, 0)
            for rank in ranks:
                row = {_WEIGHT: rank["single_partition_of_fp32_groups"][group]}
                state = rank["base_optimizer_state"]
                if not isinstance(state, dict):
                    raise Unsupported("reading ZeRO's elastic checkpoints: save without them")
                row |= state["state"].get(group, {})
                for name, address in rank["param_slice_mappings"][group].items():
                    at, count = address.get("start"), address.get("numel")
                    self._add(name, row, done[name], at, count)
                    done[name] += count

    def _read_stage3(self, ranks: Sequence[Any]) -> None:
        for group, own in enumerate(self.groups):
            at = 0
            for name, shape in own.items():
                shares = _shares(shape, len(ranks))
                for said, (start, count) in zip(ranks, shares, strict=True):
                    row = {_WEIGHT: said["fp32_flat_groups"][group]}
                    row |= said["optimizer_state_dict"]["state"].get(group, {})
                    self._add(name, row, start, at, count)
                at += shares[0][1]

    def read_universal(self, tag: Path, said: Mapping[str, Any]) -> None:
        """Each parameter has a folder, of a file for itself and for each tensor of its state: made
        of stage 3, each is a row of numbers."""
        common = (said.get("optimizer_state_dict") or {}).get("state") or {}
        for group, own in enumerate(self.groups):
            numbers = {
                k: v for k, v in common.get(group, {}).items() if getattr(v, "shape", ()) == ()
            }
            for name, shape in own.items():
                self.numbers[name] = dict(numbers)
                for path in sorted(named(tag / "zero", name, tag).glob("*.pt")):
                    value = torch_files.load(path)
                    value = value["param"] if isinstance(value, dict) else value
                    if isinstance(value, Found) and path.stem != "step":
                        in_a_row = replace(value, shape=(prod(value.shape),))
                        self._add(name, {path.stem: in_a_row}, 0, 0, prod(shape))
                    else:
                        self.numbers[name][path.stem] = value

    def weights(self, states: Sequence[Any]) -> dict[str, Found]:
        """In fp32, and from the module what no optimizer has: frozen ones and buffers."""
        found = {name: self._tensor(name, _WEIGHT) for name in self.parts}
        shared = states[0].get("shared_params") or {}
        known = found.keys() | shared.keys()
        found |= {name: each for name, each in _rest(states) if name not in known}
        return found | {name: found[of] for name, of in shared.items() if of in found}

    def optimizer(self, groups: Sequence[Any]) -> dict[str, Any]:
        """Its state_dict, by names. A group's numbers are those of rows; of stage 3 it may have
        several."""
        state = {
            name: {key: self._tensor(name, key) for key in keys if key != _WEIGHT}
            | self.numbers.get(name, {})
            for name, keys in self.parts.items()
        }
        of = {row: index for index, group in enumerate(groups) for row in group["params"]}
        members: list[list[str]] = [[] for _ in groups]
        for row, own in enumerate(self.groups):
            members[of[row]] += own
        named = [{**group, "params": own} for group, own in zip(groups, members, strict=True)]
        return {"state": state, "param_groups": named}

    def _tensor(self, name: str, key: str) -> Found:
        return Found(self.dtypes[key], self.shapes[name], tuple(self.parts[name][key]))


def _shares(shape: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Where the elements begin that each rank has of a parameter in stage 3, and how many."""
    size, share = prod(shape), -(-prod(shape) // count)
    starts = (min(rank * share, size) for rank in range(count))
    return [(start, min(share, size - start)) for start in starts]


def _rest(states: Sequence[Any]) -> Iterator[tuple[str, Found]]:
    """Of the module all that may be no optimizer's: in stage 3 what is frozen lies beside it."""
    said = states[0]
    yield from (said.get("module") or {}).items()
    fragments = [each.get("frozen_param_fragments") or {} for each in states]
    for name, shape in (said.get("frozen_param_shapes") or {}).items():
        rows, shape, parts = [own[name] for own in fragments], lengths(shape), list[Part]()
        if rows[0].shape == shape:
            yield name, rows[0]
            continue
        for row, (start, count) in zip(rows, _shares(shape, len(rows)), strict=True):
            parts += row.flat(shape, start, 0, count)
        yield name, Found(rows[0].dtype, shape, tuple(parts))


def _engine(state: Mapping[str, Any], optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """What the engine counts. Micro-steps are counted from one update to the next."""
    scaler = optimizer.get("loss_scaler")
    known = scaler.state if isinstance(scaler, Inert) and isinstance(scaler.state, dict) else {}
    plain = {key: each for key, each in known.items() if type(each) in (int, float, bool)}
    said = {name: state.get(name, 0) for name in _COUNTERS} | {"micro_steps": 0}
    return said | {"lr_scheduler": state.get("lr_scheduler"), "loss_scaler": plain}


def read_folder(folder: Path, part: str) -> Saved:
    """Raises Missing, Corrupt, Unsupported."""
    tag = tag_of(folder)
    if tag is None:
        raise Missing(f"importing {folder}: it is no folder of DeepSpeed's")
    models = sorted(tag.glob("*_model_states.pt"))
    states = [torch_files.load(path) for path in models if "_expert_" not in path.name]
    if len(states) != len(models) or not states:
        raise Unsupported(f"importing {tag}: experts of DeepSpeed's own are not known here")
    universal = tag / "zero" / "optimizer_state.pt"
    files = [universal] if universal.is_file() else _files(tag)
    step = states[0].get("global_steps")
    if not files and models[0].name.startswith("zero_"):
        raise Corrupt(f"importing {tag}: the files of its optimizer are not there")
    if not files:  # an engine without ZeRO
        parts = {part: "module", "optimizer": "optimizer", "scheduler": "lr_scheduler"}
        plain = {name: states[0].get(key) for name, key in parts.items()}
        return Saved({name: each for name, each in plain.items() if each}, step)
    said, rows = [torch_files.load(path) for path in files], _Rows(states[0]["param_shapes"])
    if universal in files:
        rows.read_universal(tag, said[0])
        groups = said[0]["param_groups"]
    else:
        said = [each["optimizer_state_dict"] for each in said]
        groups = rows.read_partitions(tag, said)
    tree: dict[str, Any] = {part: rows.weights(states)}
    tree |= {"optimizer": rows.optimizer(groups), "engine": _engine(states[0], said[0])}
    return Saved(tree, step)


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


# ---- to a universal checkpoint -------------------------------------------------------------------


def write_universal(folder: Path, whole: Whole, tree: dict[str, Any], read: Read) -> None:
    """Write a universal checkpoint of a model and its optimizer. `tree`: all parts by names. Raises
    Unsupported for others, OSError."""
    what = f"exporting step {whole.name.step} for DeepSpeed"
    objects = whole.manifest.objects
    known = [name for name in whole.optimizers if "state_dict" not in (objects.get(name) or {})]
    if not len(known) == len(whole.optimizers) == 1:
        raise Unsupported(
            f"{what}: it has {len(whole.optimizers)} optimizers, and needs one, of a class that "
            f"leaves it to torch what its state is"
        )
    (optimizer,) = known
    moments = tree[optimizer]
    part = next(iter(whole.optimizers[optimizer]["groups"]), "").partition(".")[0]
    model = tree[part]
    tag = folder / f"global_step{whole.name.step}"

    def write(path: Path, value: Any) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_torch(path, value, read)

    for group in moments["param_groups"]:
        for name in group["params"]:
            if not NAME.fullmatch(name) or name not in model:
                raise Unsupported(f"{what}: a parameter {name!r:.200} of {part!r}")
            own = {"fp32": model[name], **moments["state"].get(name, {})}
            for key, value in own.items():
                is_alike = isinstance(value, StandIn) and value.shape == model[name].shape
                value = {"param": value} if is_alike and key != "step" else value
                write(tag / "zero" / name / f"{key}.pt", value)
    write(tag / "zero" / "optimizer_state.pt", _common(moments))
    engine = tree["engine"] if isinstance(tree.get("engine"), dict) else {}
    engine = {"global_steps": whole.name.step, "lr_scheduler": tree.get("scheduler")} | engine
    write(tag / "mp_rank_00_model_states.pt", _engine_file(engine, model, moments["param_groups"]))
    of_stage_3 = tag / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    os.link(tag / "mp_rank_00_model_states.pt", of_stage_3)
    (folder / "latest_universal").write_text(tag.name)


def _common(moments: Any) -> dict[str, Any]:
    groups = [{**group, "params": [at]} for at, group in enumerate(moments["param_groups"])]
    firsts = [group["params"][:1] for group in moments["param_groups"]]
    steps = [moments["state"].get(name, {}).get("step") for (name,) in firsts]
    state = {at: {} if step is None else {"step": step} for at, step in enumerate(steps)}
    return {
        "param_groups": groups,
        "optimizer_state_dict": {"state": state, "param_groups": groups},
        "dynamic_loss_scale": False,
        "overflow": False,
        "clip_grad": 0.0,
        "zero_stage": 1,
        "partition_count": [1] * len(groups),
        "group_paddings": [0] * len(groups),
        "ds_version": _VERSION,
    }


def _engine_file(engine: dict[str, Any], model: dict[str, StandIn], groups: Any) -> dict[str, Any]:
    """What the engine counts, and knows of its model: the weights that are trained are those of the
    folders."""
    shapes = [{name: model[name].shape for name in group["params"]} for group in groups]
    firsts: dict[str, str] = {}
    tensors = {name: each for name, each in model.items() if isinstance(each, StandIn)}
    shared = {n: known for n, t in tensors.items() if (known := firsts.setdefault(t.of, n)) != n}
    elsewhere = shared.keys() | {name for group in groups for name in group["params"]}
    rest = {name: each for name, each in model.items() if name not in elsewhere}
    return {
        "module": rest,
        "buffer_names": list(rest.keys() & tensors.keys()),
        "param_shapes": shapes,
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": shared,
        "optimizer": None,
        "lr_scheduler": engine["lr_scheduler"],
        **{name: engine.get(name, 0) for name in _COUNTERS},
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": _VERSION,
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
    }
