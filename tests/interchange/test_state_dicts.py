"""everstep export --to torch and dcp: what torch itself makes of it trains on as everstep does."""

import random
import zipfile

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from trained import Job

from commands import run, run_json
from everstep import Checkpointer, Log, Store
from everstep.integrations.dcp import StorageReader, StorageWriter

REST = (4, 8)


def trained(store, **options):
    job = Job()
    with Checkpointer(store, {**job.state, "own": {"t": torch.ones(3), "n": 1}}, **options) as made:
        for step in (1, 2, 3):
            job.train(step)
            made.step(step)
    return job


@pytest.mark.parametrize("strategy", ["full", Log(base_every=100)], ids=["state", "log"])
@pytest.mark.parametrize("mmap", [False, True])
def test_a_file_for_torch(store, tmp_path, strategy, mmap):
    job = trained(store, strategy=strategy)
    assert run("export", store, "--to", "torch", tmp_path / "out") == 0
    path = tmp_path / "out" / "checkpoint.pt"
    assert zipfile.ZipFile(path).testzip() is None
    saved = torch.load(path, weights_only=True, mmap=mmap)
    assert saved["own"].keys() == {"t", "n"}
    random.setstate(saved["rng"]["python"])
    np.random.set_state(saved["rng"]["numpy"])
    weights = saved["model"]
    assert weights["head.weight"].data_ptr() == weights["embedding.weight"].data_ptr()
    other = Job(seed=2)
    for name, part in other.state.items():
        part.load_state_dict(saved[name])
    assert other.run(*REST) == job.run(*REST)


