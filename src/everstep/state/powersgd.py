"""torch's PowerSGD hook, with its state by parameter instead of by bucket.

torch keeps error, P and Q for each bucket's number, but makes the buckets anew in the second
iteration of each process, so that what was saved after that would not fit the first one after a
restore. Here that state is put in order for the buckets as they come. The first Q of a parameter
depends on its number and the seed alone, for the same reason.
Source: Vogels et al., PowerSGD (NeurIPS 2019).
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from everstep.errors import Unsupported
from everstep.state.buckets import Bucket, Future
from everstep.state.forms import Form

_COUNTS = (
    "iter",
    "next_stats_report",
    "total_numel_before_compression",
    "total_numel_after_compression",
)


class PowerSGD:
    """A Compressor."""

    def __init__(
        self,
        group: Any,
        parameters: Iterable[Tensor],
        *,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,  # noqa: N803 - torch's names
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
    ) -> None:
        """Options: torch's PowerSGDState. Raises what that raises, and Unsupported for parameters
        that torch's hook fails on."""
        if any(parameter.dim() == 0 or parameter.numel() == 0 for parameter in parameters):
            raise Unsupported(
                "compressing by 'powersgd': torch's hook cannot take parameters without dimensions "
                "or elements. Give them a dimension, or keep them out of the wrapped model"
            )
        self._torch = PowerSGDState(
            group,
            matrix_approximation_rank,
            start_powerSGD_iter,
            min_compression_rate,
            use_error_feedback,
            warm_start=True,
            orthogonalization_epsilon=orthogonalization_epsilon,
        )
        self._seed = random_seed
        self._members: dict[int, tuple[tuple[int, ...], tuple[Tensor, ...]]] = {}
        """Whose state torch's is, by number of the bucket."""
        self._errors: dict[int, Tensor] = {}
        self._qs: dict[int, Tensor] = {}
        """Flat, by number of the parameter: what is in no bucket yet."""

    def reduce(self, bucket: Bucket) -> Future:
        """torch's hook: dense at first, compressed from `start_powerSGD_iter` on."""
        bucket.kept = self._torch.iter >= self._torch.start_powerSGD_iter
        if bucket.kept:
            self._arrange(bucket)
        future: Future = powerSGD_hook(self._torch, bucket.source)
        if bucket.buffer.device.type == "cpu":
            # Its callbacks wait inside of gloo's two threads: two buckets at a time may hang.
            future.wait()
        return future

    def forms(self, bucket: Bucket) -> dict[int, Form]:
        """P and Q of what was compressed."""
        if not bucket.kept:
            return {}
        found = {}
        for position, p, q in self._factors(bucket.index, bucket.parameters):
            layout = bucket.layout_of(position)
            found[position] = Form("low rank", torch.cat([p, q]), None, *layout)
        return found

    def state(self) -> tuple[dict[str, Any], dict[str, dict[int, Tensor]]]:
        """P is no part of it: each step begins with Q."""
        errors, qs = dict(self._errors), dict(self._qs)
        for index in self._members:
            self._take_apart(index, errors, qs)
        counts = {key: getattr(self._torch, key) for key in _COUNTS}
        return counts, {"error": errors, "q": qs}

    def size_of(self, what: str, parameter: Tensor) -> int:
        """Elements of an error, or of Q."""
        matrix = self._matrix(parameter)
        return parameter.numel() if what == "error" else matrix[1] * matrix[2] if matrix else 0

    def load(self, plain: Mapping[str, Any], tensors: Mapping[str, dict[int, Tensor]]) -> None:
        """Into buckets as they come."""
        for key in _COUNTS:
            setattr(self._torch, key, plain[key])
        for memory in (
            self._members,
            self._torch.error_dict,
            self._torch.p_memory_dict,
            self._torch.q_memory_dict,
        ):
            memory.clear()
        self._errors, self._qs = dict(tensors["error"]), dict(tensors["q"])

    def _arrange(self, bucket: Bucket) -> None:
        """Give torch the state of this bucket's parameters, under its number."""
        index, numbers = bucket.index, bucket.numbers
        if index in self._members and self._members[index][0] == numbers:
            return
        # None of these is on its way: each parameter is in one bucket of an iteration.
        others = [
            key
            for key, (found, _) in self._members.items()
            if key == index or not set(found).isdisjoint(numbers)
        ]
        for key in others:
            self._take_apart(key, self._errors, self._qs)
            del self._members[key]
            for memory in (self._torch.error_dict, self._torch.p_memory_dict):
                memory.pop(key, None)
            self._torch.q_memory_dict.pop(key, None)
        self._members[index] = numbers, tuple(bucket.parameters)
        errors = [self._errors.pop(number, None) for number in numbers]
        if any(error is not None for error in errors):
            self._torch.error_dict[index] = torch.cat(
                [
                    torch.zeros_like(piece) if error is None else error
                    for error, (_, piece) in zip(errors, bucket.pieces, strict=True)
                ]
            )
        matrices = self._matrices(bucket.parameters)
        qs = [
            self._first_q(numbers[at], columns * rank, bucket.buffer)
            if (found := self._qs.pop(numbers[at], None)) is None
            else found
            for at, _, columns, rank in matrices
        ]
        empty = bucket.buffer.new_empty(0)
        size = sum(rows * rank for _, rows, _, rank in matrices)
        self._torch.p_memory_dict[index] = bucket.buffer.new_empty(size)
        self._torch.q_memory_dict[index] = torch.cat([empty, *qs])

    def _take_apart(self, index: int, errors: dict[int, Tensor], qs: dict[int, Tensor]) -> None:
        """Put a bucket's state into these, by number of the parameter: views."""
        numbers, parameters = self._members[index]
        if (error := self._torch.error_dict.get(index)) is not None:
            sizes = [parameter.numel() for parameter in parameters]
            errors.update(zip(numbers, error.split(sizes), strict=True))
        for position, _, q in self._factors(index, parameters):
            qs[numbers[position]] = q

    def _factors(
        self, index: int, parameters: Iterable[Tensor]
    ) -> Iterable[tuple[int, Tensor, Tensor]]:
        """Position, P and Q, flat, of each parameter of a bucket that is compressed: views."""
        matrices = self._matrices(parameters)
        ps = self._torch.p_memory_dict[index].split([rows * rank for _, rows, _, rank in matrices])
        qs = self._torch.q_memory_dict[index].split([many * rank for _, _, many, rank in matrices])
        return zip([position for position, *_ in matrices], ps, qs, strict=True)

    def _matrices(self, parameters: Iterable[Tensor]) -> list[tuple[int, int, int, int]]:
        """Position, rows, columns and rank of what is compressed, in the order in which torch lays
        out P and Q: by shape."""
        shapes: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
        for position, parameter in enumerate(parameters):
            if matrix := self._matrix(parameter):
                shapes.setdefault(matrix[:2], []).append((position, *matrix))
        return [matrix for found in shapes.values() for matrix in found]

    def _matrix(self, parameter: Tensor) -> tuple[int, int, int] | None:
        """Rows, columns and rank; None where torch does not compress it."""
        rows = parameter.shape[0]
        columns = parameter.numel() // rows
        rank = min(rows, columns, self._torch.matrix_approximation_rank)
        pays = (rows + columns) * rank * self._torch.min_compression_rate < rows * columns
        return (rows, columns, rank) if pays else None

    def _first_q(self, number: int, size: int, like: Tensor) -> Tensor:
        """The same on all ranks; torch orthogonalises it."""
        generator = torch.Generator().manual_seed((self._seed << 24) + number)
        return torch.randn(size, generator=generator, dtype=like.dtype).to(like.device)
