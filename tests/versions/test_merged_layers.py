"""everstep merge: layers of several checkpoints, with what belongs to them; all that is wrong at
once."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from test_diff import Job
from torch import nn

import stores
from commands import run, run_json
from everstep import Checkpointer, Log, Mismatch, Store
from everstep.sharding.leaves import bytes_of
from everstep.store.retain import sweep
from everstep.tiers.disk import Disk
from examples import slow
from independent_reader import read

torch.set_num_threads(1)


class Other(Job):
    """The same model; other weights, another rate for each layer."""

    def __init__(self, seed=7, rates=(0.1, 0.2, 0.3)):
        super().__init__()
        torch.manual_seed(seed)
        for parameter in self.model.parameters():
            nn.init.normal_(parameter)
        groups = [
            {"params": list(layer.parameters()), "lr": rate}
            for layer, rate in zip(self.model.values(), rates, strict=True)
        ]
        self.optimizer = torch.optim.AdamW(groups)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.state = {"model": self.model, "optimizer": self.optimizer, "plan": self.scheduler}


def recipe(path, base, *takes):
    lines = [f"base = {{ store = {str(base[0])!r}, step = {base[1]!r} }}"]
    for (place, step), rows in takes:
        lines += ["[[take]]", f"from = {{ store = {str(place)!r}, step = {step!r} }}"]
        lines += [f"{key} = {value}" for key, value in rows.items()]
    path.write_text("\n".join(lines).replace("'", '"'))
    return path


def wanted(base, other, layers):
    """What the merged state has, by the two whole states."""
    mine = {f"model.layer{i}." for i in layers} | {f"optimizer.model.layer{i}." for i in layers}
    return {
        name: (other if any(name.startswith(each) for each in mine) else base)[name]
        for name in base
    }


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("strategy", ["full", *slow("log")])
def test_layers_come_with_their_optimizer_state(store, other_store, tmp_path, capsys, strategy):
    options = {"strategy": Log(base_every=100) if strategy == "log" else "full"}
    Other(1, (0.5, 0.5, 0.5)).train(store, 3, **options)
    Other().train(other_store, 5, **options)
    states = []
    for place, step in ((store, 3), (other_store, 5)):
        if strategy == "log":
            assert run("materialize", place, step) == 0
        states.append(Store(place).read(step))
    capsys.readouterr()
    new = tmp_path / "merged"
    takes = ((other_store, 5), {"tensors": '"model.layer{1..2}.**"'})
    said = run_json(capsys, "merge", recipe(tmp_path / "r.toml", (store, 3), takes), new)
    assert (said["step"], said["bytes"] > 0) == (3, strategy == "log" and said["bytes"] > 0)
    expected = wanted(*states, (1, 2))
    same(Store(new).read(3), expected)
    assert run("verify", new) == 0
    assert run("show", new, 3) == 0
    assert str(other_store) in capsys.readouterr().out
    job = Other(3)
    with Checkpointer(new, job.state) as checkpointer:
        assert checkpointer.restore() == 3
        assert [group["lr"] for group in job.optimizer.param_groups] == [0.25, 0.05, 0.075]
        steps = [job.optimizer.state[p]["step"].item() for p in job.model.parameters()]
        assert steps == [3, 3, 5, 5, 5, 5]
        job.optimizer.step()
        checkpointer.save(4).wait("local", timeout=60)
    stores.end_keeper(new)
    if strategy == "full":
        tensors = read(new, 3)[1]
        for name, tensor in expected.items():
            assert tensors[name][2] == bytes_of(tensor).numpy().tobytes()


def test_layers_out_of_a_bucket(store, other_store, bucket, tmp_path, capsys):
    Other(1, (0.5, 0.5, 0.5)).train(store, 3, strategy="full")
    Other().train(other_store, 5, strategy="full")
    assert run("cp", other_store, 5, bucket) == 0
    capsys.readouterr()
    new = tmp_path / "merged"
    takes = ((bucket, 5), {"tensors": '"model.layer{1..2}.**"'})
    said = run_json(capsys, "merge", recipe(tmp_path / "r.toml", (store, 3), takes), new)
    assert said["bytes"] > 0
    same(Store(new).read(3), wanted(Store(store).read(3), Store(bucket).read(5), (1, 2)))
    assert run("verify", new) == 0


def test_either_store_may_go(store, other_store, tmp_path, capsys):
    Other(1).train(store, 2, strategy="full")
    Other().train(other_store, 2, strategy="full")
    expected = wanted(Store(store).read(2), Store(other_store).read(2), (0,))
    new, copied = tmp_path / "merged", tmp_path / "copied"
    takes = ((other_store, 2), {"tensors": '"model.layer0.*"'})
    path = recipe(tmp_path / "r.toml", (store, 2), takes)
    assert run_json(capsys, "merge", path, new)["bytes"] == 0
    for place in (store, other_store):
        stores.end_keeper(place)
        assert run("rm", place, 2, "--yes") in (0, 2)
        for file in (place / "data").glob("*.safetensors"):
            file.unlink()
    sweep(Disk(new))
    assert run("cp", new, copied) == 0
    same(Store(copied).read(2), expected)
    assert run("verify", copied) == 0
    assert run("fork", copied, 2, tmp_path / "forked") == 0
    same(Store(tmp_path / "forked").read(2), expected)


def test_a_layer_is_used_twice_under_other_names(store, tmp_path, capsys):
    Other(1).train(store, 2, strategy="full")
    takes = (
        (store, 2),
        {"tensors": '"model.layer0.*"', "rename": '{ "model.layer0" = "model.layer2" }'},
    )
    path = recipe(tmp_path / "r.toml", (store, 2), takes)
    said = run_json(capsys, "merge", path, tmp_path / "new")
    assert 0 < said["bytes"] < said["bytes_shared"]
    found = Store(tmp_path / "new").read(2)
    assert torch.equal(found["model.layer2.weight"], found["model.layer0.weight"])
    names = [f"optimizer.model.layer{i}.weight.exp_avg" for i in (2, 0)]
    assert torch.equal(found[names[0]], found[names[1]])
    assert run("verify", tmp_path / "new") == 0


def test_all_that_is_wrong_is_told_at_once(store, other_store, tmp_path, capsys):
    Job().train(store, 2, strategy="full")
    Job(width=8).train(other_store, 1, strategy="full")
    odd = {"model": nn.ModuleDict({"layer0": nn.Linear(3, 5)})}
    with Checkpointer(tmp_path / "odd", odd, strategy="full") as checkpointer:
        checkpointer.save(1).wait("local", timeout=60)
    new = tmp_path / "new"
    path = recipe(
        tmp_path / "r.toml",
        (store, 2),
        ((other_store, 1), {"tensors": '"model.layer0.*"'}),
        ((other_store, 1), {"tensors": '"model.**"', "speed": "1"}),
        ((other_store, 9), {"tensors": '"model.layer1.*"'}),
        ((new, 1), {"tensors": '"model.layer1.*"'}),
        ((tmp_path / "nowhere", 1), {"tensors": '"model.layer1.*"'}),
        ((tmp_path / "odd", 1), {"tensors": '"model.layer0.*"', "optimizer": "false"}),
        ((other_store, 1), {"tensors": '"model.nothing"'}),
        ((other_store, 1), {"tensors": '"model.layer1.*"', "rename": '{ "model" = "../../etc" }'}),
        ((other_store, 1), {"tensors": '"model.{5..1}"'}),
        ((other_store, 1), {"tensors": '"model.{0..1"'}),
        (("s3x://what", 1), {"tensors": '"model.layer1.*"'}),
        ((other_store, 1), {"tensors": "7"}),
        ((other_store, 1), {"tensors": '"model.layer1.*"', "rename": '{ "model.layer" = "x" }'}),
    )
    path.write_text(path.read_text().replace("step = 2 }", "step = 2, epoch = 1 }"))
    path.write_text(path.read_text().replace("step = 9 }", "step = 9, run = 1 }"))
    assert run("merge", path, new) == 1
    said = capsys.readouterr().err
    for each in (
        "everstep: Mismatch: merging",
        "nothing was written",
        "base: 'epoch' is not known",
        "take 2: 'speed' is not known",
        "take 3.from: 'run' is not known",
        "'model.layer0.bias' is taken twice",
        f"{other_store} 9:",
        "where the merged checkpoint is to be",
        "nowhere",
        "float32 [5, 3]",
        "no tensor is called 'model.nothing'",
        "the base has no tensor '../../etc.layer1.bias'",
        "no tensor is called 'model.{5..1}'",
        "no tensor is called 'model.{0..1'",
        "s3x",
        "take 12.tensors is 7 (",
        "nothing that is taken is called 'model.layer', or in it",
    ):
        assert each in said, each
    assert not new.exists()


@pytest.mark.parametrize(
    "text",
    ["take = 3", "base = 1\n[[take]]\n", "[[take]\n", "\xff", "base = { store = 1, step = 2 }"],
)
def test_what_is_no_recipe(tmp_path, text, capsys):
    (tmp_path / "r.toml").write_bytes(text.encode("latin-1"))
    assert run("merge", tmp_path / "r.toml", tmp_path / "new") == 1
    assert "recipe" in capsys.readouterr().err or "missing" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_what_is_there_is_let_be(store, other_store, tmp_path):
    from everstep.errors import Conflict
    from everstep.versions.merge import merge

    Job().train(store, 1, strategy="full")
    Job().train(other_store, 1, strategy="full")
    path = recipe(tmp_path / "r.toml", (store, 1), ((store, 1), {"tensors": '"model.**"'}))
    with pytest.raises(Conflict, match="checkpoints already"):
        merge(path, str(other_store))
    with pytest.raises(Mismatch, match="is to be"):
        merge(path, str(store))


def test_one_that_is_killed_is_made_again(store, tmp_path):
    Job().train(store, 2, strategy=Log(base_every=100))  # so that it is copied
    path = recipe(tmp_path / "r.toml", (store, 2), ((store, 1), {"tensors": '"model.layer0.*"'}))
    new = tmp_path / "new"
    program = (
        "import sys\nfrom everstep.cli.main import main\nfrom everstep.store import commit\n"
        "import os\ncommit.publish = lambda *_, **__: os.kill(os.getpid(), 9)\n"
        "main(sys.argv[1:])\n"
    )
    done = subprocess.run([sys.executable, "-c", program, "merge", path, new], env=dict(os.environ))
    assert done.returncode == -signal.SIGKILL
    assert Store(new).steps() == []
    assert run("merge", path, new) == 0
    assert run("verify", new) == 0
    assert run("materialize", store, 1) == run("materialize", store, 2) == 0
    same(Store(new).read(2), wanted(Store(store).read(2), Store(store).read(1), (0,)))
