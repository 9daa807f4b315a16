"""DeepSpeed's ZeRO 1, 2 and 3: the flat partitions of an engine as boxes of its model's parameters.

    from everstep.integrations.deepspeed import parts

    engine, *_ = deepspeed.initialize(...)
    state, layout = parts(engine)
    checkpointer = everstep.Checkpointer(store, state, ranks=everstep.Ranks(layout=layout))
    checkpointer.restore()

What is saved of a parameter is what the optimizer updates: the fp32 partition, under the name of
the parameter. The module's own copies (of whatever dtype) are made of it after a restore. So a
plain model in fp32, DDP, FSDP2 or another stage or number of ranks takes the same checkpoint:
restore(only=["model", "optimizer"]).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from everstep.errors import Unsupported
from everstep.sharding.leaves import canonical
from everstep.sharding.mapped import Layout, Shard
from everstep.sharding.redundancy import OptimizerProxy

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_Run = tuple[torch.Tensor, nn.Parameter, int, int, int]
"""A partition of this rank, and a parameter: its first element there, where that lies, how many
there are (not above 0: none)."""


def parts(
    engine: Any, model: str = "model", optimizer: str = "optimizer"
) -> tuple[dict[str, Any], Layout]:
    """The state of an engine for a Checkpointer, and its `layout`; the names are those of the parts
    of a plain training. Raises Unsupported for what is neither ZeRO 1, 2 nor 3 in memory."""
    kind = type(engine.optimizer).__name__
    if kind == "DeepSpeedZeroOptimizer":
        zero: _Zero12 | _Zero3 = _Zero12(engine.optimizer)
    elif kind == "DeepSpeedZeroOptimizer_Stage3":
        zero = _Zero3(engine.optimizer)
    else:
        raise Unsupported(
            f"saving a DeepSpeed engine: its optimizer is a {kind}. ZeRO 1, 2 and 3 are known "
            f"here; without ZeRO give engine.module and its optimizer to the Checkpointer"
        )
    module: nn.Module = engine.module
    names = {id(p): f"{model}.{canonical(name)}" for name, p in module.named_parameters()}
    shards: dict[int, list[Shard]] = {}
    for flat, parameter, start, at, count in zero.partitions():
        found = shards.setdefault(id(flat), [])
        shards[id(parameter)] = []  # its own memory follows from that
        if count <= 0:  # other ranks have it: an empty shard says that it belongs to them
            start = at = count = 0
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        memory = flat.detach()[at : at + count]
        found += Shard.flat(names[id(parameter)], shape, start, memory)

    frozen = nn.ParameterList()  # of stage 3, whose parameters have no memory of their own
    whole: Any
    for whole in module.parameters():
        if id(whole) not in shards and hasattr(whole, "ds_tensor"):
            own = nn.Parameter(whole.ds_tensor.detach(), requires_grad=False)
            start = min(dist.get_rank(whole.ds_process_group) * own.numel(), whole.ds_numel)
            memory = own.detach()[: whole.ds_numel - start]
            shards[id(own)] = Shard.flat(names[id(whole)], whole.ds_shape, start, memory)
            shards[id(whole)] = []
            frozen.append(own)

    def layout(name: str, tensor: torch.Tensor) -> Sequence[Shard] | None:
        return shards.get(id(tensor))

    state = {model: module, optimizer: zero.optimizer, "engine": _EngineState(engine, zero)}
    return state | ({"frozen": frozen} if len(frozen) else {}), layout


class _Zero12:
    """Stages 1 and 2: each partition is a stretch of all parameters of its group."""

    def __init__(self, zero: Any) -> None:
        self._zero = zero
        groups = zero.optimizer.param_groups  # in its steps it has one of them at a time
        self.optimizer = OptimizerProxy(zero.optimizer, [group["params"] for group in groups])

    def partitions(self) -> Iterator[_Run]:
        zero = self._zero
        for group, flat in enumerate(zero.single_partition_of_fp32_groups):
            first = dist.get_rank(zero.real_dp_process_group[group]) * flat.numel()
            parameters = zero.round_robin_bit16_groups[group]
            offsets = zero.round_robin_bit16_offsets[group]
            for parameter, offset in zip(parameters, offsets, strict=True):
                begin = max(first, offset)
                end = min(first + flat.numel(), offset + parameter.numel())
                yield flat, parameter, begin - offset, begin - first, end - begin

    def refresh(self) -> None:
        """Make the module's parameters what the partitions are now. All ranks have to."""
        from deepspeed.runtime.zero.stage_1_and_2 import all_gather_dp_groups

        zero = self._zero
        for group, flat in enumerate(zero.single_partition_of_fp32_groups):
            rank = dist.get_rank(zero.real_dp_process_group[group])
            zero.parallel_partitioned_bit16_groups[group][rank].data.copy_(flat.data)
        all_gather_dp_groups(
            groups_flat=zero.bit16_groups_flat,
            partitioned_param_groups=zero.parallel_partitioned_bit16_groups,
            dp_process_group=zero.real_dp_process_group,
            start_alignment_factor=zero.nccl_start_alignment_factor,
            allgather_bucket_size=zero.allgather_bucket_size,
        )
        for group in range(len(zero.bit16_groups)):
            zero._update_model_bit16_weights(group)


