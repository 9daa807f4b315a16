"""A remote tier beside a local store: what goes there, what comes back from it, what becomes
durable there first, and what happens where it does not answer."""

import os
import shutil
import signal

import pytest
from keepers import until
from test_bucket_store import build, train

import everstep
import forked_modules
import gated
from everstep import Conflict, Corrupt, Keep, Store, Tiers, Unavailable
from everstep.format.manifest import CheckpointName
from everstep.keeper.copies import RemoteCopies
from everstep.keeper.persist import persist
from everstep.keeper.ranks.node_save import NodeSave
from everstep.keeper.router import Router
from everstep.store import catalog
from everstep.store.copy import Copier
from everstep.store.names import epoch_path, manifest_path
from everstep.tiers.bucket import Bucket
from everstep.tiers.disk import Disk
from everstep.tiers.tier import tier_at
from examples import slow
from forked import Forked, run
from stores import end_keeper, make_store, rewrite

STEPS = 12


@pytest.fixture
def local(stores):
    return stores("local")


@pytest.fixture(params=["directory", *slow("bucket")])
def remote(request, tmp_path):
    if request.param == "directory":
        return str(tmp_path / "remote")
    return request.getfixturevalue("bucket")


def weights(state):
    return state["model"].weight.double().sum().item().hex()


def undisturbed(steps=STEPS):
    state = build()
    for _ in range(steps):
        train(state)
    return weights(state)


def trains(store, remote, strategy, die=None, steps=STEPS, copies=True, route="local"):
    """Goes on from what is there; prints the step that was restored, and the weights at the end."""
    state = build()
    tiers = Tiers(remote=remote, route=route)
    with everstep.Checkpointer(store, state, strategy=strategy, tiers=tiers) as checkpointer:
        start = checkpointer.restore()
        print(start, flush=True)
        for step in range(start + 1, steps + 1):
            train(state)
            handle = checkpointer.step(step)
            if step == die:
                if copies:
                    handle.wait("remote", timeout=60)
                os.kill(os.getpid(), signal.SIGKILL)
        checkpointer.wait("remote", timeout=60)
    print(weights(state), flush=True)


@pytest.mark.parametrize("remote", ["directory", "bucket"], indirect=True)
@pytest.mark.parametrize("strategy", ["log", *slow("full", "spread")])
def test_a_run_whose_disk_is_lost_goes_on_from_there(local, remote, strategy):
    with Forked(trains, local, remote, strategy, 7) as process:
        assert process.stdout.readline() == "0\n"
        assert process.wait() == -signal.SIGKILL
    end_keeper(local)
    shutil.rmtree(local)
    start, found = run(trains, local, remote, strategy).stdout.split()
    assert (int(start), found) == (7, undisturbed())
    assert Store(remote).latest() == Store(local).latest() == STEPS
    assert catalog.read_run(tier_at(local)) == catalog.read_run(tier_at(remote))
    assert Store(remote).verify().ok


def test_only_what_is_due_goes_there(local, remote):
    state = build()
    tiers = Tiers(remote=remote, remote_every=4)
    with everstep.Checkpointer(
        local, state, strategy="full", keep=Keep(last=2), tiers=tiers
    ) as checkpointer:
        for step in range(1, 10):
            train(state)
            tag = "best" if step == 6 else None
            handle = checkpointer.save(step, tag=tag)
            if handle.further:
                handle.wait("remote", timeout=60)
        with pytest.raises(ValueError, match="for step 9"):
            handle.wait("remote")
        with pytest.raises(ValueError, match="replicated"):
            checkpointer.wait("replicated")
    until(lambda: Store(remote).steps() == [6, 8], "the tier keeps its own last two")
    until(lambda: Store(local).steps() == [6, 8, 9], "what is copied may go")
    assert catalog.read_tags(tier_at(remote)) == catalog.read_tags(tier_at(local))


def test_a_damaged_tag_holds_nothing_up(local, tmp_path):
    """It is asked at each commit what has one; verify tells of it."""
    tiers = Tiers(remote=str(tmp_path / "remote"), remote_every=3)
    with everstep.Checkpointer(local, build(), strategy="full", tiers=tiers) as checkpointer:
        checkpointer.save(1, tag="best").wait("remote", timeout=60)
        tag = local / "tags" / "best.json"
        tag.write_bytes(tag.read_bytes()[:-5])
        checkpointer.save(2).wait("local", timeout=60)
        checkpointer.save(3).wait("remote", timeout=60)
        assert checkpointer._client.losses == 0
    assert Store(tmp_path / "remote").steps() == [1, 3]
    assert not Store(local).verify().ok


