"""A fault at every system call of the save of a state that is encoded, with a rounded copy, beside
still packs."""

import pytest
from faults import Fault
from sweep import Promises, leaves, sweep

import coded
import stores
from everstep.codecs.rounded import rounded
from everstep.format.manifest import CheckpointName
from everstep.format.packs import Spec, lay_out
from everstep.format.tables import encode_table
from everstep.store import catalog
from everstep.tiers.disk import Disk
from examples import slow
from stores import Trainer

SPECS = (
    *stores.SMALL,
    Spec("frozen", "float32", (20_000,)),
    Spec("ids", "int32", (40_000,)),
    Spec("weights", "float32", (50_000,)),
    Spec("copy", "bfloat16", (50_000,)),
)


def trainer_of(disk: Disk, **options: object) -> Trainer:
    found = Trainer(disk, specs=SPECS, **options)
    found.layout = lay_out(SPECS, {"frozen": 1})
    found.table = encode_table(found.layout, {}, {}, {})
    found.arena = stores.Arena.create(found.slots, 64 << 10, found.layout.size)
    return found


def content(spec: Spec, step: int) -> bytes:
    if spec.name == "copy":
        return bytes(rounded(memoryview(content(SPECS[-2], step)), "bfloat16"))
    size = spec.size
    return bytes(size) if spec.name == "frozen" else (bytes([0, step % 2]) * size)[:size]


def _two(disk: Disk) -> Promises:
    trainer = trainer_of(disk)
    trainer.claim()
    trainer.save(1)
    trainer.save(2)
    return Promises({CheckpointName(1, 1), CheckpointName(2, 1)}, {1})


@pytest.mark.parametrize("fault", [Fault.KILL, Fault.NO_SYNC, *slow(Fault.EIO, Fault.BURST)])
def test_a_save_that_is_encoded(folder, fault, monkeypatch):
    monkeypatch.setattr(stores, "content", content)
    coded.choose(("planes", "zstd", "rounded"), patch=monkeypatch.setattr)

    def save(disk: Disk, promises: Promises) -> None:
        trainer_of(disk, epoch=1, parent=CheckpointName(2, 1)).save(3)
        promises.checkpoints.add(CheckpointName(3, 1))
        (part,) = catalog.read_manifest(disk, CheckpointName(3, 1)).parts
        assert {each.codec for each in part.encoded} == {"planes", "zstd", "rounded:weights"}

    assert sweep(folder, _two, save, fault, leaves(4)) > 30


@pytest.mark.parametrize("fault", [Fault.KILL, *slow(Fault.NO_SYNC, Fault.EIO, Fault.BURST)])
def test_saves_with_differences(folder, fault, monkeypatch):
    monkeypatch.setattr(stores, "content", content)
    coded.choose(("planes", "difference"), patch=monkeypatch.setattr)
    seen = set()

    def save(disk: Disk, promises: Promises) -> None:
        trainer = trainer_of(disk, epoch=1, parent=CheckpointName(2, 1))
        for step in (3, 4, 5):  # with the second there is a base, and it is known for the third
            trainer.save(step)
            promises.checkpoints.add(CheckpointName(step, 1))
        (part,) = catalog.read_manifest(disk, CheckpointName(5, 1)).parts
        seen.update(each.codec for each in part.encoded)

    assert sweep(folder, _two, save, fault, leaves(6)) > 60
    assert "difference" in seen
