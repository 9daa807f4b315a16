"""catch_up: steps of a log become whole in the background, and what is before them can go."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from keepers import ended, until
from runs import check_same, check_steps, checkpointer, end_keeper, logged, restore, snapshot
from torch import nn

import everstep
from everstep import Checkpointer, Conflict, Keep, Missing, Store, Unsupported
from everstep.keeper.catch_up import CatchUp
from everstep.restore.materialize import materialize
from everstep.store import catalog, claims, commit, names, retain
from everstep.store.names import CheckpointName
from everstep.tiers.disk import Disk
from stores import files_of, packs_of

pytestmark = pytest.mark.timeout(300)  # workers give way to whatever else this machine does


def build(seed, kind=torch.optim.AdamW, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.Linear(24, 12))
    groups = [
        {"params": [model[0].weight, model[2].weight]},
        {"params": [model[0].bias, model[1].weight, model[1].bias, model[2].bias]},
    ]
    groups[1]["weight_decay"] = 0.0
    optimizer = kind(groups, **{"lr": 0.01, **options})
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def train(state, clip=None):
    state["optimizer"].zero_grad()
    (3 * state["model"](torch.randn(8, 12)) - 1).square().mean().backward()
    if clip:
        clip(state["model"].parameters(), 0.5)
    state["optimizer"].step()
    state["scheduler"].step()


def tensors_of(state):
    """As Store.read names them."""
    found = {f"model.{key}": value.clone() for key, value in state["model"].state_dict().items()}
    for key, parameter in state["model"].named_parameters():
        for kind, value in state["optimizer"].state[parameter].items():
            if isinstance(value, torch.Tensor):
                found[f"optimizer.model.{key}.{kind}"] = value.clone()
    return found


def same(found, expected):
    assert expected
    for key, value in expected.items():
        assert found[key].dtype == value.dtype, key
        assert torch.equal(found[key], value), key


def workers_of(keeper):
    """The processes that a keeper has begun."""
    found = []
    for task in Path(f"/proc/{keeper}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return found


def whole_steps(store):
    disk = Disk(store)
    return [
        name.step
        for name in catalog.committed(disk)
        if disk.size(names.state_path(name)) is not None
    ]


CASES = {
    "AdamW foreach": (torch.optim.AdamW, {"foreach": True}),
    "AdamW for-loop": (torch.optim.AdamW, {"foreach": False}),
    "AdamW fused": (torch.optim.AdamW, {"fused": True}),
    "AdamW amsgrad": (torch.optim.AdamW, {"amsgrad": True, "maximize": True}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "SGD fused": (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
}
CLIPS = {
    "unclipped": None,
    "torch": nn.utils.clip_grad_norm_,
    "everstep": everstep.clip_grad_norm_,
    "by value": nn.utils.clip_grad_value_,
}


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("case", CASES)
def test_what_is_made_whole_is_the_run(store, case, clip):
    """Groups, a schedule, buffers; from a base, and from what was made whole before."""
    kind, options = CASES[case]
    state, frozen, live = build(1, kind, **options), {}, {}
    with logged(store, state, base_every=100) as saver:
        for step in range(1, 13):
            train(state, CLIPS[clip])
            saver.step(step)
            live[step], frozen[step] = tensors_of(state), snapshot(state)
    for step in (7, 12):
        made = materialize(Disk(store), CheckpointName(step, 1))
        assert made.exact
        assert made.hyperparameters == Store(store).manifest(step).hyperparameters
        same(Store(store).read(step), live[step])
    assert [manifest.step for manifest in Store(store).chain(11)] == [7, 8, 9, 10, 11]
    assert check_steps(store, build(2, kind, **options), frozen) == list(range(1, 13))
    assert Store(store).verify().ok


def test_the_background_makes_them(store, capsys):
    state, frozen, live = build(1), {}, {}
    with logged(store, state, base_every=1000, catch_up=5) as saver:
        for step in range(1, 31):
            train(state, everstep.clip_grad_norm_)
            saver.step(step).wait("local")
            live[step], frozen[step] = tensors_of(state), snapshot(state)
            if step in (6, 20):
                until(lambda: saver.metrics.catch_ups, "the first catch-up")
        until(lambda: saver.metrics.whole_step >= 20, "a later catch-up")
        assert saver.metrics.catch_up_failures == 0
        assert saver.metrics.catch_up_seconds > 0
        newest = saver.metrics.whole_step
        keeper = saver._client.keeper_pid
    assert ended(keeper)
    whole = whole_steps(store)
    assert whole[0] == 6
    assert whole[-1] >= newest
    assert all(Store(store).manifest(step).previous for step in whole)
    for step in whole:
        state_of = catalog.read_state(Disk(store), CheckpointName(step, 1))
        assert state_of.exact
        same(Store(store).read(step), live[step])
    assert Store(store).chain(30)[0].step == whole[-1]  # where a recovery begins
    assert not Disk(store).list(names.CLAIMS)
    check_steps(store, build(2), frozen)


def _is_trimmed(store, oldest_kept):
    """Nothing is there from before what the oldest kept step is rebuilt from."""
    whole = [step for step in whole_steps(store) if step <= oldest_kept]
    return Store(store).steps()[0] == max(whole, default=1)


@pytest.mark.slow
def test_retention_keeps_the_disk_bounded(store):
    """One base, a hundred records, and never more than a few of them on the disk."""
    state, frozen, most = build(1), {}, 0
    with logged(store, state, catch_up=10, keep=Keep(last=3)) as saver:
        for step in range(1, 101):
            train(state)
            saver.step(step).wait("local")
            if step % 25 == 0:
                until(lambda step=step: (saver.metrics.whole_step or 0) > step - 25, "a catch-up")
                until(lambda step=step: _is_trimmed(store, step - 2), "retention")
                most = max(most, len(packs_of(store)))
            frozen[step] = snapshot(state)
        bases = [step for step in Store(store).steps() if not Store(store).manifest(step).previous]
        assert not bases  # the only base, of step 1, is gone
        keeper = saver._client.keeper_pid
    assert ended(keeper)  # no retention changes anything any more
    assert most < 50
    steps = Store(store).steps()
    assert steps[-3:] == [98, 99, 100]
    verdict = Store(store).verify()
    assert verdict.ok, verdict.problems
    check_steps(store, build(2), frozen)
    Store(store).gc()
    check_steps(store, build(2), frozen)


def test_going_on_after_a_restore_from_what_was_made_whole(store):
    state, frozen = build(1), {}
    keep = Keep(last=2)
    with logged(store, state, catch_up=4, keep=keep) as saver:
        for step in range(1, 11):
            train(state)
            saver.step(step).wait("local")
            frozen[step] = snapshot(state)
        until(lambda: saver.metrics.catch_ups, "a catch-up")
    end_keeper(store)
    fresh = build(2)
    with logged(store, fresh, catch_up=4, keep=keep) as saver:
        assert saver.restore() == 10
        check_same(snapshot(fresh), frozen[10])
        generator = torch.get_rng_state()
        for step in range(11, 20):
            train(fresh)
            saver.step(step).wait("local")
            frozen[step] = snapshot(fresh)
        until(lambda: (saver.metrics.whole_step or 0) > 10, "a catch-up of the new epoch")
        keeper = saver._client.keeper_pid
    assert ended(keeper)  # no retention changes anything any more
    torch.set_rng_state(generator)
    for _ in range(11, 20):
        train(state)
    check_same(snapshot(state), frozen[19])
    check_steps(store, build(3), frozen)
    assert Store(store).verify().ok


class Own(torch.optim.SGD):
    """Not torch's own: nobody but the program can build it."""


