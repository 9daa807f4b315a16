"""Steps that become durable in the remote tier first."""

import os
import signal

import pytest
from keepers import until
from test_bucket_store import build, train
from test_remote_tier import undisturbed, weights

import everstep
import forked_modules
import gated
from everstep import Conflict, Corrupt, Keep, Store, Tiers, Unavailable
from everstep.format.manifest import CheckpointName
from everstep.keeper.copies import RemoteCopies
from everstep.keeper.persist import persist
from everstep.keeper.ranks.node_save import NodeSave
from everstep.keeper.router import Router
from everstep.store.copy import Copier
from everstep.store.names import manifest_path
from everstep.tiers.disk import Disk
from examples import slow
from forked import Forked, run
from stores import end_keeper, make_store, rewrite

STEPS = 6


@pytest.fixture
def local(tmp_path):
    store = tmp_path / "local"
    yield store
    end_keeper(store)


@pytest.fixture(params=["directory", *slow("bucket")])
def remote(request, tmp_path):
    if request.param == "directory":
        return str(tmp_path / "remote")
    return request.getfixturevalue("bucket")


def trains(store, remote, route, die=None, strategy="full"):
    state = build()
    tiers = Tiers(remote=remote, route=route)
    with everstep.Checkpointer(store, state, strategy=strategy, tiers=tiers) as checkpointer:
        start = checkpointer.restore()
        print(start, flush=True)
        for step in range(start + 1, STEPS + 1):
            train(state)
            handle = checkpointer.step(step)
            handle.wait(timeout=60)
            if step == die:
                os.kill(os.getpid(), signal.SIGKILL)
    print(weights(state), flush=True)


def test_what_is_routed_is_there_alone_and_comes_back(local, remote):
    with Forked(trains, local, remote, "remote", 3) as process:
        assert process.stdout.readline() == "0\n"
        assert process.wait() == -signal.SIGKILL
    end_keeper(local)
    assert Store(local).steps() == []
    assert Store(remote).steps() == [1, 2, 3]
    start, found = run(trains, local, remote, "remote").stdout.split()
    assert (int(start), found) == (3, undisturbed(STEPS))
    assert Store(remote).steps() == [1, 2, 3, 4, 5, 6]
    assert Store(remote).verify().ok


def test_the_levels_of_a_routed_step(local, remote):
    state = build()
    tiers = Tiers(remote=remote, route="remote", remote_every=2)
    with everstep.Checkpointer(local, state, strategy="full", tiers=tiers) as checkpointer:
        for step in (1, 2):
            train(state)
            handle = checkpointer.step(step)
            handle.wait("remote", timeout=60) if step == 2 else handle.wait(timeout=60)
            assert handle.level == "remote"
            with pytest.raises(Unavailable, match="remote tier alone"):
                handle.wait("local", timeout=60)
        checkpointer.wait(timeout=60)
        handle = checkpointer.save(3, tag="kept")
        handle.wait("local", timeout=60)
        handle.wait("remote", timeout=60)
    assert Store(local).steps() == [3]
    assert Store(remote).steps() == [1, 2, 3]


def test_a_log_stays_in_the_store(local, remote):
    run(trains, local, remote, "remote", None, "log")
    assert Store(local).steps() == list(range(1, STEPS + 1))


def test_each_tier_has_its_own_retention(local, remote):
    state = build()
    tiers = Tiers(remote=remote, route="remote")
    options = {"strategy": "full", "keep": Keep(last=2), "tiers": tiers}
    with everstep.Checkpointer(local, state, **options) as checkpointer:
        for step in range(1, 6):
            train(state)
            checkpointer.step(step).wait(timeout=60)
        until(lambda: Store(remote).steps() == [4, 5], "retention")


