"""Random sequences of saves, forks, merges, averages, deletions and kills, over many stores: what
any of them offers has the bytes that it should have, after each."""

import itertools
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from test_thin import Job

from commands import run
from comparing import check_equal
from everstep import Checkpointer, EverstepError, Full, Store
from examples import slow
from forked import Forked
from stores import end_keeper

torch.set_num_threads(1)
BLOCKS = 4
STRATEGIES = {"full": "full", "thin": Full(thin={"model.blocks.*": 2}), "log": "log"}


def command(*words):
    """For a process of its own, which is killed."""
    raise SystemExit(run(*words))


class World:
    """The stores that there are, and what each step of them has."""

    def __init__(self, folder, seed):
        self.folder = folder
        self.chance = random.Random(seed)
        self.stores: dict[Path, dict[int, dict[str, torch.Tensor]]] = {}
        self._numbers = itertools.count(1)
        self.told: list[str] = []

    def new(self):
        return self.folder / f"store-{next(self._numbers)}"

    def pick(self):
        """A step that is there."""
        store = self.chance.choice([path for path, steps in self.stores.items() if steps])
        return store, self.chance.choice(sorted(self.stores[store]))

    def run(self, to, step, expected, *words):
        """A command that makes a step in a new store; `expected`: what that and the steps before it
        have, of which it may bring some. It is killed on its way, now and then, after which it is
        given again, or what it left stays."""
        self.told.append(" ".join(map(str, words)))
        is_killed = self.chance.random() < 0.3
        if is_killed:
            with Forked(command, *words) as process:
                time.sleep(self.chance.random() * 0.4)  # any moment will do
                process.kill()
                assert process.wait() in (-signal.SIGKILL, 0)
            self.told.append("killed")
        if not is_killed or (step not in self.steps(to) and self.chance.random() < 0.5):
            assert run(*words) == 0
            assert step in self.steps(to)
        if to.exists():
            self.stores[to] = {each: expected[each] for each in self.steps(to)}

    def steps(self, store):
        try:
            return Store(store).steps()
        except EverstepError:
            return []

    def train(self):
        """A run: new, or on from the newest step of a store; some steps, in one of the ways."""
        name = self.chance.choice(list(STRATEGIES))
        known = [path for path, steps in self.stores.items() if steps]
        store = self.chance.choice([*known, self.new()])
        self.told.append(f"train {store.name} {name}")
        job = Job(self.chance.randrange(100))
        expected = self.stores.setdefault(store, {})
        with Checkpointer(store, job.state, strategy=STRATEGIES[name]) as saver:
            if self.is_average(store):
                with pytest.raises(EverstepError, match="optimizer"):
                    saver.restore()
                return
            start = saver.restore()
            count = self.chance.randrange(1, 5)
            for step in range(start + 1, start + count + 1):
                job.train(step)
                saver.save(step).wait("local", timeout=60)
        for step in range(start + 1, start + count + 1):
            expected[step] = seen = job.seen[step]
            if name == "thin":
                plan = Store(store).restore_plan(step)
                expected[step] = {each: job.seen[plan[each]][each] for each in seen}

    def is_average(self, store):
        steps = self.stores[store]
        return bool(steps) and not any(name.startswith("optimizer.") for name in steps[max(steps)])

    def fork(self):
        store, step = self.pick()
        to = self.new()
        self.run(to, step, self.stores[store], "fork", store, step, to)

    def merge(self):
        (store, step), (other, from_step) = self.pick(), self.pick()
        block, to = self.chance.randrange(BLOCKS), self.new()
        recipe = to.with_suffix(".toml")
        recipe.write_text(
            f'base = {{ store = "{store}", step = {step} }}\n[[take]]\n'
            f'from = {{ store = "{other}", step = {from_step} }}\n'
            f'tensors = "model.blocks.{block}.**"\n'
        )
        base, taken = self.stores[store][step], self.stores[other][from_step]
        has_optimizer = any(name.startswith("optimizer.") for name in taken)
        if any(name.startswith("optimizer.") for name in base) and not has_optimizer:
            assert run("merge", recipe, to) != 0
            assert not self.steps(to)
            return
        mine = f"blocks.{block}."
        merged = {name: each for name, each in base.items() if mine not in name}
        merged |= {name: each for name, each in taken.items() if mine in name and name in base}
        self.run(to, step, {step: merged}, "merge", recipe, to)

    def average(self):
        store, _ = self.pick()
        steps = sorted(self.stores[store])[-2:]
        to = self.new()
        expected = {}
        for name, each in self.stores[store][steps[-1]].items():
            if name.startswith("model."):
                total = sum(self.stores[store][step][name].double() for step in steps)
                expected[name] = (total / len(steps)).to(each.dtype)
        self.run(to, steps[-1], {steps[-1]: expected}, "average", store, *steps, "--to", to)

    def remove(self):
        store, step = self.pick()
        self.told.append(f"rm {store.name} {step}")
        run("rm", store, step)  # refuses what a log goes on from
        for each in set(self.stores[store]) - set(self.steps(store)):
            assert each == step
            del self.stores[store][each]

    def delete_store(self):
        store, _ = self.pick()
        self.told.append(f"delete {store.name}")
        end_keeper(store)
        shutil.rmtree(store)
        del self.stores[store]

    def collect(self):
        store, step = self.pick()
        self.told.append(f"gc {store.name}")
        assert run("tag", store, step, "best") == 0
        assert run("gc", store) == 0

    def look(self, store, expected):
        """All that it offers is as it should be."""
        for step in self.steps(store):
            assert step in expected, (store, step)
            wanted = expected[step]
            if Store(store).manifest(step).previous is None:
                found = Store(store).read(step)
            else:
                job = Job(5)
                with Checkpointer(store, job.state) as saver:
                    assert saver.restore(step) == step
                found = job.tensors()
            check_equal({name: each for name, each in found.items() if name in wanted}, wanted)
        assert not store.exists() or not self.steps(store) or Store(store).verify().ok

    def check(self):
        for store, expected in self.stores.items():
            assert self.steps(store) == sorted(expected), store
            self.look(store, expected)


@pytest.mark.parametrize("seed", [1, *slow(*range(2, 101))])
def test_what_is_offered_is_what_it_should_be(tmp_path, seed, capsys):
    world = World(tmp_path, seed)
    actions = [world.train, world.fork, world.merge, world.average, world.remove, world.collect]
    world.train()
    try:
        for _ in range(12):
            if any(world.stores.values()):
                world.chance.choice([*actions, world.train, world.fork, world.delete_store])()
            else:
                world.train()
            capsys.readouterr()
            world.check()
    except BaseException:
        print("\n".join(world.told))
        raise
    finally:
        for store in world.stores:
            end_keeper(store)
