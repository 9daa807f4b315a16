"""Folders of several files: of transformers' Trainer, of Accelerate; and Lightning's one file.

Each becomes the parts that everstep's own integration of that library has (docs/trainers.md).
"""

import json
import logging
import re
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook

from everstep.errors import Corrupt, Missing, Unsupported
from everstep.integrations.transformers import COUNTED
from everstep.interchange import dcp, safetensors, torch_files
from everstep.interchange.tensors import Found, regular
from everstep.interchange.trees import RNG, ByRank, Saved, global_generators, numbered

log = logging.getLogger("everstep")

_TRAINER_STATE = "trainer_state.json"
_STATES = "random_states_0.pkl"
_FSDP = "pytorch_model_fsdp"
_MODULES_MAX = 100_000
_FETCHED = re.compile("implementation|backbone|pretrained")


# ---- transformers' Trainer -----------------------------------------------------------------------


def read_trainer(folder: Path, part: str) -> Saved:
    """Parts as everstep_trainer() has them. The optimizer's parameters are in the order that the
    installed transformers gives the model of config.json."""
    state = json.loads(regular(folder / _TRAINER_STATE).read_bytes())
    tree: dict[str, Any] = {
        part: _weights(folder, ""),
        "optimizer": _file_or_shards(folder / "optimizer.pt", folder / "optimizer_0", "optimizer"),
        "scheduler": _file(folder / "scheduler.pt"),
        "scaler": _file(folder / "scaler.pt"),
    }
    states = _by_rank(folder, "rng_state", ".pth")
    generators = [global_generators(each, ("python", "numpy", "cpu", "cuda")) for each in states]
    tree |= {"trainer": generators and _trainer(state, generators[0]), RNG: ByRank(generators)}
    tree = {name: each for name, each in tree.items() if each}
    orders = _orders_of_trainer(folder) if "optimizer" in tree else None
    return Saved(tree, int(state["global_step"]), orders)


def is_trainer(folder: Path) -> bool:
    """By what its Trainer writes into each."""
    return (folder / _TRAINER_STATE).is_file() and any(folder.glob("rng_state*"))


def _trainer(state: Mapping[str, Any], generators: Mapping[str, Any]) -> dict[str, Any]:
    """What the Trainer of everstep keeps of itself, as the Trainer's own resume has it."""
    step, epoch = state["global_step"], state.get("epoch") or 0
    at = {name: generators[name] for name in ("python", "numpy", "torch")}
    return {
        "state": {name: state[name] for name in COUNTED if name in state},
        "sums": {
            "current_flos": 0,
            "_total_loss_scalar": 0.0,
            "_globalstep_last_logged": step,
            "_initial_global_step": step,
            "_tr_loss": Found.of(torch.tensor(0.0)),
            "_epoch_generators": at | {"own": []},
        },
        "attributes": {},
        "callbacks": [],
        "was_stopped": False,
        "steps_per_epoch": round(step / epoch) if epoch else 0,
    }


def _orders_of_trainer(folder: Path) -> list[list[str]]:
    """The parameters in the order of its groups; none where that is not known here."""
    try:
        import transformers
    except ImportError:
        return []
    path = folder / "config.json"
    config = json.loads(path.read_bytes(), object_pairs_hook=_tame) if path.is_file() else {}
    kind: Any = getattr(transformers, str((config.get("architectures") or [""])[0]), None)
    is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    if not is_model:
        return []
    left = iter(range(_MODULES_MAX))

    def count(*_: Any) -> None:
        if next(left, None) is None:
            raise ValueError(f"it has more than {_MODULES_MAX} modules")

    try:
        with torch.device("meta"), register_module_module_registration_hook(count):
            model = kind(kind.config_class.from_dict(config))
        decaying = set(transformers.Trainer.get_decay_parameter_names(None, model))
    except Exception as error:  # noqa: BLE001  what that library raises is its own
        log.warning("reading %s: transformers makes no model of it: %s", path, str(error)[:200])
        return []
    names = [name for name, _ in model.named_parameters()]
    groups = [n for n in names if n in decaying], [n for n in names if n not in decaying]
    return [[*groups[0], *groups[1]]]


