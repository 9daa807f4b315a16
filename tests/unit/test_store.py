"""Store: what a person asks of it, and what damage does."""

import json
import os
import shutil

import pytest

from everstep import Conflict, Corrupt, Missing, Store, Unavailable, Unsupported
from everstep.format.dtypes import ITEM_SIZES
from everstep.format.manifest import CheckpointName
from everstep.format.packs import Spec
from everstep.store import commit
from everstep.store.names import parse_checkpoint
from everstep.tiers.disk import Disk
from independent_reader import Damaged
from independent_reader import read as read_independently
from stores import MIXED, Trainer, content, files_of, go_on, make_store, packs_of, rewrite


def _bytes(tensor) -> bytes:
    torch = pytest.importorskip("torch")
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _three_of_each(path):
    """A small store with a tag and a branch, and a path of each kind of file in it."""
    trainer = make_store(path, {1: None, 2: "best", 3: None})
    go_on(trainer, 2, [3])
    return sorted(files_of(path))


def test_steps_latest_and_references(tmp_path):
    _three_of_each(tmp_path)
    store = Store(tmp_path)
    assert store.steps() == [1, 2, 3]
    assert store.latest() == 3
    assert store.manifest().epoch == 2
    assert store.manifest(3).epoch == 2
    assert store.manifest("3").epoch == 2
    assert store.manifest("3-1").epoch == 1
    assert store.manifest("00000003-0001").epoch == 1
    assert store.manifest("best").step == 2
    assert store.manifest().parent == {"step": 2, "epoch": 1}
    assert store.manifest().run == store.run


def test_missing_says_what_there_is(tmp_path):
    with pytest.raises(Missing, match=r"no everstep\.json"):
        Store(tmp_path / "nothing")
    trainer = make_store(tmp_path / "s", [])
    assert Store(tmp_path / "s").latest() is None
    with pytest.raises(Missing, match="no checkpoint"):
        Store(tmp_path / "s").manifest()
    for step in (1, 2, 3):
        trainer.save(step)
    go_on(trainer, 1, [])
    store = Store(tmp_path / "s")
    with pytest.raises(Missing, match=r"has 1 from 1 to 1.*exists on a branch.*'3-1'"):
        store.manifest(3)
    with pytest.raises(Missing, match="no checkpoint of step -1"):
        store.manifest(-1)
    with pytest.raises(Missing, match=r"'nope'.*tags are"):
        store.manifest("nope")
    with pytest.raises(Missing, match="²"):
        store.manifest("²")
    for nonsense in (1.5, True, [1]):
        with pytest.raises(ValueError, match="step must be a step, a tag"):
            store.manifest(nonsense)


def test_reading_tensors(tmp_path):
    torch = pytest.importorskip("torch")
    specs = (*MIXED, *(Spec(name, name, (3, 2)) for name in ITEM_SIZES if hasattr(torch, name)))
    trainer = Trainer(Disk(tmp_path), specs=specs, aliases={"weight": ["tied"]})
    trainer.claim()
    trainer.save(5)
    store = Store(tmp_path)
    found = store.read()
    assert found.keys() == {spec.name for spec in specs} | {"tied"}
    for spec in specs:
        assert found[spec.name].shape == spec.shape
        assert found[spec.name].dtype == getattr(torch, spec.dtype)
        assert _bytes(found[spec.name]) == content(spec, 5)
    assert found["tied"] is found["weight"]
    assert store.read(5, ["tied"]).keys() == {"tied"}
    assert store.read(5, []) == {}
    with pytest.raises(Missing, match=r"\['nothing'\]"):
        store.read(5, ["nothing", "bias"])
    with pytest.raises(ValueError, match="a list of names, not 'bias'"):
        store.read(5, "bias")


def test_the_independent_reader_agrees(tmp_path):
    specs = (*MIXED, *(Spec(f"as.{name}", name, (3, 2)) for name in ITEM_SIZES))
    trainer = make_store(tmp_path, [1, 2], specs=specs)
    go_on(trainer, 1, [2, 3])
    for step in (1, 2, 3):
        manifest, tensors = read_independently(tmp_path, step)
        assert tensors == {s.name: (s.dtype, s.shape, content(s, step)) for s in specs}
    assert (manifest["step"], manifest["epoch"]) == (3, 2)


def test_the_independent_reader_sees_damage(tmp_path):
    make_store(tmp_path, [1])
    (pack,) = packs_of(tmp_path)
    data = bytearray((tmp_path / pack).read_bytes())
    data[-1] ^= 1  # padding
    (tmp_path / pack).write_bytes(data)
    with pytest.raises(Damaged, match="padding"):
        read_independently(tmp_path)


def test_verify_counts_and_reports_progress(tmp_path):
    make_store(tmp_path, [1, 2], specs=MIXED)
    seen: list[tuple[int, int]] = []
    verdict = Store(tmp_path).verify(progress=lambda done, total: seen.append((done, total)))
    assert verdict.ok
    assert verdict.checkpoints == 2
    assert [total for _, total in seen] == [seen[-1][1]] * len(seen)
    assert sorted(seen) == seen
    assert 0 < seen[-1][0] == verdict.bytes <= seen[-1][1]
    assert Store(tmp_path).verify(2).checkpoints == 1