def test_a_tier_that_is_away_costs_nothing(local, proxied, monkeypatch):
    forked_modules.begin_with(monkeypatch, gated.impatient)
    bucket, proxy = proxied
    state = build()
    tiers = Tiers(remote=bucket, route="remote")
    with everstep.Checkpointer(local, state, strategy="full", tiers=tiers) as checkpointer:
        for step in range(1, 5):
            train(state)
            proxy.is_away = step in (2, 3)
            checkpointer.step(step).wait(timeout=60)
        checkpointer.wait("remote", timeout=60)
    end_keeper(local)
    found = set(Store(local).steps()), set(Store(bucket).steps())
    assert found[0] >= {2, 3}
    assert found[1] == {1, 2, 3, 4}
    state = build()
    with everstep.Checkpointer(local, state, tiers=Tiers(remote=bucket)) as checkpointer:
        assert checkpointer.restore() == 4
    assert weights(state) == undisturbed(4)


def test_a_step_that_both_have_is_no_conflict(local, tmp_path):
    """The answer got lost: the store took it, too."""
    trainer, target = make_store(local, [1]), Disk(tmp_path / "remote")
    Copier(trainer.disk, target).copy(CheckpointName(1, 1))
    path = tmp_path / "remote" / manifest_path(CheckpointName(1, 1))
    rewrite(path, lambda document: document.update(created="2026-11-24T12:00:00.000Z"))
    assert not Copier(trainer.disk, target).copy(CheckpointName(1, 1)).checkpoints
    rewrite(path, lambda document: document["objects"].update(step=2))
    with pytest.raises(Conflict):
        Copier(trainer.disk, target).copy(CheckpointName(1, 1))


def test_what_makes_no_sense_is_left_to_who_tells_of_it(local, tmp_path):
    """The keeper does not end by it, and the next one, and so on."""
    trainer, target = make_store(local, []), Disk(tmp_path / "remote")
    copies = RemoteCopies(trainer.disk, target, 1, None, lambda message: None)
    router = Router("remote", trainer.writer, copies)
    job = trainer.seal(1)
    trainer.arena.descriptor(job.slot, job.row)[:4] = b"junk"
    save = NodeSave([job])
    assert router.persist(save, lambda save: None) is None
    [(_, outcome)] = persist(trainer.writer, [save], lambda save: None)
    assert isinstance(outcome, Corrupt)


def test_what_is_there_is_not_given_up(local, tmp_path):
    """While a large copy takes its time, many steps are routed."""
    trainer, target = make_store(local, []), Disk(tmp_path / "remote")
    copies = RemoteCopies(trainer.disk, target, 1, None, lambda message: None)
    copies.close()
    copies._thread.join()
    for step in range(20):
        copies.note(CheckpointName(step, 1), is_there=True)
    assert copies._next()
    assert copies.traffic.given_up == 0


def test_by_what_is_measured(local, tmp_path):
    trainer = make_store(local, [])
    target = Disk(tmp_path / "remote")
    copies = RemoteCopies(trainer.disk, target, 1, None, lambda message: None)
    router = Router("auto", trainer.writer, copies)

    def tier_of(step):
        save = NodeSave([trainer.seal(step)])
        routed = router.persist(save, lambda save: None)
        if routed:
            assert routed.is_routed
            return "remote"
        return "local"

    assert tier_of(1) == "local"  # nothing is known
    trainer.writer.speed.bytes_per_s, copies.speed.bytes_per_s = 40e6, 400e6
    assert tier_of(2) == "remote"
    trainer.writer.speed.bytes_per_s = 395e6  # no reason to change
    assert tier_of(3) == "remote"
    trainer.writer.speed.bytes_per_s = 4e9
    assert tier_of(4) == "local"
    copies.close()
    assert Store(tmp_path / "remote").steps() == [2, 3]


@pytest.mark.parametrize(
    "arguments", [{"route": "auto"}, {"route": "nearest", "remote": "elsewhere"}]
)
def test_bad_arguments(arguments):
    with pytest.raises(ValueError, match="route"):
        Tiers(**arguments)