@pytest.mark.filterwarnings("ignore")  # torch's own, of one process
def test_a_directory_for_dcp(store, tmp_path):
    job = trained(store, strategy="full")
    assert run("export", store, "--to", "dcp", tmp_path / "out") == 0
    other = Job(seed=2)
    weights, moments = get_state_dict(other.model, other.optimizer)
    saved = {"model": weights, "optimizer": moments, "scheduler": other.scheduler.state_dict()}
    other.train(9)  # so that there is state
    weights, moments = get_state_dict(other.model, other.optimizer)
    saved |= {"model": weights, "optimizer": moments}
    dcp.load(saved, checkpoint_id=tmp_path / "out")
    set_state_dict(
        other.model,
        other.optimizer,
        model_state_dict=saved["model"],
        optim_state_dict=saved["optimizer"],
    )
    other.scheduler.load_state_dict(saved["scheduler"])
    assert other.run(*REST) == job.run(*REST)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_what_was_exported_comes_back(store, other_store, tmp_path, kind, capsys):
    trained(store, strategy="full")
    assert run("export", store, "--to", kind, tmp_path / "out") == 0
    source = tmp_path / "out" / "checkpoint.pt" if kind == "torch" else tmp_path / "out"
    capsys.readouterr()
    said = run_json(capsys, "import", source, other_store, "--step", "3")
    assert (said["from"], said["left_out"]) == (kind, {})
    found, expected = Store(other_store).read(), Store(store).read()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    one, other = Store(other_store).manifest(), Store(store).manifest()
    assert one.hyperparameters == other.hyperparameters
    assert one.objects["scheduler"] == other.objects["scheduler"]
    assert one.objects["own"] == other.objects["own"]
    assert one.objects["rng"] == other.objects["rng"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_what_dcp_has_saved_to_a_store_goes_out_as_it_was(store, tmp_path, kind):
    job = Job()
    job.train(1)
    weights, moments = get_state_dict(job.model, job.optimizer)
    own = {"model.a": {"b": torch.ones(2)}, "several": [{"t": torch.zeros(1), "n": (1, 2)}], "n": 3}
    saved = {"model": weights, "optimizer": moments, "own": own, "gaps": [{}, {"n": 1}]}
    dcp.save(saved, storage_writer=StorageWriter(store, 1))
    assert run("export", store, "--to", kind, tmp_path / "out") == 0
    path = tmp_path / "out" / "checkpoint.pt"
    if kind == "dcp":
        dcp_to_torch_save(tmp_path / "out", path)
    found = torch.load(path, weights_only=False)
    assert found.keys() == saved.keys()
    assert str(found["own"]) == str(own)
    assert found["gaps"] == [None, {"n": 1}]  # as torch has it
    assert found["model"].keys() == weights.keys()
    assert all(found["model"][name].equal(each) for name, each in weights.items())
    assert str(found["optimizer"]["state"]) == str(moments["state"])


@pytest.mark.filterwarnings("ignore")
def test_tensors_within_what_is_no_tensor(store, tmp_path):
    """They are read in their turn, between those that DCP sees."""
    model = torch.nn.Linear(3, 2)
    a, b, c = torch.ones(2), torch.full((3,), 2.0), torch.full((2,), 3.0)
    own = {"a": (a, {"x": b, "n": 1}), "b": c, "c": [(c, a)]}
    with Checkpointer(store, {"model": model, "own": own}) as checkpointer:
        checkpointer.save(1)
    assert run("export", store, "--to", "dcp", tmp_path / "out") == 0
    dcp_to_torch_save(tmp_path / "out", tmp_path / "file")
    for found in (
        torch.load(tmp_path / "file", weights_only=False),
        _load_state_dict_from_keys(storage_reader=StorageReader(store)),
    ):
        assert str({name: found["own"][name] for name in own}) == str(own)
        assert found["model"]["weight"].equal(model.weight)


@pytest.mark.filterwarnings("ignore")
def test_an_optimizer_of_named_parameters(store, tmp_path):
    """torch's utilities have their names in each group, and want them back."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.named_parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    with Checkpointer(store, {"model": model, "optimizer": optimizer}) as checkpointer:
        checkpointer.save(1)
    assert run("export", store, "--to", "dcp", tmp_path / "out") == 0
    _, expected = get_state_dict(model, optimizer)
    for reader in (StorageReader(store), dcp.FileSystemReader(tmp_path / "out")):
        _, found = get_state_dict(model, optimizer)
        found["state"]["weight"]["exp_avg"] = torch.zeros(2, 3)
        dcp.load({"optimizer": found}, storage_reader=reader)
        assert str(found) == str(expected)


@pytest.mark.filterwarnings("ignore")
def test_two_models_of_one_optimizer(store, tmp_path):
    """Their parameters have the same names in them."""
    one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    parameters = [*one.parameters(), *other.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.5)
    (one(torch.ones(2)).sum() + 2 * other(torch.ones(2)).sum()).backward()
    optimizer.step()
    state = {"one": one, "other": other, "optimizer": optimizer}
    with Checkpointer(store, state) as checkpointer:
        checkpointer.save(1)
    found = _load_state_dict_from_keys(storage_reader=StorageReader(store))["optimizer"]
    moments = {name: each["momentum_buffer"] for name, each in found["state"].items()}
    assert {name: float(each.flatten()[0]) for name, each in moments.items()} == {
        **{"one.weight": 1, "one.bias": 1, "other.weight": 2, "other.bias": 2}
    }
    assert run("export", store, "--to", "torch", tmp_path / "out") == 0
    optimizer.load_state_dict(torch.load(tmp_path / "out" / "checkpoint.pt")["optimizer"])


def test_weights_that_two_models_have(store, tmp_path):
    one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    other.weight = one.weight
    with Checkpointer(store, {"model": one, "teacher": other}) as checkpointer:
        checkpointer.save(1)
    assert run("export", store, "--to", "torch", tmp_path / "out") == 0
    saved = torch.load(tmp_path / "out" / "checkpoint.pt")
    one.load_state_dict(saved["model"])
    other.load_state_dict(saved["teacher"])
    assert saved["teacher"]["weight"].data_ptr() == saved["model"]["weight"].data_ptr()


class Counts(torch.nn.Linear):
    """With something beside its weights."""

    seen = torch.zeros(2)

    def get_extra_state(self):
        return {"seen": self.seen, "kind": "a"}

    def set_extra_state(self, state):
        self.seen = state["seen"]


@pytest.mark.parametrize("bare", [False, True])
def test_what_modules_have_beside_their_weights(store, tmp_path, bare):
    one, other, third = Counts(2, 2), Counts(2, 2), Counts(2, 2)
    one.seen = torch.ones(2)
    torch.save(one.state_dict() if bare else {"model": one.state_dict()}, tmp_path / "saved")
    assert run("import", tmp_path / "saved", store, "--step", "1") == 0
    with Checkpointer(store, {"model": other}) as checkpointer:
        checkpointer.restore()
    assert other.seen.equal(one.seen)
    assert run("export", store, "--to", "torch", tmp_path / "out") == 0
    third.load_state_dict(torch.load(tmp_path / "out" / "checkpoint.pt")["model"])
    assert third.seen.equal(one.seen)


def test_all_dtypes(store, tmp_path):
    names = ["float64", "float16", "bfloat16", "int16", "uint8", "bool", "complex64", "uint16"]
    names += ["float8_e4m3fn"]
    values = {n: torch.arange(6).reshape(2, 3).to(getattr(torch, n)) for n in names}
    model = torch.nn.Module()
    for name, value in values.items():
        model.register_buffer(f"of_{name}", value)
    with Checkpointer(store, {"model": model}) as checkpointer:
        checkpointer.save(1)
    assert run("export", store, "--to", "torch", tmp_path / "out") == 0
    saved = torch.load(tmp_path / "out" / "checkpoint.pt")["model"]
    for name, value in values.items():
        found = saved[f"of_{name}"]
        assert found.dtype == value.dtype
        assert torch.equal(found.view(torch.uint8), value.view(torch.uint8))
