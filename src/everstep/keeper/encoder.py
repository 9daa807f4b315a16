"""What codecs were seen to do with a run's tensors, and which encoder each tensor gets for that.

Samples are taken where a chunk is in the cache anyway, when its digest is made: of each tensor at
the first save of a layout, then at every 25th. Before there are any, the first chunk that arrives
stands for all. They are taken only where the link is so slow that anything can come of them.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from everstep.codecs import codec
from everstep.codecs.choice import Figures, Sample, choose
from everstep.format.boxes import Box
from everstep.format.document import digest_of
from everstep.format.manifest import Previous
from everstep.format.packs import Piece, Spec, chunks
from everstep.format.tables import Extent, Table
from everstep.keeper.measured import FreeCores

THREADS = min(4, len(os.sched_getaffinity(0)))
"""So many digest and encode."""

SMALL_BYTES = 64 << 10
"""A chunk of less is not encoded."""

REACH_BYTES_PER_S = 1.5e9
"""Of a link, for each free core, above which nothing but zeros is worth the time."""

_SLICES, _SLICE_BYTES = 4, 16 << 10
_RENEW_SAVES = 25
_LAYOUTS_MAX = 4
_ITEMS = 64
_SPEED_TRIALS = 3

View = Callable[[Extent], memoryview]


class Master(NamedTuple):
    """Of a chunk that may be rounded: the tensor it is rounded from, its own dtype, and where its
    elements lie there."""

    name: str
    dtype: str
    elements: Extent


@dataclass(frozen=True, slots=True)
class Base:
    """The state that was saved before, as the base of differences. `document`: its table;
    `contents`: the digests of its chunks' raw bytes, but of those that are rounded; `depth`: how
    many differences it takes to read it.

    It is read where it still lies in memory. Nobody keeps it there: the trainer may capture another
    state in its slot at any moment. So who has read of it compares that with its digest afterwards.
    A base that is gone costs bytes, and no time.
    """

    name: Previous
    document: bytes
    view: View
    contents: Mapping[int, str]
    depth: int

    def has(self, chunk: Extent) -> bool:
        """Whether it is there still."""
        return digest_of(self.view(chunk)) == self.contents.get(chunk.digest)


@dataclass(slots=True)
class _Layout:
    sizes: dict[str, int]
    firsts: dict[str, Extent]
    samples: dict[str, Sample] = field(default_factory=dict)
    masters: dict[int, Master] = field(default_factory=dict)
    """Of chunks that were rounded when that was looked at last, by their digests."""
    rounded_bytes_per_s: float = 0.0
    age: int = 0

    @classmethod
    def of(cls, chunks: list[Extent]) -> "_Layout":
        sizes: dict[str, int] = {}
        firsts: dict[str, Extent] = {}
        for chunk in chunks:
            if chunk.size >= SMALL_BYTES:
                firsts.setdefault(chunk.what, chunk)
                sizes[chunk.what] = sizes.get(chunk.what, 0) + chunk.size
        return cls(sizes, firsts)

    def find_masters(self, table: Table, view: View) -> None:
        """Look which chunks are rounded; blocks until all has arrived, if there can be any."""
        from everstep.codecs.rounded import rounded

        self.masters = find_masters(table, view, SMALL_BYTES)
        if self.masters:
            _, dtype, elements = next(iter(self.masters.values()))
            began = time.thread_time()
            rounded(view(elements), dtype)
            self.rounded_bytes_per_s = elements.size / 2 / _since(began)

    def sample(self, what: str, figures: Mapping[str, Figures]) -> Sample:
        """A tensor of these figures."""
        if self.firsts[what].digest in self.masters:
            figures = {**figures, codec.ROUNDED: Figures(0.0, self.rounded_bytes_per_s)}
        return Sample(self.sizes[what], figures)


class Speeds:
    """Raw bytes that encoders take in a second of a core, by the size of items: of whole chunks,
    as short ones take several times as long for each byte. For any thread."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], tuple[int, float]] = {}
        """The largest chunk that was seen, and its bytes a second."""

    def of(
        self, encoder: str, raw: memoryview, item_size: int, before: memoryview | None = None
    ) -> float:
        """As far as it is known; where no chunk of at least half this one was seen, by this one.
        `before`: see codec.encode."""
        size, speed = self._known.get((encoder, item_size), (0, 0.0))
        if len(raw) < 2 * size:
            return speed
        times = []
        for _ in range(_SPEED_TRIALS):  # the first one imports, and takes new memory
            began = time.thread_time()
            codec.encode(encoder, raw, item_size, before)
            times.append(_since(began))
        self._known[encoder, item_size] = len(raw), len(raw) / min(times)
        return self._known[encoder, item_size][1]


