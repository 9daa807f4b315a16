"""DCP on a store of everstep, by several ranks: layouts, replicas, caches of plans, what goes wrong
on one of them."""

import errno
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gang import GangError
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from comparing import check_equal, kinds
from everstep import Checkpointer, Full, Log, Store
from everstep.cli.main import main as command
from everstep.integrations import dcp as integration
from everstep.integrations.dcp import StorageReader, StorageWriter
from everstep.redo import replay
from everstep.store import catalog
from everstep.tiers.disk import Disk
from everstep.tiers.system import System
from stores import packs_of


def made(kind, seed=0):
    """A model of uneven shapes, laid out in one of several ways, and its optimizer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 3))
    size = dist.get_world_size()
    if kind == "fsdp":
        fully_shard(model)
    elif kind == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("r", "s")))
    elif kind == "tp":
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        model = parallelize_module(model, init_device_mesh("cpu", (size,)), plan)
    elif kind == "fsdp+tp":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        model = parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"])
    elif kind == "ddp":
        model = DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))


def trains(model, optimizer, steps=2):
    torch.manual_seed(7)
    for _ in range(steps):
        model(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def state_of(model, optimizer):
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "step": 2}


def whole(model):
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(model, options=options)


def saves(store, kind, step=None):
    model, optimizer = made(kind)
    trains(model, optimizer)
    dcp.save(state_of(model, optimizer), storage_writer=StorageWriter(store, step))
    return whole(model)


def loads(store, kind):
    model, optimizer = made(kind, seed=1)
    state = {**state_of(model, optimizer), "step": 0}
    dcp.load(state, storage_reader=StorageReader(store))
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    assert state["step"] == 2
    assert optimizer.param_groups[0]["lr"] == 0.01
    return whole(model)


KINDS = ("fsdp", "hsdp", "tp", "fsdp+tp", "ddp")


@pytest.mark.parametrize("kind", KINDS)
def test_any_layout_becomes_any_other(gang, store, kind):
    saved = gang.run(saves, store, kind)[0]
    assert Store(store).verify().ok
    stored = Store(store).read()
    check_equal(
        {f"model.{name}": tensor for name, tensor in saved.items()},
        {name: tensor for name, tensor in stored.items() if name.startswith("model.")},
    )
    for other, size in (("fsdp", 2), ("tp", 3), ("plain", 1), (kind, 4)):
        check_equal(gang.run(loads, store, other, size=size)[0], saved)


def saves_by_checkpointer(store):
    model, optimizer = made("fsdp")
    state = {"model": model, "optimizer": optimizer, "step": 2}
    trains(model, optimizer)
    with Checkpointer(store, state, strategy=Full()) as checkpointer:
        checkpointer.save(2).wait("local", 60)
    return whole(model)


def test_what_a_checkpointer_saved(gang, store):
    saved = gang.run(saves_by_checkpointer, store)[0]
    for kind, size in (("fsdp", 2), ("plain", 1)):
        check_equal(gang.run(loads, store, kind, size=size)[0], saved)


def logs_by_checkpointer(store, kind, steps, **options):
    """Each step, with the default strategy; what the last one was."""
    model, optimizer = made(kind)
    state = {"model": model, "optimizer": optimizer, "step": torch.zeros(1)}
    with Checkpointer(store, state, **options) as checkpointer:
        for step in range(1, steps + 1):
            trains(model, optimizer, 1)
            state["step"] += 1
            checkpointer.step(step).wait("local", 60)
    return moved(model, optimizer)


def moved(model, optimizer):
    """Weights and moments, whole."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, moments = get_state_dict(model, optimizer, options=options)
    parts = moments.get("state", {}).items()  # the first rank has them
    return weights | {f"{name}:{key}": each for name, own in parts for key, each in own.items()}


def restored(store, kind):
    """By a Checkpointer."""
    model, optimizer = made(kind, seed=1)
    state = {"model": model, "optimizer": optimizer, "step": torch.zeros(1)}
    with Checkpointer(store.parent / "own", state) as checkpointer:
        checkpointer.restore(from_store=store)
    return moved(model, optimizer), state["step"].item()


def replayed(store, kind):
    """By DCP."""
    model, optimizer = made(kind, seed=1)
    trains(model, optimizer, 1)
    state = {**state_of(model, optimizer), "step": torch.zeros(1)}
    dcp.load(state, storage_reader=StorageReader(store))
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return moved(model, optimizer), state["step"].item()


def test_a_log_of_ranks_is_replayed(gang, store):
    """And resharded: on each layout it is what restore() has."""
    saved = gang.run(logs_by_checkpointer, store, "fsdp", 6)[0]
    assert kinds(store).endswith("rrr")
    for kind, size in (("fsdp", 2), ("tp", 2), ("plain", 1), ("fsdp", 4)):
        (expected, step), *_ = gang.run(restored, store, kind, size=size)
        (found, at), *_ = gang.run(replayed, store, kind, size=size)
        check_equal(expected, saved)
        check_equal(found, saved)
        assert step == at == 6


def failures(call):
    """What each rank is told of each."""
    with pytest.raises(dcp.api.CheckpointException) as caught:
        call()
    return [(rank, type(error).__name__) for rank, (error, _) in caught.value.failures.items()]


