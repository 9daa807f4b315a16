"""Thinned saves: of each tensor a checkpoint has the newest that was saved, says of which step it
is, and never refers to what is not there."""

import contextlib
import logging
import os
import re
import signal
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

import coded
import forked_modules
from commands import run, run_json
from comparing import check_equal
from everstep import Checkpointer, Full, Keep, Store, Tiers, Unavailable, Unsupported
from examples import slow
from forked import Forked
from independent_reader import read
from stores import end_keeper, packs_of

torch.set_num_threads(1)
THIN = {"model.blocks.*": 2}


class Net(nn.Module):
    def __init__(self, width=32, blocks=4, dtype=torch.float32):
        super().__init__()
        self.embedding = nn.Embedding(11, width, dtype=dtype)
        self.blocks = nn.ModuleList(nn.Linear(width, width, dtype=dtype) for _ in range(blocks))
        self.head = nn.Linear(width, 11, bias=False, dtype=dtype)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)


@dataclass
class Job:
    """A model that trains, and what its tensors were at each step."""

    seed: int = 1
    options: dict = field(default_factory=dict)
    seen: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self):
        torch.manual_seed(self.seed)
        self.model = Net(**self.options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def train(self, step):
        tokens = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(step))
        self.optimizer.zero_grad()
        self.model(tokens).float().logsumexp(-1).mean().backward()
        self.optimizer.step()
        self.seen[step] = self.tensors()

    def tensors(self):
        found = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"optimizer.model.{name}.{key}"] = value
        return {name: tensor.detach().clone() for name, tensor in found.items()}

    def save(self, saver, steps, **options):
        for step in steps:
            self.train(step)
            saver.save(step, **options).wait("local", timeout=60)


def plan_of(names, step, first=1, factor=2):
    """By the documentation: all at the first save, then block 0, 2, … and block 1, 3, … in turn;
    there is a save at each step from `first` on."""
    plan = {}
    for name in names:
        plan[name] = step
        if ".blocks." in name:
            block = int(name.split(".blocks.")[1].split(".")[0])
            due = [
                n for n in range(first + 1, step + 1) if (n - first - 1) % factor == block % factor
            ]
            plan[name] = max([first, *due])
    return plan


def check_stored(store, job, step, plan):
    """Each tensor is that of the step of the plan; generators are not looked at."""
    found = Store(store).read(step)
    found = {name: tensor for name, tensor in found.items() if not name.startswith("rng.")}
    check_equal(found, {name: job.seen[step][name] for name, step in plan.items()})


def check(store, job, step, first=1):
    """The checkpoint has, of each tensor, what it was at the step of its plan."""
    plan = plan_of(job.seen[step], step, first)
    stored = Store(store).restore_plan(step)
    assert {name: stored[name] for name in plan} == plan
    check_stored(store, job, step, plan)
    assert Store(store).manifest(step).exact == (set(plan.values()) == {step})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_tensor_is_the_newest_that_was_saved(store, dtype):
    job = Job(options={"dtype": dtype})
    with Checkpointer(store, job.state, strategy=Full(thin=THIN)) as saver:
        job.save(saver, range(1, 7))
        job.train(7)
        handle = saver.save(7)
        handle.wait("local", timeout=60)
    for step in range(1, 8):
        check(store, job, step)
    assert handle.bytes < 0.7 * Store(store).manifest(7).size
    assert Store(store).verify().ok
    _, tensors = read(store, 6)  # by the format's description alone
    for name, step in plan_of(job.seen[6], 6).items():
        if name in tensors:
            wanted = job.seen[step][name].reshape(-1).view(torch.uint8).numpy().tobytes()
            assert bytes(tensors[name][2]) == wanted, name


def test_frozen_layers_are_in_each(store):
    job = Job(options={"width": 256})
    job.model.blocks[:2].requires_grad_(False)
    trained = [each for each in job.model.parameters() if each.requires_grad]
    job.optimizer = job.state["optimizer"] = torch.optim.AdamW(trained, lr=0.01)
    with Checkpointer(store, job.state, strategy=Full(thin=THIN)) as saver:
        job.save(saver, range(1, 6))
        other = Job(2, {"width": 256})
        with Checkpointer(store, {"model": other.model}) as restoring:  # out of memory
            assert restoring.restore(only=["model"]) == 5
        check_equal(other.model.blocks[:2].state_dict(), job.model.blocks[:2].state_dict())
    for step, seen in job.seen.items():
        plan = Store(store).restore_plan(step)
        check_stored(store, job, step, {name: plan[name] for name in seen})


