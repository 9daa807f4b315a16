"""Rounding to the bit, and any boxes of a tensor that is rounded from another one."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from partitions import boxes_in, partitions, shapes

from everstep import Corrupt
from everstep.codecs.rounded import DTYPES, is_rounded, rounded
from everstep.format import packs as packs_module
from everstep.format.boxes import Box
from everstep.format.manifest import Encoded, Part
from everstep.format.packed import HEADER_BYTES
from everstep.format.packs import PAGE_BYTES, PackShape, Piece, Spec, chunks
from everstep.format.tables import FileLink, Table, TensorEntry
from everstep.keeper.encoder import find_masters
from everstep.restore.deliver import Delivery, as_items
from everstep.restore.load import Loader, MemorySource
from everstep.sharding.layout import LocalBox
from examples import examples

bits = arrays.arrays("<u4", st.integers(0, 200), elements=st.integers(0, 2**32 - 1))


@given(bits, st.sampled_from(DTYPES))
def test_it_rounds_as_torch_does(numbers, dtype):
    """All but what is no number."""
    values = torch.from_numpy(numbers.view("<f4"))
    expected = values.to(getattr(torch, dtype))
    found = torch.frombuffer(
        bytearray(rounded(memoryview(numbers), dtype)) or bytearray(2), dtype=torch.int16
    )
    real = ~values.isnan()
    assert torch.equal(found[: len(values)][real], expected.view(torch.int16)[real])


@given(bits, st.sampled_from(DTYPES), st.data())
def test_what_is_said_to_be_rounded_comes_back(numbers, dtype, data):
    """Whatever the bits: where it is said to be so, rounding gives them."""
    master = memoryview(numbers).cast("B")
    copy = bytearray(rounded(master, dtype))
    if copy and data.draw(st.booleans()):
        copy[data.draw(st.integers(0, len(copy) - 1))] ^= data.draw(st.integers(0, 255))
    is_same = copy == bytes(rounded(master, dtype))
    is_odd = dtype == "float16" and np.isnan(np.frombuffer(copy, "<f2")).any()
    assert is_rounded(memoryview(copy), master, dtype) == (is_same and not is_odd)


def test_no_other_dtype():
    with pytest.raises(Corrupt, match="float8"):
        rounded(memoryview(bytes(8)), "float8_e5m2")


@pytest.fixture
def small_chunks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packs_module, "CHUNK_BYTES", 64)
        yield


class Stored:
    """A tensor "x" of float32 and a copy "y", in the same boxes; of which some chunks are stored,
    though they are rounded as well."""

    def __init__(self, shape, boxes, stored, seed):
        random = np.random.default_rng(seed)
        self.x = random.standard_normal(shape).astype("<f4")
        raw = rounded(memoryview(self.x.tobytes()), "bfloat16")
        self.y = np.frombuffer(raw, "<u2").reshape(shape)
        self.image = bytearray(b"h" * HEADER_BYTES)
        self.digests, self.sizes, rows = [_digest(self.image)], [HEADER_BYTES], []
        pieces = {"x": [], "y": []}
        at = PAGE_BYTES
        for name, array in (("x", self.x), ("y", self.y)):
            for box in boxes:
                data = array[box.slices_in(Box.whole(shape))].tobytes()
                pieces[name].append(Piece(box, 0, at, len(data), len(self.digests)))
                at += len(data)
                for start, size in chunks(len(data)):
                    kept = chunk = data[start : start + size]
                    if name == "y" and size and not (stored := stored[1:] + stored[:1])[0]:
                        kept = b""
                        rows.append(Encoded(len(self.digests), "rounded:x", _digest(chunk)))
                    self.digests.append(_digest(kept))
                    self.sizes.append(len(kept))
                    self.image += kept
        self.image += bytes(-len(self.image) % PAGE_BYTES)
        self.entries = {
            name: TensorEntry(Spec(name, dtype, shape), tuple(pieces[name]))
            for name, dtype in (("x", "float32"), ("y", "bfloat16"))
        }
        self.table = Table((PackShape(at, PAGE_BYTES, 0),), self.entries, {})
        links = (FileLink("file", len(self.image)),)
        table = FileLink("table", 0)
        self.part = Part(0, table, links, tuple(self.digests), 1, tuple(self.sizes), tuple(rows))

    def load(self, wanted):
        source = MemorySource([memoryview(self.image)])
        candidate = SimpleNamespace(sources=lambda part: nullcontext([[source]]), already=())
        rows = {name: list(map(Delivery.to, found)) for name, found in wanted.items()}
        with Loader() as loader:
            loader.load(candidate, self.part, self.table, rows)


def _digest(data):
    return xxhash.xxh3_128_hexdigest(bytes(data))


@pytest.mark.usefixtures("small_chunks")
class TestAnyBoxes:
    @settings(max_examples=examples(200))
    @given(st.data())
    def test_of_the_copy_and_of_its_master(self, data):
        shape = data.draw(shapes())
        kinds = data.draw(st.lists(st.booleans(), min_size=1, max_size=5))
        source = Stored(shape, data.draw(partitions(shape)), kinds, data.draw(st.integers(0, 99)))
        wanted = {}
        for name in data.draw(st.sampled_from([("y",), ("x", "y"), ("y", "x")])):
            dtype = torch.float32 if name == "x" else torch.bfloat16
            boxes = data.draw(st.lists(boxes_in(shape), min_size=1, max_size=3))
            wanted[name] = [LocalBox(box, torch.zeros(box.lengths, dtype=dtype)) for box in boxes]
        source.load(wanted)
        for name, found in wanted.items():
            for each in found:
                expected = getattr(source, name)[each.box.slices_in(Box.whole(shape))]
                assert as_items(each.tensor).numpy().tobytes() == expected.tobytes()

    @settings(max_examples=examples(50))
    @given(st.data())
    def test_masters_are_found(self, data):
        shape = data.draw(shapes().filter(lambda shape: len(shape) > 0 and min(shape) > 0))
        source = Stored(shape, data.draw(partitions(shape)), [True], 1)
        raw = bytearray(PAGE_BYTES) + source.image[HEADER_BYTES:]

        def view(extent):
            return memoryview(raw)[extent.offset : extent.offset + extent.size]

        found = find_masters(source.table, view, 2)
        for piece in source.entries["y"].pieces:
            if piece.size >= 2 * 64:
                number = sum(1 for _ in chunks(piece.size))
                for index in range(piece.digest, piece.digest + number):
                    assert found[index].name == "x"
        assert set(found) <= set(range(len(source.digests)))