def test_damage_in_the_tier_costs_space_and_no_checkpoint(local, tmp_path):
    """Of a manifest that cannot be read nobody knows which files it needs: nothing is deleted."""
    tiers, options = Tiers(remote=str(tmp_path / "remote"), remote_every=1), {"strategy": "full"}
    with everstep.Checkpointer(local, build(), tiers=tiers, **options) as checkpointer:
        checkpointer.save(1, tag="best").wait("remote", timeout=60)
    end_keeper(local)
    (manifest,) = (tmp_path / "remote" / "checkpoints").glob("*/manifest.json")
    manifest.write_bytes(manifest.read_bytes()[:-5])
    options["keep"] = Keep(last=1)
    with everstep.Checkpointer(local, build(), tiers=tiers, **options) as checkpointer:
        checkpointer.restore()
        for step in (2, 3, 4):
            checkpointer.save(step).wait("remote", timeout=60)
        assert checkpointer.metrics.tiers["remote"]["problem"] is None
    assert Store(tmp_path / "remote").steps() == [1, 2, 3, 4]


def test_the_same_manifests_are_in_both(local, remote):
    run(trains, local, remote, "log")
    near, far = tier_at(local), tier_at(remote)
    copied = catalog.committed(far)
    assert copied[-1].step == STEPS
    assert set(copied) <= set(catalog.committed(near))
    for name in copied:
        assert catalog.digest_of_manifest(near, name) == catalog.digest_of_manifest(far, name)
    assert [near.read(epoch_path(n)) for n in catalog.claimed(near)] == [
        far.read(epoch_path(n)) for n in catalog.claimed(far)
    ]


def test_what_was_not_copied_is_copied_by_the_next_keeper(local, remote):
    with Forked(trains, local, remote, "full", 5, STEPS, False) as process:
        assert process.wait() == -signal.SIGKILL
    end_keeper(local)
    start, found = run(trains, local, remote, "full", None, 8).stdout.split()
    assert int(start) >= 1
    assert found == undisturbed(8)
    assert {int(start), 8} <= set(Store(remote).steps())


def test_a_run_that_went_back_stays_there(local, remote):
    run(trains, local, remote, "full", None, 6)
    state = build()
    with everstep.Checkpointer(local, state, tiers=Tiers(remote=remote)) as checkpointer:
        assert checkpointer.restore(3) == 3
        train(state)
        checkpointer.save(4).wait("remote", timeout=60)
    end_keeper(local)
    shutil.rmtree(local)
    with everstep.Checkpointer(local, build(), tiers=Tiers(remote=remote)) as checkpointer:
        assert checkpointer.restore() == 4
    assert Store(remote).steps() == [1, 2, 3, 4]


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr("everstep.options._PATIENCE_S", 0.5)


@pytest.mark.usefixtures("hasty")
def test_training_goes_on_while_the_bucket_is_away(local, proxied, caplog):
    bucket, proxy = proxied
    state = build()
    with everstep.Checkpointer(
        local, state, strategy="full", keep=Keep(last=1), tiers=Tiers(remote=bucket)
    ) as checkpointer:
        train(state)
        checkpointer.save(1).wait("remote", timeout=60)
        proxy.is_away = True
        handles = {}
        for step in range(2, 22):
            train(state)
            handles[step] = checkpointer.save(step)
            handles[step].wait("local", timeout=60)
        with pytest.raises(TimeoutError, match="remote"):
            handles[21].wait("remote", timeout=0.1)
        proxy.is_away = False
        handles[21].wait("remote", timeout=60)
        with pytest.raises(Unavailable, match="given up"):
            handles[3].wait("remote", timeout=60)
    assert Store(bucket).latest() == 21


@pytest.mark.usefixtures("hasty")
def test_a_run_never_begins_anew_because_a_tier_is_away(local, proxied, monkeypatch):
    bucket, proxy = proxied
    telling = Bucket._telling
    run(trains, local, bucket, "full", None, 3)
    end_keeper(local)
    shutil.rmtree(local)
    proxy.is_away = True
    asked = []
    monkeypatch.setattr(Bucket, "_telling", lambda *args: asked.append(args) or telling(*args))
    checkpointer = everstep.Checkpointer(local, build(), tiers=Tiers(remote=bucket))
    with checkpointer, pytest.raises(Unavailable, match="another tier does not answer"):
        checkpointer.restore()
    assert len(asked) == 1  # each call is one that is waited for


def test_a_bucket_that_takes_nothing_is_told_to_each_trainer(local, proxied, caplog):
    bucket, proxy = proxied
    run(trains, local, bucket, "full", None, 3)
    proxy.refuses = lambda method, headers: (403, "AccessDenied") if method == "PUT" else None
    for step in (4, 5):
        caplog.clear()
        with everstep.Checkpointer(local, build(), tiers=Tiers(remote=bucket)) as checkpointer:
            assert checkpointer.restore() == step - 1
            checkpointer.save(step).wait("local", timeout=60)
            until(lambda: f"What is due in {bucket} waits" in caplog.text, "nothing is said")
            assert "do not allow it" in checkpointer.metrics.tiers["remote"]["problem"]


def meets_another(writer):
    try:
        writer.wait("remote", timeout=60)
    except Conflict:
        return True
    return False