@dataclass(slots=True)
class Encoding:
    """What is done with the chunks of one part. Its methods are for any thread.

    `encoders`: by `what` an extent is; none where all stays raw. `wanted`: of which chunks, by
    their digests, samples are taken.
    """

    encoder: "Encoder"
    layout: _Layout
    view: View
    encoders: Mapping[str, str] = field(default_factory=dict)
    base: Base | None = None
    wanted: Set[int] = frozenset()

    def look(self, chunk: Extent, raw: memoryview) -> None:
        """Take a sample of it, if that is wanted."""
        if chunk.digest in self.wanted:
            base, speeds = self.base, self.encoder.speeds
            before = base.view(chunk) if base else None
            figures = figures_of(raw, chunk.item_size, codec.ENCODERS, speeds, before)
            if base and not base.has(chunk):
                del figures[codec.DIFFERENCE]
            self.layout.samples[chunk.what] = self.layout.sample(chunk.what, figures)

    def encode(self, chunk: Extent, raw: memoryview) -> tuple[bytes | memoryview, str | None]:
        """What is stored of a chunk, and the name of its codec; None: raw."""
        encoder = self.encoders.get(chunk.what)
        if encoder is None or chunk.size < SMALL_BYTES:
            return raw, None
        if encoder == codec.ROUNDED:
            return self._rounded(chunk, raw)
        if encoder == codec.ZEROS:  # which takes no time
            found = codec.encode(encoder, raw, chunk.item_size)
        else:
            with self.encoder.counting():
                if encoder == codec.DIFFERENCE and self.base:
                    found = codec.encode(encoder, raw, chunk.item_size, self.base.view(chunk))
                    if found and self.base.has(chunk):
                        return found, encoder
                    encoder = codec.PLANES  # it is not worth it, or the base is gone
                found = codec.encode(encoder, raw, chunk.item_size)
        return (raw, None) if found is None else (found, codec.name_of(encoder))

    def _rounded(self, chunk: Extent, raw: memoryview) -> tuple[bytes | memoryview, str | None]:
        """Nothing, where it is: blocks until its master has arrived. One that is not is not tried
        again before masters are looked for anew."""
        if not (master := self.layout.masters.get(chunk.digest)):
            return raw, None
        from everstep.codecs.rounded import is_rounded

        elements = self.view(master.elements)
        with self.encoder.counting():
            is_equal = is_rounded(raw, elements, master.dtype)
        if is_equal:
            return b"", f"{codec.ROUNDED}:{master.name}"
        self.layout.masters.pop(chunk.digest, None)
        return raw, None


class Encoder:
    """For a writer's thread, but for `counting`, which any may use."""

    def __init__(self, mode: str = "auto", cores: FreeCores | None = None) -> None:
        """`mode`: "auto" or "raw"."""
        self._mode = mode
        self._cores = cores or FreeCores()
        self._layouts: dict[bytes, _Layout] = {}
        self.speeds = Speeds()
        self._spent_s = 0.0
        self._lock = threading.Lock()
        self._limit = threading.Semaphore()

    def begin(
        self,
        document: bytes,
        chunks: list[Extent],
        view: View,
        link_bytes_per_s: float | None,
        *,
        is_record: bool,
        table: Table | None = None,
        base: Base | None = None,
    ) -> Encoding:
        """Decide for one part, whose table is `document`. `view` blocks until a chunk has arrived.
        `link_bytes_per_s`: of the slowest tier that it goes to. `table`: of a state, in which some
        tensors may be rounded from others. `base`: what it may have differences to. Raises
        Unsupported where the trainer gives it up."""
        free = min(self._cores.look(self._spent_s), THREADS)
        layout = self._layouts.pop(document, None) or _Layout.of(chunks)
        self._layouts[document] = layout
        for oldest in list(self._layouts)[:-_LAYOUTS_MAX]:
            del self._layouts[oldest]
        is_near = link_bytes_per_s is not None and link_bytes_per_s < REACH_BYTES_PER_S * free
        is_wanted = self._mode != codec.RAW and (is_near or is_record)
        if not layout.sizes or not is_wanted:
            return Encoding(self, layout, view)
        is_stale = is_near and (not layout.samples or layout.age % _RENEW_SAVES == 0)
        if is_stale and table is not None:
            layout.find_masters(table, view)
        known = layout.samples if is_near else {}
        samples = known or self._probe(layout, view, codec.ENCODERS if is_near else (codec.ZEROS,))
        knows_differences = any(codec.DIFFERENCE in each.figures for each in samples.values())
        if not base:
            samples = {name: each.without(codec.DIFFERENCE) for name, each in samples.items()}
        encoders = choose(samples, link_bytes_per_s, free)
        is_sampled = is_stale or (base is not None and not knows_differences)
        wanted = {chunk.digest for chunk in layout.firsts.values()} if is_sampled else frozenset()
        layout.age += is_near
        self._limit = threading.Semaphore(max(1, round(free)))
        return Encoding(self, layout, view, encoders, base, wanted)

    def _probe(self, layout: _Layout, view: View, encoders: tuple[str, ...]) -> dict[str, Sample]:
        """The first chunk's figures, for all that is of such items; blocks until it has arrived."""
        first = next(iter(layout.firsts.values()))
        figures = figures_of(view(first), first.item_size, encoders, self.speeds)
        return {
            what: layout.sample(what, figures if chunk.item_size == first.item_size else {})
            for what, chunk in layout.firsts.items()
        }

    @contextmanager
    def counting(self) -> Iterator[None]:
        """What is done within can be left out, and is done on no more cores than are free."""
        with self._limit:
            began = time.thread_time()
            yield
            seconds = _since(began)
        with self._lock:
            self._spent_s += seconds


