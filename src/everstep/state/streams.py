"""Streamed parts of the state: content that is larger than memory, or rarely changes.

An object with `stream()` and `load_stream()` gives and takes its content piece by piece, and has a
`version`: while that is equal, so is the content, and nothing of it is read or written. Source:
composable state providers (DataStates-LLM's second paper).
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import Any, Protocol, runtime_checkable

import torch

from everstep.format.manifest import Stream
from everstep.state.objects import TensorSink, plain_json
from everstep.state.placement import Placement
from everstep.state.stateful import AtTheCall

Chunk = bytes | bytearray | memoryview | torch.Tensor


@runtime_checkable
class Streamed(Protocol):
    """What is saved by its version and its pieces.

    version: JSON (a number, a text); another one means other content. immutable: whether the
    content never changes under a version, so that it is read while training goes on (False where it
    is not said: it is read at the call, which blocks).
    """

    version: Any

    def stream(self) -> Iterator[tuple[str, Iterable[Chunk]]]:
        """Yield names, each with its pieces: buffers or tensors, on any device. A piece is used up
        before the next one is asked for, and may then be overwritten."""

    def load_stream(self, content: Iterator[tuple[str, Iterator[Any]]]) -> None:
        """Take the same names with the same pieces, verified: tensors on the CPU as tensors,
        buffers as memoryviews, in memory of their own."""


class StreamState(AtTheCall):
    """One such part. For the thread that trains."""

    def __init__(self, name: str, value: Streamed) -> None:
        super().__init__(name)
        self.value = value
        self.known: tuple[Any, Future[Stream]] | None = None
        """The version that is durable, or will be, and where. One that comes again after another
        was loaded may have other content: only the last is known, and by what the object itself
        calls it then, which may count anew in each process."""
        self.loads = 0

    @property
    def version(self) -> Any:
        """As it stands in a manifest. Raises Unsupported for what is no JSON."""
        return plain_json(self.value.version, f"{self.name}.version")

    def objects(self, sink: TensorSink) -> Any:
        """Its version."""
        del sink
        return self.version

    def prepare(self, placement: Placement) -> None:
        """Its load_stream gets the content, when all else has arrived."""
        version = placement.object_of(self.name)
        stream = placement.saved.manifest.streams.get(self.name)
        if version is None or stream is None:
            if version is not None:
                placement.problems.append(f"other: the checkpoint has {self.name!r} as no stream")
            return

        def load() -> None:
            assert placement.read_stream
            self.known, self.loads = None, self.loads + 1
            self.value.load_stream(placement.read_stream(stream))
            found: Future[Stream] = Future()
            found.set_result(stream)
            self.known = self.version, found

        placement.then(load)
