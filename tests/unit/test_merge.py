"""Many ranks' tables into one part: the merged file is read back with the real library."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from unittest.mock import patch

import numpy as np
import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from partitions import boxes_in

from divide import halves
from everstep import Mismatch, Unsupported
from everstep.format import packs
from everstep.format.boxes import Box
from everstep.format.document import digest_of
from everstep.format.dtypes import ITEM_SIZES, carried_as
from everstep.format.manifest import Part, check_table
from everstep.format.merge import Merged, merge, merge_sets, renumbered, unite_tables
from everstep.format.packs import Layout, Spec, entry_name, lay_out
from everstep.format.tables import FileLink, Table, decode_table, encode_table, extents
from examples import examples
from stores import content

MANY = settings(max_examples=examples(80), suppress_health_check=list(HealthCheck))
SHAPES = st.lists(st.integers(0, 6), max_size=3).map(tuple) | st.sampled_from(
    [(40, 64), (13, 3, 50), (9000,)]
)


@st.composite
def partitions(draw, shape: tuple[int, ...], cuts_max: int = 5) -> list[Box]:
    """Boxes that tile the shape, cut at random; some may be empty."""
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, cuts_max)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        for piece in halves(box, dim, draw(st.integers(0, box.lengths[dim]))):
            if piece not in boxes:
                boxes.append(piece)
    return boxes


@dataclass
class Rank:
    written: list[Spec] = field(default_factory=list)
    aliases: dict[str, list[str]] = field(default_factory=dict)
    optimizers: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.layout: Layout = lay_out(self.written)
        document = encode_table(self.layout, self.aliases, {}, self.optimizers)
        self.table: Table = decode_table(document, "a rank's table")

    def image(self) -> bytes:
        image = bytearray(self.layout.size)
        starts = packs.pack_starts(pack.size for pack in self.layout.packs)
        for start, header in zip(starts, self.layout.headers, strict=True):
            image[start : start + len(header)] = header
        for spec, piece in zip(self.layout.specs, self.layout.pieces, strict=True):
            at = starts[piece.pack] + piece.offset
            image[at : at + piece.size] = part_of(spec)
        return bytes(image)


def part_of(spec: Spec) -> bytes:
    """The bytes of its box: every rank has the same ones of the same elements."""
    whole = content(Spec(spec.name, spec.dtype, spec.shape), 0)
    elements = np.frombuffer(whole, f"V{ITEM_SIZES[spec.dtype]}").reshape(spec.shape)
    box = spec.box or Box.whole(spec.shape)
    spans = zip(box.offsets, box.lengths, strict=True)
    return elements[tuple(slice(at, at + n) for at, n in spans)].tobytes()


def merged(ranks: list[Rank], *, are_all: bool = True) -> Merged:
    tables = [(f"rank {i}", rank.table) for i, rank in enumerate(ranks)]
    return merge(tables, are_all=are_all)


def digests_of(table: Table, files: list[bytes]) -> list[str]:
    found = {
        e.digest: digest_of(files[e.pack][e.offset : e.offset + e.size]) for e in extents(table)
    }
    assert sorted(found) == list(range(len(found)))
    return [found[index] for index in range(len(found))]


@contextlib.contextmanager
def limits(entries: int) -> Iterator[None]:
    """Small ones, so that small tensors have several chunks and files."""
    with (
        patch.object(packs, "ENTRIES_PER_PACK_MAX", entries),
        patch.object(packs, "ALIGNED_FROM_BYTES", 2048),
        patch.object(packs, "CHUNK_BYTES", 8192),
    ):
        yield


@st.composite
def worlds(draw) -> list[Rank]:
    """Ranks that hold boxes of the same tensors: each is written by one."""
    count = draw(st.integers(1, 4))
    written: list[list[Spec]] = [[] for _ in range(count)]
    for number in range(draw(st.integers(0, 6))):
        name = draw(st.sampled_from(["a", "b.weight", "ü", "x[0:1]"])) + str(number)
        dtype, shape = draw(st.sampled_from(sorted(ITEM_SIZES))), draw(SHAPES)
        for box in draw(partitions(shape)):
            spec = Spec(name, dtype, shape, box)
            owner = draw(st.integers(0, count - 1))
            written[owner].append(spec)
            for rank in range(count):
                if not box.count and rank != owner and draw(st.booleans()):
                    written[rank].append(spec)
    for specs in written:
        order = draw(st.randoms(use_true_random=False))
        order.shuffle(specs)
    return [Rank(specs) for specs in written]


@MANY
@given(st.data(), st.sampled_from([1, 2, 5, 1 << 16]))
def test_merged_files_hold_every_box(data, limit):
    with limits(limit):
        ranks = data.draw(worlds())
        check_merged(ranks, 1 if limit == 1 << 16 else None)


def test_large_boxes():
    """With the limits as they are: pieces of several chunks, aligned and padded."""
    upper, lower = Box((0, 0), (1100, 1024)), Box((1100, 0), (200, 1024))
    big, odd = Spec("w", "float32", (1300, 1024), upper), Spec("v", "int8", ((1 << 20) + 5,))
    rest = Spec("w", "float32", (1300, 1024), lower)
    check_merged([Rank([big]), Rank([odd, rest]), Rank()], 1)


def check_merged(ranks: list[Rank], file_count: int | None) -> None:
    found = merged(ranks)
    assert merged(ranks) == found
    assert decode_table(found.document, "merged") == found.table
    images = [rank.image() for rank in ranks]
    files = [
        header + b"".join(images[rank][at : at + size] for rank, at, size in sections)
        for header, sections in zip(found.headers, found.sections, strict=True)
    ]
    for file, pack, header in zip(files, found.table.packs, found.headers, strict=True):
        assert (len(file), len(header)) == (pack.size, pack.header)
        assert len(header) % 4096 == len(file) % 4096 == 0
    entries = [dict(safetensors.deserialize(file)) for file in files]
    if file_count is not None:
        assert len(files) == (file_count if any(rank.written for rank in ranks) else 0)

    # every box, byte for byte, by the header and by the table
    boxes = {spec.entry: spec for rank in ranks for spec in rank.written}
    for name, spec in boxes.items():
        entry = next(entry[name] for entry in entries if name in entry)
        assert bytes(entry["data"]) == part_of(spec)
        assert (entry["dtype"], entry["shape"]) == carried_as(spec.dtype, spec.lengths, spec.size)
    pads = [(n, e) for file in entries for n, e in file.items() if n not in boxes]
    assert all(name.startswith("__pad__.") and not any(e["data"]) for name, e in pads)
    pieces = [(e.spec, p) for e in found.table.tensors.values() for p in e.pieces]
    assert sorted(entry_name(s.name, s.shape, p.box) for s, p in pieces) == sorted(boxes)
    for spec, piece in pieces:
        own = files[piece.pack][piece.offset : piece.offset + piece.size]
        assert own == part_of(Spec(spec.name, spec.dtype, spec.shape, piece.box))
        is_large = piece.size >= packs.ALIGNED_FROM_BYTES
        assert piece.offset % (4096 if is_large else ITEM_SIZES[spec.dtype]) == 0

    # digests
    joined = digests_of(found.table, files)
    links = tuple(FileLink(f"data/{i}", len(file)) for i, file in enumerate(files))
    part = Part(0, FileLink("data/table", 1, "0" * 32), links, tuple(joined), 0)
    check_table(found.table, part, "merged")


@MANY
@given(st.data())
def test_holes_and_overlaps_are_found(data):
    """What one rank does not write, or writes twice, is named with the elements."""
    ranks, name = [], "w"
    shape = data.draw(st.lists(st.integers(1, 6), max_size=3).map(tuple))
    boxes = [box for box in data.draw(partitions(shape, 8)) if box.count]
    count = data.draw(st.integers(1, 3))
    owners = [data.draw(st.integers(0, count - 1)) for _ in boxes]
    lost = data.draw(st.none() | st.integers(0, len(boxes) - 1))
    for rank in range(count):
        own = [i for i, owner in enumerate(owners) if owner == rank and i != lost]
        ranks.append(Rank([Spec(name, "int8", shape, boxes[i]) for i in own]))
    found = merged(ranks, are_all=lost is None)
    if lost is None:
        # a box more: overlaps
        extra = data.draw(boxes_in(shape).filter(lambda box: box.count))
        with pytest.raises(Mismatch, match=rf"(?s)'w'.*overlap: .*rank {count}\b"):
            merged([*ranks, Rank([Spec(name, "int8", shape, extra)])])
        late = Rank([Spec(name, "int8", shape, extra)]).table
        with pytest.raises(Mismatch, match=r"'w'.*overlap: part 0 .*part 1 "):
            unite_tables([("part 0", found.table), ("part 1", late)], are_all=True)
    elif len(boxes) > 1:
        with pytest.raises(Mismatch, match=r"'w'.*hole: nobody wrote .*rank \d wrote"):
            merged(ranks)
        rest = Rank([Spec(name, "int8", shape, boxes[lost])]).table
        unite_tables([("part 0", found.table), ("part 1", rest)], are_all=True)  # of another node
    else:
        assert not found.table.tensors


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (
            Spec("w", "float16", (4, 2)),
            r"'w' has the dtype float32 \(rank 0\), and float16 \(rank 1",
        ),
        (Spec("w", "float32", (2, 4)), r"'w' has the global shape \(4, 2\) .*\(2, 4\) \(rank 1"),
        (Spec("w", "float32", (4, 2)), r"overlap: rank 0 wrote .*0:4,0:2.* rank 1 wrote"),
    ],
)
def test_ranks_that_disagree(other, expected):
    with pytest.raises(Mismatch, match=expected):
        merged([Rank([Spec("w", "float32", (4, 2))]), Rank([other])])


def test_names_that_collide_with_boxes():
    ranks = [
        Rank([Spec("w", "int8", (4,), Box((0,), (2,)))]),
        Rank([Spec("w[0:2]", "int8", (4,)), Spec("w", "int8", (4,), Box((2,), (2,)))]),
    ]
    with pytest.raises(Unsupported, match=r"'w\[0:2\]' beside one called 'w'"):
        merged(ranks)


def test_tied_tensors():
    spec, other = Spec("a", "int8", (2,), Box((0,), (1,))), Spec("b", "int8", (2,))
    rest = Spec("a", "int8", (2,), Box((1,), (1,)))
    first = Rank([spec], aliases={"a": ["z", "y"]})
    found = merged([first, Rank([rest], aliases={"a": ["x", "y"]})])
    assert found.table.tensors["a"].aliases == ("z", "y", "x")
    with pytest.raises(Mismatch, match="'z' is a tensor of its own"):
        merged([first, Rank([Spec("z", "int8", (2,))])])
    with pytest.raises(Mismatch, match="'z' is another name of 'b'"):
        merged([first, Rank([other], aliases={"b": ["z"]})])


def test_strides_stay_where_all_ranks_have_them():
    def rank(box: Box, strides) -> tuple[str, Table]:
        layout = lay_out([Spec("w", "int8", (4, 2), box)])
        table = decode_table(encode_table(layout, {}, {"w": "cuda:1"}, {}, strides), "x")
        return "rank 0", table

    upper, lower = Box((0, 0), (2, 2)), Box((2, 0), (2, 2))
    same = merge([rank(upper, {"w": (1, 4)}), rank(lower, {"w": (1, 4)})]).table.tensors["w"]
    assert (same.strides, same.device) == ((1, 4), "cuda:1")
    other = merge([rank(upper, {"w": (1, 4)}), rank(lower, {})]).table.tensors["w"]
    assert other.strides is None


def test_many_shards_of_no_rows():
    """Five rows on eight ranks, by torch.chunk: the last ones have none, at the same place."""
    boxes = [Box((min(i, 5), 0), (1 if i < 5 else 0, 3)) for i in range(8)]
    found = merged([Rank([Spec("w", "int8", (5, 3), box)]) for box in boxes])
    (entry,) = found.table.tensors.values()
    assert [piece.box.count for piece in entry.pieces] == [3] * 5 + [0]


def test_optimizers_are_united():
    def rank(number: int, optimizers: dict, sets: dict) -> tuple[str, Table]:
        return f"rank {number}", renumbered(Rank(optimizers=optimizers).table, sets)

    one = {"adam": {"groups": {"a": 0, "b": 1}, "state": {"a": ["m"], "b": ["m", "v"]}}}
    two = {
        "adam": {"groups": {"b": 0, "c": 1}, "state": {"a": ["step"], "c": ["m"]}},
        "sgd": {"groups": {"d": 0}, "state": {}},
    }
    found = merge([rank(0, one, {}), rank(3, two, {"adam": [1, 2]})])
    assert found.table.optimizers == {
        "adam": {
            "groups": {"a": 0, "b": 1, "c": 2},
            "state": {"a": ["m", "step"], "b": ["m", "v"], "c": ["m"]},
        },
        "sgd": {"groups": {"d": 0}, "state": {}},
    }
    assert decode_table(found.document, "x") == found.table
    with pytest.raises(Mismatch, match=r"'b' has other .* on rank 3 \(set 0\) than on rank 0"):
        merge([rank(0, one, {}), rank(3, two, {"adam": [0, 2]})])


def test_sets_keep_their_numbers():
    a, b, c = {"lr": 1}, {"lr": 2}, {"lr": 1.0}
    assert merge_sets([{"o": [a, b]}, {"o": [a, b]}]) == ({"o": [a, b]}, [{"o": [0, 1]}] * 2)
    found, indices = merge_sets([{"o": [a, b]}, {"o": [b, c, a]}, {"p": [c]}, {"o": [b, b]}])
    assert json.dumps(found) == json.dumps({"o": [a, b, c], "p": [c]})
    assert indices == [{"o": [0, 1]}, {"o": [1, 2, 0]}, {"p": [0]}, {"o": [1, 1]}]
    assert merge_sets([{"o": [a]}, {"o": [a, a]}]) == ({"o": [a, a]}, [{"o": [0]}, {"o": [0, 1]}])
    assert merge_sets([]) == ({}, [])


SETS = st.dictionaries(
    st.sampled_from("op"), st.lists(st.sampled_from([0, 0.0, False, -0.0, "x"]), max_size=4)
)


@given(st.lists(SETS, max_size=4))
def test_each_rank_finds_its_own_sets(ranks):
    found, indices = merge_sets(ranks)
    for rank, own in zip(ranks, indices, strict=True):
        chosen = {name: [found[name][i] for i in new] for name, new in own.items()}
        assert json.dumps(chosen) == json.dumps(rank)
    if ranks:
        assert all(own == list(range(len(own))) for own in indices[0].values())


def test_boxes_of_one_rank_in_one_table():
    """Several boxes of one tensor: rows by name, pieces by where they begin; any order is one."""
    boxes = [Box((2, 0), (1, 3)), Box((0, 1), (2, 2)), Box((0, 0), (2, 1))]
    specs = [Spec("w", "float32", (3, 3), box) for box in boxes] + [Spec("v", "int8", ())]
    layout = lay_out(specs)
    assert encode_table(layout, {}, {}, {}) == encode_table(lay_out(specs[::-1]), {}, {}, {})
    table = decode_table(encode_table(layout, {}, {}, {}), "x")
    assert [piece.box for piece in table.tensors["w"].pieces] == sorted(
        boxes, key=lambda box: box.offsets
    )
    names = json.loads(layout.headers[0][8:])
    assert names["w[0:2,1:3]"]["shape"] == [2, 2]
    assert {"v", "w[2:3,0:3]", "w[0:2,0:1]"} < names.keys()
    assert Spec("w", "int8", (3,), Box.whole((3,))).entry == "w"
