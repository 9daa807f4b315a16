"""Fingerprint: the one answer to "did anybody write to these tensors?".

It reads the version counter of each tensor, because torch's operations count what they write; a
few bytes of some CPU tensors, other ones each time, because other writes (fused optimizers,
`.data`, numpy) do not count; and on request the address of each, because `tensor.data = other` puts
other memory in its place. It is a tripwire, not a proof: docs/guarantees.md says what the user has
to leave alone. Where all bytes are read, a thread of its own hashes them meanwhile.

On CUDA only counters and addresses are read: bytes would cost a synchronisation.
"""

import copy
import ctypes
import threading
from collections.abc import Iterable, Sequence
from operator import attrgetter

import torch
import xxhash

from everstep.sharding.layout import is_dtensor, local_of
from everstep.sharding.leaves import Leaf, fills_memory

_SAMPLE_BYTES = 16
_SAMPLES_MAX = 32  # cold memory is slow to look at; of more tensors, others each time
_STRIDE = 0x9E3779B1  # Fibonacci hashing: each turn looks elsewhere
_peek = ctypes.string_at
_version = attrgetter("_version")
_tensor = attrgetter("tensor")
_pointer = torch.Tensor.data_ptr


class Fingerprint:
    """How some tensors are at the moment of construction. For the thread that trains, but that any
    thread may ask what has changed."""

    def __init__(
        self, leaves: Iterable[Leaf], turn: int = 0, *, is_full: bool = False, follows: bool = False
    ) -> None:
        """`turn`: other numbers sample other bytes. `is_full`: look at all bytes of dense CPU
        tensors, and not at a sample. `follows`: other memory in the place of a tensor's is a
        change; else it is the memory of now that is looked at. That is kept alive."""
        found = list(leaves)
        # Detached: they share the counter, and keep the memory, whatever `.data` becomes.
        held = [(leaf.name, local_of(leaf.tensor).detach()) for leaf in found]
        on_cpu = [row for row in held if row[1].is_cpu and fills_memory(row[1])]
        self._on_cpu = [(*row, size) for row in on_cpu if (size := row[1].nbytes)]
        counted = [row for row in held if not row[1].is_inference()]  # those count nothing
        # What torch writes to a DTensor counts there, and not in its local tensor.
        counted += [(leaf.name, leaf.tensor) for leaf in found if is_dtensor(leaf.tensor)]
        self._names = [name for name, _ in counted]
        self._counted = [tensor for _, tensor in counted]
        self._live = found if follows else []
        self._is_sharded = any(is_dtensor(leaf.tensor) for leaf in self._live)
        self._addresses = self._addresses_now()
        self._read(turn)
        self._hash_all(is_full=is_full)

    def again(self, turn: int) -> "Fingerprint":
        """One of the same tensors, in the same memory, as they are now; as full."""
        other = copy.copy(self)
        other._read(turn)
        other._hash_all(is_full=self._hashing is not None)
        return other

    def in_place(self) -> "Fingerprint":
        """The same, but for other memory in the place of a tensor's, and with a sample of bytes."""
        other = copy.copy(self)
        other._live, other._hashing = [], None
        return other

    def changed(self, *, is_in_place: bool = False) -> list[str]:
        """The names of the tensors that were written to since, or have other memory. Waits for the
        thread that hashes. `is_in_place`: it is known that they have the same memory."""
        found: list[str] = []
        versions = list(map(_version, self._counted))
        if versions != self._versions:
            rows = zip(self._names, versions, self._versions, strict=True)
            found += [name for name, version, known in rows if version != known]
        found += [name for at, size, name, known in self._samples if _peek(at, size) != known]
        is_followed = self._live and not is_in_place
        if is_followed and (addresses := self._addresses_now()) != self._addresses:
            pairs = zip(self._live, addresses, self._addresses, strict=True)
            found += [leaf.name for leaf, address, known in pairs if address != known]
        if self._hashing and not found:
            self._hashing.join()
            digests = zip(self._on_cpu, self._digests, strict=True)
            found = [name for (name, tensor, _), known in digests if memory_digest(tensor) != known]
        return sorted(set(found))

    def _read(self, turn: int) -> None:
        self._versions = list(map(_version, self._counted))
        self._samples = []
        first = turn * _SAMPLES_MAX % max(1, len(self._on_cpu))
        chosen = self._on_cpu[first : first + _SAMPLES_MAX]
        chosen += self._on_cpu[: min(first, _SAMPLES_MAX - len(chosen))]
        for name, tensor, size in chosen:
            shift = turn * _STRIDE % (size - _SAMPLE_BYTES) if size > _SAMPLE_BYTES else 0
            at, count = tensor.data_ptr() + shift, min(size, _SAMPLE_BYTES)
            self._samples.append((at, count, name, _peek(at, count)))

    def _addresses_now(self) -> list[int]:
        tensors = map(_tensor, self._live)
        return list(map(_pointer, map(local_of, tensors) if self._is_sharded else tensors))

    def _hash_all(self, *, is_full: bool) -> None:
        self._digests: list[bytes] = []
        self._hashing: threading.Thread | None = None
        if is_full:
            self._hashing = threading.Thread(target=self._hash, name="everstep-hash", daemon=True)
            self._hashing.start()

    def _hash(self) -> None:
        self._digests = [memory_digest(tensor) for _, tensor, _ in self._on_cpu]


def memory_digest(tensor: torch.Tensor) -> bytes:
    """XXH3-128 of a dense tensor's memory (of another's: of nothing); releases the GIL."""
    size = tensor.nbytes if fills_memory(tensor) else 0
    memory = (ctypes.c_char * size).from_address(tensor.data_ptr()) if size else b""
    return xxhash.xxh3_128_digest(memory)


def describe(step: int, changed: Sequence[str]) -> str:
    """What the handle's error says of a torn copy: of gradients, or of the state."""
    shown = ", ".join(map(repr, changed[:5])) + (
        f" and {len(changed) - 5} more" if len(changed) > 5 else ""
    )
    if changed[0].startswith("@"):
        return (
            f"saving step {step}: the gradients {shown} were written to while they were being "
            f"copied, by a backward that added to them, perhaps, so that the record was thrown "
            f"away. They are copied in the update from now on"
        )
    return (
        f"saving step {step}: {shown} changed while the copy was being made, outside of "
        f"optimizer.step(), so that the copy was thrown away. Between checkpointer.step() and the "
        f"next optimizer.step() nothing may write to what an optimizer owns; call "
        f"checkpointer.wait('captured') before you do"
    )
