"""Log(replica=True): a process holds the newest state, from which a restart copies it. It dies,
fails and gives way."""

import os
import signal

import pytest
import torch
from keepers import ended, stopped, until
from runs import check_same, check_steps, checkpointer, end_keeper, logged, restore, snapshot
from wholes import advance, begun, build, come, same, tensors_of, train, whole_steps, workers_of

import everstep
import forked
from everstep import Keep, Store, Unsupported
from everstep.format.manifest import CheckpointName
from everstep.store import catalog, retain
from everstep.tiers.disk import Disk
from examples import slow
from stores import packs_of

pytestmark = pytest.mark.timeout(300)  # workers give way to whatever else this machine does


def trains_and_dies(store, steps, kind="AdamW"):
    state = build(1, getattr(torch.optim, kind))
    saver = logged(store, state, replica=True, base_every=1000)
    start = saver.restore()
    for step in range(start + 1, start + steps + 1):
        train(state, everstep.clip_grad_norm_)
        saver.step(step).wait("local")
    come(saver, step)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("kind", ["ASGD", *slow("AdamW", "Adafactor", "SGD")])
def test_a_restart_copies_the_state_out_of_it(store, monkeypatch, kind):
    """No file with data is opened, however long the log is."""
    for _ in range(2):
        assert forked.run(trains_and_dies, store, 12, kind).returncode == -signal.SIGKILL
    assert not whole_steps(store)
    expected = build(1, getattr(torch.optim, kind))
    for _ in range(24):
        train(expected, everstep.clip_grad_norm_)
    frozen, restored = snapshot(expected), build(2, getattr(torch.optim, kind))
    with monkeypatch.context() as patch, checkpointer(store, restored) as restorer:
        patch.setattr("everstep.restore.choose._Lazy.read_into", None)
        assert restorer.restore() == 24
    check_same(snapshot(restored), frozen)
    end_keeper(store)
    with checkpointer(store, again := build(3, getattr(torch.optim, kind))) as restorer:
        assert restorer.restore() == 24
    check_same(snapshot(again), frozen)


@pytest.mark.slow
def test_it_writes_the_bases(store):
    state, frozen, live = build(1), {}, {}
    with logged(store, state, base_every=5, replica=True) as saver:
        for step in range(1, 15):
            train(state, everstep.clip_grad_norm_)
            saver.step(step).wait("local")
            live[step], frozen[step] = tensors_of(state), snapshot(state)
            if step == 6:
                until(lambda: saver.metrics.replica_bases, "the first base")
        until(lambda: saver.metrics.replica_bases > 1, "a later base")
        assert saver.metrics.replica_failures == 0
        come(saver, 14)
        assert saver.metrics.replica_seconds > 0
        keeper = saver._client.keeper_pid
    assert ended(keeper)
    whole = whole_steps(store)
    assert whole[0] == 6
    assert all(Store(store).manifest(step).previous for step in range(2, 15))  # one whole copy
    for step in whole:
        state_of = catalog.read_state(Disk(store), CheckpointName(step, 1))
        assert state_of.exact
        same(Store(store).read(step), live[step])
    assert Store(store).chain(14)[0].step == whole[-1]
    check_steps(store, build(2), frozen)


@pytest.mark.slow
def test_it_writes_bases_as_often_as_the_log_has_them(store):
    """Each manifest says how often: after ten records, where these are as large as states."""
    state = build(1)
    with logged(store, state, base_every=None, replica=True) as saver:
        for step in range(1, 12):
            train(state, everstep.clip_grad_norm_)
            saver.step(step).wait("local")
        until(lambda: saver.metrics.replica_bases, "the first base")
    assert whole_steps(store) == [11]


@pytest.mark.slow
def test_going_on_after_a_restore_from_its_base(store):
    state, keep = build(1), Keep(last=2)
    with logged(store, state, base_every=4, replica=True, keep=keep) as saver:
        frozen = advance(saver, state, range(1, 11))
        until(lambda: saver.metrics.replica_bases, "a base")
    end_keeper(store)
    fresh = build(2)
    with logged(store, fresh, base_every=4, replica=True, keep=keep) as saver:
        assert saver.restore() == 10
        check_same(snapshot(fresh), frozen[10])
        generator = torch.get_rng_state()
        advance(saver, fresh, range(11, 20), frozen)
        until(lambda: saver.metrics.replica_bases, "a base of the new epoch")
        keeper = saver._client.keeper_pid
    assert ended(keeper)  # no retention changes anything any more
    torch.set_rng_state(generator)
    for _ in range(11, 20):
        train(state)
    check_same(snapshot(state), frozen[19])
    check_steps(store, build(3), frozen)
    assert Store(store).verify().ok


