"""Manifests and piece tables: what comes from outside is checked before it is believed."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep import Corrupt, Unsupported
from everstep.format.document import seal
from everstep.format.global_tensors import Described
from everstep.format.manifest import (
    Manifest,
    Part,
    Previous,
    Record,
    check_table,
    decode_manifest,
    encode_manifest,
)
from everstep.format.packs import lay_out
from everstep.format.tables import FileLink, decode_table, encode_table
from examples import examples
from stores import MIXED

LAYOUT = lay_out(MIXED)
TABLE = encode_table(
    LAYOUT, {"weight": ["tied"]}, {"weight": "cuda"}, {"adam": {"groups": {}, "state": {}}}
)
PART = Part(
    0,
    FileLink("data/tables/0.json", len(TABLE), "0" * 32),
    tuple(FileLink(f"data/{i}", pack.size) for i, pack in enumerate(LAYOUT.packs)),
    ("0" * 32,) * LAYOUT.digest_count,
    7,
)
MANIFEST = Manifest(
    7, 1, "ab", "now", (PART,), {"a": 1}, {"adam": [{"lr": 0.1}]}, metrics={"loss": 1.5}
)


def _changed(document: bytes, change) -> bytes:
    value = json.loads(document)
    del value["digest"]
    change(value)
    return seal(value)


def test_round_trip():
    assert decode_manifest(encode_manifest(MANIFEST), "x") == MANIFEST
    table = decode_table(TABLE, "x")
    check_table(table, PART, "x")
    assert table.tensors["weight"].aliases == ("tied",)
    assert table.tensors["weight"].device == "cuda"
    assert MANIFEST.files == (PART.table, *PART.packs)
    assert MANIFEST.size == LAYOUT.size


def test_a_record_has_a_part_of_each_node():
    parts = (replace(PART, packs=PART.packs[:1]), replace(PART, rank=1, packs=PART.packs[1:]))
    record = Record(7, ({"optimizer": "adam", "class": "A", "sets": []},), parts)
    previous = Previous(6, 1, "0" * 32)
    found = replace(MANIFEST, parts=(), records=(record,), previous=previous)
    document = encode_manifest(found)
    assert decode_manifest(document, "x") == found
    assert found.all_parts == parts
    assert found.size == record.size == LAYOUT.size
    (told,) = json.loads(document)["records"]
    assert "part" not in told
    one = replace(found, records=(replace(record, parts=parts[:1]),))
    (told,) = json.loads(encode_manifest(one))["records"]
    assert "parts" not in told
    for parts in ([], "x", {}):
        wrong = _changed(document, lambda value, n=parts: value["records"][0].update(parts=n))
        with pytest.raises(Corrupt):
            decode_manifest(wrong, "x")


@pytest.mark.parametrize(
    ("said", "classes"), [(3, {}), ({"a": "x.Adam", "b": 1}, {"a": "x.Adam"}), (None, {})]
)
def test_classes_are_names_or_not_there(said, classes):
    assert replace(MANIFEST, topology={"optimizers": said}).classes == classes


def test_unknown_members_are_ignored():
    document = _changed(encode_manifest(MANIFEST), lambda value: value.update(news={"x": 1}))
    assert decode_manifest(document, "x") == MANIFEST


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../x", "data/../../x", "data//x", "", "data/x/", "a b", "data/..x", 5]
)
def test_paths_stay_inside_the_store(path):
    def change(value):
        value["parts"][0]["packs"][0]["path"] = path

    with pytest.raises(Corrupt):
        decode_manifest(_changed(encode_manifest(MANIFEST), change), "x")


@settings(max_examples=examples(150))
@given(st.data())
def test_a_changed_table_is_refused_or_harmless(data):
    """Whatever one value of a piece is changed to: no reader seeks or allocates beyond the pack."""

    def change(value):
        row = data.draw(st.sampled_from(value["tensors"]))
        piece = row["pieces"][0]
        key = data.draw(st.sampled_from(["pack", "at", "size", "digest", "offsets", "lengths"]))
        number = st.integers(-2, 1 << 63) | st.integers(-2, 3)
        odd = st.none() | st.booleans() | st.text(max_size=2) | st.lists(number, max_size=2)
        piece[key] = data.draw(number | odd)

    document = _changed(TABLE, change)
    try:
        table = decode_table(document, "x")
        check_table(table, PART, "x")
    except Corrupt:
        return
    for entry in table.tensors.values():
        for piece in entry.pieces:
            assert piece.offset + piece.size <= table.packs[piece.pack].size
            assert piece.digest < len(PART.digests)


def test_unknown_codecs_are_unsupported():
    def change(value):
        value["tensors"][0]["pieces"][0]["codec"] = "zstd"

    with pytest.raises(Unsupported, match="zstd"):
        decode_table(_changed(TABLE, change), "x")


def test_table_and_manifest_must_agree():
    table = decode_table(TABLE, "x")
    for part in (replace(PART, digests=PART.digests[:-1]), replace(PART, packs=PART.packs[:-1])):
        with pytest.raises(Corrupt):
            check_table(table, part, "x")


def test_pieces_cover_their_tensor():
    """Or nobody would fill what memory was taken for."""
    value = json.loads(TABLE)
    value.pop("digest")
    value["tensors"][0]["shape"] = [1 << 40]
    table = decode_table(seal(value), "a table")
    name = value["tensors"][0]["name"]
    with pytest.raises(Corrupt, match=rf"{name}.*elements \[7:1099511627776\] are in no piece"):
        Described(MANIFEST, [table]).check("a store")


def test_pieces_do_not_overlap():
    def change(value):
        value["tensors"][0]["pieces"] *= 2

    with pytest.raises(Corrupt, match="overlap"):
        decode_table(_changed(TABLE, change), "a table")
