"""What lies at a path, and the draft of a checkpoint that it makes: the kinds of `--from`.

Folders of several files become the parts that everstep's own integration of that library has
(docs/trainers.md).
"""

import json
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook

from everstep.errors import Corrupt, Missing, Unsupported
from everstep.interchange import dcp, deepspeed, safetensors, torch_files
from everstep.interchange.draft import Draft
from everstep.interchange.tensors import Found, reading, regular
from everstep.interchange.trees import (
    RNG,
    ByRank,
    Options,
    Saved,
    draft_of,
    global_generators,
    numbered,
)

log = logging.getLogger("everstep")

COUNTED = ["epoch", "global_step", "num_input_tokens_seen", "total_flos", "log_history"]
COUNTED += ["best_metric", "best_global_step", "best_model_checkpoint"]
"""Of TrainerState; the rest follows from the arguments."""
_TRAINER_STATE = "trainer_state.json"
_STATES = "random_states_0.pkl"
_FSDP = "pytorch_model_fsdp"
_MODULES_MAX = 100_000
_FETCHED = re.compile("implementation|backbone|pretrained")
_TIMES_MAX, _SPARE_BYTES = 4, 64 << 20


def read_source(path: Path, kind: str | None, options: Options) -> Draft:
    """The draft of what lies there; its tensors are read when they are written. `kind`: one of
    KINDS, None: it is recognised. Raises Missing, Corrupt, Unsupported, Unavailable."""
    if not path.exists():
        raise Missing(f"importing {path}: there is nothing")
    with reading(path):
        chosen = kind or next((name for name, (is_one, _) in KINDS.items() if is_one(path)), None)
        if chosen is None:
            raise Unsupported(
                f"importing {path}: nobody here knows what it is. Say it by --from, one of "
                f"{', '.join(KINDS)}"
            )
        _, read = KINDS[chosen]
        draft = draft_of(read(path, options.part), path, chosen, options)
    if not draft.tensors and not draft.objects:
        why = "; ".join(draft.left_out.values()) or "it is empty"
        raise Unsupported(f"importing {path}: there is nothing that can be taken: {why[:1000]}")
    files = [path] if path.is_file() else filter(Path.is_file, path.rglob("*"))
    there = sum(each.stat().st_size for each in files)
    if draft.size > _TIMES_MAX * there + _SPARE_BYTES:  # the same bytes, named until a disk is full
        raise Unsupported(f"importing {path}: {there} bytes, which say that they are {draft.size}")
    return draft


def read_names(path: Path) -> list[list[str]]:
    """Orders that a user has written down: a JSON list of names, or one of lists, each of which is
    a group or an optimizer. Raises Corrupt, Unavailable."""
    with reading(path):
        said = json.loads(path.read_bytes())
    rows = said if isinstance(said, list) else [None]
    names = [name for row in rows for name in (row if isinstance(row, list) else [row])]
    if not all(type(name) is str for name in names):
        raise Corrupt(f"reading {path}: it is no list of names")
    return [names, *(row for row in rows if isinstance(row, list))]


def read_trainer(folder: Path, part: str) -> Saved:
    """Parts as everstep_trainer() has them. The optimizer's parameters are in the order that the
    installed transformers gives the model of config.json."""
    state = json.loads(regular(folder / _TRAINER_STATE).read_bytes())
    tree = _parts(folder, 0, ".pt", part)
    states = _by_rank(folder, "rng_state", ".pth")
    generators = [global_generators(each, ("python", "numpy", "cpu", "cuda")) for each in states]
    tree |= {"trainer": generators and _trainer(state, generators[0]), RNG: ByRank(generators)}
    tree = {name: each for name, each in tree.items() if each}
    orders = _orders_of_trainer(folder) if "optimizer" in tree else None
    return Saved(tree, int(state["global_step"]), orders)


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
    return [sorted(names, key=lambda name: name not in decaying)]