class _Zero3:
    """Stage 3: each partition is made up of one stretch of each parameter."""

    def __init__(self, zero: Any) -> None:
        if zero.swap_optimizer or zero.params_in_nvme_and_cpu:
            raise Unsupported(
                "saving a DeepSpeed engine: its optimizer state is on NVMe, out of reach here. "
                "Offload it to the CPU, or not at all"
            )
        self._zero = zero
        # Its groups have their parameters in its steps alone.
        members: list[list[torch.Tensor]] = [[] for _ in zero.optimizer.param_groups]
        for number, flat in enumerate(zero.fp32_partitioned_groups_flat):
            members[zero.sub_group_to_group_id[number]].append(flat)
        self.optimizer = OptimizerProxy(zero.optimizer, members)

    def partitions(self) -> Iterator[_Run]:
        zero = self._zero
        for number, flat in enumerate(zero.fp32_partitioned_groups_flat):
            rank = zero._get_sub_group_partition_rank(number)
            at = 0
            for parameter in zero.fp16_groups[number]:
                size = parameter.ds_tensor.ds_numel
                start = rank * size
                yield flat, parameter, start, at, min(size, parameter.ds_numel - start)
                at += size

    def refresh(self) -> None:
        zero = self._zero
        for number in range(len(zero.fp32_partitioned_groups_flat)):
            zero._reassign_or_swap_out_partitioned_parameters(number)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].partition(zero.persistent_parameters)
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


class _EngineState:
    """What an engine counts; and where all tensors are restored, its module's parameters."""

    def __init__(self, engine: Any, zero: _Zero12 | _Zero3) -> None:
        self._engine = engine
        self._zero = zero

    def state_dict(self) -> dict[str, Any]:
        """Counters, the learning-rate scheduler, the scale of the loss."""
        engine = self._engine
        scheduler, scaler = engine.lr_scheduler, engine.optimizer.loss_scaler
        plain = (int, float, bool)
        return {
            **{name: getattr(engine, name) for name in _COUNTERS},
            "lr_scheduler": scheduler.state_dict() if scheduler else None,
            "loss_scaler": {k: v for k, v in vars(scaler).items() if isinstance(v, plain)},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """All ranks have to: parameters are gathered."""
        engine = self._engine
        for name in _COUNTERS:
            setattr(engine, name, state[name])
        if engine.lr_scheduler and state["lr_scheduler"] is not None:
            engine.lr_scheduler.load_state_dict(state["lr_scheduler"])
        vars(engine.optimizer.loss_scaler).update(state["loss_scaler"])
        with torch.no_grad():
            self._zero.refresh()
