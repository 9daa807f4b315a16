"""Any boxes out of any boxes: against slices of a dense reference, byte for byte."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from partitions import boxes_in, partitions, shapes

from everstep import Corrupt
from everstep.format import packs as packs_module
from everstep.format.boxes import Box
from everstep.format.dtypes import ITEM_SIZES
from everstep.format.packed import HEADER_BYTES, raw_chunks
from everstep.format.packs import PAGE_BYTES, Spec, chunks
from everstep.restore.deliver import Delivery, as_items
from everstep.restore.plan import plan
from everstep.sharding.layout import LocalBox
from examples import examples
from written import Written

DTYPES = [name for name in ITEM_SIZES if hasattr(torch, name)]
SMALL_CHUNK_BYTES = 64


@pytest.fixture
def small_chunks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packs_module, "CHUNK_BYTES", SMALL_CHUNK_BYTES)
        yield


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
    return LocalBox(box, found)


def bytes_of(tensor):
    return as_items(tensor).contiguous().numpy().tobytes()


def check(source, destinations):
    for destination in destinations:
        assert bytes_of(destination.tensor) == source.bytes_of(destination.box)


@pytest.mark.usefixtures("small_chunks")
class TestSmallChunks:
    @settings(max_examples=examples(250))
    @given(st.data())
    def test_any_boxes_out_of_any_boxes(self, data):
        source = data.draw(written())
        boxes = data.draw(st.lists(boxes_in(source.spec.shape), min_size=1, max_size=3))
        boxes += data.draw(st.sampled_from([[], [Box.whole(source.spec.shape)]]))
        destinations = [data.draw(memory(source.spec.dtype, box)) for box in boxes]
        source.load(destinations)
        check(source, destinations)

    @settings(max_examples=examples(150))
    @given(st.data())
    def test_what_goes_to_a_device_is_picked_likewise(self, data):
        """The same copies with this machine's memory as the device's."""
        source = data.draw(written().filter(lambda found: found.parts[0][0].stored is None))
        box = data.draw(boxes_in(source.spec.shape))
        destination = data.draw(memory(source.spec.dtype, box))
        delivery = replace(Delivery.to(destination), is_on_device=True)
        for part, table, images in source.parts:
            for span in plan([(table.tensors["x"], [box])], part, table):
                for target in span.targets:
                    view = memoryview(images[span.pack])[target.offset :][: target.size]
                    delivery.put(target, view)
        check(source, [destination])

    @settings(max_examples=examples(150))
    @given(st.data())
    def test_the_plan_has_what_is_needed_once_and_nothing_else(self, data):
        source = data.draw(written())
        wanted = data.draw(st.lists(boxes_in(source.spec.shape), max_size=3))
        for part, table, _ in source.parts:
            entry = table.tensors["x"]
            spans = plan([(entry, wanted)], part, table)
            targets = [target for span in spans for target in span.targets]
            found = [(target.box, target.start) for target in targets if target.raw]
            expected = [
                (piece.box, start)
                for piece in entry.pieces
                for start, size in chunks(piece.size)
                if source.is_needed(piece, start, size, wanted)
            ]
            assert set(found) == set(expected)
            assert len(found) == len(set(found))
            for span in spans:
                assert span.offset % PAGE_BYTES == span.size % PAGE_BYTES == 0
                assert all(
                    span.offset <= t.offset and t.offset + t.size <= span.offset + span.size
                    for t in span.targets
                )

    @settings(max_examples=examples(150))
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
                length = part.stored[chunk.digest]
                if chunk.digest == piece.digest + index:
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
        destination = LocalBox(box, torch.zeros(box.lengths))
        reads = source.load([destination])
        check(source, [destination])
        return sum(size for part in reads for pack in part for _, size in pack)

    assert read(Box((0, 0), (512, 2048))) <= stored * 1.01 + 2 * PAGE_BYTES
    assert read(Box((600, 5), (800, 3))) <= stored * 2.01 + 4 * PAGE_BYTES
    assert read(Box((0, 100), (2048, 1))) > stored * 3.9  # a column is in every chunk
    assert read(Box((7, 7), (0, 9))) == 0