def test_what_is_restored_is_that_and_says_so(store, caplog, capsys):
    job = Job()
    with Checkpointer(store, job.state, strategy=Full(thin=THIN)) as saver:
        job.save(saver, range(1, 5))
    for place in ("memory", "disk"):  # of the keeper, while it is there
        other = Job(2)
        caplog.clear()
        with Checkpointer(store, other.state) as saver, caplog.at_level(logging.WARNING):
            assert saver.restore() == 4
            if place == "memory":
                end_keeper(store)
        plan = plan_of(job.seen[4], 4)
        check_equal(other.tensors(), {name: job.seen[plan[name]][name] for name in plan})
        assert "some of its tensors are of earlier steps" in caplog.text
        with Checkpointer(store, other.state) as saver, pytest.raises(Unsupported, match="thinned"):
            saver.restore(exact="require")
    shown = run_json(capsys, "show", store, 4)
    assert shown["exact"] is False
    assert run("show", store, 4) == 0
    assert "of steps       3, 4\n" in capsys.readouterr().out
    rows = run_json(capsys, "ls", store)["checkpoints"]
    assert [row["exact"] for row in rows] == [True, False, False, False]
    assert run("ls", store) == 0
    assert capsys.readouterr().out.count("state (inexact)") == 3


def test_a_tagged_one_the_first_and_one_after_a_restore_have_all(store):
    job = Job()
    with Checkpointer(store, job.state, strategy=Full(thin=THIN)) as saver:
        job.save(saver, [1, 2])
        job.save(saver, [3], tag="best")
        job.save(saver, [4])
    check(store, job, 2)
    check(store, job, 3, first=3)
    check(store, job, 4, first=3)
    other = Job(2)
    with Checkpointer(store, other.state, strategy=Full(thin=THIN)) as saver:
        assert saver.restore(3) == 3
        check_equal(other.tensors(), job.seen[3])
        other.save(saver, [4, 5])
    check(store, other, 4, first=4)
    check(store, other, 5, first=4)


def test_no_reference_dangles(store):
    """Neither retention, nor rm, nor gc takes what a later one refers to."""
    job = Job()
    with Checkpointer(store, job.state, strategy=Full(thin=THIN), keep=Keep(last=2)) as saver:
        job.save(saver, range(1, 8))
    steps = Store(store).steps()
    assert steps[-2:] == [6, 7]
    for step in (6, 7):
        check(store, job, step)
    Store(store).delete(6)
    Store(store).gc()
    check(store, job, 7)
    assert Store(store).verify().ok
    manifest = Store(store).manifest(7)
    assert {link.path for link in manifest.parts[0].packs} <= packs_of(store)


def test_what_the_last_one_had_is_gone(store):
    """The one before is deleted while the next is saved: that fails, and the next has all."""
    job = Job()
    with Checkpointer(store, job.state, strategy=Full(thin=THIN)) as saver:
        job.save(saver, [1, 2])
        for step in (1, 2):
            Store(store).delete(step)
        job.train(3)
        with contextlib.suppress(Exception):
            saver.save(3).wait("local", timeout=60)
        job.save(saver, [4, 5])
    for step in Store(store).steps():
        assert step >= 4
        check(store, job, step, first=4)
    assert Store(store).steps() == [4, 5]
    assert Store(store).verify().ok


def test_one_that_is_left_out_is_not_counted(store):
    """Saves that take no checkpoint leave no hole in the turns."""
    job = Job()
    with Checkpointer(store, job.state, strategy=Full(thin={"model.blocks.*": 3})) as saver:
        for step in range(1, 30):
            job.train(step)
            saver.save(step)
        saver.wait()
    for step in Store(store).steps():
        stored = Store(store).restore_plan(step)
        plan = {name: stored[name] for name in job.seen[step]}
        check_stored(store, job, step, plan)
        assert min(plan.values()) >= 1
    assert Store(store).verify().ok


@pytest.mark.parametrize("route", ["local", "remote"])
def test_a_remote_tier_has_it_too(store, tmp_path, route):
    """A thinned save is never in the remote tier alone, as the next one refers to it."""
    job, remote = Job(), tmp_path / "remote"
    tiers = Tiers(remote=remote, route=route)
    with Checkpointer(store, job.state, strategy=Full(thin=THIN), tiers=tiers) as saver:
        for step in range(1, 5):
            job.train(step)
            saver.save(step).wait("remote", timeout=60)
    for step in range(1, 5):
        check(store, job, step)
        check(remote, job, step)
    assert Store(remote).verify().ok


