"""Trainings of one small model in the layouts that PyTorch has, for tests on many ranks.

    def trains(layout, recipe):  # on each rank of a gang (gang.py)
        job = zoo.build(layout, recipe)
        losses = [job.train(step) for step in range(1, 4)]  # equal on all ranks
        return losses, job.full_state()  # dense tensors by canonical name; {} but on rank 0

    gang.run(trains, "fsdp2", zoo.Recipe(tied=True), size=zoo.SIZES["fsdp2"])

A job has what a user would give to a Checkpointer: `model`, as it is wrapped, and `optimizer`. All
of a recipe's jobs train the same: what differs is the order of sums. The same layout on as many
ranks gives the same bits. `SIZES` says on how many ranks a layout runs by default; `ddp`, `fsdp2`,
`fsdp1`, `fsdp1_flat` and `zero1` run on any number that divides the batch, `tp` on 1 or 2 (heads).
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, debug
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from zoo_model import (
    BATCH,
    LENGTH,
    MICROBATCHES,
    Block,
    Decoder,
    Recipe,
    adamw,
    batch,
    decoder,
    loss_of,
    mean,
    optimizer_of,
)

with warnings.catch_warnings(action="ignore"):  # torch's own, of torch.jit
    from torch.distributed.optim import ZeroRedundancyOptimizer

__all__ = ["LAYOUTS", "SIZES", "Job", "Recipe", "adamw", "build"]

FullState = dict[str, torch.Tensor]


class Job:
    """One training, on each of its ranks."""

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_rank: int = 0,
        data_size: int = 1,
    ) -> None:
        self.recipe = recipe
        self.model = model
        self.optimizer = optimizer
        self.data_rank = data_rank
        self.data_size = data_size

    def train(self, step: int) -> float:
        """One step; the loss of the global batch."""
        inputs, targets = self.batch(step)
        self.optimizer.zero_grad()
        loss = loss_of(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()
        return mean(_gathered(loss.item()))

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's inputs and targets."""
        inputs, targets = batch(self.recipe, step)
        size = BATCH // self.data_size
        mine = slice(self.data_rank * size, (self.data_rank + 1) * size)
        return inputs[mine], targets[mine]

    def full_state(self) -> FullState:
        """Parameters, buffers and `NAME:exp_avg`, …: dense copies on rank 0, by canonical name.

        Gathered with collectives: all ranks have to call it.
        """
        found = {name: _dense(tensor) for name, tensor in self._named()}
        for name, parameter in self._named():
            for key, value in self._state_of(parameter).items():
                found[f"{name}:{key}"] = _dense(value)
        return found if _rank() == 0 else {}

    def _state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.optimizer.state.get(parameter, {})

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        model = self.model
        if isinstance(model, DistributedDataParallel):
            model = model.module
        yield from model.named_parameters()
        yield from model.named_buffers()


class _FullyShardedJob(Job):
    """FSDP1: each rank has a range of each block's flat parameter."""

    def full_state(self) -> FullState:
        if not self.model._use_orig_params:
            return self._from_flat()
        found = {}
        whole = decoder(self.recipe)
        local = dict(fsdp1_names(self.model.named_parameters()))
        for name, parameter in whole.named_parameters():
            mine = local[name]
            parts = {"": mine.detach(), **self._state_of(mine)}
            for key, shards in _by_key(_gathered({k: v.clone() for k, v in parts.items()})):
                shards = [shard for shard in shards if shard is not None]
                tensor = shards[0] if key == "step" else torch.cat(shards).view(parameter.shape)
                found[f"{name}:{key}".rstrip(":")] = tensor
        found |= {name: tensor.clone() for name, tensor in fsdp1_names(self.model.named_buffers())}
        return found if _rank() == 0 else {}

    def _from_flat(self) -> FullState:
        """By torch's own functions (with use_orig_params and gloo, torch 2.13 has them wrong)."""
        with (
            warnings.catch_warnings(action="ignore"),
            fsdp.FullyShardedDataParallel.state_dict_type(
                self.model,
                fsdp.StateDictType.FULL_STATE_DICT,
                fsdp.FullStateDictConfig(rank0_only=True),
                fsdp.FullOptimStateDictConfig(rank0_only=True),
            ),
        ):
            found = self.model.state_dict()
            states = fsdp.FullyShardedDataParallel.optim_state_dict(self.model, self.optimizer)
        if _rank():
            return {}
        for name, state in states["state"].items():
            found |= {f"{name}:{key}": value for key, value in state.items()}
        if self.recipe.tied:
            found.pop("head.weight", None)
        return {name: tensor.clone() for name, tensor in found.items()}


