"""Boxes: rectangles of a global tensor."""

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Box:
    """The elements with offsets[d] <= index[d] < offsets[d] + lengths[d] in each dim d."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "Box":
        """The box that is all of a tensor of that shape."""
        return cls((0,) * len(shape), shape)

    @property
    def count(self) -> int:
        """How many elements it holds."""
        return prod(self.lengths)

    def intersect(self, other: "Box") -> "Box | None":
        """What both hold; None where that is nothing. Equal boxes, also empty ones, meet."""
        if self == other:
            return self
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = tuple(
            min(a + m, b + n)
            for a, m, b, n in zip(
                self.offsets, self.lengths, other.offsets, other.lengths, strict=True
            )
        )
        if any(end <= start for start, end in zip(starts, ends, strict=True)):
            return None
        return Box(starts, tuple(end - start for start, end in zip(starts, ends, strict=True)))