def test_what_can_never_work_is_tried_once(store, caplog):
    state = build(1, Own)
    with logged(store, state, catch_up=2, base_every=1000) as saver:
        for step in range(1, 6):
            train(state)
            saver.step(step).wait("local")
        until(lambda: saver.metrics.catch_up_failures, "a failure")
        for step in range(6, 12):
            train(state)
            saver.step(step).wait("local")
        assert saver.metrics.catch_up_failures == 1
        assert "only torch's own" in saver.metrics.last_error
        assert not workers_of(saver._client.keeper_pid)
    assert "It is not tried any more" in caplog.text
    assert whole_steps(store) == []
    assert restore(store, build(2, Own)) == 11


def test_a_worker_that_dies_is_started_again(store):
    """And what it had begun is cleared away."""
    state = build(1)
    with logged(store, state, catch_up=3, base_every=1000) as saver:
        for step in range(1, 5):
            train(state)
            saver.step(step).wait("local")
        keeper = saver._client.keeper_pid
        (worker,) = until(lambda: workers_of(keeper), "a worker")
        os.kill(worker, signal.SIGKILL)
        until(lambda: saver.metrics.catch_ups, "the next worker")
        assert saver.metrics.catch_up_failures == 0
    assert whole_steps(store) == [4]
    assert Store(store).verify().ok


