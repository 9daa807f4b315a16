"""everstep import: what torch, DCP and safetensors have written, trained on as they would."""

import argparse
import json
import shutil
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemWriter, HuggingFaceStorageWriter
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from trained import Job

from commands import run, run_json
from everstep import Checkpointer, Store

REST = (4, 8)
CORPUS = Path(__file__).parent / "corpus"


def trained(groups=True):
    job = Job(groups=groups)
    job.run(1, 4)
    return job


def state_dicts(job):
    return {name: part.state_dict() for name, part in job.state.items()}


def resumed(store, only=None, groups=True):
    """The losses of a new training that goes on from the store."""
    job = Job(seed=1, groups=groups)
    with Checkpointer(store, job.state) as checkpointer:
        assert checkpointer.restore(only=only) == 3
        return job.run(*REST)


@pytest.mark.parametrize("groups", [True, False], ids=["two groups", "one group"])
def test_a_file_of_torch_trains_on(store, tmp_path, capsys, groups):
    job = trained(groups)
    torch.save({**state_dicts(job), "step": 3}, tmp_path / "latest.pt")
    said = run_json(capsys, "import", tmp_path / "latest.pt", store)
    assert (said["step"], said["from"], said["left_out"]) == (3, "torch", {})
    assert Store(store).verify().ok
    assert resumed(store, groups=groups) == job.run(*REST)


def test_a_bare_state_dict_of_a_wrapped_model(store, tmp_path, capsys):
    job = trained()
    weights = {f"module.{name}": each for name, each in job.model.state_dict().items()}
    torch.save(weights, tmp_path / "weights.pt")
    assert run("import", tmp_path / "weights.pt", store) == 1
    assert "say it by --step" in capsys.readouterr().err
    assert not store.exists()
    assert run("import", tmp_path / "weights.pt", store, "--step", "3", "--part", "model") == 0
    found = Store(store).read()
    expected = job.model.state_dict()
    assert found.keys() == {f"model.{name}" for name in expected}
    assert all(torch.equal(found[f"model.{name}"], each) for name, each in expected.items())


VALUES = {
    "numbers": [1, -(2**70), 2.5, float("inf"), True, None, 1 + 2j, "ü", b"\x00\xff"],
    "containers": (OrderedDict(b=1, a=2), {3: "x", (1, 2): "y"}, {1, 2}, frozenset("ab")),
    "others": [Counter("aab"), deque([1, 2], maxlen=3), range(3), bytearray(b"abc")],
    "defaults": defaultdict(list, {"a": [1]}),
    "arrays": [np.arange(6).reshape(2, 3), np.float32(1.5), np.asfortranarray(np.eye(3)[:2])],
    "torch": [torch.float16, torch.device("cpu"), torch.Size([2, 3])],
    "tensors": [torch.arange(5), torch.ones(3, 4).t(), torch.zeros(()), torch.empty(0, 3)],
    "views": [torch.arange(20.0)[3:9], torch.ones(2, 3, 4).permute(2, 0, 1), torch.tensor([True])],
}


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_values_come_back_with_their_types(store, tmp_path, protocol):
    torch.save({"own": VALUES, "step": 1}, tmp_path / "values.pt", pickle_protocol=protocol)
    assert run("import", tmp_path / "values.pt", store) == 0
    live = {"own": torch.load(tmp_path / "values.pt", weights_only=False)["own"]}
    for name in ("tensors", "views"):
        for each in live["own"][name]:
            each.zero_()
    with Checkpointer(store, live) as checkpointer:
        checkpointer.restore()
    expected = torch.load(tmp_path / "values.pt", weights_only=False)["own"]
    check(live["own"], expected)