def figures_of(
    raw: memoryview,
    item_size: int,
    encoders: tuple[str, ...],
    speeds: Speeds,
    before: memoryview | None = None,
) -> dict[str, Figures]:
    """What encoders do with a chunk, and differences to what was `before`: what stays of some
    slices of it, and how fast that goes."""
    data, found = _excerpt(raw), {}
    earlier = None if before is None else _excerpt(before)
    for encoder in encoders if before is None else (*encoders, codec.DIFFERENCE):
        encoded = codec.encode(encoder, data, item_size, earlier)
        share = 1.0 if encoded is None else len(encoded) / len(data)
        found[encoder] = Figures(share, speeds.of(encoder, raw, item_size, before))
    return found


def _since(began: float) -> float:
    return max(time.thread_time() - began, 1e-9)


def _excerpt(raw: memoryview) -> memoryview:
    if len(raw) <= _SLICES * _SLICE_BYTES:
        return raw
    step = len(raw) // _SLICES // 16 * 16
    slices = (raw[at * step : at * step + _SLICE_BYTES] for at in range(_SLICES))
    return memoryview(b"".join(slices))


# ---- copies in fewer bits ----------------------------------------------------------------------


def find_masters(table: Table, view: View, size_min: int) -> dict[int, Master]:
    """Which chunks seem to be rounded from others (a bfloat16 copy of float32 weights, by whatever
    names), by their digests; of pieces of at least `size_min` bytes, which have the same box. Told
    from a few elements, and proven where it is used. Blocks until all has arrived, if there can be
    any. Raises Unsupported where it never will."""
    from everstep.codecs.rounded import DTYPES, SOURCE, rounded

    copies = _pieces(table, DTYPES, size_min)
    if not copies:
        return {}
    known: dict[tuple[Box, str, bytes], tuple[str, Piece]] = {}
    for spec, piece in _pieces(table, (SOURCE,), 2 * size_min):
        some = memoryview(_elements(view, piece, 4))
        for dtype in DTYPES:
            known.setdefault((piece.box, dtype, bytes(rounded(some, dtype))), (spec.name, piece))
    found = {}
    for spec, piece in copies:
        if row := known.get((piece.box, spec.dtype, _elements(view, piece, 2))):
            name, master = row
            for number, (start, size) in enumerate(chunks(piece.size)):
                at = master.offset + 2 * start
                elements = Extent(master.pack, at, 2 * size, master.digest, "")
                found[piece.digest + number] = Master(name, spec.dtype, elements)
    return found


def _pieces(table: Table, dtypes: Sequence[str], size_min: int) -> list[tuple[Spec, Piece]]:
    entries = (entry for entry in table.tensors.values() if entry.spec.dtype in dtypes)
    return [(e.spec, piece) for e in entries for piece in e.pieces if piece.size >= size_min]


def _elements(view: View, piece: Piece, item_size: int) -> bytes:
    whole = view(Extent(piece.pack, piece.offset, piece.size, piece.digest, ""))
    step = piece.size // item_size // _ITEMS * item_size
    return b"".join(whole[at * step : at * step + item_size] for at in range(_ITEMS))
