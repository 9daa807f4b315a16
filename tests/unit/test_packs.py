"""Packs: no holes, everything aligned, readable by the real library."""

import json

import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep import Unsupported
from everstep.format import packs
from everstep.format.dtypes import ITEM_SIZES, carried_as
from everstep.format.packs import Spec, chunks, lay_out, pack_starts
from everstep.format.tables import decode_table, encode_table, extents
from examples import examples
from stores import content, image_of

MIB = 1 << 20
NAMES = st.text(st.characters(codec="utf-8"), min_size=1).filter(
    lambda name: name != "__metadata__" and not name.startswith("__pad__.")
)
SHAPES = st.lists(st.integers(0, 5), max_size=3) | st.tuples(
    st.integers(MIB // 16, MIB // 8), st.just(3)
)
SPECS = st.lists(
    st.builds(Spec, NAMES, st.sampled_from(sorted(ITEM_SIZES)), SHAPES.map(tuple)),
    unique_by=lambda spec: spec.name,
    max_size=8,
)


def _entries(header: bytes) -> dict:
    length = int.from_bytes(header[:8], "little")
    assert len(header) == 8 + length
    return json.loads(header[8:])


@settings(max_examples=examples(60))
@given(SPECS, st.integers(1, 4))
def test_layout(specs, entries_max):
    limit, packs.ENTRIES_PER_PACK_MAX = packs.ENTRIES_PER_PACK_MAX, entries_max
    try:
        layout = lay_out(specs)
        assert lay_out(specs) == layout
    finally:
        packs.ENTRIES_PER_PACK_MAX = limit
    assert len(layout.packs) == -(-len(specs) // entries_max)
    for number, (pack, header) in enumerate(zip(layout.packs, layout.headers, strict=True)):
        assert pack.size % 4096 == pack.header % 4096 == 0
        assert pack.header == len(header)
        entries = _entries(header)
        ranges = sorted(entry["data_offsets"] for entry in entries.values())
        end = 0
        for start, stop in ranges:
            assert start == end
            end = stop
        assert pack.header + end == pack.size
        for spec, piece in zip(layout.specs, layout.pieces, strict=True):
            if piece.pack != number:
                continue
            entry = entries[spec.name]
            assert piece.offset == pack.header + entry["data_offsets"][0]
            assert (entry["dtype"], entry["shape"]) == carried_as(spec.dtype, spec.shape, spec.size)
            assert piece.offset % (4096 if spec.size >= MIB else ITEM_SIZES[spec.dtype]) == 0
    table = decode_table(encode_table(layout, {}, {}, {}), "x")
    assert sorted(extent.digest for extent in extents(table)) == list(range(layout.digest_count))
    assert [entry.spec for entry in table.tensors.values()] == sorted(specs, key=lambda s: s.name)


def test_the_real_library_reads_every_dtype(tmp_path):
    specs = [Spec(name, name, (2, 3)) for name in ITEM_SIZES]
    specs += [
        Spec("scalar", "float32", ()),
        Spec("empty", "bfloat16", (4, 0)),
        Spec("big", "int8", (MIB + 5,)),
    ]
    layout = lay_out(specs)
    contents = {spec.name: content(spec, 0) for spec in specs}
    image = bytes(image_of(layout, contents))
    found = dict(safetensors.deserialize(image))
    pads = [name for name in found if name.startswith("__pad__.")]
    assert found.keys() - pads == contents.keys()
    assert all(not any(found[name]["data"]) for name in pads)
    for spec in specs:
        entry = found[spec.name]
        assert bytes(entry["data"]) == contents[spec.name]
        assert (entry["dtype"], entry["shape"]) == carried_as(spec.dtype, spec.shape, spec.size)
    (tmp_path / "pack").write_bytes(image)
    with safetensors.safe_open(tmp_path / "pack", "pt") as file:
        assert file.get_tensor("scalar").shape == ()
        assert file.get_tensor("empty").shape == (4, 0)
        assert file.get_tensor("complex64").numel() == 48


def test_headers_do_not_depend_on_contents_or_order():
    specs = [Spec(f"t{i}", "float32", (i,)) for i in range(20)]
    there, back = lay_out(specs), lay_out(specs[::-1])
    assert (there.packs, there.headers) == (back.packs, back.headers)
    assert there.pieces == back.pieces[::-1]


@pytest.mark.parametrize("name", ["__metadata__", "__pad__.3", "\ud800"])
def test_names_that_a_header_cannot_hold(name):
    with pytest.raises(Unsupported, match="cannot be called"):
        lay_out([Spec(name, "float32", (1,))])


@pytest.mark.parametrize("size", [0, 1, 4 * MIB - 1, 4 * MIB, 4 * MIB + 1, 8 * MIB])
def test_chunks_cover_a_piece(size):
    found = list(chunks(size))
    assert len(found) == packs.chunk_count(size)
    assert sum(length for _, length in found) == size
    assert [start for start, _ in found] == [4 * MIB * i for i in range(len(found))]


def test_where_packs_begin():
    assert pack_starts([]) == []
    assert pack_starts(size for size in (4096, 8192, 4096)) == [0, 4096, 12288]