def check(found, expected):
    assert type(found) is type(expected) or isinstance(expected, torch.Size)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            check(found[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            check(one, other)
    elif isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert torch.equal(found, expected)
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        assert np.array_equal(found, expected)
    else:
        assert found == expected


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_nobody_knows_is_left_out(store, tmp_path, capsys):
    job = trained()
    complex_ones = torch.ones(2, dtype=torch.complex64)
    strange = {
        "args": argparse.Namespace(lr=1),
        "objects": np.array([1, "a"], dtype=object),
        "days": np.array(["2020-01-01"], dtype="datetime64[D]"),
        "conjugated": complex_ones.conj(),
        "negated": torch.ones(2, dtype=torch.complex128).conj().imag,
        "quantised": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    }
    torch.save({**state_dicts(job), **strange, "epoch": 2, "step": 3}, tmp_path / "latest.pt")
    said = run_json(capsys, "import", tmp_path / "latest.pt", store)
    assert said["left_out"].keys() == strange.keys()
    assert "argparse.Namespace" in said["left_out"]["args"]
    assert resumed(store, only=["model", "optimizer", "scheduler"]) == job.run(*REST)


def test_only_some_parts(store, tmp_path):
    job = trained()
    torch.save({**state_dicts(job), "epoch": 2}, tmp_path / "latest.pt")
    words = ["--step", "3", "--only", "model", "--only", "optimizer", "--only", "scheduler"]
    assert run("import", tmp_path / "latest.pt", store, *words) == 0
    assert resumed(store) == job.run(*REST)


def test_parameters_that_have_numbers(store, tmp_path, capsys):
    """A third group order, which no rule knows: the user says it; or the optimizer has names."""
    job = trained()
    names = [name for name, _ in job.model.named_parameters()]
    order = names[::-1]
    own = dict(job.model.named_parameters())
    state = job.optimizer.state_dict()
    parameters = [p for g in job.optimizer.param_groups for p in g["params"]]
    place = {n: next(i for i, p in enumerate(parameters) if p is own[n]) for n in names}
    group = {**state["param_groups"][0], "params": list(range(len(names)))}
    moved = {i: state["state"][place[name]] for i, name in enumerate(order)}
    saved = {"model": job.model.state_dict(), "step": 3}
    torch.save({**saved, "optimizer": {"state": moved, "param_groups": [group]}}, tmp_path / "a")
    assert run("import", tmp_path / "a", store) == 1
    assert "give it by --names" in capsys.readouterr().err
    (tmp_path / "names.json").write_text(json.dumps(order))
    assert run("import", tmp_path / "a", store, "--names", tmp_path / "names.json") == 0
    found = Store(store).read()
    for name in names:
        expected = state["state"][place[name]]["exp_avg"]
        assert torch.equal(found[f"optimizer.model.{name}.exp_avg"], expected)
    (tmp_path / "names.json").write_text(json.dumps(names))
    assert (
        run("import", tmp_path / "a", store, "--step", "4", "--names", tmp_path / "names.json") == 1
    )
    (tmp_path / "names.json").write_text("5")
    assert run("import", tmp_path / "a", store, "--names", tmp_path / "names.json") == 1
    assert "no list of names" in capsys.readouterr().err
    assert run("import", tmp_path, store, "--from", "accelerate") == 1
    assert "is not of save_state()" in capsys.readouterr().err
    assert run("import", tmp_path / "a", store, "--step", "-1", "--only", "model") == 1
    assert "is not of step -1" in capsys.readouterr().err
    group["param_names"] = order
    torch.save({**saved, "optimizer": {"state": moved, "param_groups": [group]}}, tmp_path / "b")
    assert run("import", tmp_path / "b", store, "--step", "4") == 0
    again = Store(store).read()
    assert all(torch.equal(again[name], found[name]) for name in found)


def test_several_optimizers_whose_parameters_have_numbers(store, tmp_path):
    models = {"a": torch.nn.Linear(3, 2), "b": torch.nn.Linear(2, 2)}
    saved = {name: model.state_dict() for name, model in models.items()}
    for name, model in models.items():
        model(torch.ones(model.in_features)).sum().backward()
        optimizer = torch.optim.SGD([model.bias, model.weight], momentum=0.5)
        optimizer.step()
        saved[f"of_{name}"] = optimizer.state_dict()
    torch.save({**saved, "step": 1}, tmp_path / "saved")
    assert run("import", tmp_path / "saved", store) == 1
    (tmp_path / "names.json").write_text(json.dumps([["bias", "weight"]] * 2))
    assert run("import", tmp_path / "saved", store, "--names", tmp_path / "names.json") == 0
    found = Store(store).read()
    for name in models:
        buffer = found[f"of_{name}.{name}.bias.momentum_buffer"]
        assert buffer.equal(saved[f"of_{name}"]["state"][0]["momentum_buffer"])


class Training:
    def __init__(self, job):
        self.job = job

    def state_dict(self):
        weights, moments = get_state_dict(self.job.model, self.job.optimizer)
        own = {"scheduler": self.job.scheduler.state_dict(), "step": 3}
        return {"model": weights, "optimizer": moments, **own}

    def load_state_dict(self, saved):
        model, moments = saved["model"], saved["optimizer"]
        job = self.job
        set_state_dict(job.model, job.optimizer, model_state_dict=model, optim_state_dict=moments)
        job.scheduler.load_state_dict(saved["scheduler"])


@pytest.mark.filterwarnings("ignore")  # torch's own, of one process
@pytest.mark.parametrize("wrapped", [True, False])
def test_a_directory_of_dcp_trains_on(store, tmp_path, capsys, wrapped):
    job = trained()
    saved = {"app": Training(job)} if wrapped else Training(job).state_dict()
    dcp.save(saved, checkpoint_id=tmp_path / "dcp")
    said = run_json(capsys, "import", tmp_path / "dcp", store)
    assert (said["step"], said["from"], said["left_out"]) == (3, "dcp", {})
    other = Job(seed=2)
    if wrapped:
        dcp.load({"app": Training(other)}, checkpoint_id=tmp_path / "dcp")
        assert other.run(*REST) == resumed(store)
    else:
        assert job.run(*REST) == resumed(store)


@pytest.mark.filterwarnings("ignore")
def test_a_flat_directory_of_dcp(store, tmp_path, capsys):
    """As torchtitan has it: weights beside the parts, hyperparameters by parameter."""
    job = trained()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, moments = get_state_dict(job.model, job.optimizer, options=options)
    saved = {**weights, "optimizer": moments, "scheduler": job.scheduler.state_dict()}
    dcp.save(saved, checkpoint_id=tmp_path / "dcp")
    said = run_json(capsys, "import", tmp_path / "dcp", store, "--step", "3")
    assert (said["from"], said["left_out"]) == ("dcp", {})
    assert resumed(store) == job.run(*REST)


@pytest.mark.filterwarnings("ignore")
def test_a_directory_of_megatron(store, tmp_path, capsys):
    """As Megatron-core writes it in the format torch_dist, which is not installed here."""
    name = "decoder.layers.self_attention.linear_qkv.weight"
    weights = {name: torch.randn(6, 4), f"optimizer.state.exp_avg.{name}": torch.randn(6, 4)}
    dcp.save(weights, checkpoint_id=tmp_path / "iter_0000007")
    common = {"args": argparse.Namespace(lr=0.1), "iteration": 7, "checkpoint_version": 3.0}
    common["opt_param_scheduler"] = {"max_lr": 0.1, "num_steps": 56}
    torch.save(common, tmp_path / "iter_0000007" / "common.pt")
    said = run_json(capsys, "import", tmp_path / "iter_0000007", store)
    assert (said["step"], [*said["left_out"]]) == (7, ["args"])
    found, kept = Store(store).read(), Store(store).manifest().objects
    assert {key: torch.equal(found[f"model.{key}"], each) for key, each in weights.items()} == (
        dict.fromkeys(weights, True)
    )
    assert kept["opt_param_scheduler"] == common["opt_param_scheduler"]


@pytest.mark.filterwarnings("ignore")
def test_numbers_in_a_directory_of_dcp(store, tmp_path):
    """Plain state dicts, whose parameters have numbers."""
    job = trained()
    dcp.save(state_dicts(job), checkpoint_id=tmp_path / "dcp")
    assert run("import", tmp_path / "dcp", store, "--step", "3") == 0
    assert resumed(store) == job.run(*REST)


def test_files_of_safetensors(store, tmp_path, capsys):
    job = trained()
    weights = {name: each for name, each in job.model.state_dict().items() if "head" not in name}
    save_file(weights, tmp_path / "model.safetensors")
    words = ["import", tmp_path / "model.safetensors", store, "--step", "1"]
    assert run_json(capsys, *words)["from"] == "hf"
    shards = tmp_path / "shards"
    shards.mkdir()
    names = sorted(weights)
    for number, own in enumerate((names[:2], names[2:])):
        save_file({name: weights[name] for name in own}, shards / f"part-{number}.safetensors")
    index = {name: f"part-{int(name in names[2:])}.safetensors" for name in names}
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert run("import", shards, store, "--step", "2") == 0
    for step in (1, 2):
        found = Store(store).read(step)
        assert found.keys() == {f"model.{name}" for name in weights}
        assert all(torch.equal(found[f"model.{name}"], weights[name]) for name in weights)
    other = Job(seed=1)
    with Checkpointer(store, {"model": other.model}) as checkpointer:
        checkpointer.restore()
    assert torch.equal(other.model.head.weight, job.model.head.weight)


@pytest.mark.filterwarnings("ignore")
def test_safetensors_of_dcp(store, tmp_path, capsys):
    state, form = {"a": torch.arange(6.0), "b": torch.ones(2)}, SerializationFormat.SAFETENSORS
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "dcp", serialization_format=form))
    assert run("import", tmp_path / "dcp", store, "--step", "1") == 1
    assert "Unsupported" in capsys.readouterr().err
    writer = HuggingFaceStorageWriter(tmp_path / "whole", {"a": 1, "b": 2}, save_distributed=False)
    dcp.save(state, storage_writer=writer)
    assert run("import", tmp_path / "whole", store, "--step", "1") == 0
    dcp.save(
        state,
        storage_writer=HuggingFaceStorageWriter(str(tmp_path / "ranks"), save_distributed=True),
    )
    (one,) = (tmp_path / "ranks").rglob("shard-*")
    capsys.readouterr()
    assert run("import", one, store, "--step", "2") == 1  # of each tensor what that rank has
    assert "consolidate" in capsys.readouterr().err


