"""Any boxes out of any boxes: against slices of a dense reference, byte for byte."""

import math
import random

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from partitions import boxes_in, partitions, shapes

from everstep import Corrupt
from everstep.codecs.planes import encode
from everstep.format import packs as packs_module
from everstep.format.boxes import Box
from everstep.format.dtypes import ITEM_SIZES
from everstep.format.manifest import Part
from everstep.format.packed import HEADER_BYTES, raw_chunks
from everstep.format.packs import PAGE_BYTES, Piece, Spec, chunks
from everstep.format.tables import FileLink, PackShape, Table, TensorEntry
from everstep.restore.load import Loader, MemorySource
from everstep.restore.plan import plan
from everstep.state.placement import Destination
from everstep.store.tensors import as_items

DTYPES = [name for name in ITEM_SIZES if hasattr(torch, name)]
SMALL_CHUNK_BYTES = 64


@pytest.fixture
def small_chunks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packs_module, "CHUNK_BYTES", SMALL_CHUNK_BYTES)
        yield


class Counted(MemorySource):
    """Counts what is read of it."""

    __slots__ = ("reads",)

    def __init__(self, image):
        super().__init__(memoryview(image))
        object.__setattr__(self, "reads", [])

    def read_into(self, offset, view):
        self.reads.append((offset, len(view)))
        super().read_into(offset, view)


class Written:
    """A tensor of random bytes, of which each part has some boxes, in some packs."""

    def __init__(self, spec, parts, seed, is_packed=False):
        self.spec = spec
        item = ITEM_SIZES[spec.dtype]
        data = random.Random(seed).randbytes(spec.size)
        if spec.dtype == "bool":
            data = bytes(byte & 1 for byte in data)
        elif is_packed:  # so that some chunks can be encoded
            data = bytes(byte if k % 1000 < 300 else 0 for k, byte in enumerate(data))
        self.dense = np.frombuffer(data, np.uint8).reshape(*spec.shape, item)
        self.parts = [
            self._packed(number, boxes) if is_packed else self._part(number, boxes)
            for number, boxes in enumerate(parts)
        ]

    def _bytes(self, box):
        return self.dense[(*box.slices_in(Box.whole(self.spec.shape)), ...)].tobytes()

    def _part(self, number, packs):
        images, pieces, digests, shapes = [], [], [], []
        for pack, boxes in enumerate(packs):
            image = bytearray(b"h" * PAGE_BYTES)
            shapes.append((len(digests), pack))
            digests.append(xxhash.xxh3_128_hexdigest(image))
            for box in boxes:
                data = self._bytes(box)
                image += bytes(-len(image) % 16 + 16 * (len(pieces) % 3))
                pieces.append(Piece(box, pack, len(image), len(data), len(digests)))
                image += data
                for start, size in chunks(len(data)):
                    digests.append(xxhash.xxh3_128_hexdigest(data[start : start + size]))
            images.append(image + bytes(-len(image) % PAGE_BYTES))
        table = Table(
            tuple(PackShape(len(images[pack]), PAGE_BYTES, digest) for digest, pack in shapes),
            {self.spec.name: TensorEntry(self.spec, tuple(pieces))},
            {},
        )
        links = tuple(FileLink(f"part-{number}-{k}", len(i)) for k, i in enumerate(images))
        part = Part(number, FileLink("table", 0), links, tuple(digests), 1)
        return part, table, images

    def _packed(self, number, packs):
        raw_part, table, (raw,) = self._part(number, [[box for pack in packs for box in pack]])
        image = bytearray(b"h" * HEADER_BYTES)
        digests, stored = list(raw_part.digests), [HEADER_BYTES] * len(raw_part.digests)
        for chunk in raw_chunks(table):
            extent = chunk.extent
            data = raw[extent.offset : extent.offset + extent.size]
            kept = encode(memoryview(data), chunk.item_size) or data
            digests[extent.digest] = xxhash.xxh3_128_hexdigest(kept)
            stored[extent.digest] = len(kept)
            image += kept
        image += bytes(-len(image) % PAGE_BYTES)
        links = (FileLink(f"part-{number}", len(image)),)
        part = Part(number, FileLink("table", 0), links, tuple(digests), 1, tuple(stored))
        return part, table, [image]

    def load(self, destinations):
        """Fill them, as a restore does; what was read, by part and pack."""
        reads = []
        with Loader() as loader:
            for part, table, images in self.parts:
                sources = [Counted(image) for image in images]
                entry = table.tensors[self.spec.name]
                here = [(entry, destinations)]
                loader.load(part, [[source] for source in sources], here, table)
                reads.append([source.reads for source in sources])
        return reads

    def is_needed(self, piece, start, size, wanted):
        """Whether any of these bytes of a piece is wanted: counted in a dense array."""
        marks = np.zeros((*self.spec.shape, ITEM_SIZES[self.spec.dtype]), bool)
        for box in wanted:
            marks[(*box.slices_in(Box.whole(self.spec.shape)), ...)] = True
        inside = marks[(*piece.box.slices_in(Box.whole(self.spec.shape)), ...)]
        return bool(inside.ravel()[start : start + size].any())