def test_a_write_that_no_record_tells_of_is_found_while_training_goes_on(store, caplog):
    """One element of 90,000, by .data, between an update and its step()."""
    torch.manual_seed(1)
    model = torch.nn.Linear(300, 300)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    frozen, failed = {}, 0
    with logged(store, state, replica=True, base_every=1000) as saver:
        for step in range(1, 200):
            state["optimizer"].zero_grad()
            model(torch.randn(4, 300)).square().mean().backward()
            state["optimizer"].step()
            if step == 5:
                model.weight.data[150, 150] += 1
            saver.step(step).wait("local")
            frozen[step] = snapshot(state)
            metrics = saver.metrics

            def has_come(step=step, failed=failed, metrics=metrics):
                return failed or metrics.replica_failures or metrics.replica_step == step

            until(has_come, f"the replica at {step}", 200.0)
            failed = failed or (step if metrics.replica_failures else 0)
            if failed and step > failed + 3:
                break
        come(saver, step)
        assert saver.metrics.replica_failures == 1
    assert 5 <= failed < 60
    assert "came to other bytes than the run had" in caplog.text
    assert "'model.weight'" in caplog.text or "'optimizer.model.weight" in caplog.text
    whole = [each for each in Store(store).steps() if not Store(store).manifest(each).previous]
    assert whole[0] == 1
    assert failed < whole[1] <= failed + 2
    again = torch.nn.Linear(300, 300)
    fresh = {"model": again, "optimizer": torch.optim.AdamW(again.parameters())}
    check_steps(store, fresh, frozen, steps=[step])


class Own(torch.optim.SGD):
    """Not torch's own: nobody but the program can build it."""


def test_what_no_other_process_can_follow_is_told_at_once(store):
    with pytest.raises(Unsupported, match="only torch's own"):
        logged(store, build(1, Own), replica=True)
    state = build(1)
    rules = {"average": lambda step: None}
    with pytest.raises(Unsupported, match="derived by a rule"):
        logged(store, {**state, "average": torch.zeros(2)}, replica=True, derive=rules)
    assert not store.exists() or not Store(store).steps()


# ---- the processes -------------------------------------------------------------------------------


def replicated(store, state, **options):
    return logged(store, state, **{"replica": True, "base_every": 1000, **options})


@pytest.mark.slow
def test_workers_that_die(store):
    """There is another, which goes on from base and records, but not for ever."""
    state, killed = build(1), []
    with replicated(store, state, base_every=3) as saver:
        advance(saver, state, range(1, 5))
        come(saver, 4)
        keeper, worker = begun(saver)
        os.kill(worker, signal.SIGKILL)
        until(lambda: saver.metrics.replica_failures, "the failure")
        advance(saver, state, range(5, 8))
        come(saver, 7)
        assert Store(store).verify().ok

        def kill_again():
            for worker in workers_of(keeper):
                killed.append(worker)
                os.kill(worker, signal.SIGKILL)
            return saver.metrics.replica_failures == 4

        until(kill_again, "three failures in a row")
        assert len({*killed}) == 3
        advance(saver, state, range(8, 13))
        assert not workers_of(keeper)
        assert "has died" in saver.metrics.last_error
    manifests = [Store(store).manifest(step) for step in Store(store).steps()]
    assert any(not each.previous for each in manifests[7:])  # training makes bases again
    assert restore(store, build(2)) == 12


@pytest.mark.slow
def test_what_a_dead_worker_had_written_of_a_base_is_deleted(store):
    state = build(1)
    with replicated(store, state) as saver:
        advance(saver, state, range(1, 5))
        come(saver, 4)
        _, worker = begun(saver)
        there = packs_of(store)
        names = [f"00000004-0001-abcd-{number}.safetensors" for number in range(2)]
        for name in names:
            (store / "data" / name).write_bytes(bytes(1000))
        os.kill(worker, signal.SIGKILL)
        until(lambda: packs_of(store) == there, "the end of them")
        advance(saver, state, range(5, 7))
    assert Store(store).verify().ok
    assert restore(store, build(2)) == 6


def test_a_worker_ends_with_its_keeper(store):
    state = build(1)
    with replicated(store, state) as saver:
        advance(saver, state, range(1, 4))
        keeper, worker = begun(saver)
        os.kill(keeper, signal.SIGKILL)
        assert ended(worker)
        advance(saver, state, range(4, 7))  # and the next keeper goes on
        come(saver, 6)
        assert saver._client.keeper_pid != keeper
    assert Store(store).verify().ok
    assert restore(store, build(2)) == 6


@pytest.mark.slow
def test_a_worker_gives_way_and_ends_with_its_trainer(store):
    """In peace: nothing will be added to this log."""
    state = build(1)
    with replicated(store, state, base_every=2) as saver:
        advance(saver, state, range(1, 4))
        come(saver, 3)
        keeper, worker = begun(saver)
        until(lambda: os.getpriority(os.PRIO_PROCESS, worker) == 19, "that it gives way")
        assert os.getsid(worker) == worker
        assert os.getpriority(os.PRIO_PROCESS, keeper) == 0
    assert ended(worker)
    assert ended(keeper)
    assert Store(store).verify().ok
    retain.sweep(Disk(store))
    assert len(packs_of(store)) == 3 + len(whole_steps(store))


@pytest.mark.slow
def test_a_worker_that_stands_still_costs_nothing_but_its_state(store):
    """Slots and commits go on; what it missed it reads from the disk."""
    state = build(1)
    with replicated(store, state) as saver:
        advance(saver, state, range(1, 4))
        come(saver, 3)
        _, worker = begun(saver)
        with stopped(worker):
            advance(saver, state, range(4, 100))
            assert saver.metrics.replica_step == 3
        come(saver, 99)
        assert saver.metrics.replica_failures == 0
