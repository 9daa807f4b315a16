"""DeepSpeed's universal checkpoints: for each parameter a folder, in it a file for its fp32 weights
and one for each tensor of its state; and what the engine counts.

    global_step120/zero/net.0.weight/{fp32,exp_avg,exp_avg_sq,step}.pt
    global_step120/zero/optimizer_state.pt, global_step120/mp_rank_00_model_states.pt
"""

import os
from pathlib import Path
from typing import Any

from everstep.errors import Unsupported
from everstep.interchange.tensors import NAME, StandIn
from everstep.interchange.torch_files import Read, write_torch
from everstep.restore.whole import Whole

_VERSION = "0.19.8"
"""Of DeepSpeed, whose format this is."""


def write_universal(folder: Path, whole: Whole, tree: dict[str, Any], read: Read) -> None:
    """Write one for a model and its optimizer. `tree`: all parts by names. Raises Unsupported for
    others, OSError."""
    what = f"exporting step {whole.name.step} for DeepSpeed"
    if len(whole.optimizers) != 1 or not set(whole.optimizers) <= tree.keys():
        raise Unsupported(
            f"{what}: it has {len(whole.optimizers)} optimizers, and needs one, of a class that "
            f"leaves it to torch what its state is"
        )
    (optimizer,) = whole.optimizers
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
    said = _engine(tree, whole.name.step) | _model(model, moments["param_groups"])
    write(tag / "mp_rank_00_model_states.pt", said)
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


def _model(model: dict[str, StandIn], groups: Any) -> dict[str, Any]:
    """What the engine knows of it. The weights that are trained are those of the folders."""
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
    }


def _engine(tree: dict[str, Any], step: int) -> dict[str, Any]:
    """What it counts."""
    engine = tree["engine"] if isinstance(tree.get("engine"), dict) else {}
    return {
        "optimizer": None,
        "lr_scheduler": engine.get("lr_scheduler", tree.get("scheduler")),
        "skipped_steps": engine.get("skipped_steps", 0),
        "global_steps": engine.get("global_steps", step),
        "global_samples": engine.get("global_samples", 0),
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": _VERSION,
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
    }