def test_workers_that_always_die_are_not_started_for_ever(store):
    state, killed = build(1), []
    with logged(store, state, catch_up=1, base_every=1000) as saver:
        keeper = saver._client.keeper_pid
        step = 0

        def advance():
            nonlocal step
            step += 1
            train(state)
            saver.step(step).wait("local")
            for worker in workers_of(keeper):
                killed.append(worker)
                os.kill(worker, signal.SIGKILL)
            return saver.metrics.catch_up_failures == 3

        until(advance, "three failures")
        assert len({*killed}) == 9
        for _ in range(5):
            advance()
        assert not workers_of(keeper)
        assert "the worker died 3 times" in saver.metrics.last_error
    assert restore(store, build(2)) == step


def test_a_worker_ends_with_its_keeper(store):
    state = build(1)
    with logged(store, state, catch_up=2, base_every=1000) as saver:
        for step in range(1, 4):
            train(state)
            saver.step(step).wait("local")
        keeper = saver._client.keeper_pid
        (worker,) = until(lambda: workers_of(keeper), "a worker")
        os.kill(keeper, signal.SIGKILL)
        assert ended(worker)
        for step in range(4, 7):  # and the next keeper goes on
            train(state)
            saver.step(step).wait("local")
        until(lambda: saver.metrics.catch_ups, "a worker of the next keeper")
        assert saver._client.keeper_pid != keeper
    assert Store(store).verify().ok
    assert restore(store, build(2)) == 6


def test_a_worker_ends_with_its_trainer(store):
    """In peace: nothing will be added to this log."""
    state = build(1)
    with logged(store, state, catch_up=2, base_every=1000) as saver:
        for step in range(1, 4):
            train(state)
            saver.step(step).wait("local")
        keeper = saver._client.keeper_pid
        (worker,) = until(lambda: workers_of(keeper), "a worker")
    assert ended(worker)
    assert ended(keeper)
    assert Store(store).verify().ok
    retain.sweep(Disk(store))
    assert len(packs_of(store)) == 3 + len(whole_steps(store))


def test_the_worker_gives_way(store):
    state = build(1)
    with logged(store, state, catch_up=2, base_every=1000) as saver:
        for step in range(1, 4):
            train(state)
            saver.step(step).wait("local")
        keeper = saver._client.keeper_pid
        (worker,) = until(lambda: workers_of(keeper), "a worker")
        is_low = until(
            lambda: ended(worker, 0) or os.getpriority(os.PRIO_PROCESS, worker) == 19, "a low one"
        )
        assert is_low
        if not ended(worker, 0):
            assert os.getsid(worker) == worker
            assert os.getpriority(os.PRIO_PROCESS, keeper) == 0


