"""Which encoder a tensor gets: a pure function of what was measured; and how it is measured."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.codecs import codec
from everstep.codecs.choice import CAUTION, FREE_CORES_MIN, Figures, Sample, choose, together
from everstep.errors import Corrupt, Unsupported
from everstep.format.tables import Extent
from everstep.keeper.encoder import Encoder, Speeds, figures_of
from everstep.keeper.measured import FreeCores, Traffic

GB = 1e9
FP32 = {
    "zeros": Figures(1.0, 6 * GB),
    "planes": Figures(0.85, 2 * GB),
    "zstd": Figures(0.92, 0.6 * GB),
}
BF16 = {
    "zeros": Figures(1.0, 6 * GB),
    "planes": Figures(0.7, 2 * GB),
    "zstd": Figures(0.78, 0.5 * GB),
}
HALF_ZERO = {
    "zeros": Figures(0.5, 6 * GB),
    "planes": Figures(0.36, 2.9 * GB),
    "zstd": Figures(0.4, 0.8 * GB),
}
NOISE = {name: Figures(1.0, 30 * GB) for name in codec.ENCODERS}
figures = st.builds(Figures, st.floats(0.01, 1.0), st.floats(1e7, 1e11))
samples = st.dictionaries(
    st.text("abcdefgh", min_size=1, max_size=2),
    st.builds(
        Sample,
        st.integers(1, 10**10),
        st.fixed_dictionaries({name: figures for name in codec.ENCODERS}),
    ),
    max_size=12,
)


@given(samples, st.floats(1e6, 2e10), st.floats(FREE_CORES_MIN, 64))
def test_no_choice_is_slower_than_raw(samples, link, cores):
    """What is written and what is encoded together; nor any planes of zeros."""
    chosen = choose(samples, link, cores)
    stored = encode_s = 0.0
    for name, sample in samples.items():
        found = sample.figures[chosen[name]] if name in chosen else Figures(1.0, 1e30)
        stored += sample.size * found.share
        if chosen.get(name) == "zeros":
            assert sample.size / found.bytes_per_s / max(cores, 1.0) <= sample.size / link
        else:
            encode_s += CAUTION * sample.size / found.bytes_per_s / cores
    raw = sum(sample.size for sample in samples.values()) / link
    assert together(stored / link, encode_s) <= raw * (1 + 1e-9)


@given(samples, st.floats(1e6, 2e10), st.floats(0, FREE_CORES_MIN, exclude_max=True))
def test_without_a_free_core_nothing_is_done_that_takes_one(samples, link, cores):
    assert set(choose(samples, link, cores).values()) <= {"zeros"}


@given(samples, st.floats(0, 64))
def test_a_link_that_is_not_known_is_taken_for_a_fast_one(samples, cores):
    assert set(choose(samples, None, cores).values()) <= {"zeros"}


@pytest.mark.parametrize(
    ("kind", "link", "cores", "expected"),
    [
        (FP32, 50e6, 1.0, "planes"),
        (FP32, 200e6, 1.0, "planes"),
        (FP32, 1 * GB, 1.0, None),  # it takes nearly as long to encode as to write
        (FP32, 1 * GB, 8.0, "planes"),
        (FP32, 5 * GB, 4.0, None),
        (FP32, 200e6, 0.1, None),
        (BF16, 200e6, 1.0, "planes"),
        (BF16, 2 * GB, 1.0, None),
        (HALF_ZERO, 2 * GB, 0.0, "zeros"),
        (HALF_ZERO, None, 0.0, "zeros"),
        (HALF_ZERO, 100 * GB, 1.0, None),
        (HALF_ZERO, 100e6, 1.0, "planes"),
        (NOISE, 1e6, 2.0, None),
    ],
)
def test_what_is_chosen(kind, link, cores, expected):
    chosen = choose({"x": Sample(1 << 30, kind)}, link, cores)
    assert chosen.get("x") == expected


def test_what_saves_most_for_its_time_comes_first():
    """Where the cores do not suffice for all of it."""
    found = {"fp32": Sample(1 << 30, FP32), "bf16": Sample(1 << 30, BF16)}
    assert choose(found, 1.7 * GB, 1.0) == {"bf16": "planes"}
    assert choose(found, 1.7 * GB, 4.0) == {"bf16": "planes", "fp32": "planes"}


def test_a_slower_encoder_is_taken_where_there_is_time_for_it():
    text = {**NOISE, "planes": Figures(0.6, GB), "zstd": Figures(0.3, 0.4 * GB)}
    assert choose({"x": Sample(1 << 30, text)}, 50e6, 1.0) == {"x": "zstd"}
    assert choose({"x": Sample(1 << 30, text)}, 300e6, 1.0) == {"x": "planes"}


# ---- what is measured ----------------------------------------------------------------------------


class Machine:
    """Two cores, of which `idle` are not used."""

    def __init__(self):
        self.now = self.idle_s = 0.0

    def pass_by(self, seconds, idle):
        self.now += seconds
        self.idle_s += seconds * idle


def test_free_cores(monkeypatch):
    monkeypatch.setattr("everstep.keeper.measured.core_count", lambda: 2.0)
    machine = Machine()
    cores = FreeCores(lambda: machine.idle_s, lambda: machine.now)
    assert cores.look(0.0) == 0.0  # nothing is known yet
    machine.pass_by(1.0, 1.25)
    assert cores.look(0.0) == pytest.approx(1.25)
    machine.pass_by(0.1, 0.0)
    assert cores.look(0.0) == pytest.approx(1.25)  # too short a time
    machine.pass_by(0.9, 0.0)
    assert cores.look(0.5) == pytest.approx(0.5)  # used by the keeper's own encoding
    machine.pass_by(1.0, 0.0)
    assert cores.look(0.5) == 0.0
    machine.pass_by(1.0, 9.0)
    assert cores.look(0.5) == 2.0


def test_the_machine_tells():
    from everstep.keeper.measured import core_count, idle_seconds

    found = idle_seconds()
    assert found is not None
    assert found > 0
    assert core_count() >= 0.1


def test_a_system_that_does_not_tell(tmp_path):
    from everstep.keeper.measured import idle_seconds

    assert idle_seconds(tmp_path / "nothing") is None
    (tmp_path / "stat").write_text("cpu0 nonsense\n")
    assert idle_seconds(tmp_path / "stat") is None
    cores = FreeCores(lambda: None)
    assert cores.look(0.0) == 0.0


def test_a_speed_forgets():
    speed = Traffic("local", "here")
    speed.wrote(1 << 20, 1.0)
    assert speed.bytes_per_s is None  # too small to tell
    for _ in range(30):
        speed.wrote(100 << 20, 1.005)
    assert speed.bytes_per_s == pytest.approx(100 << 20)


# ---- from one part to the next -------------------------------------------------------------------


class Cores:
    free = 1.0

    def look(self, own_s):
        return self.free


def chunks_of(*names):
    return [
        Extent(0, at << 20, 1 << 20, at, f"tensor {name!r}", 4) for at, name in enumerate(names)
    ]


TEXT = memoryview(b"some words that come again and again, " * 40_000)[: 1 << 20]


def begin(encoder, link, chunks, is_record=False):
    return encoder.begin(b"a table", chunks, lambda chunk: TEXT, link, is_record=is_record)


def test_the_choice_is_made_anew():
    encoder, chunks, cores = Encoder(cores=Cores()), chunks_of("a", "b"), Cores
    assert not begin(encoder, None, chunks).encoders
    assert not begin(encoder, 5 * GB, chunks).encoders
    first = begin(encoder, 20e6, chunks)
    assert set(first.encoders) == {chunk.what for chunk in chunks}  # as the first chunk says
    noise = memoryview(random.Random(1).randbytes(1 << 20))
    first.look(chunks[0], TEXT)
    first.look(chunks[1], noise)
    second = begin(encoder, 20e6, chunks)
    assert set(second.encoders) == {chunks[0].what}
    assert not begin(encoder, 5 * GB, chunks).encoders
    try:
        cores.free = 0.0
        assert not begin(encoder, 20e6, chunks).encoders
    finally:
        cores.free = 1.0
    for _ in range(25):
        renewed = begin(encoder, 20e6, chunks)
        renewed.look(chunks[0], noise)
    assert not begin(encoder, 20e6, chunks).encoders


def test_raw_does_nothing():
    encoder = Encoder("raw", Cores())
    assert not begin(encoder, 1e6, chunks_of("a")).encoders


def test_records_lose_their_zeros_on_any_link():
    half = memoryview((b"\0\0" + b"ab") * (1 << 18))
    encoder, chunks = Encoder(cores=Cores()), chunks_of("a")
    found = encoder.begin(b"", chunks, lambda chunk: half, None, is_record=True)
    assert set(found.encoders.values()) == {"zeros"}
    data, name = found.encode(chunks[0], half)
    assert (name, len(data)) == ("planes", 8 + 16 + (1 << 19))


# ---- codecs by their names -----------------------------------------------------------------------


@given(st.sampled_from(codec.ENCODERS), st.binary(max_size=300), st.integers(0, 3000))
def test_what_is_encoded_comes_back(encoder, data, zeros):
    raw = data + bytes(zeros)
    encoded = codec.encode(encoder, memoryview(raw), 4)
    if encoded is not None:
        into = bytearray(len(raw))
        name = codec.name_of(encoder)
        codec.decode_into(name, memoryview(encoded), 4, memoryview(into))
        assert into == raw
        for size in (0, len(raw) - 1, len(raw) + 1):
            with pytest.raises(Corrupt):
                codec.decode_into(name, memoryview(encoded), 4, memoryview(bytearray(size)))


@given(st.binary(max_size=200))
def test_nonsense_is_no_frame(data):
    with pytest.raises(Corrupt):
        codec.decode_into("zstd", memoryview(data), 4, memoryview(bytearray(100)))


def test_a_codec_of_later():
    with pytest.raises(Unsupported, match=r"'xor'.*newer one"):
        codec.decode_into("xor", memoryview(b"x"), 4, memoryview(bytearray(4)))


def test_a_sample_is_a_part_of_the_chunk():
    found = figures_of(TEXT, 4, codec.ENCODERS, Speeds())
    assert found["zstd"].share < 0.1
    assert all(each.bytes_per_s > 0 for each in found.values())


def test_a_speed_is_that_of_the_largest_chunk():
    speeds = Speeds()
    small = speeds.of("planes", TEXT[:1024], 4)
    assert speeds.of("planes", TEXT[:1500], 4) == small  # no matter of size
    large = speeds.of("planes", TEXT, 4)
    assert large != small
    assert speeds.of("planes", TEXT[:1024], 4) == large
