"""What docs/migrating.md and docs/trainers.md say is run, or looked up."""

import ast
import re
from pathlib import Path

import pytest
import torch

import everstep
from stores import end_keeper

ROOT = Path(__file__).parents[2]
MIGRATING = (ROOT / "docs" / "migrating.md").read_text()
TRAINERS = (ROOT / "docs" / "trainers.md").read_text()
BLOCKS = dict(re.findall(r"<!-- run: (.*?) -->\n```python\n(.*?)```", MIGRATING, re.DOTALL))
pytestmark = pytest.mark.filterwarnings("ignore")  # DCP's, of one process


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    end_keeper(tmp_path / "runs" / "mine")


def run(*names, steps=6, **given):
    """A program of these blocks, seeded; what it leaves."""
    torch.manual_seed(0)
    names_here = dict(given)
    for name in names:
        exec(BLOCKS[name], names_here)  # noqa: S102
        if name == "given":
            names_here["steps"] = steps
    return names_here


def weights(program):
    return [each.detach().clone() for each in program["model"].parameters()]


def test_every_block_is_run():
    assert MIGRATING.count("```python") == len(BLOCKS)
    assert len(BLOCKS) == 10


def test_a_run_of_everstep_goes_on_bit_for_bit(here):
    whole = run("given", "everstep", steps=6)
    end_keeper(here / "runs" / "mine")
    (here / "runs").rename(here / "whole")
    run("given", "everstep", steps=3)
    resumed = run("given", "everstep", steps=6)
    assert resumed["start"] == 3
    assert all(map(torch.equal, weights(resumed), weights(whole)))
    run("given", "to torch.save")
    assert torch.equal(torch.load("weights.pt")["0.weight"], weights(whole)[0])


@pytest.mark.parametrize("old", ["torch.save", "dcp"])
def test_an_old_checkpoint_is_gone_on_from(here, monkeypatch, old):
    begun = run("given", old, steps=4)
    resumed = run("given", old, steps=4)  # and the old way, too, resumes: nothing is left to do
    assert all(map(torch.equal, weights(resumed), weights(begun)))
    defined = BLOCKS["dcp"].partition("training = Training()")[0]
    monkeypatch.setitem(BLOCKS, "definitions", defined)
    run("given", "definitions", f"from {old}")
    assert everstep.Store("runs/mine").steps() == [4]
    gone_on = run("given", "everstep", steps=4)
    assert gone_on["start"] == 4
    assert all(map(torch.equal, weights(gone_on), weights(begun)))


def test_the_storage_of_dcp(here, monkeypatch):
    defined = BLOCKS["dcp"].partition("training = Training()")[0]
    monkeypatch.setitem(BLOCKS, "definitions", defined)
    run("given", "definitions", "dcp storage")
    assert everstep.Store("runs/dcp").steps() == [1]
    assert everstep.Store("runs/dcp").verify().ok


def test_the_trainers_blocks(here, monkeypatch):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=8)
    rows = torch.arange(16 * 8).remainder(20).reshape(16, 8)
    dataset = [{"input_ids": row, "labels": row} for row in rows]

    first = BLOCKS["trainer"].replace("resume_from_checkpoint=True", "")
    monkeypatch.setitem(BLOCKS, "first trainer", first)

    def trained(block, steps):
        options = {"per_device_train_batch_size": 4, "report_to": [], "save_steps": 2}
        args = transformers.TrainingArguments("out", max_steps=steps, use_cpu=True, **options)
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config)
        given = {"Trainer": transformers.Trainer, "model": model, "args": args, "dataset": dataset}
        return run(block, **given)["trainer"]

    trained("everstep trainer", 2)
    assert trained("everstep trainer", 4).state.global_step == 4
    assert everstep.Store("runs/mine").steps() == [1, 2, 3, 4]
    trained("first trainer", 2)
    assert trained("trainer", 4).state.global_step == 4


@pytest.mark.parametrize(("code", "module"), re.findall(r"\| `([^|]*?)` from `([\w.]+)`", TRAINERS))
def test_what_trainers_md_names_is_there(code, module):
    ast.parse(code.replace("...", "a=1"))
    path = ROOT / "src" / Path(*module.split(".")).with_suffix(".py")
    names = {each.name for each in ast.parse(path.read_text()).body if hasattr(each, "name")}
    assert names & set(re.findall(r"\w+", code))
