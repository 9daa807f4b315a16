"""Communication hooks that send compressed gradients, and whose records hold what was sent.

    hook = everstep.compress(model, "topk", density=0.01)
    checkpointer = everstep.Checkpointer(store, {"model": model, "compression": hook, ...})

What the hook itself remembers (what it still owes to the weights) goes with the state. It is kept
by parameter: DistributedDataParallel makes its buckets anew in the second iteration of a process.
Sources: torch.distributed.algorithms.ddp_comm_hooks; Stich et al., Sparsified SGD with Memory
(NeurIPS 2018).
"""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from everstep.errors import Mismatch, Unsupported
from everstep.redo import compressed, kept
from everstep.redo.buckets import Bucket, Compressor, Future
from everstep.redo.forms import CompressedGradient, scatter
from everstep.redo.graphs import is_capturing
from everstep.redo.powersgd import PowerSGD
from everstep.sharding.leaves import canonical

# Its name since torch 2.13, and before.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_INT32_MAX = 2**31 - 1
_WORD = 8
"""Bytes to which what is sent is aligned."""


class Cast:
    """A Compressor: sends float16 or bfloat16, as torch's fp16_compress_hook does."""

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype) -> None:
        self._group = group
        self._dtype = dtype

    def reduce(self, bucket: Bucket) -> Future:
        """The mean of what all ranks have, rounded before and after each sum."""
        sent = bucket.buffer.to(self._dtype).div_(self._group.size())
        bucket.kept = sent
        buffer = bucket.buffer

        def widen(done: Any) -> Tensor:
            return buffer.copy_(done.value()[0])

        future: Any = dist.all_reduce(sent, group=self._group, async_op=True).get_future()
        widened: Future = future.then(widen)
        return widened

    def forms(self, bucket: Bucket) -> dict[int, CompressedGradient]:
        """Views of what was sent."""
        found = {}
        for position, (start, _) in enumerate(bucket.bounds):
            dtype, shape, strides = bucket.layout_of(position)
            narrow = bucket.kept.as_strided(shape, strides, start)
            found[position] = CompressedGradient("cast", narrow, None, dtype, shape, strides)
        return found

    def state(self) -> tuple[dict[str, Any], dict[str, dict[int, Tensor]]]:
        """None."""
        return {}, {}

    def size_of(self, what: str, parameter: Tensor) -> int:
        """There are no such tensors."""
        return 0

    def load(self, plain: Mapping[str, Any], tensors: Mapping[str, dict[int, Tensor]]) -> None:
        """Nothing to do."""