def replays_otherwise(store):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "_step", lambda state, call: None)
        return failures(lambda: replayed(store, "fsdp"))


def test_a_replay_that_comes_to_other_bytes_on_ranks(gang, store):
    log = Log(base_every=100, verify="full")
    gang.run(logs_by_checkpointer, store, "plain", 3, size=1, strategy=log)
    told = gang.run(replays_otherwise, store, size=2)
    assert told == [[(0, "Corrupt"), (1, "Corrupt")]] * 2


def test_a_copy_is_loaded(gang, store, tmp_path):
    saved = gang.run(saves, store, "fsdp")[0]
    assert command(["cp", str(store), str(tmp_path / "copy")]) == 0
    assert Store(tmp_path / "copy").verify().ok
    check_equal(gang.run(loads, tmp_path / "copy", "tp", size=2)[0], saved)


def test_replicas_are_written_once(gang, store):
    gang.run(saves, store, "ddp")
    manifest = Store(store).manifest()
    tables = Store(store).tables(manifest)
    having = Counter(name for table in tables for name in table.tensors)
    assert len(having) == 16
    assert set(having.values()) == {1}
    assert len(tables) > 1


class Rows(nn.Module):
    """One parameter, of which each rank has a hundred rows."""

    def __init__(self, value):
        super().__init__()
        rows = torch.full((100, 8), float(value))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.w = nn.Parameter(DTensor.from_local(rows, mesh, [Shard(0)]))


def loads_rows(store, model):
    dcp.load({"model": model.state_dict()}, storage_reader=StorageReader(store))


def restores_rows(store, model):
    with Checkpointer(store.parent / "own", {"model": model}) as checkpointer:
        assert checkpointer.restore(from_store=store, only=["model"])


def counts_tables(way, store):
    read, original, model = [], catalog.read_table, Rows(-1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalog, "read_table", lambda *of: read.append(of[1].rank) or original(*of))
        way(store, model)
    return read, model.w.to_local().unique().tolist()


def saves_rows(store):
    dcp.save({"model": Rows(dist.get_rank()).state_dict()}, storage_writer=StorageWriter(store))


@pytest.mark.parametrize("way", [loads_rows, restores_rows])
def test_a_rank_reads_the_tables_that_it_needs(gang, store, way):
    gang.run(saves_rows, store)
    found = gang.run(counts_tables, way, store)
    assert found == [([rank], [float(rank)]) for rank in range(4)]


def saves_cached(store, is_one_writer):
    model, optimizer = made("fsdp")
    writer = StorageWriter(store)
    for step in (1, 2, 3):
        trains(model, optimizer, 1)
        planner = DefaultSavePlanner(enable_plan_caching=True)
        planner._cached_plans_key = f"one writer: {is_one_writer}"
        state = {"model": get_model_state_dict(model), "step": step}
        writer = writer if is_one_writer else StorageWriter(store, step)
        dcp.save(state, storage_writer=writer, planner=planner)
    return whole(model)


@pytest.mark.parametrize("is_one_writer", [False, True])
def test_cached_plans_of_ranks(gang, store, is_one_writer):
    saved = gang.run(saves_cached, store, is_one_writer)[0]
    assert [Store(store).manifest(step).objects["step"] for step in (1, 2, 3)] == [1, 2, 3]
    stored = Store(store).read(3)
    check_equal(stored, {f"model.{name}": tensor for name, tensor in saved.items()})


class FullDisk(System):
    def pwrite(self, fd, data, offset):
        raise OSError(errno.ENOSPC, "No space left on device")


def saves_on_full(store):
    model, _ = made("fsdp")
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 2:
            patch.setattr(integration, "tier_at", lambda path: Disk(path, FullDisk()))
        writer = StorageWriter(store)
        return failures(lambda: dcp.save(get_model_state_dict(model), storage_writer=writer))


def test_a_full_disk_on_one_rank(gang, store):
    assert gang.run(saves_on_full, store) == [[(2, "Unavailable")]] * 4
    assert Store(store).steps() == []
    assert len(packs_of(store)) == 3  # it has left nothing
    gang.run(saves, store, "fsdp")
    assert Store(store).steps() == [1]
    assert len(packs_of(store)) == 4  # what others had left is gone


def saves_async(store):
    model, optimizer = made("fsdp")
    writer = StorageWriter(store)
    for _ in range(2):
        trains(model, optimizer, 1)
        state = {"model": get_model_state_dict(model), "step": 2}
        dcp.async_save(state, storage_writer=writer).result()
    return whole(model)


def test_async_by_ranks(gang, store):
    saved = gang.run(saves_async, store, size=2)[0]
    found = Store(store)
    assert [found.manifest(step).epoch for step in found.steps()] == [1, 1]
    check_equal(found.read(), {f"model.{name}": tensor for name, tensor in saved.items()})


def saves_alone(store):
    dcp.save({"x": torch.ones(3)}, storage_writer=StorageWriter(store), use_collectives=False)


def test_ranks_that_do_not_talk_are_refused(gang, store):
    with pytest.raises(GangError, match="use_collectives=False"):
        gang.run(saves_alone, store, size=2)
