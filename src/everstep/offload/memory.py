"""Tensors in an arena of one slot, as a piece table says: two processes see the same ones."""

from typing import Any

import torch

from everstep.format.document import seal, unseal
from everstep.format.packs import ALIGNED_FROM_BYTES, Layout, pack_starts, round_up
from everstep.keeper.arena import Arena, Row, SlotState
from everstep.keeper.data import Image, Segment, parse
from everstep.sharding.leaves import bytes_of

_SLACK_BYTES = 1 << 20


class Memory:
    """The packs of a state, by the names of the tensors in them; with room for documents."""

    def __init__(self, arena: Arena) -> None:
        """`arena`: of `create`, in this process or another one. Raises Corrupt."""
        row = arena.row(0)
        assert row
        self.arena, self.document = arena, bytes(arena.table(0, row))
        """The piece table."""
        parsed, image = parse(self.document), arena.image(0)
        self.table = parsed.table
        self._starts = pack_starts(pack.size for pack in self.table.packs)
        rows = zip(self._starts, self.table.packs, strict=True)
        views = [image[at : at + pack.size] for at, pack in rows]
        self._packs = [torch.frombuffer(view, dtype=torch.uint8) for view in views]
        self.image = Image(parsed, [[Segment(view)] for view in views])
        """All of it."""

    @classmethod
    def create(
        cls, layout: Layout, document: bytes, directory: str | None = None, documents_bytes: int = 0
    ) -> "Memory":
        """In an arena of its own, with the packs' headers in their places. `document`: the piece
        table. `directory`: for a file; None: in memory. `documents_bytes`: what else is said of it,
        but for a MB. Raises Unavailable."""
        room = len(document) + documents_bytes + _SLACK_BYTES
        arena = Arena.create(1, room, layout.size, directory)
        _seal(arena, document, layout.size, 0, {"holds": "tensors"})
        arena.set_state(0, SlotState.FREE)
        found = cls(arena)
        for memory, header in zip(found._packs, layout.headers, strict=True):
            memory[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        return found

    def say(self, said: dict[str, Any]) -> None:
        """Put this beside the tensors, of which nothing is to be saved or restored."""
        self.seal(0, said)
        self.arena.set_state(0, SlotState.FREE)

    def seal(self, step: int, said: dict[str, Any]) -> Row:
        """The slot has the whole state of a step."""
        size = sum(pack.size for pack in self.table.packs)
        return _seal(self.arena, self.document, size, step, said)

    @property
    def said(self) -> dict[str, Any]:
        """What was said last. Raises Corrupt."""
        row = self.arena.row(0)
        assert row
        return unseal(self.arena.descriptor(0, row), "what is said of memory")

    def bytes(self, name: str) -> torch.Tensor:
        """A tensor's."""
        (piece,) = self.table.tensors[name].pieces
        return self._packs[piece.pack][piece.offset : piece.offset + piece.size]

    def drop(self, name: str) -> None:
        """Let the file alone have a tensor's bytes, where they are pages; blocks."""
        (piece,) = self.table.tensors[name].pieces
        if piece.size >= ALIGNED_FROM_BYTES:
            start = self._starts[piece.pack] + piece.offset
            self.arena.drop(0, start, round_up(piece.size))

    def tensor(self, name: str) -> torch.Tensor:
        """Row-major, as its spec says."""
        spec = self.table.tensors[name].spec
        return self.bytes(name).view(getattr(torch, spec.dtype)).view(spec.shape)

    def take(self, name: str, tensor: torch.Tensor) -> None:
        """Let it lie here from now on; one that is not row-major is copied."""
        here = self.bytes(name)
        if here.numel() == 0 or tensor.data_ptr() == here.data_ptr():
            return
        here.copy_(bytes_of(tensor))
        if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            tensor.data = here.view(tensor.dtype).view(tensor.shape)


def _seal(arena: Arena, document: bytes, size: int, step: int, said: dict[str, Any]) -> Row:
    descriptor = seal(said)
    row = Row(1, step, size, len(document), len(descriptor))
    arena.seal(0, row, document, descriptor)
    return row
