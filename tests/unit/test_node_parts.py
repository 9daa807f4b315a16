"""Part documents: what goes in comes out, another attempt is not there, and gc sweeps them."""

from dataclasses import replace

import pytest

from everstep.errors import Corrupt, Mismatch, Unavailable
from everstep.format.boxes import Box
from everstep.format.document import seal
from everstep.format.index import INDEXED_FROM_PARTS, Index, Run
from everstep.format.manifest import (
    CheckpointName,
    Manifest,
    Part,
    decode_manifest,
    encode_manifest,
)
from everstep.format.node_parts import NodePart, decode_node_part, encode_node_part
from everstep.format.packs import Spec, lay_out
from everstep.format.tables import FileLink, TensorEntry, encode_table
from everstep.keeper.ranks.descriptions import merge_numbered
from everstep.keeper.ranks.nodes import unite
from everstep.store import catalog, commit, names, retain
from everstep.tiers.disk import Disk
from stores import go_on, make_store, packs_of

PART = Part(
    0, FileLink("data/tables/a.json", 7, "0" * 32), (FileLink("data/b", 9),), ("1" * 32,), 5
)
RANKS = {
    4: {
        "objects": {"one": 1, "two": [2.5], "three": None},
        "own": {"rng": {"index": 0, "count": 1, "value": 4}},
        "digests": {"a": "1", "b": "2"},
        "held": {"w[0:1]": "5"},
    },
    6: {
        "objects": {"one": True, "two": [2.5]},
        "own": {},
        "digests": {"b": "3"},
        "held": {"w[0:1]": "5"},
    },
    9: {"objects": {}, "own": {}, "digests": {}, "held": {}},
    11: {
        "objects": {"one": 1.0, "four": {"$": "x"}, "three": None},
        "own": {},
        "digests": {"a": "1", "b": "2"},
        "held": {"w[0:1]": "5"},
    },
}


def found_of(attempt="run.1", node=3, **more):
    sets = {"optimizer": [{"lr": 0.5}, {"lr": 1}]}
    return NodePart(attempt, node, None, PART, sets, RANKS, **more)


def publish(disk, name, part):
    disk.replace(names.part_path(name, part.node), encode_node_part(part))


def test_what_goes_in_comes_out():
    again = decode_node_part(encode_node_part(found_of()), "here")
    assert again == found_of()
    for rank, said in RANKS.items():  # 1, True and 1.0 are equal, and not the same
        found = again.ranks[rank]["objects"]
        assert {name: type(value) for name, value in found.items()} == {
            name: type(value) for name, value in said["objects"].items()
        }
    record = {"previous": 4, "calls": [{"optimizer": "o", "class": "C", "sets": [{"lr": 0.5}]}]}
    again = decode_node_part(encode_node_part(found_of(record=record)), "here")
    assert again == found_of(record=record)
    for failed in (NodePart("run.1", 2, "no room"), NodePart("run.1", 2, "apart", kind="Mismatch")):
        assert decode_node_part(encode_node_part(failed), "here") == failed


def test_what_is_no_part_document_is_told():
    with pytest.raises(Corrupt):
        decode_node_part(
            seal({"format": 1, "attempt": "a", "node": 1, "part": {"rank": 0}}), "here"
        )


def said_by(rank, numbers):
    """What a rank says of a record, whose hyperparameters it counts in that order."""
    rates = [{"lr": 0.25 * (number + 1)} for number in range(3)]
    call = {
        "optimizer": "o",
        "class": "torch.optim.SGD",
        "sets": [rates[number] for number in numbers],
        "digest": f"{rank}",
        "compressed": [{"form": "cast", "dtype": "float32", "names": [f"w{rank}"]}],
        **({"scaler": {"found_inf": rank}} if rank > 1 else {}),
    }
    return {
        "objects": {},
        "hyperparameters": {"o": [{"lr": 9.0 + number} for number in numbers]},
        "record": {"previous": 4, "calls": [call]},
    }


@pytest.mark.parametrize("nodes", [[(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0,), (1, 2, 3)]])
def test_calls_of_nodes_are_merged_as_those_of_their_ranks(nodes):
    orders = [(0, 1), (0, 1, 2), (0, 1), (0, 1, 2)]
    each = [said_by(rank, numbers) for rank, numbers in enumerate(orders)]
    sets, (call,), _ = merge_numbered(each, [(rank,) for rank in range(4)])
    merged = []
    for ranks in nodes:
        own = [each[rank] for rank in ranks]
        found, calls, _ = merge_numbered(own, [(number,) for number in range(len(own))])
        merged.append({"hyperparameters": found, "record": {"previous": 4, "calls": calls}})
    united, (again,), _ = merge_numbered(merged, nodes)
    assert united == sets
    rows = [row for found in (call, again) for row in [found.pop("compressed")]]
    assert sorted(row["names"] for row in rows[0]) == sorted(row["names"] for row in rows[1])
    assert again == call
    assert [own["digest"] for own in again["ranks"]] == ["0", "1", "2", "3"]


def test_nodes_with_different_things_to_save_are_told():
    each = [said_by(rank, (0,)) for rank in range(2)]
    each[1]["record"]["previous"] = 3
    with pytest.raises(Mismatch, match="different things"):
        merge_numbered(each, [(0,), (1,)])
    each[1]["record"] = None
    with pytest.raises(Mismatch, match="different things"):
        merge_numbered(each, [(0,), (1,)])


