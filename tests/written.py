"""A tensor in boxes, over parts and packs in memory; what a restore reads of them is counted."""

import random
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import xxhash

from everstep.codecs.planes import encode
from everstep.format.boxes import Box
from everstep.format.dtypes import ITEM_SIZES
from everstep.format.manifest import Part
from everstep.format.packed import HEADER_BYTES, raw_chunks
from everstep.format.packs import PAGE_BYTES, PackShape, Piece, chunks
from everstep.format.tables import FileLink, Table, TensorEntry
from everstep.restore.deliver import Delivery
from everstep.restore.load import Loader, MemorySource


class Counted(MemorySource):
    """Counts what is read of it."""

    __slots__ = ("reads",)

    def __init__(self, image):
        super().__init__([memoryview(image)])
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

    def bytes_of(self, box):
        return self.dense[(*box.slices_in(Box.whole(self.spec.shape)), ...)].tobytes()

    def _part(self, number, packs):
        images, pieces, digests, shapes = [], [], [], []
        for pack, boxes in enumerate(packs):
            image = bytearray(b"h" * PAGE_BYTES)
            shapes.append((len(digests), pack))
            digests.append(xxhash.xxh3_128_hexdigest(image))
            for box in boxes:
                data = self.bytes_of(box)
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
        for extent in raw_chunks(table):
            data = raw[extent.offset : extent.offset + extent.size]
            kept = encode(memoryview(data), extent.item_size) or data
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
                here = {self.spec.name: list(map(Delivery.to, destinations))}
                found = nullcontext([[source] for source in sources])
                candidate = SimpleNamespace(sources=lambda part, found=found: found, already=())
                loader.load(candidate, part, table, here)
                reads.append([source.reads for source in sources])
        return reads

    def is_needed(self, piece, start, size, wanted):
        """Whether any of these bytes of a piece is wanted: counted in a dense array."""
        marks = np.zeros((*self.spec.shape, ITEM_SIZES[self.spec.dtype]), bool)
        for box in wanted:
            marks[(*box.slices_in(Box.whole(self.spec.shape)), ...)] = True
        inside = marks[(*piece.box.slices_in(Box.whole(self.spec.shape)), ...)]
        return bool(inside.ravel()[start : start + size].any())