def fsdp1_names(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Without what FSDP1 puts in."""
    return ((name.replace("_fsdp_wrapped_module.", ""), tensor) for name, tensor in named)


def _by_key(ranks: list[FullState]) -> Iterator[tuple[str, list[torch.Tensor | None]]]:
    for key in {key: None for rank in ranks for key in rank}:
        yield key, [rank.get(key) for rank in ranks]


class _ZeroJob(Job):
    """ZeRO-1: each rank has the optimizer's state of some parameters."""

    def _state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state = self.optimizer.optim.state.get(parameter, {})
        state = {key: value.clone() for key, value in state.items()}
        return next((state for state in _gathered(state) if state), {})


class _PipelineJob(Job):
    """A stage on each rank, or on each rank of `mesh`; `names` of its layers are local, `canonical`
    makes them global."""

    def __init__(self, recipe: Recipe, model: nn.Module, first: int, mesh: DeviceMesh) -> None:
        super().__init__(recipe, model, optimizer_of(recipe, model))
        self.first = first
        at, size = mesh.get_local_rank(), mesh.size()
        stage = PipelineStage(
            model,
            at,
            size,
            torch.device("cpu"),
            # Given, since to find them out takes a forward, which the model's buffer would count.
            input_args=_sample(recipe, recipe.width if at else None),
            output_args=_sample(recipe, recipe.width if at < size - 1 else recipe.vocabulary),
            group=mesh.get_group(),
        )
        self._schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
        self._is_first, self._is_last = stage.is_first, stage.is_last

    def train(self, step: int) -> float:
        inputs, targets = self.batch(step)
        self.optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        self._schedule.step(
            *([inputs] if self._is_first else []),
            **({"target": targets, "losses": losses} if self._is_last else {}),
        )
        self.optimizer.step()
        return mean(_gathered([loss.item() for loss in losses])[-1])

    def canonical(self, name: str) -> str:
        """The name in the whole model of what this stage calls `name`."""
        head, *rest = name.split(".", 2)
        if head != "blocks" or not rest:
            return name
        return ".".join([head, str(int(rest[0]) + self.first), *rest[1:]])

    def full_state(self) -> FullState:
        found = {name: _dense(tensor) for name, tensor in self._named()}
        for name, parameter in self._named():
            for key, value in self._state_of(parameter).items():
                found[f"{name}:{key}"] = _dense(value)
        found = {self.canonical(name): tensor for name, tensor in found.items()}
        stages = _gathered(found)
        if _rank():
            return {}
        return {name: tensor for stage in stages for name, tensor in stage.items()}


_built: list[tuple[str, int]] = []
"""The last layout of this process, and how many groups there were before it."""


def build(layout: str, recipe: Recipe | None = None) -> Job:
    """A training in `layout`, on the world as it is; the same start in all layouts.

    The parameters of `fsdp1_flat` are mixtures: it needs a recipe that is not `grouped`.
    """
    built = layout, len(dist.distributed_c10d._world.pg_map)
    if _built != [built]:
        # DTensor goes on with what it has found out of equal meshes of a world that has ended,
        # whose groups had other names, as they are numbered. torch 2.9 cannot forget it.
        getattr(debug, "_clear_sharding_prop_cache", lambda: None)()
        _built[:] = [built]
    return LAYOUTS[layout](recipe or Recipe())


def _dense_job(recipe: Recipe) -> Job:
    model = decoder(recipe)
    return Job(recipe, model, optimizer_of(recipe, model))


def _ddp(recipe: Recipe) -> Job:
    model = _replicated(recipe)
    return Job(recipe, model, optimizer_of(recipe, model), *_data())


def _zero1(recipe: Recipe) -> Job:
    model = _replicated(recipe)
    recipe = replace(recipe, optimizer=partial(_redundancy_free, recipe.optimizer))
    optimizer = optimizer_of(recipe, model)
    return _ZeroJob(recipe, model, optimizer, *_data())


def _redundancy_free(optimizer: partial, parameters: object) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(parameters, optimizer_class=optimizer.func, **optimizer.keywords)


def _replicated(recipe: Recipe) -> DistributedDataParallel:
    """Several buckets, and the same ones in each step: see find_unused_parameters.

    Without it DDP makes its buckets anew after the first step, also after a restart; from three
    ranks on they sum in another order then, and a training that goes on is no more bit-equal.
    """
    model = _shared(decoder(recipe), dist.get_world_size())
    return DistributedDataParallel(model, find_unused_parameters=True, bucket_cap_mb=0.02)


def _fsdp2(recipe: Recipe) -> Job:
    return _sharded(recipe, decoder(recipe), init_device_mesh("cpu", (dist.get_world_size(),)))


def _hsdp(recipe: Recipe) -> Job:
    mesh = init_device_mesh(
        "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard")
    )
    return _sharded(recipe, decoder(recipe), mesh)