def test_only_the_same_attempt_is_found(tmp_path):
    disk, name = make_store(tmp_path / "store", [1]).disk, CheckpointName(2, 1)
    publish(disk, name, found_of("run.1"))
    assert catalog.find_part(disk, name, 3, "run.1") == found_of("run.1")
    assert catalog.find_part(disk, name, 3, "run.2") is None
    assert catalog.find_part(disk, name, 2, "run.1") is None
    assert catalog.committed(disk) == [CheckpointName(1, 1)]


def test_an_epoch_is_found_by_its_claim(tmp_path):
    disk = make_store(tmp_path / "store", [1]).disk
    assert catalog.find_attachment(disk, "run.1") is None
    number = commit.claim_epoch(disk, CheckpointName(1, 1), "run.1")
    assert catalog.find_attachment(disk, "run.1") == number
    assert catalog.find_attachment(disk, "run.2") is None
    assert catalog.read_epochs(disk)[number].attachment == "run.1"


def test_gc_sweeps_what_nothing_will_come_of(tmp_path):
    trainer = make_store(tmp_path / "store", [1, 2])
    disk = trainer.disk
    of_dead, of_committed = CheckpointName(3, 1), CheckpointName(2, 1)
    for name in (of_dead, of_committed):
        publish(disk, name, found_of())
    retain.sweep(disk)
    assert catalog.part_documents(disk, of_committed) == []
    assert catalog.part_documents(disk, of_dead) == [names.part_path(of_dead, 3)]  # it may come yet
    go_on(trainer, 2, [])
    of_live = CheckpointName(3, 2)
    publish(disk, of_live, found_of())
    retain.sweep(disk)
    assert catalog.part_documents(disk, of_dead) == []
    assert not (disk.root / "checkpoints" / str(of_dead)).exists()
    assert catalog.part_documents(disk, of_live) == [names.part_path(of_live, 3)]


def test_what_a_part_document_names_stays(tmp_path):
    """Another node may be about to commit it; of an epoch that is over, gc knows better."""
    trainer = make_store(tmp_path / "store", [1, 2])
    disk, name = trainer.disk, CheckpointName(3, 1)
    first = catalog.read_manifest(disk, CheckpointName(1, 1)).parts[0]
    publish(disk, name, replace(found_of(), part=first))
    retain.delete(disk, [CheckpointName(1, 1)])
    retain.sweep(disk)
    assert {pack.path for pack in first.packs} <= packs_of(disk.root)
    go_on(trainer, 2, [3])
    retain.delete(disk, [CheckpointName(2, 1)])
    assert {pack.path for pack in first.packs} <= packs_of(disk.root)
    retain.sweep(disk)
    retain.sweep(disk)
    assert not {pack.path for pack in first.packs} & packs_of(disk.root)
    assert catalog.part_documents(disk, name) == []


def test_a_turn_is_of_one_step_on_all_nodes():
    told = []
    for node, steps in enumerate([{1: 4, 2: 5}, {}, {1: 4, 2: 3}]):
        specs = [Spec(f"{name}{node}", "float32", (2,)) for name in "abc"]
        turns = {f"b{node}": 1, f"c{node}": 2} if steps else {}
        layout = lay_out(specs, {}, turns)
        table = encode_table(layout, {}, {}, {})
        links = tuple(
            FileLink(names.pack_path(CheckpointName(steps.get(i, 5), 1), f"{node:08x}", i), p.size)
            for i, p in enumerate(layout.packs)
        )
        digests = ("1" * 32,) * layout.digest_count
        part = Part(node, commit.table_link(table), links, digests, 5)
        told.append((NodePart("run.1", node, None, part, {}, {}), table))
    manifest = Manifest(5, 1, "run", "now", (), {}, {})
    with pytest.raises(Unavailable, match=r"\(2, 3\), \(2, 5\)"):
        unite(None, manifest, told)
    united, _ = unite(None, manifest, [told[0], told[1]])
    assert not united.exact
    united, _ = unite(None, manifest, [told[1]])
    assert united.exact


@pytest.mark.parametrize(("nodes", "is_indexed"), [(INDEXED_FROM_PARTS - 1, False), (40, True)])
def test_the_manifest_of_many_nodes_says_which_has_what(tmp_path, nodes, is_indexed):
    shape, optimizers = (2 * nodes, 3), {"o": {"groups": {"w": 0}, "state": {}}}
    told = []
    for node in range(nodes):
        spec = Spec("w", "float32", shape, Box((2 * node, 0), (2, 3)))
        layout = lay_out([spec])
        table = encode_table(layout, {"w": ["v"]}, {"w": "cuda:0"}, optimizers)
        links = tuple(FileLink(f"data/{node}-{i}", p.size) for i, p in enumerate(layout.packs))
        digests = ("0" * 32,) * layout.digest_count
        part = Part(node, commit.table_link(table), links, digests, 5)
        said = {node: {"own": {}, "objects": {}, "digests": {}, "held": {}}}
        told.append((NodePart("run.1", node, None, part, {"o": [{"lr": 1}]}, said), table))
    first = Manifest(5, 1, "run", "", (told[0][0].part,), {}, {"o": [{"lr": 1}]})
    manifest, _ = unite(Disk(tmp_path), first, told)
    assert decode_manifest(encode_manifest(manifest), "x") == manifest
    assert len(manifest.parts) == nodes
    assert (manifest.index is not None) == is_indexed
    if is_indexed:
        entry = TensorEntry(Spec("w", "float32", shape), (), ("v",), "cuda:0")
        runs = {"w": [Run(0, nodes, (0, 0), (2, 3))]}
        assert manifest.index == Index({"w": entry}, optimizers, runs)
