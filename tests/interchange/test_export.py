"""everstep export: what safetensors itself reads of it, from a directory, a URL and a log."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file
from trained import Job

from commands import run, run_json
from everstep import Checkpointer, Log, Store


def trained(place, **options):
    job = Job()
    with Checkpointer(place, job.state, **options) as checkpointer:
        for step in (1, 2, 3):
            job.train(step)
            checkpointer.step(step)
    return job


@pytest.fixture(params=["directory", "bucket"])
def place(request, store):
    return store if request.param == "directory" else request.getfixturevalue("bucket")


def read_all(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        own = load_file(path)
        assert found.keys().isdisjoint(own)
        found |= own
    return found


def check_weights(found, model):
    expected = model.state_dict()
    assert set(expected) - set(found) == {"head.weight"}  # tied to the embedding
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_weights_of_the_only_model_without_its_name(place, tmp_path, capsys):
    job = trained(place)
    said = run_json(capsys, "export", place, "--to", "hf", tmp_path / "out")
    assert said["left_out"] == ["'model.head.weight': tied to 'model.embedding.weight'"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    check_weights(read_all(tmp_path / "out"), job.model)
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".tmp"] == []


def test_a_log_is_made_whole_on_the_way(store, tmp_path, capsys):
    job = trained(store, strategy=Log(base_every=100))
    manifests = sorted(store.rglob("*.json"))
    assert run("export", store, "3", "--to", "hf", tmp_path / "out") == 0
    check_weights(read_all(tmp_path / "out"), job.model)
    assert sorted(store.rglob("*.json")) == manifests
    assert run("export", store, "--to", "safetensors", tmp_path / "all") == 0
    found = read_all(tmp_path / "all")
    first = job.optimizer.state[job.model.embedding.weight]
    assert torch.equal(found["optimizer.model.embedding.weight.exp_avg"], first["exp_avg"])


def test_all_tensors_of_a_state(store, tmp_path):
    trained(store, strategy="full")
    assert run("export", store, "2", "--to", "safetensors", tmp_path / "all") == 0
    found, expected = read_all(tmp_path / "all"), Store(store).read(2)
    assert found.keys() == expected.keys() - {"model.head.weight"}
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_shards_of_a_size_and_dtype_with_what_is_beside(store, tmp_path, capsys):
    job = trained(store)
    beside = tmp_path / "beside"
    beside.mkdir()
    for name in ("config.json", "tokenizer.json", "vocab.txt", "secret.txt"):
        (beside / name).write_text('{"dtype": "float32", "layers": 2}')
    words = ["export", store, "--to", "hf", tmp_path / "out", "--config", beside]
    said = run_json(capsys, *words, "--dtype", "bfloat16", "--shard-size", "150")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = {path.name: path for path in (tmp_path / "out").glob("*.safetensors")}
    assert len(files) > 2
    assert set(files) == set(index["weight_map"].values())
    assert index["metadata"]["total_size"] == said["bytes"]
    for name, file in index["weight_map"].items():
        expected = job.model.state_dict()[name]
        expected = expected.bfloat16() if expected.is_floating_point() else expected
        assert torch.equal(load_file(files[file])[name], expected)
    for path in files.values():
        tensors = load_file(path)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 150
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert (tmp_path / "out" / "vocab.txt").exists()
    assert not (tmp_path / "out" / "secret.txt").exists()


def test_what_cannot_be_exported_leaves_nothing(store, tmp_path, capsys):
    job = Job()
    state = {**job.state, "teacher": torch.nn.Linear(2, 2), "own": {"t": torch.ones(2)}}
    job.train(1)
    with Checkpointer(store, state) as checkpointer:
        checkpointer.save(1)
    out = tmp_path / "out"
    assert run("export", store, "--to", "hf", out) == 1
    assert "weights in model, teacher: say which, by --part" in capsys.readouterr().err
    assert run("export", store, "--to", "hf", out, "--part", "own") == 1
    assert "no weights in 'own', but in model, teacher" in capsys.readouterr().err
    assert run("export", store, "--to", "hf", out, "--config", tmp_path / "none") == 1
    assert run("export", store, "--to", "hf", out, "--dtype", "int8") == 1
    capsys.readouterr()
    for kind, *option in (
        ("torch", "--part", "model"),
        ("dcp", "--shard-size", "1GB"),
        ("ucp", "--dtype", "float16"),
        ("safetensors", "--config", tmp_path),
    ):
        assert run("export", store, "--to", kind, out, *option) == 1
        assert f"no use for {option[0]}" in capsys.readouterr().err
    pack = max((store / "data").glob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(pack.read_bytes())
    data[-4096 - 1 :] = bytes(byte ^ 1 for byte in data[-4096 - 1 :])
    pack.write_bytes(data)
    capsys.readouterr()
    assert run("export", store, "--to", "safetensors", out) == 1
    assert "Corrupt" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    out.mkdir()
    (out / "mine").write_text("")
    assert run("export", store, "--to", "hf", out, "--part", "teacher") == 1
    assert "Conflict" in capsys.readouterr().err
    assert run("export", store, "--to", "hf", tmp_path / "one", "--part", "teacher") == 0
    assert set(load_file(tmp_path / "one" / "model.safetensors")) == {"weight", "bias"}


class Own(torch.optim.SGD):
    """Says itself what its state is."""

    def state_dict(self):
        return super().state_dict() | {"more": 1}


def test_an_optimizer_that_says_itself_what_its_state_is(store, tmp_path, capsys):
    model = torch.nn.Linear(2, 2)
    optimizer = Own(model.parameters(), momentum=0.5)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    with Checkpointer(store, {"model": model, "optimizer": optimizer}) as checkpointer:
        checkpointer.save(1)
    assert run("export", store, "--to", "torch", tmp_path / "out") == 0
    found = torch.load(tmp_path / "out" / "checkpoint.pt")["optimizer"]
    assert str(found) == str(optimizer.state_dict())
    capsys.readouterr()
    assert run("export", store, "--to", "ucp", tmp_path / "ucp") == 1
    assert "Unsupported" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_that_of_the_largest_tensors(store, tmp_path):
    """Of a state of 600 MB, in a process of its own."""
    import subprocess

    names = [f"part{number}" for number in range(30)]
    state = {"model": torch.nn.ParameterDict({n: torch.zeros(5_000_000) for n in names})}
    with Checkpointer(store, state, memory_bytes=2 << 30) as checkpointer:
        checkpointer.save(1)
    program = (
        "import resource, sys, torch, everstep.interchange.export, everstep.cli.main as m\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "assert m.main(sys.argv[1:]) == 0\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    words = ["export", store, "--to", "hf", tmp_path / "out", "--dtype", "bfloat16"]
    command = [sys.executable, "-c", program, *map(str, words)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert int(said.split()[-1]) << 10 < (2 * 20 << 20) + (256 << 20)