def test_all_dtypes_of_safetensors(store, tmp_path):
    names = ["complex64", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz", "bool", "uint64"]
    values = {name: torch.ones(3).to(getattr(torch, name)) for name in names}
    save_file({**values, "empty": torch.empty(0, 2)}, tmp_path / "a.safetensors")
    assert run("import", tmp_path / "a.safetensors", store, "--step", "1") == 0
    assert run("export", store, "--to", "hf", tmp_path / "out") == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == {*values, "empty"}
    for name, value in values.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name].view(torch.uint8), value.view(torch.uint8))


def test_an_adapter_without_its_model(store, tmp_path, capsys):
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 1}))
    (folder / "adapter_config.json").write_text("{}")
    torch.save({}, folder / "rng_state.pth")
    save_file({"lora_A.weight": torch.ones(2)}, folder / "adapter_model.safetensors")
    assert run("import", folder, store) == 1
    assert "resume_from_checkpoint" in capsys.readouterr().err


def test_frozen_weights_of_zero_1(store, tmp_path):
    """Which nobody but the module has there."""
    shutil.unpack_archive(CORPUS / "zero-2.zip", tmp_path / "zero")
    (path,) = tmp_path.rglob("mp_rank_00_model_states.pt")
    said = torch.load(path, weights_only=False)
    said["module"]["frozen"] = torch.arange(3.0)
    torch.save(said, path)
    assert run("import", tmp_path / "zero", store) == 0
    assert Store(store).read(names=["model.frozen"])["model.frozen"].equal(torch.arange(3.0))