@pytest.mark.usefixtures("hasty")
@pytest.mark.slow
def test_of_two_writers_of_one_bucket_one_wins(tmp_path, proxied):
    bucket, proxy = proxied
    stores = tmp_path / "one", tmp_path / "two"
    run(trains, stores[0], bucket, "full", None, 3)
    end_keeper(stores[0])
    shutil.copytree(*stores)  # as on another machine
    proxy.is_away = True
    writers, states = [], []
    for store in stores:
        states.append(build())
        writers.append(everstep.Checkpointer(store, states[-1], tiers=Tiers(remote=bucket)))
        assert writers[-1].restore() == 3
        writers[-1].save(4).wait("local", timeout=60)
    proxy.is_away = False
    ended = [writer for writer in writers if meets_another(writer)]
    # Where both claim in the same moment, the one of the lower number is told with its next step.
    steps = [1, 2, 3, 4]
    if not ended:
        steps.append(5)
        for writer in writers:
            writer.save(5).wait("local", timeout=60)
        ended = [writer for writer in writers if meets_another(writer)]
    assert len(ended) == 1
    with pytest.raises(Conflict, match="another writer"):
        ended[0].save(6).wait(timeout=60)
    for writer in writers:
        if writer not in ended:
            writer.close()
        else:
            with pytest.raises(Conflict):
                writer.close()
    for store in stores:
        end_keeper(store)
    assert Store(bucket).steps() == steps


def test_another_runs_place_is_refused(tmp_path, local, remote):
    run(trains, tmp_path / "other", remote, "full", None, 2)
    end_keeper(tmp_path / "other")
    with everstep.Checkpointer(local, build()):
        pass
    with pytest.raises(Conflict, match="another place"):
        everstep.Checkpointer(local, build(), tiers=Tiers(remote=remote))


def test_damage_is_made_good_from_there(local, remote):
    run(trains, local, remote, "full", None, 2)
    end_keeper(local)
    [pack] = [path for path in (local / "data").iterdir() if path.name.startswith("00000002-")]
    with open(pack, "r+b") as file:
        file.seek(5000)
        file.write(b"x" * 100)
    state = build()
    with everstep.Checkpointer(local, state, tiers=Tiers(remote=remote)) as checkpointer:
        assert checkpointer.restore() == 2
    assert weights(state) == undisturbed(2)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"remote": ""}, TypeError),
        ({"remote": 5}, TypeError),
        ({"remote_every": 0}, ValueError),
        ({"peers": 2}, ValueError),
    ],
)
def test_bad_arguments(arguments, error):
    with pytest.raises(error):
        Tiers(**arguments)


def test_a_remote_that_is_the_store(local):
    with pytest.raises(ValueError, match="itself"):
        everstep.Checkpointer(local, build(), tiers=Tiers(remote=local))


# ---- steps that become durable there first -------------------------------------------------------


def trains_routed(*args):
    trains(*args, route="remote")


def test_what_is_routed_is_there_alone_and_comes_back(local, remote):
    with Forked(trains_routed, local, remote, "full", 3, 6) as process:
        assert process.stdout.readline() == "0\n"
        assert process.wait() == -signal.SIGKILL
    end_keeper(local)
    assert Store(local).steps() == []
    assert Store(remote).steps() == [1, 2, 3]
    start, found = run(trains_routed, local, remote, "full", None, 6).stdout.split()
    assert (int(start), found) == (3, undisturbed(6))
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
    run(trains_routed, local, remote, "log", None, 6)
    assert Store(local).steps() == list(range(1, 7))


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
    copies.begin()
    router = Router("remote", trainer.writer, copies)
    job = trainer.seal(1)
    trainer.arena.descriptor(job.slot, job.row)[:4] = b"junk"
    save = NodeSave([job])
    assert router.persist(save, lambda save: None) is None
    [(_, outcome)] = persist(trainer.writer, [save], lambda save: None)
    assert isinstance(outcome, Corrupt)


def test_by_what_is_measured(local, tmp_path):
    trainer = make_store(local, [])
    target = Disk(tmp_path / "remote")
    copies = RemoteCopies(trainer.disk, target, 1, None, lambda message: None)
    copies.begin()
    router = Router("auto", trainer.writer, copies)

    def tier_of(step):
        save = NodeSave([trainer.seal(step)])
        routed = router.persist(save, lambda save: None)
        if routed:
            assert routed.is_routed
            return "remote"
        return "local"

    assert tier_of(1) == "local"  # nothing is known
    trainer.writer.traffic.bytes_per_s, copies.traffic.bytes_per_s = 40e6, 400e6
    assert tier_of(2) == "remote"
    trainer.writer.traffic.bytes_per_s = 395e6  # no reason to change
    assert tier_of(3) == "remote"
    trainer.writer.traffic.bytes_per_s = 4e9
    assert tier_of(4) == "local"
    copies.close()
    assert Store(tmp_path / "remote").steps() == [2, 3]


@pytest.mark.parametrize(
    "arguments", [{"route": "auto"}, {"route": "nearest", "remote": "elsewhere"}]
)
def test_routes_that_are_none(arguments):
    with pytest.raises(ValueError, match="route"):
        Tiers(**arguments)