class TopK:
    """A Compressor: each rank sends the elements of largest magnitude, and remembers the rest."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        density: float = 0.01,
        error_feedback: bool = True,
        residual_dtype: torch.dtype | None = None,
    ) -> None:
        """`density`: the part of a parameter's elements that is sent, at least one.
        `error_feedback`: add what was not sent to the next gradient. `residual_dtype`: in which
        that is kept, and recorded with each step; None: the gradient's."""
        if not 0 < density <= 1:
            raise ValueError(f"density must be in (0, 1], it is {density}")
        if residual_dtype is not None and not residual_dtype.is_floating_point:
            raise ValueError(f"residual_dtype must be a floating point dtype, not {residual_dtype}")
        self._group = group
        self._density = density
        self._has_feedback = error_feedback
        self._dtype = residual_dtype
        self._residuals: dict[int, Tensor] = {}

    def reduce(self, bucket: Bucket) -> Future:
        """The mean of what all ranks send."""
        values, places = [], []
        for number, flat in bucket.pieces:
            if number in self._residuals:
                flat.add_(self._residuals[number])
            count = min(flat.numel(), max(1, round(self._density * flat.numel())))
            chosen = torch.topk(flat.abs(), count, sorted=False).indices
            values.append(flat[chosen])
            places.append(chosen)
            if self._has_feedback:
                # Not finite: a GradScaler skips this step, and it must not stay for ever.
                rest = torch.nan_to_num(flat, nan=0.0, posinf=0.0, neginf=0.0)
                rest[chosen] = 0
                self._residuals[number] = rest if self._dtype is None else rest.to(self._dtype)
        counts = [len(chosen) for chosen in values]
        is_small = bucket.buffer.numel() <= _INT32_MAX
        sent = [torch.cat(values), torch.cat(places).to(torch.int32 if is_small else torch.int64)]
        row = _pack(sent)
        rows = row.new_empty(self._group.size() * row.numel())
        future: Any = _gather(rows, row, group=self._group, async_op=True).get_future()
        pieces = [flat for _, flat in bucket.pieces]
        buffer = bucket.buffer

        def spread(done: Any) -> Tensor:
            done.value()  # raises where it failed
            bucket.kept = [part.split(counts, dim=1) for part in _unpack(rows, row.numel(), sent)]
            for values, places, flat in zip(*bucket.kept, pieces, strict=True):
                scatter(values, places, flat)
            return buffer

        spreading: Future = future.then(spread)
        return spreading

    def forms(self, bucket: Bucket) -> dict[int, CompressedGradient]:
        """What all ranks have sent."""
        found = {}
        for position, (values, places) in enumerate(zip(*bucket.kept, strict=True)):
            layout = bucket.layout_of(position)
            found[position] = CompressedGradient(
                "sparse", values.contiguous(), places.contiguous(), *layout
            )
        return found

    def state(self) -> tuple[dict[str, Any], dict[str, dict[int, Tensor]]]:
        """What was not sent yet."""
        return {}, {"residual": dict(self._residuals)}

    def size_of(self, what: str, parameter: Tensor) -> int:
        """As many as the parameter has."""
        return parameter.numel()

    def load(self, plain: Mapping[str, Any], tensors: Mapping[str, dict[int, Tensor]]) -> None:
        """Go on with those residuals."""
        self._residuals = dict(tensors["residual"])


class Compression:
    """A hook on a model, and its state: to be part of what is checkpointed. One per rank; not
    thread-safe."""

    is_by_rank = True
    """Each rank has a residual of its own."""

    def __init__(self, model: DistributedDataParallel, kind: str, compressor: Compressor) -> None:
        self._kind = kind
        self._compressor = compressor
        named = list(model.module.named_parameters())
        self._names = [canonical(name) for name, _ in named]
        self._parameters: list[Tensor] = [parameter for _, parameter in named]
        self._numbers = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        self._by_name = {name: index for index, name in enumerate(self._names)}
        # The model's reducer holds this object, in a way that no collector sees.
        self._model = weakref.ref(model)
        self._round: list[Bucket] | None = None

    def state_dict(self) -> dict[str, Any]:
        """What the next step depends on; tensors by name of the parameter, not copied."""
        plain, tensors = self._compressor.state()
        by_name = {
            what: {self._names[number]: found[number] for number in sorted(found)}
            for what, found in tensors.items()
        }
        return {"kind": self._kind, "numbers": plain, "tensors": by_name}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from that; tensors are copied. Raises Mismatch where it is not for such a hook."""
        if state_dict["kind"] != self._kind:
            raise Mismatch(
                f"restoring a compression: the checkpoint's is {state_dict['kind']!r}, the model's "
                f"is {self._kind!r}. Compress as it was, or leave it out with only=[...]"
            )
        tensors = {
            what: {self._number(what, name, found): found for name, found in by_name.items()}
            for what, by_name in state_dict["tensors"].items()
        }
        self._compressor.load(
            state_dict["numbers"],
            {
                what: {
                    number: found.detach().to(self._parameters[number].device, copy=True)
                    for number, found in numbered.items()
                }
                for what, numbered in tensors.items()
            },
        )

    def reduce(self, source: Any) -> Future:
        """One bucket, torch's; the hook."""
        parameters = source.parameters()
        numbers = tuple(self._numbers[id(parameter)] for parameter in parameters)
        bucket = Bucket(source, source.index(), source.buffer(), parameters, numbers)
        if bucket.index == 0:
            self._round = [] if kept.is_wanted() and not is_capturing() else None
            if self._round is not None:
                _after_backward(self._keep)
        if self._round is not None:
            self._round.append(bucket)
        return self._compressor.reduce(bucket)

    def _keep(self) -> None:
        """The gradients are there: say what each was made of."""
        buckets, self._round = self._round, None
        model = self._model()
        if model is None:
            return
        # Then one that no rank has used stays as it was, whatever was sent.
        may_differ = bool(model.find_unused_parameters or model.static_graph)
        threads = torch.get_num_threads()
        for bucket in buckets or ():
            compressed.release(bucket.parameters)
            layout = bucket.numbers, bucket.buffer.data_ptr(), threads
            for position, form in self._compressor.forms(bucket).items():
                compressed.keep(bucket.parameters[position], form, layout, may_differ)

    def _number(self, what: str, name: str, tensor: Tensor) -> int:
        number = self._by_name.get(name)
        if number is None:
            raise Mismatch(f"restoring a compression: the model has no parameter {name!r}")
        size = self._compressor.size_of(what, self._parameters[number])
        if tensor.numel() != size:
            raise Mismatch(
                f"restoring a compression: {what} of {name!r} has {tensor.numel()} elements in the "
                f"checkpoint, {size} in the model. Compress as it was, with the same options"
            )
        return number


