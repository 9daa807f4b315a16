"""Which codec each tensor gets: decided by what was measured, and by nothing else.

A part is taken to be durable after

    write = stored bytes / link,  encode = Σ raw bytes / (speed of the encoder x free cores)
    the larger of the two + UNHIDDEN of the smaller

since chunks are encoded while others are written, beside training and on few cores. An encoder is
taken where the time falls by it: so no choice is slower than raw. To drop planes of zeros takes no
longer than to write them, so that it is not counted. Where figures come from: keeper/encoder.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from everstep.codecs import WORTH
from everstep.codecs.codec import ZEROS

FREE_CORES_MIN = 0.5
"""With less, training would pay: only what takes less time than the write that it saves is done."""

CAUTION = 1.5
"""An encoder is taken to need so much longer than in its sample, which was in the cache; digests of
what is stored are in it."""

UNHIDDEN = 0.15
"""So much of the smaller of two times shows where both are spent side by side, by what
`python -m benchmarks.codecs` measured."""

GAIN_MIN = 0.05
"""Of the time until durable: for less everything stays raw."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One encoder on the sample of a tensor: the share of bytes that stays, and the raw bytes that
    one core encodes in a second."""

    share: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Sample:
    """A tensor: its bytes, and figures by encoder."""

    size: int
    figures: Mapping[str, Figures]

    def without(self, encoder: str) -> "Sample":
        """The same, where that one cannot be had."""
        return replace(self, figures={k: v for k, v in self.figures.items() if k != encoder})


def choose(
    samples: Mapping[str, Sample], link_bytes_per_s: float | None, free_cores: float
) -> dict[str, str]:
    """The encoder of each tensor that has one; the others stay raw. Pure.

    `link_bytes_per_s`: of the slowest tier that the step is due in; None where it is not known yet.
    `free_cores`: what training leaves of the processor.
    """
    chosen = {
        name: ZEROS
        for name, sample in samples.items()
        if _is_free(sample.figures.get(ZEROS), link_bytes_per_s, free_cores)
    }
    if link_bytes_per_s is None or free_cores < FREE_CORES_MIN:
        return chosen
    stored = {name: _stored(sample, chosen.get(name)) for name, sample in samples.items()}
    spent = dict.fromkeys(samples, 0.0)
    write_s, encode_s = sum(stored.values()) / link_bytes_per_s, 0.0
    bound_s = (1 - GAIN_MIN) * write_s
    better = dict(chosen)
    for name, encoder in _by_worth(samples):
        saved = stored[name] - _stored(samples[name], encoder)
        takes = CAUTION * samples[name].size / samples[name].figures[encoder].bytes_per_s
        new_write_s = write_s - saved / link_bytes_per_s
        new_encode_s = encode_s + (takes - spent[name]) / free_cores
        if saved > 0 and together(new_write_s, new_encode_s) < together(write_s, encode_s):
            write_s, encode_s = new_write_s, new_encode_s
            better[name], stored[name], spent[name] = encoder, stored[name] - saved, takes
    return better if together(write_s, encode_s) < bound_s else chosen


def together(write_s: float, encode_s: float) -> float:
    """The seconds that both take, side by side. Pure."""
    return max(write_s, encode_s) + UNHIDDEN * min(write_s, encode_s)


def _is_free(zeros: Figures | None, link_bytes_per_s: float | None, free_cores: float) -> bool:
    """Whether to drop planes of zeros takes less time than to write them, on whatever cores."""
    if zeros is None or zeros.share > WORTH:
        return False
    link = CAUTION * (link_bytes_per_s or 0.0)
    return zeros.bytes_per_s * max(1.0, free_cores) > link


def _by_worth(samples: Mapping[str, Sample]) -> list[tuple[str, str]]:
    """Tensors and encoders, by how much they save in a second of a core."""
    found = [
        ((1 - figures.share) * figures.bytes_per_s, name, encoder)
        for name, sample in samples.items()
        for encoder, figures in sample.figures.items()
        if encoder != ZEROS and figures.share <= WORTH
    ]
    return [(name, encoder) for _, name, encoder in sorted(found, reverse=True)]


def _stored(sample: Sample, encoder: str | None) -> float:
    return sample.size * (sample.figures[encoder].share if encoder else 1.0)