def test_universal_checkpoints_of_all_stages(store, other_store, tmp_path):
    shutil.unpack_archive(Path(__file__).parent / "corpus" / "ucp.zip", tmp_path)
    assert run("import", tmp_path, store, "--step", 1) == 0
    # Of stage 3 DeepSpeed leaves each tensor a row of numbers.
    for path in tmp_path.glob("*/zero/*/*.pt"):
        found = torch.load(path, weights_only=False)
        found = found["param"] if isinstance(found, dict) else found
        torch.save(found.flatten().clone() if path.stem != "step" else found, path)
    assert run("import", tmp_path, other_store, "--step", 1) == 0
    one, two = Store(store).read(), Store(other_store).read()
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_what_was_exported_comes_back(store, other_store, tmp_path):
    job = trained()
    with Checkpointer(store, job.state) as checkpointer:
        checkpointer.save(3)
    assert run("export", store, "--to", "hf", tmp_path / "out", "--shard-size", "100") == 0
    assert run("import", tmp_path / "out", other_store, "--step", "3") == 0
    found, expected = Store(other_store).read(), Store(store).read()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert {name for name in expected if name.startswith("model.")} == set(found) | {
        "model.head.weight"
    }


def test_a_store_has_one_writer(store, tmp_path, capsys):
    job = trained()
    torch.save({**state_dicts(job), "step": 3}, tmp_path / "latest.pt")
    with Checkpointer(store, job.state) as checkpointer:
        checkpointer.save(3).wait()
        assert run("import", tmp_path / "latest.pt", store, "--step", "9") == 1
        assert "writes to it" in capsys.readouterr().err
        checkpointer.save(5).wait()
    assert run("import", tmp_path / "latest.pt", store, "--step", "4") == 1
    assert "Conflict: importing step 4" in capsys.readouterr().err
    assert run("import", tmp_path / "latest.pt", store, "--step", "6") == 0
    assert Store(store).steps() == [3, 5, 6]
    assert run("import", tmp_path / "latest.pt", store, "--step", "4", "--branch") == 0
    assert Store(store).steps() == [3, 4]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    assert run("import", tmp_path / "latest.pt", tmp_path / "full", "--step", "4") == 1
    assert "Name another place" in capsys.readouterr().err


def test_a_bucket(bucket, tmp_path):
    job = trained()
    torch.save({**state_dicts(job), "step": 3}, tmp_path / "latest.pt")
    assert run("import", tmp_path / "latest.pt", bucket) == 0
    assert Store(bucket).verify().ok
    assert resumed(bucket) == job.run(*REST)