def _tame(rows: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of a config what a model's names follow from: not what names code, or weights, that
    transformers would fetch. Raises Corrupt for counts that fill the memory by themselves."""
    for name, value in rows:
        if type(value) is int and value > _MODULES_MAX and re.search("layer|label", name):
            raise Corrupt(f"reading a config.json: {name!r:.80} is {value}")
    return {name: value for name, value in rows if not _FETCHED.search(name)}


# ---- Accelerate ----------------------------------------------------------------------------------


def read_accelerate(folder: Path, part: str) -> Saved:
    """Parts as state_of(accelerator) has them. Raises Missing; Unsupported for shards of each
    rank's own."""
    if not is_accelerate(folder):
        raise Missing(f"importing {folder}: it has no {_STATES}, and so is not of save_state()")
    if any(folder.glob(f"{_FSDP}*_rank*.bin")):
        raise Unsupported(
            f"importing {folder}: each rank has saved its own shards (LOCAL_STATE_DICT, or without "
            f"DCP). Save it as SHARDED_STATE_DICT or FULL_STATE_DICT"
        )
    tree: dict[str, Any] = {}
    for name, read in (
        ("model", lambda number: _model(folder, number)),
        ("optimizer", lambda number: _optimizer(folder, number)),
        ("scheduler", lambda number: _file(folder / f"scheduler{_ending(number)}.bin")),
        ("custom", lambda number: _file(folder / f"custom_checkpoint_{number}.pkl")),
    ):
        tree |= numbered(name, list(takewhile(bool, map(read, range(_MODULES_MAX)))))
    tree |= {"scaler": scaler} if (scaler := _file(folder / "scaler.pt")) else {}
    states = _by_rank(folder, "random_states", ".pkl")
    if type(states[0].get("step")) is int:
        tree["accelerator"] = {"step": states[0]["step"], "sync_gradients": True}
    names = ("random_state", "numpy_random_seed", "torch_manual_seed", "torch_cuda_manual_seed")
    tree[RNG] = ByRank(global_generators(each, names) for each in states)
    return Saved(tree, None, None if (folder / "pytorch_model.bin").is_file() else [])


def is_accelerate(folder: Path) -> bool:
    """By what its first rank writes into each."""
    return (folder / _STATES).is_file()


def _model(folder: Path, number: int) -> Any:
    file, shards = folder / f"{_FSDP}{_ending(number)}.bin", folder / f"{_FSDP}_{number}"
    return _weights(folder, _ending(number)) or _file_or_shards(file, shards, "model")


def _optimizer(folder: Path, number: int) -> Any:
    file, shards = folder / f"optimizer{_ending(number)}.bin", folder / f"optimizer_{number}"
    return _file_or_shards(file, shards, "optimizer")


def _ending(number: int) -> str:
    return f"_{number}" if number else ""


# ---- Lightning -----------------------------------------------------------------------------------


def read_lightning(path: Path, part: str) -> Saved:
    """Models, optimizers and schedulers as EverstepCallback has them."""
    said = torch_files.load(path)
    tree = {part: said["state_dict"]}
    tree |= {f"optimizer.{n}": each for n, each in enumerate(said.get("optimizer_states", ()))}
    tree |= {f"scheduler.{n}": each for n, each in enumerate(said.get("lr_schedulers", ()))}
    return Saved(tree, said.get("global_step"))


def is_lightning(path: Path) -> bool:
    """By what its trainer writes into each."""
    if not torch_files.is_archive(path):
        return False
    said = torch_files.load(path)
    return isinstance(said, dict) and "pytorch-lightning_version" in said


# ---- what they have in common --------------------------------------------------------------------


def _weights(folder: Path, ending: str) -> Any:
    """Of a model, by safetensors or torch; None where there are none."""
    if (folder / "adapter_config.json").is_file():
        raise Unsupported(
            f"importing {folder}: it has an adapter, and not the weights beneath. Go on from it by "
            f"train(resume_from_checkpoint={str(folder)!r}) of everstep_trainer(Trainer)"
        )
    file = folder / f"model{ending}.safetensors"
    if file.is_file():
        return safetensors.read_file(file)
    if not ending and any(folder.glob(safetensors.INDEX)):
        return safetensors.read_weights(folder)
    return _file(folder / f"pytorch_model{ending}.bin")


def _file(path: Path) -> Any:
    return torch_files.load(path) if path.is_file() else None


def _file_or_shards(file: Path, folder: Path, key: str) -> Any:
    """What FSDP has gathered, or a directory of DCP's."""
    return _file(file) or (dcp.read_tree(folder)[key] if dcp.is_any(folder) else None)


def _by_rank(folder: Path, stem: str, suffix: str) -> list[Any]:
    """What each rank has written; of the Trainer's, one process alone has no number."""
    alone = folder / f"{stem}{suffix}"
    if alone.is_file():
        return [torch_files.load(alone)]
    count = len(list(folder.glob(f"{stem}_*{suffix}")))
    return [torch_files.load(folder / f"{stem}_{rank}{suffix}") for rank in range(count)]
