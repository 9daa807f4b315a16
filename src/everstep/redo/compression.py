"""Gradients that DistributedDataParallel sends compressed, and records that hold what was sent.

    hook = everstep.compress(model, "topk", ratio=0.01)
    checkpointer = everstep.Checkpointer(store, {"model": model, "compression": hook, ...})

Training and replay make a gradient dense again by the same `expand`, and a record holds the
compressed form only where that is the gradient which the optimizer consumes, bit for bit
(`clipping.origins`). What top-k did not send yet is the hook's state. It is kept by parameter,
since DistributedDataParallel makes its buckets anew in the second iteration of a process.
Sources: torch.distributed.algorithms.ddp_comm_hooks; Stich et al., Sparsified SGD with Memory
(NeurIPS 2018); Alistarh et al., QSGD (NeurIPS 2017). Logs from before may hold the thin matrices
of Vogels et al., PowerSGD (NeurIPS 2019), which are still read.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from everstep.errors import Mismatch, Unsupported
from everstep.format.tables import is_dense, raw_name
from everstep.redo import clipping
from everstep.sharding.leaves import canonical

Kind = Literal["cast", "int8", "low rank", "sparse"]
Residual = Literal["bases", "records"]
Future = torch.futures.Future[Tensor]
# Its name since torch 2.13, and before.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_CASTS = {"fp16": torch.float16, "bf16": torch.bfloat16}
_INT32_MAX = 2**31 - 1
_SHAPED = ("cast", "int8")
"""Forms that have the gradient's own shape and strides."""
_LEVELS = 127
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, eq=False)
class CompressedGradient:
    """A gradient in compressed form. Nobody may change its tensors.

    `tensor`: "cast": the gradient in another dtype, same shape and strides. "int8": likewise, to be
    multiplied by `beside`, 0-d. "low rank": the elements of P [rows, rank], then those of Q
    [columns, rank]. "sparse": values [ranks, count], with `beside` of that shape, indices into the
    gradient's memory. `dtype`, `shape`, `strides`: of the gradient, which has neither gaps nor
    overlaps.
    """

    kind: Kind
    tensor: Tensor
    beside: Tensor | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def makes(self, gradient: Tensor, coefficient: Tensor | None, foreach: bool) -> Tensor:
        """Returns whether this gradient comes of it, clipped by that, bit for bit: 0-d."""
        layout = gradient.dtype, tuple(gradient.shape), gradient.stride()
        if layout != (self.dtype, self.shape, self.strides):
            return torch.zeros((), dtype=torch.bool, device=gradient.device)
        made = self.expand()
        if coefficient is not None:
            clipping.scale_in_place([made], coefficient, foreach)
        integers = _INTEGERS[gradient.element_size()]  # nan equals itself, 0.0 differs from -0.0
        return (flat_of(made).view(integers) == flat_of(gradient.detach()).view(integers)).all()

    def tensors(self, at: str, name: str) -> dict[str, Tensor]:
        """Its tensors by their names in a record; `at`: the call's prefix."""
        is_shaped = self.kind in _SHAPED
        found = {f"{at}.{name}": self.tensor if is_shaped else self.tensor.contiguous()}
        if self.beside is not None:
            found[_beside_name(self.kind, at, name)] = self.beside.contiguous()
        return found

    @torch.no_grad()
    def expand(self) -> Tensor:
        """The gradient, on the form's device. Raises ValueError, IndexError and RuntimeError for
        what is no form."""
        shape, strides = self.shape, self.strides
        if self.kind == "cast":
            return self.tensor.to(self.dtype)
        if self.kind == "int8" and self.beside is not None:
            return _dequantized(self.tensor, self.beside, self.dtype)
        if not is_dense(shape, strides):
            raise ValueError(f"a gradient of shape {shape} cannot have {strides=}")
        gradient = torch.empty_strided(shape, strides, dtype=self.dtype, device=self.tensor.device)
        flat = flat_of(gradient)
        if self.kind == "low rank" and flat.numel():
            flat.copy_(_product(self.tensor, shape[0], flat.numel() // shape[0]))
        elif self.kind == "sparse" and self.beside is not None:
            _scatter(self.tensor, self.beside, flat)
        else:
            raise ValueError(f"{self.kind!r} is no form of a gradient")
        return gradient


def flat_of(tensor: Tensor) -> Tensor:
    """A view of its elements in the order of memory; it must have neither gaps nor overlaps."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _scatter(values: Tensor, indices: Tensor, flat: Tensor) -> None:
    """The mean over ranks of what each of them sent, into `flat`, rank by rank: no element is added
    to twice at a time, so that the sums have one order. `values`, `indices`: [ranks, count]."""
    flat.zero_()
    for row, places in zip(values, indices, strict=True):
        flat.index_add_(0, places, row)
    flat.div_(len(values))


def _dequantized(levels: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return levels.to(torch.float32).mul_(scale).to(dtype)


def _product(factors: Tensor, rows: int, columns: int) -> Tensor:
    """P times Q transposed, flat, by the kernel that training used. Both lie in one tensor, as they
    did then, since kernels round by alignment."""
    rank = factors.numel() // (rows + columns)
    p, q = factors.split([rows * rank, columns * rank])
    return torch.bmm(p.view(1, rows, rank), q.view(1, columns, rank).transpose(1, 2)).view(-1)


# --- in a record ---------------------------------------------------------------------------------


def describe(forms: Mapping[str, CompressedGradient]) -> list[dict[str, Any]]:
    """What a record's call says of its compressed gradients, by name of the parameter."""
    groups: dict[tuple[str, torch.dtype], dict[str, Any]] = {}
    for name, form in forms.items():
        dtype = str(form.dtype).removeprefix("torch.")
        group = groups.setdefault(
            (form.kind, form.dtype), {"form": form.kind, "dtype": dtype, "names": []}
        )
        group["names"].append(name)
        if form.kind not in _SHAPED and form.strides != _row_major(form.shape):
            group.setdefault("strides", {})[name] = list(form.strides)
    return list(groups.values())


def by_parameter(said: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Of a call: what it says of each gradient that is compressed (its `form`) or was clipped (the
    `clip` that it was multiplied by), by name of the parameter."""
    forms = {name: group for group in said.get("compressed", ()) for name in group["names"]}
    clips = {name: {"clip": row} for row in said.get("clips", ()) for name in row["names"]}
    return {name: {**forms.get(name, {}), **clips.get(name, {})} for name in {**forms, **clips}}


def has_shape(said: Mapping[str, Any]) -> bool:
    """Whether what is recorded so has the gradient's shape, so that ranks can read what they have
    of it; else they read it whole."""
    return bool(said.get("form", "cast") == "cast")


def gradient_of(
    tensors: Mapping[str, Tensor], at: str, name: str, parameter: Tensor, said: Mapping[str, Any]
) -> Tensor | None:
    """The gradient that a record has for a parameter of that shape, dense and clipped, on its
    device; None where it has none (a DTensor's: of all ranks, where it has not `has_shape`).
    `said`: of it, by `by_parameter`. One that is not compressed is clipped in place, as training
    did. Raises KeyError where something is missing."""
    made = tensors.get(f"{at}.{name}", tensors.get(raw_name(at, name)))
    if made is None:
        return None
    shape, device = tuple(parameter.shape), parameter.device
    made = made.to(device)
    if "form" in said:
        beside = tensors.get(_beside_name(said["form"], at, name))
        form = CompressedGradient(
            said["form"],
            made,
            None if beside is None else beside.to(device),
            getattr(torch, said["dtype"]),
            shape,
            said.get("strides", {}).get(name, _row_major(shape)),
        )
        made = form.expand()
    if clip := said.get("clip"):
        clipping.scale_in_place([made], tensors[clip["coefficient"]], clip["foreach"])
    return made


def _beside_name(kind: Kind, at: str, name: str) -> str:
    return f"{at}!{'scale' if kind == 'int8' else 'indices'}.{name}"


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(torch.empty(tuple(shape), device="meta").stride())


# --- the hook ------------------------------------------------------------------------------------


class _Bucket:
    """What DistributedDataParallel sends at once: gradients, one behind the other in `buffer`."""

    def __init__(self, source: Any, names: Mapping[int, str]) -> None:
        """`source`: torch's GradBucket. `names`: of the model's parameters, by id()."""
        self.buffer: Tensor = source.buffer()
        self._parameters: list[Tensor] = source.parameters()
        sizes = [parameter.numel() for parameter in self._parameters]
        self.starts = list(accumulate(sizes[:-1], initial=0))
        self.pieces = self.buffer.split(sizes)
        """The gradients: flat, in the order of memory, views."""
        self.names = [names[id(parameter)] for parameter in self._parameters]
        self.is_last: bool = source.is_last()
        self._is_recorded = clipping.is_recording()

    def layout_of(self, position: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and strides of a gradient: its parameter's, where these have no gaps."""
        parameter = self._parameters[position]
        shape, strides = tuple(parameter.shape), parameter.stride()
        return shape, strides if is_dense(shape, strides) else _row_major(shape)

    def shaped(self, sent: Tensor) -> Iterator[Tensor]:
        """What was sent of each gradient, one behind the other as in `buffer`, in its shape."""
        for position, start in enumerate(self.starts):
            yield sent.as_strided(*self.layout_of(position), start)

    def note(self, position: int, kind: Kind, tensor: Tensor, beside: Tensor | None = None) -> None:
        """That gradient was made of this; of no use to a record where it is not smaller."""
        size = tensor.nbytes + (0 if beside is None else beside.nbytes)
        if self._is_recorded and size < self.pieces[position].nbytes:
            form = kind, tensor, beside, self.buffer.dtype, *self.layout_of(position)
            clipping.note(self._parameters[position], CompressedGradient(*form))


class Compression(ABC):
    """A hook on a model, and its state: to be part of what is checkpointed. One per rank; not
    thread-safe."""

    is_by_rank = True
    """Each rank has a residual of its own."""
    is_in_bases_alone = False
    """Whether its tensors are left out of records. Who goes on from one owes nothing, which trains
    better than what was owed at the base: much of that was sent since."""

    def __init__(self, model: DistributedDataParallel, kind: str) -> None:
        self._kind = kind
        self._group = model.process_group
        self._numbers: dict[str, int] = {}
        self._residuals: dict[str, Tensor] = {}
        """What was not sent yet, flat, by name of the parameter. Never written to."""
        self._parameters: dict[str, Tensor] = {
            canonical(name): parameter for name, parameter in model.module.named_parameters()
        }
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}

    def state_dict(self) -> dict[str, Any]:
        """What the next step depends on; tensors by name of the parameter, not copied."""
        found = self._residuals
        residuals = {name: found[name] for name in self._parameters if name in found}
        tensors = {"residual": residuals} if self._kind == "topk" else {}
        return {"kind": self._kind, "numbers": dict(self._numbers), "tensors": tensors}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from that; tensors are copied. Raises Mismatch where it is not for such a hook."""
        if state_dict["kind"] != self._kind:
            raise Mismatch(
                f"restoring a compression: the checkpoint's is {state_dict['kind']!r}, the model's "
                f"is {self._kind!r}. Compress as it was, or leave it out with only=[...]"
            )
        residuals = {}
        for name, residual in state_dict["tensors"].get("residual", {}).items():
            parameter = self._parameters.get(name)
            if parameter is None or residual.numel() != parameter.numel():
                raise Mismatch(
                    f"restoring a compression: the checkpoint has a residual of {name!r}, of "
                    f"{residual.numel()} elements, and the model no such parameter"
                )
            residuals[name] = residual.detach().to(parameter.device, copy=True)
        self._residuals = residuals
        known = self._numbers
        known |= {key: int(state_dict["numbers"].get(key, known[key])) for key in known}

    def reduce(
        self,
        bucket: dist.GradBucket,  # type: ignore[name-defined] # torch looks at it
    ) -> Future:
        """Send one bucket; the hook."""
        work, finish = self._send(_Bucket(bucket, self._names))

        def then(done: Any) -> Tensor:
            done.value()  # raises where it failed
            return finish()

        reduced: Future = work.get_future().then(then)
        return reduced

    @abstractmethod
    def _send(self, bucket: _Bucket) -> tuple[Any, Callable[[], Tensor]]:
        """Begin to send it: torch's work, and what makes the mean over all ranks of what came."""


class _Cast(Compression):
    """Sends float16 or bfloat16, as torch's fp16_compress_hook does."""

    def _send(self, bucket: _Bucket) -> tuple[Any, Callable[[], Tensor]]:
        """Rounded before and after each sum."""
        sent = bucket.buffer.to(_CASTS[self._kind]).div_(self._group.size())

        def widen() -> Tensor:
            for position, own in enumerate(bucket.shaped(sent)):
                bucket.note(position, "cast", own)
            return bucket.buffer.copy_(sent)

        return dist.all_reduce(sent, group=self._group, async_op=True), widen


class _Int8(Compression):
    """Sends whole numbers of levels, of which the largest sum of all ranks fits into a byte; what
    lies between two is rounded up or down by chance, so that on average nothing is lost. The chance
    follows from the seed, the iteration, the parameter and the rank: a replay needs none of it, and
    a run that goes on draws as if nothing had been."""

    def __init__(self, model: DistributedDataParallel, kind: str, *, seed: int = 0) -> None:
        super().__init__(model, kind)
        if not 1 <= self._group.size() <= _LEVELS:
            ranks = self._group.size()
            raise Unsupported(f"compressing by 'int8': {ranks} ranks, at most {_LEVELS}")
        self._levels = _LEVELS // self._group.size()
        self._numbers = {"seed": int(seed), "iteration": 0}

    def _send(self, bucket: _Bucket) -> tuple[Any, Callable[[], Tensor]]:
        """In levels of the largest of each parameter."""
        pieces = [piece.float() for piece in bucket.pieces]
        zero = bucket.buffer.new_zeros((), dtype=torch.float32)
        scales = torch.stack([each.abs().max() if each.numel() else zero for each in pieces])
        dist.all_reduce(scales, op=dist.ReduceOp.MAX, group=self._group)
        scales /= self._levels
        rows = zip(bucket.names, pieces, scales, strict=True)
        sent = torch.cat([self._rounded(*row) for row in rows])
        self._numbers["iteration"] += bucket.is_last
        means = scales / self._group.size()

        def widen() -> Tensor:
            for position, levels in enumerate(bucket.shaped(sent)):
                bucket.note(position, "int8", levels, means[position])
                piece, flat = bucket.pieces[position], flat_of(levels)
                piece.copy_(_dequantized(flat, means[position], piece.dtype))
            return bucket.buffer

        return dist.all_reduce(sent, group=self._group, async_op=True), widen

    def _rounded(self, name: str, piece: Tensor, scale: Tensor) -> Tensor:
        """In levels. Where something is not finite the scale is not either, nor what comes of it:
        a GradScaler sees it."""
        numbers = self._numbers
        drawn = f"{numbers['seed']} {numbers['iteration']} {self._group.rank()} {name}"
        seed = int.from_bytes(blake2b(drawn.encode(), digest_size=7).digest(), "big")
        chance = torch.rand(piece.shape, generator=torch.Generator().manual_seed(seed))
        found = (piece / scale).add_(chance.to(piece.device)).floor_().nan_to_num_(0.0)
        return found.clamp_(-self._levels, self._levels).to(torch.int8)


class _TopK(Compression):
    """Each rank sends the elements of largest magnitude, and remembers the rest."""

    def __init__(
        self,
        model: DistributedDataParallel,
        kind: str,
        *,
        ratio: float = 0.01,
        error_feedback: bool = True,
        residual: Residual = "bases",
        residual_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(model, kind)
        if not 0 < ratio <= 1:
            raise ValueError(f"ratio must be in (0, 1], it is {ratio}")
        if residual not in ("bases", "records"):
            raise ValueError(f"residual must be 'bases' or 'records', not {residual!r}")
        if residual_dtype is not None and not residual_dtype.is_floating_point:
            raise ValueError(f"residual_dtype must be a floating point dtype, not {residual_dtype}")
        self._ratio = ratio
        self._has_feedback = error_feedback
        self._dtype = residual_dtype
        self.is_in_bases_alone = residual == "bases"

    def _send(self, bucket: _Bucket) -> tuple[Any, Callable[[], Tensor]]:
        """Values and places, one behind the other, as bytes."""
        values, places = [], []
        for name, flat in zip(bucket.names, bucket.pieces, strict=True):
            if name in self._residuals:
                flat.add_(self._residuals[name])
            count = min(flat.numel(), max(1, round(self._ratio * flat.numel())))
            chosen = torch.topk(flat.abs(), count, sorted=False).indices
            values.append(flat[chosen])
            places.append(chosen)
            if self._has_feedback:
                # Not finite: a GradScaler skips this step, and it must not stay for ever.
                rest = torch.nan_to_num(flat, nan=0.0, posinf=0.0, neginf=0.0)
                rest[chosen] = 0
                self._residuals[name] = rest if self._dtype is None else rest.to(self._dtype)
        counts = [len(chosen) for chosen in values]
        is_small = bucket.buffer.numel() <= _INT32_MAX
        sent = torch.cat(values), torch.cat(places).to(torch.int32 if is_small else torch.int64)
        row = torch.cat([each.view(torch.uint8) for each in sent])
        rows = row.new_empty(self._group.size() * row.numel())

        def spread() -> Tensor:
            of_ranks = rows.view(-1, row.numel()).split([each.nbytes for each in sent], dim=1)
            found, at = (
                part.clone(memory_format=torch.contiguous_format).view(each.dtype)  # aligned
                for part, each in zip(of_ranks, sent, strict=True)
            )
            parts = zip(found.split(counts, dim=1), at.split(counts, dim=1), strict=True)
            for position, (of_piece, at_piece) in enumerate(parts):
                _scatter(of_piece, at_piece, bucket.pieces[position])
                bucket.note(position, "sparse", of_piece, at_piece)
            return bucket.buffer

        return _gather(rows, row, group=self._group, async_op=True), spread


def compress(model: DistributedDataParallel, kind: str, **options: Any) -> Compression:
    """Send this model's gradients compressed, and record them so.

    `kind`: "fp16" or "bf16": as torch's hooks. "int8": levels of each parameter's largest element,
    rounded by chance from `seed=0`. "topk": `ratio=0.01`, the part of a parameter's
    elements that is sent, at least one; `error_feedback=True`: add what was not sent to the next
    gradient; `residual_dtype=None`: in which that is kept (None: the gradient's);
    `residual="bases"`: what was not sent, which is as large as the gradients, is in whole states
    and not in records, so that a run which goes on from a record owes nothing: weights and
    optimizer are exact, the rest of the run is not (`exact: false`).
    "records": it is in each record as well, and all is exact. Call it once, on all ranks, before
    the first backward, and put what it returns into the state that is checkpointed. Raises
    ValueError and TypeError for unknown kinds and options, Unsupported for a model that cannot be
    compressed so.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(f"compress() wants a DistributedDataParallel, not a {type(model).__name__}")
    kinds: dict[str, type[Compression]]
    kinds = {**dict.fromkeys(_CASTS, _Cast), "int8": _Int8, "topk": _TopK}
    if kind not in kinds:
        raise ValueError(f"compress() knows {', '.join(kinds)}, not {kind!r}")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not all(parameter.is_floating_point() for parameter in trained):
        raise Unsupported(f"compressing by {kind!r}: a parameter is complex. Leave it uncompressed")
    compression = kinds[kind](model, kind, **options)
    model.register_comm_hook(compression, Compression.reduce)
    return compression