@pytest.mark.parametrize("folder", ["tags", "epochs"])
def test_damage_of_what_says_how_steps_follow(tmp_path, folder):
    _three_of_each(tmp_path)
    path = min((tmp_path / folder).iterdir())
    whole = path.read_bytes()
    for data in (b"", whole[:-1], whole + bytes(4096), b"x" + whole[1:]):
        path.write_bytes(data)
        store = Store(tmp_path)
        assert store.verify().problems.keys() == {folder}
        assert path.name in store.verify().problems[folder][0]
        if folder == "tags":
            with pytest.raises(Corrupt):
                store.manifest("best")
        assert store.steps() == [1, 2, 3]  # a claim can be told from the manifests
        assert store.manifest("2-1").step == 2  # a full name needs neither


def test_every_flipped_bit_of_a_pack_is_seen(tmp_path):
    make_store(tmp_path, [1])
    (pack,) = packs_of(tmp_path)
    whole = (tmp_path / pack).read_bytes()
    store = Store(tmp_path)
    for at in [*range(0, len(whole), 97), *range(4096, 4096 + 160)]:
        data = bytearray(whole)
        data[at] ^= 1 << at % 8
        (tmp_path / pack).write_bytes(data)
        assert not store.verify().ok, at


@pytest.mark.parametrize("kind", ["everstep.json", "manifest.json", "tables", "epochs"])
def test_unknown_versions_are_unsupported(tmp_path, kind):
    make_store(tmp_path, [1])
    (path,) = [path for path in files_of(tmp_path) if kind in path]
    rewrite(tmp_path / path, lambda value: value.update(format=99))
    with pytest.raises(Unsupported, match="version 99"):
        Store(tmp_path).read()
    if kind != "everstep.json":
        assert not Store(tmp_path).verify().ok


def test_documents_in_the_wrong_place_are_corrupt(tmp_path):
    make_store(tmp_path / "s", [1, 2])
    checkpoints = tmp_path / "s/checkpoints"
    shutil.copytree(checkpoints / "00000002-0001", checkpoints / "00000003-0001")
    with pytest.raises(Corrupt, match="manifest of 00000002-0001"):
        Store(tmp_path / "s").manifest(3)
    assert Store(tmp_path / "s").verify().problems.keys() == {"00000003-0001"}


def test_a_table_that_another_has_replaced_is_corrupt(tmp_path):
    """Sealed, of equal shape, and yet not the one that the manifest names."""
    make_store(tmp_path, [1])
    (path,) = (tmp_path / "data/tables").iterdir()

    def swap(value):
        rows = {row["name"]: row for row in value["tensors"]}
        rows["bias"]["name"], rows["mask"]["name"] = "mask", "bias"

    rewrite(path, swap)
    with pytest.raises(Corrupt, match="another piece table"):
        Store(tmp_path).read()


def test_a_step_saved_twice(tmp_path):
    trainer = make_store(tmp_path, [1])
    before = files_of(tmp_path)
    assert trainer.save(1).bytes == 0
    assert files_of(tmp_path) == before
    trainer.save(1, tag="again")
    assert Store(tmp_path).manifest("again").step == 1
    with pytest.raises(Conflict, match=r"other content.*everstep rm"):
        trainer.save(1, salt=5)
    assert packs_of(tmp_path) <= before


def test_a_superseded_writer_stops(tmp_path):
    old = make_store(tmp_path, [1])
    new = go_on(old, 1, [2])
    with pytest.raises(Conflict, match=r"epoch 2 has started.*0002\.json"):
        old.save(2)
    new.save(3)
    assert Store(tmp_path).steps() == [1, 2, 3]
    assert Store(tmp_path).verify().ok
    assert len(packs_of(tmp_path)) == 3


@pytest.mark.parametrize(
    "tag", ["", "7", "12-3", "../x", "a/b", ".x", "-x", "é", "x" * 101, "a b", "latest"]
)
def test_tags_that_cannot_be(tmp_path, tag):
    trainer = make_store(tmp_path, [1])
    with pytest.raises(ValueError, match="cannot be a tag"):
        commit.set_tag(trainer.disk, tag, CheckpointName(1, 1))


def test_what_is_deleted_is_named(tmp_path):
    make_store(tmp_path, [1, 2])
    with pytest.raises(ValueError, match="delete needs a step"):
        Store(tmp_path).delete(None)
    assert Store(tmp_path).steps() == [1, 2]


def test_a_step_of_another_epoch_is_named(tmp_path):
    make_store(tmp_path, [1, 2])
    with pytest.raises(Missing, match=r"no checkpoint or tag '2-7' .*of that step it has 2-1"):
        Store(tmp_path).manifest("2-7")


def test_names():
    assert str(CheckpointName(120, 3)) == "00000120-0003"
    assert parse_checkpoint("120-3") == CheckpointName(120, 3)
    assert parse_checkpoint(str(CheckpointName(10**12, 12345))) == CheckpointName(10**12, 12345)
    for other in ("120", "-1-2", "1-2-3", "a-1", "1-", ".", "1-2.tmp"):
        assert parse_checkpoint(other) is None


def test_a_store_that_is_a_file(tmp_path):
    (tmp_path / "s").write_bytes(b"")
    with pytest.raises(Unavailable):
        Store(tmp_path / "s")


def test_paths_that_leave_the_store_are_refused(tmp_path):
    make_store(tmp_path / "s", [1])
    (path,) = (tmp_path / "s/checkpoints").rglob("manifest.json")
    os.link(tmp_path / "s" / packs_of(tmp_path / "s").pop(), tmp_path / "outside")
    text = json.loads(path.read_text())["parts"][0]["packs"][0]["path"]

    def leave(value):
        assert value["parts"][0]["packs"][0]["path"] == text
        value["parts"][0]["packs"][0]["path"] = "../outside"

    rewrite(path, leave)
    with pytest.raises(Corrupt, match=r"packs\[0\].path is '../outside'"):
        Store(tmp_path / "s").read()