def test_none_is_begun_for_a_store_that_is_gone_or_taken_over(store):
    fill(store, 3)
    name, told = CheckpointName(3, 1), []

    def attempt():
        caught_up = CatchUp(
            Disk(store), 1, is_resumed=False, tell=told.append, on_whole=lambda: None
        )
        caught_up.note(name, takes_replay=True)
        until(lambda: caught_up._lag == 0, "the decision")
        caught_up.close()

    commit.claim_epoch(Disk(store), 1, 3)
    attempt()
    shutil.rmtree(store)
    attempt()
    assert not told
    assert not store.exists()
    done = subprocess.run(
        [sys.executable, "-m", "everstep.restore.worker", str(store), str(name)],
        stdin=subprocess.PIPE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert not store.exists()


def test_the_worker_says_what_went_wrong(store):
    fill(store, 3)
    for step, kind in ((1, "Unsupported"), (9, "Missing")):
        worker = subprocess.Popen(
            [sys.executable, "-m", "everstep.restore.worker", str(store), f"{step}-1"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert json.loads(worker.stdout.readline())["kind"] == kind
        assert worker.wait(60) == 1
        worker.communicate()


def test_arguments(store):
    for wrong in (0, -1, 2.0, True, "3"):
        with pytest.raises(ValueError, match="catch_up must be"):
            Checkpointer(store, build(1), strategy="log", catch_up=wrong)


# ---- what holds a log while it is read -------------------------------------------------------


def fill(store, steps=8, **options):
    state, frozen = build(1), {}
    with logged(store, state, base_every=1000, **options) as saver:
        for step in range(1, steps + 1):
            train(state)
            saver.step(step).wait("local")
            frozen[step] = snapshot(state)
    return frozen


def test_a_claim_holds_what_is_read(store):
    fill(store)
    disk, name = Disk(store), CheckpointName(6, 1)
    materialize(disk, CheckpointName(8, 1))  # retention could delete all that is before it
    with claims.hold(disk, name):
        assert retain.apply(disk, Keep(last=1)) > 0
        assert Store(store).steps() == [1, 2, 3, 4, 5, 6, 8]
        with pytest.raises(Conflict, match=r"00000006-0001 is being made whole. Try again"):
            Store(store).delete(6)
        Store(store).gc()
        assert Store(store).verify().ok
    retain.apply(disk, Keep(last=1))
    assert Store(store).steps() == [8]
    assert restore(store, build(2)) == 8


def test_gc_leaves_what_a_worker_writes_and_takes_what_a_dead_one_left(store):
    fill(store)
    disk, name = Disk(store), CheckpointName(6, 1)
    before = files_of(store)
    with claims.hold(disk, name) as token:
        pack = store / names.pack_path(name, token, 0)
        pack.write_bytes(bytes(1000))
        (store / names.epoch_path(2)).write_bytes((store / names.epoch_path(1)).read_bytes())
        Store(store).gc()
        assert pack.exists()
    (store / names.epoch_path(2)).unlink()
    dead = store / names.claim_path(name, token)
    dead.touch()  # as a process that was killed leaves it
    assert Store(store).gc() == (1, 1000)
    assert files_of(store) == before


def test_a_step_that_was_made_whole_outlives_what_was_before(store):
    """Also when it goes itself: its manifest first, since without its state it is nothing."""
    frozen = fill(store)
    disk = Disk(store)
    materialize(disk, CheckpointName(5, 1))
    assert retain.apply(disk, Keep(last=2)) > 0
    assert Store(store).steps() == [5, 6, 7, 8]
    assert Store(store).verify().ok
    check_steps(store, build(2), frozen)
    for step in (8, 7, 6, 5):
        assert Store(store).delete(step) > 0
    assert files_of(store) & {"data", "checkpoints"} == set()
    assert not packs_of(store)


def test_what_is_not_exact_frees_nothing(store, monkeypatch):
    """As of a CUDA run. Of several such states the newest stays, for those who read the store."""
    frozen = fill(store)
    disk = Disk(store)
    monkeypatch.setattr("everstep.restore.materialize.differences", lambda then: ["torch 1"])
    for step in (3, 5, 6):
        assert not materialize(disk, CheckpointName(step, 1)).exact
    retain.apply(disk, Keep(last=1))
    assert Store(store).steps() == list(range(1, 9))
    assert whole_steps(store) == [6]
    assert Store(store).verify().ok
    assert len(packs_of(store)) == 9
    check_steps(store, build(2), frozen)


def test_the_settings_of_then_are_adopted(store):
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    torch.set_default_dtype(torch.float64)
    try:
        frozen = fill(store, 4)
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(torch.float32)
    assert materialize(Disk(store), CheckpointName(4, 1)).exact
    assert torch.get_num_threads() == threads
    assert torch.get_default_dtype() == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert frozen.keys() == {*check_steps(store, build(2), frozen)}
    finally:
        torch.set_default_dtype(torch.float32)


def test_where_denormals_were_flushed_it_is_not_exact(store):
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot")
    try:
        fill(store, 3)
    finally:
        torch.set_flush_denormal(False)
    assert not materialize(Disk(store), CheckpointName(3, 1)).exact


@pytest.mark.parametrize(
    ("whole", "step", "nearest"),
    [
        ((), 4, "1"),
        ((3,), 4, "3"),
        ((6,), 4, "1 and 6"),
        ((2, 3, 6, 7), 4, "3 and 6"),
        ((3,), 8, "3"),
    ],
)
def test_reading_a_log_names_the_nearest_whole_states(store, whole, step, nearest):
    fill(store)
    for chosen in whole:
        materialize(Disk(store), CheckpointName(chosen, 1))
    base = 3 if 3 in whole else 1
    with pytest.raises(Unsupported) as caught:
        Store(store).read(step)
    assert str(caught.value) == (
        f"reading step {step} of {store}: it is stored as the redo records since step {base}, "
        f"which Checkpointer.restore replays. Make it whole with: everstep materialize {store} "
        f"{step}. Whole states nearest to it: {nearest}"
    )


def test_a_base_is_not_due_where_a_step_was_made_whole(store):
    """The distance counts from the newest whole state, and a real base still comes."""
    state = build(1)
    with logged(store, state, base_every=None) as saver:
        saver._captures.strategy.distance = lambda: 10
        for step in range(1, 40):
            train(state)
            saver.step(step).wait("local")
            if step in (8, 15, 24):
                saver._on_whole(step, 1)
            if step == 16:
                saver._on_whole(1000, 7)  # of another epoch
    manifests = [Store(store).manifest(step) for step in range(1, 40)]
    assert [m.step for m in manifests if not m.previous] == [1, 34]


def test_retention_goes_up_to_a_base_that_is_spread_over_records(store):
    """Its bytes lie in the packs of records that are deleted."""
    state, frozen, keep = build(1), {}, Keep(last=2)
    with logged(store, state, base_every=8, window=3, keep=keep) as saver:
        for step in range(1, 31):
            train(state)
            saver.step(step).wait("local")
            frozen[step] = snapshot(state)
        keeper = saver._client.keeper_pid
    assert ended(keeper)
    spread = whole_steps(store)
    assert spread
    assert Store(store).steps() == list(range(spread[-1], 31))
    assert all(not state.parts for state in map(Store(store).manifest, Store(store).steps()))
    assert Store(store).verify().ok
    assert Store(store).gc()[0] == 0
    check_steps(store, build(2), frozen)
    with pytest.raises(Unsupported, match="Whole states nearest to it: none"):
        Store(store).read(30)
    materialize(Disk(store), CheckpointName(spread[-1], 1))  # takes its place
    assert Store(store).read(spread[-1])
    retain.apply(Disk(store), Keep(last=2))
    assert Store(store).verify().ok
    check_steps(store, build(2), frozen)


def test_a_base_of_which_a_part_is_gone_is_not_published(store):
    """What holds the parts may have been deleted when a later step was made whole."""
    fill(store, 6)
    disk = Disk(store)
    lost = replace(Store(store).manifest(1), step=6)
    materialize(disk, CheckpointName(4, 1))
    retain.apply(disk, Keep(last=1))
    with pytest.raises(Missing, match="is gone"):
        commit.publish_base(disk, lost)
    assert whole_steps(store) == [4]
    assert Store(store).verify().ok


def test_full_and_auto_take_the_argument(store, other_store):
    for path, strategy in ((store, "full"), (other_store, "auto")):
        state = build(1)
        with checkpointer(path, state, strategy=strategy, catch_up=2) as saver:
            for step in range(1, 5):
                train(state)
                saver.step(step)
            saver.wait()
            assert not workers_of(saver._client.keeper_pid)
        assert restore(path, build(2)) == 4
