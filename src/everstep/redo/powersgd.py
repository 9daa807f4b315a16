"""PowerSGD as torch's hook does it, but parameter by parameter, whatever buckets they come in.

torch keeps error and Q by bucket and multiplies in a bucket's memory. But the buckets are made anew
in the second iteration of each process, so that what was saved would not fit the first one after a
restore, and kernels round by how memory is aligned. Here each parameter has memory of its own. All
is done in the thread and on the stream of the backward pass, because kernels also go by the number
of threads, and because callbacks that wait (as torch's do) hang in gloo's two threads.
Source: Vogels et al., PowerSGD (NeurIPS 2019); torch's powerSGD_hook.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _orthogonalize

from everstep.redo.buckets import Bucket, Future
from everstep.redo.forms import CompressedGradient, product


@dataclass(slots=True, eq=False)
class _Matrix:
    """A gradient that is compressed. `whole`: [1, rows, columns], what is owed included."""

    position: int
    number: int
    flat: Tensor
    whole: Tensor
    rank: int


class PowerSGD:
    """A Compressor: sends P and Q, of which P times Q transposed is about the gradient."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,  # noqa: N803 - torch's names
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
    ) -> None:
        """Options as of torch's PowerSGDState; Q always begins with the last one."""
        if matrix_approximation_rank < 1:
            raise ValueError(
                f"matrix_approximation_rank must be positive, it is {matrix_approximation_rank}"
            )
        self._group = group
        self._rank = matrix_approximation_rank
        self._start = start_powerSGD_iter
        self._rate = min_compression_rate
        self._has_feedback = use_error_feedback
        self._epsilon = orthogonalization_epsilon
        self._seed = random_seed
        self._iteration = 0
        self._errors: dict[int, Tensor] = {}
        self._qs: dict[int, Tensor] = {}
        """Flat, by number of the parameter. Never written to: records may hold them."""

    def reduce(self, bucket: Bucket) -> Future:
        """Dense at first; compressed from `start_powerSGD_iter` on."""
        is_compressed = self._iteration >= self._start
        self._iteration += bool(bucket.source.is_last())
        if not is_compressed:
            future: Future = default_hooks.allreduce_hook(self._group, bucket.source)
            return future
        plain, matrices = self._divide(bucket)
        ps = [torch.bmm(matrix.whole, self._q_of(matrix)) for matrix in matrices]
        total = self._sum([*plain, *ps])
        for flat, mean in zip(plain, total[: len(plain)], strict=True):
            flat.copy_(mean.div_(self._group.size()))
        ps = [p.clone().view_as(mine) for p, mine in zip(total[len(plain) :], ps, strict=True)]
        for p in ps:
            _orthogonalize(p, self._epsilon)
        rows = [
            torch.bmm(matrix.whole.transpose(1, 2), p)
            for matrix, p in zip(matrices, ps, strict=True)
        ]
        qs = [q.div_(self._group.size()) for q in self._sum(rows)]
        bucket.kept = {
            matrix.position: self._finish(matrix, torch.cat([p.view(-1), q]))
            for matrix, p, q in zip(matrices, ps, qs, strict=True)
        }
        buffer = bucket.buffer
        done: Future = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
        done.set_result(buffer)
        return done

    def forms(self, bucket: Bucket) -> dict[int, CompressedGradient]:
        """P and Q of what was compressed."""
        return {
            position: CompressedGradient("low rank", factors, None, *bucket.layout_of(position))
            for position, factors in (bucket.kept or {}).items()
        }

    def state(self) -> tuple[dict[str, Any], dict[str, dict[int, Tensor]]]:
        """P is no part of it: each step begins with Q."""
        return {"iteration": self._iteration}, {"error": dict(self._errors), "q": dict(self._qs)}

    def size_of(self, what: str, parameter: Tensor) -> int:
        """Elements of an error, or of Q; of none where it is not compressed."""
        if not (shape := self._shape_of(parameter)):
            return 0
        return parameter.numel() if what == "error" else shape[1] * shape[2]

    def load(self, plain: Mapping[str, Any], tensors: Mapping[str, dict[int, Tensor]]) -> None:
        """Go on from there."""
        self._iteration = plain["iteration"]
        self._errors, self._qs = dict(tensors["error"]), dict(tensors["q"])

    def _divide(self, bucket: Bucket) -> tuple[list[Tensor], list[_Matrix]]:
        """What is sent as it is, and what is compressed."""
        plain, matrices = [], []
        for position, (number, flat) in enumerate(bucket.pieces):
            shape = self._shape_of(bucket.parameters[position])
            if shape is None:
                plain.append(flat)
                continue
            error = self._errors.get(number)
            whole = (flat.clone() if error is None else flat + error).view(1, *shape[:2])
            matrices.append(_Matrix(position, number, flat, whole, shape[2]))
        return plain, matrices

    def _q_of(self, matrix: _Matrix) -> Tensor:
        """The last Q, or the first, which all ranks draw alike; made orthogonal."""
        columns = matrix.whole.shape[2]
        q = self._qs.get(matrix.number)
        if q is None:
            q = self._first_q(matrix.number, columns * matrix.rank, matrix.flat.dtype)
        q = q.to(matrix.flat.device, copy=True).view(1, columns, matrix.rank)
        _orthogonalize(q, self._epsilon)
        return q

    def _first_q(self, number: int, size: int, dtype: torch.dtype) -> Tensor:
        generator = torch.Generator().manual_seed((self._seed << 24) + number)
        return torch.randn(size, generator=generator, dtype=dtype, device="cpu")

    def _sum(self, tensors: list[Tensor]) -> list[Tensor]:
        """Over all ranks; flat."""
        if not tensors:
            return []
        total = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(total, group=self._group)
        return list(total.split([tensor.numel() for tensor in tensors]))

    def _finish(self, matrix: _Matrix, factors: Tensor) -> Tensor:
        """Put their product into the bucket, and remember what it lacks; returns `factors`."""
        _, rows, columns = matrix.whole.shape
        found = product(factors, rows, columns)
        matrix.flat.copy_(found)
        if self._has_feedback:
            self._errors[matrix.number] = matrix.whole.view(-1) - found
        self._qs[matrix.number] = factors[rows * matrix.rank :]
        return factors

    def _shape_of(self, parameter: Tensor) -> tuple[int, int, int] | None:
        """Rows, columns and rank; None where it does not pay."""
        if parameter.dim() == 0 or parameter.numel() == 0:
            return None
        rows = parameter.shape[0]
        columns = parameter.numel() // rows
        rank = min(rows, columns, self._rank)
        pays = (rows + columns) * rank * self._rate < rows * columns
        return (rows, columns, rank) if pays else None
