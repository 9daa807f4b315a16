"""Small stores for the tests of the command, written without torch, but with real packs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash

import stores
from everstep.format.manifest import CheckpointName, Manifest, Part, Previous, Record
from everstep.format.packs import Spec, lay_out
from everstep.format.tables import Extent, decode_table, encode_table, extents
from everstep.store import catalog, commit
from everstep.tiers.disk import Disk

SPECS = (
    Spec("model.wte.weight", "float32", (512, 1024)),
    Spec("model.blocks.0.attention.weight", "bfloat16", (96, 64)),
    Spec("model.blocks.0.attention.bias", "bfloat16", (96,)),
    Spec("optimizer.state.model.wte.weight.exp_avg", "float32", (1200, 1024)),
    Spec("optimizer.state.model.wte.weight.step", "float32", ()),
    Spec("ema.empty", "complex64", (0, 3)),
)
_GROUPS = {
    "model.wte.weight": 0,
    "model.blocks.0.attention.weight": 0,
    "model.blocks.0.attention.bias": 1,
}
OPTIMIZERS = {"optimizer": {"groups": _GROUPS, "state": {"model.wte.weight": ["exp_avg", "step"]}}}
_BETAS = {"$": "tuple", "v": [0.9, 0.95]}
HYPERPARAMETERS = {
    "optimizer": [
        {"lr": 3e-4, "betas": _BETAS, "weight_decay": 0.1, "fused": None},
        {"lr": 3e-4, "betas": _BETAS, "weight_decay": 0.0, "fused": None},
    ]
}
OBJECTS: dict[str, Any] = {
    "scheduler": {"last_epoch": 120, "base_lrs": [3e-4], "milestones": {"$": "Counter", "v": []}},
    "loader": {"epoch": 2, "position": 4711},
    "rng": {"python": {"$": "tuple", "v": [3, {"$": "tuple", "v": list(range(625))}, None]}},
}
MEMORY = {"slots": 2, "image_bytes": 7000000, "budget_bytes": 1234567890, "formula": "2 images"}
CAPTURE = {"strategy": "full", "every": 1, "memory": MEMORY}
TABLE = encode_table(lay_out(SPECS), {"model.wte.weight": ["model.head.weight"]}, {}, OPTIMIZERS)

RECORD_SPECS = (
    Spec("@0.model.wte.weight", "float32", (512, 1024)),
    Spec("@0.model.blocks.0.attention.weight", "bfloat16", (96, 64)),
    Spec("@0!clip.0", "float32", ()),
    Spec("rng.torch", "uint8", (5056,)),
)
RECORD_TABLE = encode_table(lay_out(RECORD_SPECS), {}, {}, OPTIMIZERS)
_CLIP = {
    "coefficient": "@0!clip.0",
    "foreach": True,
    "names": ["model.wte.weight", "model.blocks.0.attention.weight"],
}
CALLS = (
    {
        "optimizer": "optimizer",
        "class": "torch.optim.adamw.AdamW",
        "sets": [
            {"lr": 0.25, "betas": _BETAS, "weight_decay": 0.1, "fused": None},
            {"lr": 0.25, "betas": _BETAS, "weight_decay": 0.0, "fused": None},
        ],
        "clips": [_CLIP],
    },
)


def begin(path: Path) -> tuple[Disk, str]:
    """A store without checkpoints: (disk, run id)."""
    disk = Disk(path, stores.Unsynced())
    return disk, commit.open_store(disk)


def save(disk: Disk, run: str, step: int, epoch: int, **more: Any) -> CheckpointName:
    """Commit a checkpoint whose bytes follow from its step."""
    name = CheckpointName(step, epoch)
    _publish(disk, name, run, parts=(_part(disk, name, SPECS, TABLE),), **more)
    return name


def save_log(disk: Disk, run: str, step: int, previous: CheckpointName, **more: Any) -> None:
    """Commit a record of one step, in the epoch of what it goes on from."""
    name = CheckpointName(step, previous.epoch)
    digest = catalog.digest_of_manifest(disk, previous)
    calls = more.pop("calls", CALLS)
    _publish(
        disk,
        name,
        run,
        parts=(),
        records=(Record(step, calls, (_part(disk, name, RECORD_SPECS, RECORD_TABLE),)),),
        previous=Previous(previous.step, previous.epoch, digest),
        **more,
    )


def make_whole(disk: Disk, name: CheckpointName, exact: bool = True) -> None:
    """Put a whole state beside a log step, as `everstep materialize` does."""
    part = _part(disk, name, SPECS, TABLE)
    log = catalog.read_manifest(disk, name)
    state = replace(log, parts=(part,), records=(), previous=None, exact=exact)
    commit.publish_state(disk, state, catalog.digest_of_manifest(disk, name), TABLE)


def make_logged(path: Path) -> Disk:
    """States 10 and 14 of epoch 1; 11 to 13 and 15 are logs; epoch 2 went back to 12 and wrote the
    state 13 and the log 14."""
    disk, run = begin(path)
    commit.claim_epoch(disk, None)
    save(disk, run, 10, 1)
    for step in (11, 12, 13):
        save_log(disk, run, step, CheckpointName(step - 1, 1))
    save(disk, run, 14, 1)
    save_log(disk, run, 15, CheckpointName(14, 1))
    commit.claim_epoch(disk, CheckpointName(12, 1))
    save(disk, run, 13, 2, parent={"step": 12, "epoch": 1})
    save_log(disk, run, 14, CheckpointName(13, 2))
    return disk


def make_branched(path: Path) -> Disk:
    """40, 80 and 120 of epoch 1; epoch 2 went back to 80 and wrote 81 and 100; "best" is 80."""
    disk, run = begin(path)
    commit.claim_epoch(disk, None)
    for step in (40, 80, 120):
        save(disk, run, step, 1, metrics={"loss": 400 / step})
    commit.set_tag(disk, "best", CheckpointName(80, 1))
    commit.claim_epoch(disk, CheckpointName(80, 1))
    for step in (81, 100):
        save(disk, run, step, 2, metrics={"loss": 4.25, "accuracy": 0.5})
    return disk


def _publish(disk: Disk, name: CheckpointName, run: str, **more: Any) -> None:
    manifest = Manifest(
        step=name.step,
        epoch=name.epoch,
        run=run,
        created=more.pop("created", commit.now()),
        objects=OBJECTS,
        hyperparameters=HYPERPARAMETERS,
        capture=CAPTURE,
        topology={"ranks": 1},
        **more,
    )
    commit.publish(disk, manifest)


def _part(disk: Disk, name: CheckpointName, specs: tuple[Spec, ...], table: bytes) -> Part:
    layout = lay_out(specs)
    image = stores.image_of(layout, {spec.name: bytes([name.step]) * spec.size for spec in specs})
    links = stores.write_packs(disk, name, [memoryview(image)])
    link = commit.write_table(disk, table)
    found = extents(decode_table(table, "the test's table"))
    return Part(0, link, links, _digests(image, found), name.step)


def _digests(image: bytearray, found: list[Extent]) -> tuple[str, ...]:
    digests = [""] * len(found)
    for extent in found:
        data = image[extent.offset : extent.offset + extent.size]
        digests[extent.digest] = xxhash.xxh3_128_hexdigest(data)
    return tuple(digests)