def compress(model: DistributedDataParallel, kind: str, **options: Any) -> Compression:
    """Send this model's gradients compressed, and record them so.

    `kind`: "fp16" or "bf16": as torch's hooks; "powersgd": as torch's, options those of its
    PowerSGDState but for warm_start and batch_tensors_with_same_shape; "topk": density=0.01,
    error_feedback=True, residual_dtype=None. Call it once, on all ranks, before the first backward,
    and put what it returns into the state that is checkpointed. Raises ValueError and TypeError for
    unknown kinds and options, Unsupported for a model that cannot be compressed so.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(f"compress() wants a DistributedDataParallel, not a {type(model).__name__}")
    group = model.process_group
    makers: dict[str, Callable[..., Compressor]] = {
        "fp16": lambda: Cast(group, torch.float16),
        "bf16": lambda: Cast(group, torch.bfloat16),
        "powersgd": lambda **options: PowerSGD(group, **options),
        "topk": lambda **options: TopK(group, **options),
    }
    if kind not in makers:
        raise ValueError(f"compress() knows {', '.join(makers)}, not {kind!r}")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not all(parameter.is_floating_point() for parameter in trained):
        raise Unsupported(f"compressing by {kind!r}: a parameter is complex. Leave it uncompressed")
    compression = Compression(model, kind, makers[kind](**options))
    model.register_comm_hook(compression, _hook)
    return compression


def _hook(
    state: Compression,
    bucket: dist.GradBucket,  # type: ignore[name-defined] # torch looks at it
) -> torch.futures.Future[torch.Tensor]:
    return state.reduce(bucket)


def _after_backward(action: Callable[[], None]) -> None:
    """Do it at the end of this backward pass, after what others have put there by then: DDP hands
    out the gradients at its end."""

    def again() -> None:
        Variable._execution_engine.queue_callback(action)

    Variable._execution_engine.queue_callback(again)


def _pack(tensors: list[Tensor]) -> Tensor:
    """Bytes of these, each aligned."""
    parts = []
    for tensor in tensors:
        raw = tensor.view(torch.uint8)
        parts += [raw, raw.new_zeros(-len(raw) % _WORD)]
    return torch.cat(parts)


def _unpack(rows: Tensor, size: int, like: list[Tensor]) -> list[Tensor]:
    """What `_pack` made of tensors like these, of all ranks: [ranks, ...]."""
    found, start = [], 0
    table = rows.view(-1, size)
    for tensor in like:
        found.append(table[:, start : start + tensor.nbytes].view(tensor.dtype))
        start += tensor.nbytes + -tensor.nbytes % _WORD
    return found
