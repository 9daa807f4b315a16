"""DCP on a store of everstep, in one process: what comes back, which step, what is refused."""

import contextlib
import dataclasses
import inspect
import io
import json
import subprocess
import sys
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import everstep
from comparing import check_equal, kinds
from everstep.format.document import seal
from everstep.integrations.dcp import StorageReader, StorageWriter, split_id
from everstep.store import commit

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


@contextlib.contextmanager
def refused(kind, *words):
    """DCP hands on what its storage raises by rank."""
    with pytest.raises(dcp.api.CheckpointException) as caught:
        yield
    (error,) = [failure[0] for failure in caught.value.failures.values()]
    assert type(error) is kind, error
    assert all(word in str(error) for word in words), error


def save(store, state, step=None, planner=None, **more):
    dcp.save(state, storage_writer=StorageWriter(store, step, **more), planner=planner)


def load(store, state, step=None, planner=None):
    dcp.load(state, storage_reader=StorageReader(store, step), planner=planner)
    return state


def trained(seed=0, width=8):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(width, 600), nn.ReLU(), nn.Linear(600, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))
    model(torch.randn(4, width)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def emptied(state):
    """The same structure with other values."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: emptied(value) for key, value in state.items()}
    return None


KINDS = {
    "int": 3,
    "large": 1 << 80,
    "float": float("-inf"),
    "text": "ü",
    "none": None,
    "tuple": (1, (2.5, "x")),
    "list": [1, 2, [3]],
    "bytes": b"\x80\x04.",
    "set": {1, 2},
    "mappings": (OrderedDict(a=1), Counter("aab")),
    "array": np.arange(4, dtype=np.int16),
    "dtype": torch.bfloat16,
    "size": torch.Size([2, 3]),
}
TENSORS = {
    "half": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "eight": torch.arange(16, dtype=torch.uint8).view(torch.float8_e4m3fn),
    "mask": torch.tensor([True, False]),
    "wave": torch.tensor([1 + 2j]),
    "scalar": torch.tensor(7),
    "none": torch.zeros(0, 3),
    "turned": torch.arange(12.0).view(3, 4).t(),
    "large": torch.randn(700, 700),
}


def test_everything_comes_back_with_its_type(store):
    save(store, {"tensors": TENSORS, "objects": KINDS, "within": (TENSORS["half"], 3)}, step=5)
    found = {"tensors": emptied(TENSORS), "objects": dict.fromkeys(KINDS), "within": None}
    load(store, found, 5)
    check_equal(found["tensors"], TENSORS)
    check_equal({"half": found["within"][0]}, {"half": TENSORS["half"]})
    assert repr(found["objects"]) == repr(KINDS)
    assert everstep.Store(store).verify().ok
    assert torch.equal(everstep.Store(store).read(5)["tensors.large"], TENSORS["large"])


def test_one_element_of_a_column(store):
    """torch calls it contiguous, whatever its stride."""
    save(store, {"w": torch.arange(8.0).view(4, 2)[:1, 1]})
    assert load(store, {"w": torch.zeros(1)})["w"].item() == 1


def test_training_goes_on_from_it(store):
    model, optimizer = trained()
    weights, moments = get_state_dict(model, optimizer)
    save(store, {"model": weights, "optimizer": moments, "step": 1})
    other, another = trained(seed=1)
    weights, moments = get_state_dict(other, another)
    found = load(store, {"model": weights, "optimizer": moments, "step": 0})
    set_state_dict(
        other, another, model_state_dict=found["model"], optim_state_dict=found["optimizer"]
    )
    assert found["step"] == 1
    assert another.param_groups[0]["lr"] == 0.01
    for each, its in ((model, optimizer), (other, another)):
        torch.manual_seed(3)
        its.zero_grad()
        each(torch.randn(4, 8)).square().mean().backward()
        its.step()
    check_equal(other.state_dict(), model.state_dict())


def test_a_stream_of_bytes_is_one_again(store):
    data = io.BytesIO()
    torch.save([1.5], data)
    save(store, {"losses": data, "bytes": data.getvalue()})
    found = load(store, {"losses": None, "bytes": None})
    assert isinstance(found["losses"], io.BytesIO)
    assert torch.load(found["losses"]) == [1.5]
    assert found["bytes"] == data.getvalue()


def test_steps_and_epochs(store):
    state = {"x": torch.ones(3)}
    writer = StorageWriter(store)
    dcp.save(state, storage_writer=writer)
    dcp.save(state, storage_writer=writer)
    dcp.save(state, checkpoint_id=f"{store}@5000", storage_writer=StorageWriter())
    found = everstep.Store(store)
    assert found.steps() == [1, 2, 5000]
    assert [found.manifest(step).epoch for step in found.steps()] == [1, 1, 2]
    assert found.manifest(5000).parent == {"step": 2, "epoch": 1}
    with refused(everstep.Conflict, "epoch 1", "epoch 2 has started"):
        dcp.save(state, storage_writer=writer)
    with refused(everstep.Conflict, "step 5000", "newest one, 5000"):
        save(store, state, step=5000)
    save(store, {"x": torch.zeros(3)})
    assert found.latest() == 5001
    assert load(store, {"x": torch.ones(3)})["x"].tolist() == [0, 0, 0]
    reader = StorageReader()
    dcp.load(state, checkpoint_id=f"{store}@00000002-0001", storage_reader=reader)
    assert state["x"].tolist() == [1, 1, 1]


def test_a_step_counts_for_the_id_that_names_it(store):
    writer, reader = StorageWriter(), StorageReader(path=store)
    for checkpoint_id, value in ((f"{store}@5", 5), (store, 6)):
        dcp.save({"x": torch.tensor(value)}, checkpoint_id=checkpoint_id, storage_writer=writer)
    assert everstep.Store(store).steps() == [5, 6]
    for checkpoint_id, value in ((f"{store}@5", 5), (store, 6)):
        found = {"x": torch.tensor(0)}
        dcp.load(found, checkpoint_id=checkpoint_id, storage_reader=reader)
        assert found["x"].item() == value


def test_ids():
    assert split_id("runs/gpt") == ("runs/gpt", None)
    assert split_id("runs/gpt@12") == ("runs/gpt", "12")
    assert split_id("runs/gpt@12-3") == ("runs/gpt", "12-3")
    assert split_id("me@host/gpt") == ("me@host/gpt", None)
    assert StorageWriter("runs/gpt", 12).checkpoint_id == "runs/gpt@12"
    assert StorageReader("runs/gpt@12").checkpoint_id == "runs/gpt@12"
    assert StorageWriter.validate_checkpoint_id("runs/gpt@12")
    assert not StorageReader.validate_checkpoint_id("abc://runs/gpt")
    with pytest.raises(ValueError, match="STORE@STEP"):
        StorageReader().read_metadata()


class Told(DefaultSavePlanner):
    """Keeps what it is told of the storage."""

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.storage_meta = storage_meta


def test_what_dcp_is_told_of_a_checkpoint(store):
    writer, planner = StorageWriter(store), Told()
    dcp.save({"x": torch.ones(3)}, storage_writer=writer, planner=planner)
    assert planner.storage_meta.save_id == writer.save_id
    reader = StorageReader(store)
    found = reader.read_metadata()
    assert found.version == CURRENT_DCP_VERSION
    assert found.storage_meta.checkpoint_id == str(store)
    assert found.storage_meta.save_id == writer.save_id
    assert found.storage_meta.load_id == reader.load_id


def test_options_of_the_file_system_writer(store):
    options = inspect.signature(dcp.FileSystemWriter).parameters.values()
    given = {each.name: each.default for each in options if each.name != "path"}
    dcp.save({"x": torch.ones(3)}, storage_writer=StorageWriter(store, **given))
    given |= {"single_file_per_rank": False, "thread_count": 4, "sync_files": False}
    dcp.save({"x": torch.ones(3)}, storage_writer=StorageWriter(store, **given))
    assert len(everstep.Store(store).steps()) == 2
    for wrong in ({"_extensions": ["rot13"]}, {"threads": 4}):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            StorageWriter(store, **wrong)


def test_in_the_place_of_torchs_own(store, monkeypatch):
    """As whoever runs torch's tests against it has it."""
    monkeypatch.setattr(dcp, "FileSystemWriter", StorageWriter)
    monkeypatch.setattr(dcp, "FileSystemReader", StorageReader)
    writer = dcp.FileSystemWriter(store, thread_count=2, single_file_per_rank=False)
    dcp.save({"x": torch.ones(3)}, storage_writer=writer)
    found = {"x": torch.zeros(3)}
    dcp.load(found, storage_reader=dcp.FileSystemReader(store))
    assert found["x"].tolist() == [1, 1, 1]


def test_retention(store):
    for step in range(1, 5):
        save(store, {"x": torch.ones(step)}, keep=everstep.Keep(last=2))
    assert everstep.Store(store).steps() == [3, 4]
    assert len(list((store / "data").glob("*.safetensors"))) == 2


def test_beside_a_checkpointer(store):
    model, optimizer = trained()
    state = {"model": model, "optimizer": optimizer, "note": {"epoch": 3}}
    with everstep.Checkpointer(store, state, strategy=everstep.Full()) as checkpointer:
        checkpointer.save(7).wait("local", 60)
        with refused(everstep.Conflict, "close() that Checkpointer"):
            save(store, {"x": torch.ones(3)})
    other, another = trained(seed=1)
    weights, moments = get_state_dict(other, another)
    note = {"epoch": None}
    found = load(store, {"model": weights, "optimizer": moments, "note": note}, 7)
    assert found["note"] == {"epoch": 3}
    set_state_dict(other, another, model_state_dict=weights, optim_state_dict=moments)
    check_equal(other.state_dict(), model.state_dict())
    assert str(another.state_dict()) == str(optimizer.state_dict())
    other, _ = trained(seed=2)
    save(store, {"model": other.state_dict(), "more": 1})
    with everstep.Checkpointer(store, {"model": model}) as checkpointer:
        assert checkpointer.restore(only=["model"]) == 8
        check_equal(model.state_dict(), other.state_dict())
        checkpointer.save(9).wait("local", 60)
    assert everstep.Store(store).steps() == [7, 8, 9]


class Noisy(nn.Module):
    """Has buffers, which no optimizer changes, and a frozen weight."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 60), nn.BatchNorm1d(60), nn.Linear(60, 2))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)


def logging_run(seed):
    """What a program gives a Checkpointer; moments begin in the first step."""
    torch.manual_seed(seed)
    net = Noisy()
    optimizer = torch.optim.AdamW(net.model.parameters(), lr=0.01 * (seed + 1))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return {"net": net, "optimizer": optimizer, "scheduler": scheduler, "note": {"at": seed}}


def logs(store, steps, **options):
    """Train, and save each step."""
    run = logging_run(0)
    with everstep.Checkpointer(store, run, **options) as checkpointer:
        for step in range(1, steps + 1):
            run["optimizer"].zero_grad()
            run["net"].model(torch.randn(4, 8)).square().mean().backward()
            run["optimizer"].step()
            run["scheduler"].step()
            run["note"]["at"] = torch.tensor([step])
            checkpointer.step(step).wait("local", 60)


def stepped(seed):
    """Another program's, whose optimizer has moments to be filled."""
    run = logging_run(seed)
    run["net"].model(torch.randn(4, 8)).square().mean().backward()
    run["optimizer"].step()
    return run


def loaded(store, step, seed=1):
    """By DCP, as its own state dict utilities have it."""
    run = stepped(seed)
    net, optimizer = run["net"], run["optimizer"]
    weights, moments = get_state_dict(net, optimizer)
    note = {"at": torch.tensor([0])}
    found = {"net": weights, "optimizer": moments, "scheduler": run["scheduler"], "note": note}
    load(store, found, step)
    weights, moments = found.pop("net"), found.pop("optimizer")
    set_state_dict(net, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return {**run, "note": found["note"]}


def said(run):
    """All of it, with the bits of its tensors."""
    plain = {name: run[name].state_dict() for name in ("net", "optimizer", "scheduler")}
    data = io.BytesIO()
    torch.save({**plain, "note": run["note"]}, data)
    data.seek(0)
    return repr(torch.utils._pytree.tree_map(bits, torch.load(data)))


def bits(value):
    if not isinstance(value, torch.Tensor):
        return value
    return value.dtype, value.shape, value.contiguous().reshape(-1).view(torch.uint8).tolist()


def test_a_step_of_a_log_is_replayed(store):
    """Of a run with the default strategy each step comes back as restore() has it."""
    logs(store, 6)
    assert kinds(store).endswith("rrr")
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*") if path.is_file()}
    for step in everstep.Store(store).steps():
        run = logging_run(2)
        with everstep.Checkpointer(store.parent / "own", run) as checkpointer:
            assert checkpointer.restore(step, from_store=store) == step
        assert said(loaded(store, step)) == said(run)
    assert said(loaded(store, None)) == said(run)
    assert {path: path.stat().st_mtime_ns for path in store.rglob("*") if path.is_file()} == before


def test_what_a_replay_came_to_is_let_go_of(store):
    logs(store, 4)
    reader = StorageReader(store)
    values = {"net": {"frozen": torch.zeros(3)}}
    for _ in range(2):
        dcp.load(values, storage_reader=reader)
        assert reader._opened is None
    check_equal(values["net"], {"frozen": everstep.Store(store).read()["net.frozen"]})


def test_a_log_that_does_not_verify(store):
    logs(store, 4, strategy=everstep.Log(base_every=100))
    link = everstep.Store(store).manifest(3).records[0].parts[0].packs[0]
    data = bytearray((store / link.path).read_bytes())
    data[4096:] = bytes(each ^ 1 for each in data[4096:])
    (store / link.path).write_bytes(data)
    values = {"net": {"frozen": torch.zeros(3)}}
    with refused(everstep.Corrupt, link.path):
        load(store, values, 4)
    assert not values["net"]["frozen"].any()
    load(store, values, 2)
    assert values["net"]["frozen"].any()


def test_a_log_that_takes_its_program_is_refused(store):
    """What a rule derives is in no record."""
    torch.manual_seed(0)
    model = nn.Linear(300, 30)
    mean = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "mean": mean, "optimizer": optimizer}
    derive = {"mean": lambda step: mean.update_parameters(model)}
    with everstep.Checkpointer(store, state, strategy=everstep.Log(), derive=derive) as saver:
        for step in (1, 2):
            optimizer.zero_grad()
            model(torch.randn(4, 300)).square().mean().backward()
            optimizer.step()
            saver.step(step).wait("local", 60)
    with refused(everstep.Unsupported, "'mean' is derived by a rule"):
        load(store, {"model": model.state_dict()}, 2)


# ---- planners ------------------------------------------------------------------------------------


def test_unflattened(store):
    state = {"model": {"w": torch.ones(3)}, "x": torch.arange(4)}
    flat = {"flatten_state_dict": False, "flatten_sharded_tensors": False}
    save(store, state, planner=DefaultSavePlanner(**flat))
    found = {"model": None, "x": torch.zeros(4, dtype=torch.int64)}
    load(store, found, planner=DefaultLoadPlanner(**flat))
    check_equal({**found["model"], "n": found["x"]}, {**state["model"], "n": state["x"]})


def test_partial_load(store):
    save(store, {"a": torch.ones(3), "b": {"c": torch.ones(2), "d": 4}})
    with pytest.raises(dcp.api.CheckpointException, match="Missing key"):
        load(store, {"a": torch.zeros(3), "e": torch.zeros(3)})
    planner = DefaultLoadPlanner(allow_partial_load=True)
    found = load(store, {"a": torch.zeros(3), "e": torch.zeros(3)}, planner=planner)
    assert (found["a"].tolist(), found["e"].tolist()) == ([1, 1, 1], [0, 0, 0])


def test_without_a_state_dict(store):
    save(store, {"a": {"b.c": torch.ones(3), "d": 4}, "e": [torch.zeros(2)]})
    reader = StorageReader(store)
    assert _load_state_dict_from_keys("a.d", storage_reader=reader) == {"a": {"d": 4}}
    found = _load_state_dict_from_keys(storage_reader=reader)
    assert found.keys() == {"a", "e"}
    assert found["a"]["b.c"].tolist() == [1, 1, 1]
    assert found["e"][0].tolist() == [0, 0]


def test_a_checkpointers_without_a_state_dict(store):
    """It is nested, as it would be had DCP saved it."""
    run = logging_run(1)
    with everstep.Checkpointer(store, run) as checkpointer:
        checkpointer.save(1).wait("local", 60)
    reader = StorageReader(store)
    found = _load_state_dict_from_keys(storage_reader=reader)
    check_equal(found["net"], run["net"].state_dict())
    assert found["scheduler"] == run["scheduler"].state_dict()
    (group,) = found["optimizer"]["param_groups"]
    assert group["lr"] == run["optimizer"].param_groups[0]["lr"]
    assert group["params"] == [f"model.{name}" for name, _ in run["net"].model.named_parameters()]
    part = _load_state_dict_from_keys({"net", "optimizer.param_groups"}, storage_reader=reader)
    assert part.keys() == {"net", "optimizer"}
    assert part["optimizer"].keys() == {"param_groups"}


def test_nothing(store):
    save(store, {})
    assert load(store, {}) == {}
    assert everstep.Store(store).verify().ok


class Halved(DefaultSavePlanner):
    """Saves in half precision, and says so, or not."""

    says = True

    def create_local_plan(self):
        plan = super().create_local_plan()
        return dataclasses.replace(plan, items=[self.told(item) for item in plan.items])

    def told(self, item):
        if item.type == WriteItemType.BYTE_IO or not self.says:
            return item
        data = item.tensor_data
        properties = dataclasses.replace(data.properties, dtype=torch.float16)
        return dataclasses.replace(
            item, tensor_data=dataclasses.replace(data, properties=properties)
        )

    def transform_object(self, write_item, object):
        found = super().transform_object(write_item, object)
        return found.half() if isinstance(found, torch.Tensor) else found


def test_a_planner_that_converts(store):
    save(store, {"w": torch.ones(3), "n": (1, 2)}, planner=Halved())
    found = load(store, {"w": torch.zeros(3, dtype=torch.float16), "n": None})
    assert (found["w"].tolist(), found["n"]) == ([1, 1, 1], (1, 2))
    silent = Halved()
    silent.says = False
    with refused(everstep.Mismatch, "'w'", "torch.float16", "torch.float32"):
        save(store, {"w": torch.ones(3)}, planner=silent)


class Pickled(DefaultSavePlanner):
    """Makes bytes of objects by itself."""

    def transform_object(self, write_item, object):
        if write_item.type != WriteItemType.BYTE_IO:
            return object
        data = io.BytesIO()
        torch.save(object if object != "evil" else print, data)
        return data


def test_a_planner_that_pickles(store):
    save(store, {"n": {"a": (1, 2.5)}}, planner=Pickled(flatten_state_dict=False))
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    assert load(store, {"n": None}, planner=planner)["n"] == {"a": (1, 2.5)}
    with refused(everstep.Unsupported, "'n'", "pickles are not stored"):
        save(store, {"n": "evil"}, planner=Pickled())


class Cut(DefaultSavePlanner):
    """Leaves out, or has twice, the last row."""

    def __init__(self, boxes):
        super().__init__()
        self.boxes = boxes

    def create_local_plan(self):
        (item,) = super().create_local_plan().items
        items = []
        for at, length in self.boxes:
            chunk = dataclasses.replace(
                item.tensor_data.chunk, offsets=torch.Size([at, 0]), sizes=torch.Size([length, 2])
            )
            data = dataclasses.replace(item.tensor_data, chunk=chunk)
            index = dataclasses.replace(item.index, offset=torch.Size([at, 0]))
            new = dataclasses.replace(item, tensor_data=data, index=index, type=WriteItemType.SHARD)
            items.append(new)
        return dataclasses.replace(self.plan, items=items, planner_data={})

    def lookup_object(self, index):
        lengths = dict(self.boxes)
        start = index.offset[0]
        return self.state_dict[index.fqn][start : start + lengths[start]]


def test_a_tensor_is_all_there_or_nothing_is(store):
    values = {"w": torch.arange(8).view(4, 2)}
    save(store, values, planner=Cut([(0, 1), (1, 3)]))
    check_equal(load(store, {"w": torch.zeros(4, 2, dtype=torch.int64)}), values)
    with refused(everstep.Mismatch, "'w'", "nobody wrote [3:4,0:2]"):
        save(store, values, planner=Cut([(0, 1), (1, 2)]))
    assert everstep.Store(store).steps() == [1]
    assert len(list((store / "data").glob("*.safetensors"))) == 1


@pytest.mark.parametrize(("step", "found"), [(3, [1, 2, 3]), (None, [1, 2, 3]), (2, [1, 2])])
def test_a_save_that_ends_while_another_begins_is_not_left_behind(store, monkeypatch, step, found):
    """The other one has looked for the newest checkpoint, and not yet claimed its epoch."""
    save(store, {"w": torch.zeros(2)}, 1)
    claim = commit.claim_epoch

    def late(*given, **more):
        monkeypatch.setattr(commit, "claim_epoch", claim)
        save(store, {"w": torch.ones(2)}, 2)
        return claim(*given, **more)

    monkeypatch.setattr(commit, "claim_epoch", late)
    with (
        contextlib.nullcontext()
        if 3 in found
        else refused(everstep.Conflict, "not above its newest")
    ):
        save(store, {"w": torch.full((2,), 2.0)}, step)
    assert everstep.Store(store).steps() == found
    for each in found:
        assert load(store, {"w": torch.zeros(2)}, each)["w"].tolist() == [each - 1.0] * 2


def test_ranks_that_are_one_process(store):
    """As threads of it are: what another one of them has written stays."""
    planners = [DefaultSavePlanner(), DefaultSavePlanner()]
    writers = [StorageWriter(store), StorageWriter(store)]
    local = []
    for rank, (planner, writer) in enumerate(zip(planners, writers, strict=True)):
        planner.set_up_planner({f"w{rank}": torch.ones(3)}, is_coordinator=rank == 0)
        writer.set_up_storage_writer(rank == 0, rank=rank)
        local.append(writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planners[0].create_global_plan(local)
    plans = writers[0].prepare_global_plan(plans)
    rows = zip(writers, plans, planners, strict=True)
    written = [writer.write_data(plan, planner).value() for writer, plan, planner in rows]
    writers[0].finish(metadata, written)
    check_equal(everstep.Store(store).read(), {"w0": torch.ones(3), "w1": torch.ones(3)})


# ---- what DCP lets pass --------------------------------------------------------------------------


def test_another_dtype(store):
    save(store, {"w": torch.ones(3)})
    with refused(everstep.Mismatch, "'w'", "float32", "float64"):
        load(store, {"w": torch.zeros(3, dtype=torch.float64)})


def test_a_flipped_byte(store):
    save(store, {"w": torch.ones(3)})
    (pack,) = (store / "data").glob("*.safetensors")
    data = bytearray(pack.read_bytes())
    data[4097] ^= 1
    pack.write_bytes(data)
    with refused(everstep.Corrupt, "tensor 'w'"):
        load(store, {"w": torch.zeros(3)})
    assert not everstep.Store(store).verify().ok


def test_what_cannot_be_stored_is_named(store):
    with refused(everstep.Unsupported, "a.b.0", "builtin_function_or_method"):
        save(store, {"a": {"b": [print]}})
    with refused(everstep.Unsupported, "'s'", "sparse"):
        save(store, {"s": torch.eye(3).to_sparse()})
    with refused(everstep.Unsupported, "'dcp.planner'"):
        save(store, {"dcp": {"planner": "mine"}})
    assert not (store / "checkpoints").exists()


def rewritten(store, change):
    """The manifest, sealed anew."""
    path = next((store / "checkpoints").glob("*/manifest.json"))
    document = json.loads(path.read_bytes())
    del document["digest"]
    change(document)
    path.write_bytes(seal(document))


def test_nothing_of_a_store_is_unpickled(store):
    """What a manifest says is an object becomes one, or Corrupt: no pickle is read."""
    save(store, {"n": b"x"})
    evil = {"$": "pickle", "v": "gASVIAAAAAAAAACMCGJ1aWx0aW5zlIwFcHJpbnSUk5Qu"}
    rewritten(store, lambda document: document["objects"].update(n=evil))
    with refused(everstep.Corrupt, "pickle"):
        load(store, {"n": None})


def test_an_index_that_lies(store):
    save(store, {"w": torch.ones(4), "v": torch.ones(3)})

    def lie(document):
        named = {row["name"]: row for row in document["index"]["tensors"]}
        named["v"].update(shape=[4], runs=[[0, 1, [2], [2], 0]])

    rewritten(store, lie)
    assert "index" in everstep.Store(store).verify().problems["00000001-0001"][0]
    with refused(everstep.Corrupt, "differ in what it is"):
        load(store, {"v": torch.zeros(4), "w": torch.zeros(4)})


def test_where_there_is_nothing(store):
    with refused(everstep.Missing, "there is none"):
        load(store, {"w": torch.zeros(3)})
    dcp.save({"w": torch.ones(3)}, checkpoint_id=store)
    with refused(everstep.Missing, "everstep import"):
        load(store, {"w": torch.zeros(3)})
    reader = StorageReader(store)
    with pytest.raises(everstep.Missing):
        reader.read_metadata()
    save(store, {"w": torch.ones(3)})
    with refused(everstep.Missing, "no checkpoint of step 3"):
        load(store, {"w": torch.zeros(3)}, 3)
    values = {"w": torch.zeros(3)}
    dcp.load(values, storage_reader=reader)
    assert values["w"].tolist() == [1, 1, 1]


PROGRAM = """
import sys
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from everstep.integrations.dcp import StorageWriter

if __name__ == "__main__":
    dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=0, world_size=1)
    writer = StorageWriter(sys.argv[1])
    for step in (1, 2):
        state = {"w": torch.full((1000,), float(step)), "n": {"step": step}}
        future = dcp.async_save(
            state, storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType.PROCESS
        )
        state["w"].zero_()
        future.result()
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_async_by_a_process(store, tmp_path):
    """Each save unpickles the writer anew: it has one epoch all the same."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    words = [sys.executable, "-W", "ignore", program, store, tmp_path / "rendezvous"]
    subprocess.run(words, check=True, timeout=100)
    found = everstep.Store(store)
    assert [found.manifest(step).epoch for step in found.steps()] == [1, 1]
    assert found.read(1)["w"].tolist() == [1.0] * 1000
    assert load(store, {"n": {"step": 0}})["n"] == {"step": 2}
