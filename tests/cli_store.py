"""Small stores for the tests of the command, written without torch, but with real packs."""

from pathlib import Path
from typing import Any

import xxhash

import stores
from everstep.format.manifest import Extent, Manifest, Part, decode_table, encode_table, extents
from everstep.format.packs import Spec, lay_out
from everstep.store import commit
from everstep.store.names import CheckpointName
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


def begin(path: Path) -> tuple[Disk, str]:
    """A store without checkpoints: (disk, run id)."""
    disk = Disk(path, stores.Unsynced())
    return disk, commit.open_store(disk)


def save(disk: Disk, run: str, step: int, epoch: int, **more: Any) -> CheckpointName:
    """Commit a checkpoint whose bytes follow from its step."""
    layout = lay_out(SPECS)
    image = stores.image_of(layout, {spec.name: bytes([step]) * spec.size for spec in SPECS})
    name = CheckpointName(step, epoch)
    links = commit.write_packs(disk, name, [memoryview(image)])
    table = commit.write_table(disk, TABLE)
    found = extents(decode_table(TABLE, "the test's table"))
    part = Part(0, table, links, _digests(image, found), step)
    manifest = Manifest(
        step=step,
        epoch=epoch,
        run=run,
        created=more.pop("created", commit.now()),
        parts=(part,),
        objects=OBJECTS,
        hyperparameters=HYPERPARAMETERS,
        capture=CAPTURE,
        topology={"ranks": 1},
        **more,
    )
    commit.publish(disk, manifest)
    return name


def make_branched(path: Path) -> Disk:
    """40, 80 and 120 of epoch 1; epoch 2 went back to 80 and wrote 81 and 100; "best" is 80."""
    disk, run = begin(path)
    commit.claim_epoch(disk, None, 0)
    for step in (40, 80, 120):
        save(disk, run, step, 1, metrics={"loss": 400 / step})
    commit.set_tag(disk, "best", CheckpointName(80, 1))
    commit.claim_epoch(disk, 1, 80)
    for step in (81, 100):
        save(disk, run, step, 2, metrics={"loss": 4.25, "accuracy": 0.5})
    return disk


def _digests(image: bytearray, found: list[Extent]) -> tuple[str, ...]:
    digests = [""] * len(found)
    for extent in found:
        data = image[extent.offset : extent.offset + extent.size]
        digests[extent.digest] = xxhash.xxh3_128_hexdigest(data)
    return tuple(digests)