def _tame(rows: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of a config what a model's names follow from: not what names code, or weights, that
    transformers would fetch. Raises Corrupt for counts that fill the memory by themselves."""
    for name, value in rows:
        if type(value) is int and value > _MODULES_MAX and re.search("layer|label", name):
            raise Corrupt(f"reading a config.json: {name!r:.80} is {value}")
    return {name: value for name, value in rows if not _FETCHED.search(name)}


def read_accelerate(folder: Path, part: str) -> Saved:
    """Parts as state_of(accelerator) has them. Raises Missing; Unsupported for shards of each
    rank's own."""
    if not (folder / _STATES).is_file():
        raise Missing(f"importing {folder}: it has no {_STATES}, and so is not of save_state()")
    if any(folder.glob(f"{_FSDP}*_rank*.bin")):
        raise Unsupported(
            f"importing {folder}: each rank has saved its own shards (LOCAL_STATE_DICT, or without "
            f"DCP). Save it as SHARDED_STATE_DICT or FULL_STATE_DICT"
        )
    several: dict[str, list[Any]] = {}
    for number in range(_MODULES_MAX):
        found = _parts(folder, number, ".bin")
        found |= {"custom": _file(folder / f"custom_checkpoint_{number}.pkl")}
        if all(each is None for each in found.values()):
            break
        for name, each in found.items():
            several.setdefault(name, []).extend([] if each is None else [each])
    tree = {key: part for name, own in several.items() for key, part in numbered(name, own).items()}
    states = _by_rank(folder, "random_states", ".pkl")
    if type(states[0].get("step")) is int:
        tree["accelerator"] = {"step": states[0]["step"], "sync_gradients": True}
    names = ("random_state", "numpy_random_seed", "torch_manual_seed", "torch_cuda_manual_seed")
    tree[RNG] = ByRank(global_generators(each, names) for each in states)
    return Saved(tree, None, None if (folder / "pytorch_model.bin").is_file() else [])


def read_lightning(path: Path, part: str) -> Saved:
    """Models, optimizers and schedulers as EverstepCallback has them."""
    said = torch_files.load(path)
    tree = {part: said["state_dict"]}
    tree |= {f"optimizer.{n}": each for n, each in enumerate(said.get("optimizer_states", ()))}
    tree |= {f"scheduler.{n}": each for n, each in enumerate(said.get("lr_schedulers", ()))}
    return Saved(tree, said.get("global_step"))


def is_lightning(path: Path) -> bool:
    """By what its trainer writes into each."""
    said = torch_files.load(path) if torch_files.is_archive(path) else None
    return isinstance(said, dict) and "pytorch-lightning_version" in said


def _parts(folder: Path, number: int, suffix: str, model: str = "model") -> dict[str, Any]:
    """Of the models, optimizers and so on, which have numbers from the second on, that one."""
    end, fsdp = f"_{number}" if number else "", folder / f"{_FSDP}_{number}"
    optimizer = folder / f"optimizer{end}{suffix}", folder / f"optimizer_{number}"
    whole = folder / f"{_FSDP}{end}.bin"
    return {
        model: _weights(folder, end) or _file_or_shards(whole, fsdp, "model"),
        "optimizer": _file_or_shards(*optimizer, "optimizer"),
        "scheduler": _file(folder / f"scheduler{end}{suffix}"),
        "scaler": None if number else _file(folder / "scaler.pt"),
    }


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


KINDS: dict[str, tuple[Callable[[Path], bool], Callable[[Path, str], Saved]]] = {
    "dcp": (dcp.is_any, lambda path, part: Saved(dcp.read_tree(path))),
    "trainer": (
        lambda p: (p / _TRAINER_STATE).is_file() and any(p.glob("rng_state*")),
        read_trainer,
    ),
    "accelerate": (lambda path: (path / _STATES).is_file(), read_accelerate),
    "deepspeed": (lambda path: deepspeed.tag_of(path) is not None, deepspeed.read_folder),
    "hf": (safetensors.is_any, lambda path, part: Saved(safetensors.read_weights(path))),
    "lightning": (is_lightning, read_lightning),
    "torch": (torch_files.is_archive, lambda path, part: Saved(torch_files.load(path))),
}
"""How each is recognised, by what is recognised first, and read; what a model is called that has no
name is told."""