def _tp(recipe: Recipe) -> Job:
    model = _parallel(recipe, init_device_mesh("cpu", (dist.get_world_size(),)))
    return Job(recipe, model, optimizer_of(recipe, model))


def _fsdp_tp(recipe: Recipe) -> Job:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    model = _parallel(recipe, mesh["tp"])
    return _sharded(recipe, model, mesh["dp"])


def _fsdp1(recipe: Recipe, use_orig_params: bool) -> Job:
    model = fsdp.FullyShardedDataParallel(
        _shared(decoder(recipe), dist.get_world_size()),
        auto_wrap_policy=fsdp.wrap.ModuleWrapPolicy({Block}),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )
    optimizer = optimizer_of(recipe, model)
    return _FullyShardedJob(recipe, model, optimizer, *_data())


def _pipeline(recipe: Recipe) -> Job:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return _PipelineJob(recipe, *_stage(recipe, mesh), mesh)


def _pipeline_tp(recipe: Recipe) -> Job:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "tp"))
    model, first = _stage(recipe, mesh["pp"])
    return _PipelineJob(recipe, _parallel(recipe, mesh["tp"], model), first, mesh["pp"])


def _stage(recipe: Recipe, mesh: DeviceMesh) -> tuple[Decoder, int]:
    """This rank's of a pipeline, and the number of its first layer: they count from 0 in each."""
    assert not recipe.tied, "a tied weight would be in two stages"
    at, size = mesh.get_local_rank(), mesh.size()
    first, last = (recipe.layers * stage // size for stage in (at, at + 1))
    model = decoder(recipe)
    if at > 0:
        model.embedding = None
    if at < size - 1:
        model.norm = model.head = None
    mine = list(model.blocks.values())[first:last]
    model.blocks = nn.ModuleDict({str(number): block for number, block in enumerate(mine)})
    return model, first


def _parallel(recipe: Recipe, mesh: DeviceMesh, model: Decoder | None = None) -> Decoder:
    """Norms and scales stay plain tensors, the same on all ranks of `mesh`."""
    model = model or decoder(recipe)
    plan = {}
    if model.embedding is not None:
        plan["embedding"] = RowwiseParallel(input_layouts=Replicate())
    if model.head is not None:
        plan["head"] = ColwiseParallel(output_layouts=Replicate())
    for number in model.blocks:
        for name in ("q", "k", "v"):
            plan[f"blocks.{number}.{name}"] = ColwiseParallel()
        # Uneven: as a plain tensor, what it gives would not say how it is split.
        plan[f"blocks.{number}.up"] = ColwiseParallel(use_local_output=False)
        for name in ("o", "down"):
            plan[f"blocks.{number}.{name}"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)
    if recipe.tied:
        model.tie()
    return model


def _sharded(recipe: Recipe, model: Decoder, mesh: DeviceMesh) -> Job:
    _shared(model, mesh.size())
    for block in model.blocks.values():
        fsdp.fully_shard(block, mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    coordinate = mesh.get_coordinate()
    rank = coordinate[0] if len(coordinate) == 1 else coordinate[0] * mesh.size(1) + coordinate[1]
    return Job(recipe, model, optimizer_of(recipe, model), rank, mesh.size())


def _shared(model: Decoder, data_size: int) -> Decoder:
    model.share = data_size / BATCH
    return model


def _sample(recipe: Recipe, width: int | None) -> torch.Tensor:
    """What goes into a stage of a pipeline, or comes out: tokens where there is no width."""
    shape = (BATCH // MICROBATCHES, LENGTH)
    if width is None:
        return torch.zeros(shape, dtype=torch.int64, device="meta")
    return torch.zeros(*shape, width, device="meta", requires_grad=True)


def _data() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.clone()


def _gathered(value: object) -> list:
    """`value` of each rank, by rank."""
    if not dist.is_initialized():
        return [value]
    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


LAYOUTS: dict[str, Callable[[Recipe], Job]] = {
    "dense": _dense_job,
    "ddp": _ddp,
    "zero1": _zero1,
    "fsdp2": _fsdp2,
    "hsdp": _hsdp,
    "tp": _tp,
    "fsdp_tp": _fsdp_tp,
    "fsdp1": partial(_fsdp1, use_orig_params=True),
    "fsdp1_flat": partial(_fsdp1, use_orig_params=False),
    "pipeline": _pipeline,
    "pipeline_tp": _pipeline_tp,
}
SIZES = {
    "dense": 1,
    "ddp": 2,
    "zero1": 2,
    "fsdp2": 4,
    "hsdp": 4,
    "tp": 2,
    "fsdp_tp": 4,
    "fsdp1": 2,
    "fsdp1_flat": 2,
    "pipeline": 2,
    "pipeline_tp": 4,
}