@st.composite
def written(draw):
    spec = Spec("x", draw(st.sampled_from(DTYPES)), draw(shapes()))
    boxes = draw(partitions(spec.shape))
    count = draw(st.integers(1, 3))
    parts = [[[] for _ in range(draw(st.integers(1, 2)))] for _ in range(count)]
    for box in boxes:
        draw(st.sampled_from(draw(st.sampled_from(parts)))).append(box)
    return Written(spec, parts, draw(st.integers(0, 99)), draw(st.booleans()))


@st.composite
def memory(draw, dtype, box):
    """A destination for a box, which lies in memory in one of many ways; all ones before."""
    kind = draw(st.sampled_from(["dense", "gaps", "transposed", "reversed"]))
    lengths = box.lengths
    order = list(range(len(lengths)))
    if kind == "transposed":
        order = draw(st.permutations(order))
    steps = [1 if kind in ("dense", "transposed") else draw(st.integers(1, 3)) for _ in lengths]
    outer = [lengths[dim] * steps[dim] for dim in order]
    item = ITEM_SIZES[dtype]
    raw = torch.full((math.prod(outer) * item,), 255, dtype=torch.uint8)
    whole = raw.view(getattr(torch, dtype)).reshape(outer)
    items = whole.permute([order.index(dim) for dim in range(len(order))])
    found = items[tuple(slice(None, None, step) for step in steps)]
    if kind == "dense" and draw(st.booleans()):
        found = found.contiguous()
    return Destination(box, found)


def bytes_of(tensor):
    return as_items(tensor).contiguous().numpy().tobytes()


def check(source, destinations):
    for destination in destinations:
        assert bytes_of(destination.tensor) == source._bytes(destination.box)


@pytest.mark.usefixtures("small_chunks")
class TestSmallChunks:
    @settings(max_examples=250, deadline=None)
    @given(st.data())
    def test_any_boxes_out_of_any_boxes(self, data):
        source = data.draw(written())
        boxes = data.draw(st.lists(boxes_in(source.spec.shape), min_size=1, max_size=3))
        boxes += data.draw(st.sampled_from([[], [Box.whole(source.spec.shape)]]))
        destinations = [data.draw(memory(source.spec.dtype, box)) for box in boxes]
        source.load(destinations)
        check(source, destinations)

    @settings(max_examples=150, deadline=None)
    @given(st.data())
    def test_the_plan_has_what_is_needed_once_and_nothing_else(self, data):
        source = data.draw(written())
        wanted = data.draw(st.lists(boxes_in(source.spec.shape), max_size=3))
        for part, table, _ in source.parts:
            entry = table.tensors["x"]
            spans = plan([(entry, wanted)], part, table)
            found = [target.digest for span in spans for target in span.targets]
            expected = [
                piece.digest + index
                for piece in entry.pieces
                for index, (start, size) in enumerate(chunks(piece.size))
                if source.is_needed(piece, start, size, wanted)
            ]
            empty = [piece.digest for piece in entry.pieces if not piece.size]
            assert sorted(set(found) - set(empty)) == sorted(expected)
            assert len(found) == len(set(found))
            for span in spans:
                assert span.offset % PAGE_BYTES == span.size % PAGE_BYTES == 0
                assert all(
                    span.offset <= t.offset and t.offset + t.size <= span.offset + span.size
                    for t in span.targets
                )

    @settings(max_examples=150, deadline=None)
    @given(st.data())
    def test_damage_is_found_where_it_would_be_used(self, data):
        source = data.draw(written())
        box = data.draw(boxes_in(source.spec.shape))
        rows = [
            (part, table, images, piece, index, start, size)
            for part, table, images in source.parts
            for piece in table.tensors["x"].pieces
            for index, (start, size) in enumerate(chunks(piece.size))
            if size
        ]
        if not rows:
            return
        part, table, images, piece, index, start, size = data.draw(st.sampled_from(rows))
        at, length = piece.offset + start, size
        if part.stored:
            at = HEADER_BYTES
            for chunk in raw_chunks(table):
                length = part.stored[chunk.extent.digest]
                if chunk.extent.digest == piece.digest + index:
                    break
                at += length
        images[piece.pack][at + data.draw(st.integers(0, length - 1))] ^= 1
        destinations = [data.draw(memory(source.spec.dtype, box))]
        if source.is_needed(piece, start, size, [box]):
            with pytest.raises(Corrupt, match="tensor 'x'"):
                source.load(destinations)
        else:
            source.load(destinations)
            check(source, destinations)


@pytest.mark.parametrize("is_packed", [False, True])
def test_no_more_is_read_than_is_needed(is_packed):
    """At the real size of a chunk: rows, columns and blocks of some chunks of 4 MiB."""
    spec = Spec("x", "float32", (2048, 2048))
    halves = [[[Box((0, 0), (1024, 2048))]], [[Box((1024, 0), (1024, 2048))]]]
    source = Written(spec, halves, 1, is_packed)
    stored = sum(len(image) for _, _, images in source.parts for image in images) / 4

    def read(box):
        destination = Destination(box, torch.zeros(box.lengths))
        reads = source.load([destination])
        check(source, [destination])
        return sum(size for part in reads for pack in part for _, size in pack)

    assert read(Box((0, 0), (512, 2048))) <= stored * 1.01 + 2 * PAGE_BYTES
    assert read(Box((600, 5), (800, 3))) <= stored * 2.01 + 4 * PAGE_BYTES
    assert read(Box((0, 100), (2048, 1))) > stored * 3.9  # a column is in every chunk
    assert read(Box((7, 7), (0, 9))) == 0
