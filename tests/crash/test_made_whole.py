"""Steps that are made whole while something fails: at each system call, and by SIGKILL at random
moments. The log is never the worse for it."""

import contextlib
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from faults import Fault
from sweep import Promises, sweep
from trainer import build, train_one_step

import everstep
from everstep import Keep, Store, Unavailable
from everstep.format.manifest import CheckpointName
from everstep.restore.materialize import materialize
from everstep.store import catalog, commit, names, retain
from everstep.tiers.disk import Disk
from examples import slow
from processes import ended, until
from stores import end_keeper, packs_of

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))
from wholes import workers_of

STEPS = 5
FAULTS = [Fault.KILL, *slow(Fault.EIO, Fault.NO_SYNC)]
ALL = {CheckpointName(step, 1) for step in range(1, STEPS + 1)}


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """A store of a base and four records, and the tensors of the model at each step."""
    path = tmp_path_factory.mktemp("logged") / "store"
    torch.manual_seed(1)
    model = torch.nn.Linear(40, 40)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    live = {}
    with everstep.Checkpointer(path, state, strategy=everstep.Log(base_every=100)) as checkpointer:
        for step in range(1, STEPS + 1):
            model(torch.randn(4, 40)).square().mean().backward()
            state["optimizer"].step()
            state["optimizer"].zero_grad()
            checkpointer.step(step)
            live[step] = {f"model.{k}": v.clone() for k, v in model.state_dict().items()}
    end_keeper(path)
    return path, live


def check_read(path, step, live):
    found = Store(path).read(step)
    assert all(torch.equal(found[key], value) for key, value in live[step].items())


@pytest.mark.parametrize("fault", FAULTS)
def test_making_a_step_whole(folder, logged, fault):
    path, live = logged
    name = CheckpointName(4, 1)

    def prepare(disk: Disk) -> Promises:
        shutil.copytree(path, disk.root)
        return Promises(set(ALL), {1})

    def make(disk: Disk, promises: Promises) -> None:
        assert materialize(disk, name).exact
        promises.whole.add(name)
        check_read(disk.root, 4, live)
        assert [manifest.step for manifest in Store(disk.root).chain(5)] == [4, 5]

    def finish(disk: Disk) -> None:
        commit.claim_epoch(disk, CheckpointName(STEPS, 1))
        retain.sweep(disk)
        assert len(packs_of(disk.root)) == STEPS + 1
        assert retain.apply(disk, Keep(last=1)) > 0  # nothing is needed but 4 and 5
        assert Store(disk.root).steps() == [4, 5]

    assert sweep(folder, prepare, make, fault, lambda disk: on_a_copy(disk, finish)) > 25


def on_a_copy(disk, finish):
    """What is promised is checked afterwards, and this deletes some of it."""
    copy = disk.root.with_name("finished")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(disk.root, copy)
    finish(Disk(copy))
    assert Store(copy).verify().ok


@pytest.mark.parametrize("fault", FAULTS)
def test_deleting_what_was_made_whole(folder, logged, fault):
    """Nothing is before 3 any more; it goes, and with it the state without which it is nothing."""
    path, live = logged

    def prepare(disk: Disk) -> Promises:
        shutil.copytree(path, disk.root)
        for step in (3, 5):
            materialize(Disk(disk.root), CheckpointName(step, 1))
        retain.delete(Disk(disk.root), [CheckpointName(step, 1) for step in (1, 2)])
        assert Store(disk.root).steps() == [3, 4, 5]
        return Promises({CheckpointName(5, 1)}, {1}, whole={CheckpointName(5, 1)})

    def apply(disk: Disk, promises: Promises) -> None:
        retain.apply(disk, Keep(last=1))
        if Store(disk.root).steps() != [5]:  # allowed where 5 cannot be seen to be durable
            raise Unavailable("nothing was deleted yet")
        check_read(disk.root, 5, live)

    def finish(disk: Disk) -> None:
        commit.claim_epoch(disk, CheckpointName(STEPS, 1))
        retain.sweep(disk)
        assert len(packs_of(disk.root)) == 2
        assert len(disk.list(names.CHECKPOINTS)) == 1

    assert sweep(folder, prepare, apply, fault, finish) > 10


def kill(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.timeout(300)  # workers give way to whatever else this machine does
@pytest.mark.slow
def test_workers_and_keepers_killed_at_random_moments(store):
    """With retention, which deletes what workers read if it is wrong. EVERSTEP_SEED=... again."""
    seed = int(os.environ.get("EVERSTEP_SEED", random.SystemRandom().randrange(1 << 30)))
    print(f"EVERSTEP_SEED={seed}")
    rng = random.Random(seed)
    state, live = build(), {}
    with everstep.Checkpointer(
        store, state, strategy=everstep.Log(replica=True, base_every=3), keep=Keep(last=4)
    ) as checkpointer:
        step = made = killed = 0
        while step < 40 or made < 2:
            step += 1
            assert step < 3000
            train_one_step(state)
            checkpointer.step(step).wait("local")
            live[step] = {f"model.{k}": v.clone() for k, v in state["model"].state_dict().items()}
            keeper = checkpointer._client.keeper_pid
            workers = workers_of(keeper)
            has_come = checkpointer.metrics.replica_step or 0
            if workers and has_come > killed and rng.random() < 0.1:
                time.sleep(rng.uniform(0, 0.5))  # at a moment, not for a state
                kill(keeper if rng.random() < 0.3 else workers[0])
                killed = step
            made = checkpointer.metrics.replica_bases
            if step % 10 == 0:
                verdict = Store(store).verify()
                assert verdict.ok, verdict.problems
        keeper = checkpointer._client.keeper_pid
    assert ended(keeper)
    verdict = Store(store).verify()
    assert verdict.ok, verdict.problems
    disk = Disk(store)
    for name in catalog.committed(disk):
        if catalog.read_state(disk, name):
            check_read(store, name.step, live)
    fresh = build()
    with everstep.Checkpointer(store, fresh) as restorer:
        for reference in Store(store).steps():
            assert restorer.restore(reference) == reference
            found = fresh["model"].state_dict()
            assert all(torch.equal(found[k[6:]], v) for k, v in live[reference].items())
        keeper = restorer._client.keeper_pid
    until(lambda: ended(keeper), "the keeper's end")
    retain.sweep(disk)