def test_a_fork_and_a_merge_of_it(store, tmp_path):
    job = Job()
    with Checkpointer(store, job.state, strategy=Full(thin=THIN)) as saver:
        job.save(saver, range(1, 5))
    assert run("fork", store, 4, tmp_path / "fork") == 0
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'base = {{ store = "{store}", step = 4 }}\n[[take]]\n'
        f'from = {{ store = "{store}", step = 2 }}\ntensors = "model.blocks.1.**"\n'
    )
    assert run("merge", recipe, tmp_path / "merged") == 0
    for step in (1, 2, 3, 4):
        Store(store).delete(step)
    check(tmp_path / "fork", job, 4)
    plan = plan_of(job.seen[4], 4)
    plan |= {name: 1 for name in plan if "blocks.1." in name}
    check_stored(tmp_path / "merged", job, 4, plan)
    assert Store(tmp_path / "merged").verify().ok
    assert not Store(tmp_path / "merged").manifest().exact
    with (
        Checkpointer(tmp_path / "merged", job.state) as restorer,
        pytest.raises(Unsupported, match="merged of what is not exact"),
    ):
        restorer.restore(exact="require")


def trains(store, first):
    job = Job()
    with Checkpointer(store, job.state, strategy=Full(thin=THIN)) as saver:
        at = saver.restore() or 0
        print("began", at, flush=True)
        for step in range(at + 1, at + 100):
            job.train(step)
            saver.save(step).wait("local", timeout=60)
            print(step, flush=True)


@pytest.mark.parametrize("kills", [2, *slow(12)])
def test_kills(store, kills):
    """What is offered after a kill has what its plan says."""
    for kill in range(kills):
        with Forked(trains, store, kill) as process:
            assert process.stdout.readline().startswith("began")
            for _ in range(3 + kill % 4):
                process.stdout.readline()
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        if kill % 2:
            end_keeper(store)
        assert Store(store).verify().ok
        newest = Store(store).steps()[-1]
        plan = Store(store).restore_plan(newest)
        assert set(plan.values()) <= set(range(max(1, newest - 1), newest + 1))
        found = Store(store).read(newest)
        for step in set(plan.values()):
            there = Store(store).read(step)
            for name in found:
                if plan[name] == step:
                    assert torch.equal(found[name], there[name]), name


@pytest.mark.parametrize(
    ("thin", "error", "says"),
    [
        ({"model.blocks.*": 0}, ValueError, "positive number of saves"),
        ({"model.blocks.*": 2.0}, ValueError, "positive number of saves"),
        ({"model.blocks.*": None}, ValueError, "positive number of saves"),
        (["model.blocks.*"], TypeError, "a dict by names"),
    ],
)
def test_what_cannot_be_is_refused(thin, error, says):
    with pytest.raises(error, match=says):
        Full(thin=thin)


@pytest.mark.parametrize("pattern", ["model.layers.*", 3])
def test_a_pattern_that_nothing_matches(store, pattern):
    job, called = Job(), re.escape(repr(pattern))
    saver = Checkpointer(store, job.state, strategy=Full(thin={pattern: 2}))
    job.train(1)
    with pytest.raises(ValueError, match=f"is called.* {called} .*Names here are like"):
        saver.save(1)
    with pytest.raises(Unavailable, match=called):
        saver.close()


def test_what_is_saved_in_turn_is_nothing_to_round_from(store, monkeypatch):
    forked_modules.begin_with(monkeypatch, coded.choose, ("rounded",))
    masters = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(2))
    copies = nn.ParameterList(torch.empty(512, 512, dtype=torch.bfloat16) for _ in range(2))
    state, numbers = {"masters": masters, "copies": copies}, [1.0, 0.0, 1.0, 0.0, 2.0, 1.0]
    with Checkpointer(store, state, strategy=Full(thin={"masters.*": 2})) as saver:
        for step, number in enumerate(numbers, 1):
            for parameter in (*masters.parameters(), *copies.parameters()):
                nn.init.constant_(parameter, number)
            saver.save(step).wait("local", timeout=60)
    assert Store(store).verify().ok
    for step, number in enumerate(numbers, 1):
        found = Store(store).read(step, names=["copies.0", "copies.1"])
        assert all((each == number).all() for each in found.values())


def test_a_save_at_which_all_is_due_is_exact(store):
    job = Job()
    with Checkpointer(store, job.state, strategy=Full(thin={"model.blocks.1": 2})) as saver:
        job.save(saver, range(1, 6))
    found = Store(store)
    plans = {step: found.restore_plan(step)["model.blocks.1.weight"] for step in range(1, 6)}
    assert plans == {1: 1, 2: 1, 3: 3, 4: 3, 5: 5}
    assert [found.manifest(step).exact for step in plans] == [True, False, True, False, True]
