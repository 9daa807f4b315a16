"""Several nodes, each with a directory and a keeper of its own, which the others do not see."""

import contextlib
import os
import random
import shutil
import signal
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import zoo
from jobs import RECIPE, attached, parts_of, trains, trains_alone, unheard
from test_thinned_ranks import THIN, check_plans, planned

from comparing import check_equal, check_stored, stored_name
from everstep import EverstepError, Keep, Missing, Store, Tiers
from everstep.cli.top import status
from examples import slow
from processes import until
from stores import keeper_pid, packs_of

NODES = "aabb"


@pytest.fixture
def folders():
    """A short path: below it each node has its store and its runtime directory."""
    with tempfile.TemporaryDirectory(prefix="es-") as name:
        yield Path(name)
        for node in "abc":
            end_node(name, node)


def at(folders, node):
    """What is the node's own."""
    return Path(folders) / node


def node_keeper(folders, node):
    """Its process, if there is one."""
    with pytest.MonkeyPatch.context() as patch:
        (at(folders, node) / "run").mkdir(parents=True, exist_ok=True, mode=0o700)
        patch.setenv("EVERSTEP_RUNTIME_DIR", str(at(folders, node) / "run"))
        return keeper_pid(at(folders, node) / "store", node)


def end_node(folders, node):
    if pid := node_keeper(folders, node):
        os.kill(pid, signal.SIGKILL)


def on_node(folders, nodes, function, *args, **options):
    """Call it where this rank's node has its things."""
    here = at(folders, nodes[dist.get_rank()])
    (here / "run").mkdir(parents=True, exist_ok=True, mode=0o700)
    os.environ["EVERSTEP_RUNTIME_DIR"] = str(here / "run")
    return function(*args[:1], here / "store", *args[1:], nodes=nodes, **options)


def united(folders, nodes="ab"):
    """All stores as one directory, as one would have them who has them all."""
    for node in nodes:
        shutil.copytree(at(folders, node) / "store", folders / "all", dirs_exist_ok=True)
    return folders / "all"


@pytest.mark.parametrize("layout", ["fsdp2"])
@pytest.mark.slow
def test_each_node_has_its_packs_and_what_all_need(gang, folders, layout):
    saved, *_ = gang.run(
        on_node, folders, NODES, trains, layout, 3, waits=True, after=1, strategy="full"
    )
    a, b = (at(folders, node) / "store" for node in "ab")
    assert not packs_of(a) & packs_of(b)
    assert Store(a).steps() == Store(b).steps() == [1, 2, 3]
    for step in (1, 2, 3):
        manifest = Store(a).manifest(step)
        assert manifest == Store(b).manifest(step)
        assert [part.rank for part in manifest.parts] == [0, 1]
        assert {pack.path for part in manifest.parts for pack in part.packs} <= (
            packs_of(a) | packs_of(b)
        )
    assert not list(folders.glob("*/store/checkpoints/*/part-*.json"))
    check_stored(united(folders), saved.states[3])
    for nodes in (NODES, "abab"):
        run, *_ = gang.run(on_node, folders, nodes, trains, layout, after=1)
        assert run.first == 3
        check_equal(run.begun, saved.states[3])
    gang.run(on_node, folders, NODES, trains, layout, 5, strategy="full", keep=Keep(last=1))
    for store in (a, b):  # keepers delete when the trainers have their answer
        assert Store(store).steps() == [5]
        own = {pack.path for part in Store(store).manifest().parts for pack in part.packs}
        until(lambda: packs_of(store) < own, f"there is more in {store}")  # noqa: B023


def has_frozen(job):
    torch.manual_seed(0)
    job.frozen = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(4))
    return {**parts_of(job), "frozen": job.frozen.requires_grad_(False)}


@pytest.mark.slow
def test_what_does_not_change_lies_in_each_nodes_store_once(gang, folders):
    options = {"waits": True, "strategy": "full", "state_of": has_frozen, "keep": Keep(last=2)}
    for last in (3, 5):
        run, *_ = gang.run(on_node, folders, NODES, trains, "fsdp2", last, **options)
        assert not run.errors
    a, b = (Store(at(folders, node) / "store") for node in "ab")
    assert a.steps() == b.steps() == [4, 5]
    for part in a.manifest().parts:
        assert part.packs[-1].path.startswith("data/00000001-")
    assert Store(united(folders)).verify().ok


def trains_on(files, store, nodes, last=1000, **options):
    """Step after step; a file tells the newest whose call has returned. What was restored, its
    step, and the steps that other nodes have held when the call after them began."""
    job = zoo.build("fsdp2", RECIPE)
    options = {"strategy": "full", "tiers": Tiers(peers=1), **options}
    with attached(job, store, nodes=nodes, **options) as made:
        first = made.restore()
        begun, handles = job.full_state(), []
        for step in range(first + 1, last + 1):
            job.train(step)
            handles.append(made.step(step))
            note_step(files, step)
        made.wait("replicated")
    return first, begun, ["replicated" in handle.times for handle in handles]


def note_step(files, step):
    """This rank's call of it has returned."""
    note = Path(files) / f"{dist.get_rank()}"
    note.with_suffix(".new").write_text(str(step))
    note.with_suffix(".new").replace(note)


def newest(files, ranks):
    """The newest step whose calls have returned on all ranks."""
    notes = [Path(files) / str(rank) for rank in range(ranks)]
    return min(int(note.read_text()) if note.exists() else 0 for note in notes)


def lose(gang, folders, nodes, lost):
    """A node is gone at once: its ranks, its keeper, its disk; and then, as torchrun does it, the
    other ranks. What is left of it."""
    keeper = node_keeper(folders, lost)
    os.kill(keeper, signal.SIGKILL)
    gang.kill(*(rank for rank, node in enumerate(nodes) if node == lost))
    gang.kill()
    gang.finish()
    shutil.rmtree(at(folders, lost))


@pytest.mark.parametrize("strategy", ["full", *slow(THIN, "log")])
@pytest.mark.parametrize(
    ("nodes", "lost"), [("ab", "b"), *slow(("ab", "a"), ("aabb", "b"), ("abc", "a"), ("aabc", "c"))]
)
def test_the_loss_of_a_node_loses_a_step_at_most(
    gang, folders, files, impatient, nodes, lost, strategy
):
    """Of a thinned save the next node has, in memory, the packs of earlier steps as well."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance, size, is_thin = random.Random(seed), len(nodes), strategy is THIN
    how = on_node, folders, nodes, trains_on, files
    run = partial(gang.run, *how, size=size, strategy=strategy)
    gang.start(*how, size=size, strategy=strategy)
    end = chance.randint(3, 9)
    until(lambda: newest(files, size) >= end, "it did not come to that")
    time.sleep(chance.random() * 0.1)
    lose(gang, folders, nodes, lost)
    first, begun, _ = run(last=0)[0]
    assert first >= newest(files, size) - 1
    survivor = at(folders, next(node for node in nodes if node != lost)) / "store"
    alone = trains_alone_on(gang, size, first)
    check_equal(begun, planned(survivor, first, alone) if is_thin else alone[first])
    runs = run(last=first + 4)
    assert [run[0] for run in runs] == [first] * size
    assert all(run[2][-1] for run in runs)
    if is_thin:
        check_each_has_its_own(folders, nodes, first)
    assert Store(united(folders, sorted(set(nodes)))).verify(first + 4).ok
    last, state, _ = run(last=0)[0]
    assert last == first + 4
    found = Store(folders / "all").read(last)
    check_equal({name: found[stored_name(name)] for name in state}, state)
    if not is_thin:
        check_equal(state, trains_alone_on(gang, size, last)[last])


def restores_alone(files, store, nodes, **options):
    """Restores, tells the step, and makes no other one until it is killed."""
    job = zoo.build("fsdp2", RECIPE)
    with attached(job, store, nodes=nodes, **{"tiers": Tiers(peers=1), **options}) as made:
        note_step(files, made.restore())
        signal.pause()


def newest_of(folders, node, level):
    """The newest step that there is of this level, by what the node's keeper says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVERSTEP_RUNTIME_DIR", str(at(folders, node) / "run"))
        patch.setenv("EVERSTEP_NODE", node)
        said = status(str(at(folders, node) / "store"))
    return next(tier["newest"] for tier in said["tiers"] if tier["level"] == level)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["full", THIN, "log"])
@pytest.mark.parametrize(
    ("nodes", "lost", "then"),
    [("ab", "b", "ab"), ("ab", "a", "ab"), ("ab", "a", "ba"), ("abc", "b", "abc")],
)
def test_nodes_are_lost_one_after_another_before_a_new_step(
    gang, folders, files, impatient, nodes, lost, then, strategy
):
    """What is restored is held twice again, also where nodes come back by other numbers."""
    size = len(nodes)
    gang.start(on_node, folders, nodes, trains_on, files, size=size, strategy=strategy)
    until(lambda: newest(files, size) >= 5, "it did not come to that")
    lose(gang, folders, nodes, lost)
    least = newest(files, size) - 1
    for node in [*nodes, lost]:
        for note in files.iterdir():
            note.unlink()
        gang.start(on_node, folders, then, restores_alone, files, size=size, strategy=strategy)
        until(lambda: newest(files, size), "it did not restore")
        first = newest(files, size)
        assert first >= least
        until(
            lambda: all(newest_of(folders, each, "replicated") == first for each in nodes),  # noqa: B023
            "it is not held by several nodes again",
        )
        lose(gang, folders, then, node)
    first, begun, _ = gang.run(
        on_node, folders, then, trains_on, files, size=size, strategy=strategy, last=0
    )[0]
    assert first >= least
    alone = trains_alone_on(gang, size, first)
    survivor = next(each for each in nodes if each != lost)
    stored = at(folders, survivor) / "store"
    check_equal(begun, planned(stored, first, alone) if strategy is THIN else alone[first])


def check_each_has_its_own(folders, nodes, first):
    """Four steps later, though the last but one is deleted."""
    for node in sorted(set(nodes)):
        own = Store(at(folders, node) / "store")
        check_plans(own.path, range(first + 2, first + 5))
        own.delete(first + 3)
        own.gc()
        packs = {pack.path for part in own.manifest(first + 4).parts for pack in part.packs}
        assert packs_of(own.path) & packs


def trains_alone_on(gang, size, last):
    _, states = gang.run(trains_alone, "fsdp2", last, size=size)[0]
    return states


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["full", THIN])
@pytest.mark.parametrize("node", ["a", "b"])
def test_a_keeper_that_dies_is_followed_by_one_at_its_address(gang, folders, files, node, strategy):
    """Training goes on, and what comes is held by the other node again."""
    options = {"size": 2, "strategy": strategy, "last": 20}
    gang.start(on_node, folders, "ab", trains_on, files, **options)
    until(lambda: newest(files, 2) >= 4, "it did not come to that")
    os.kill(node_keeper(folders, node), signal.SIGKILL)
    for outcome in gang.finish():
        assert outcome.kind == "returned", outcome.text
        assert outcome.value[2][-1]
    store, alone = united(folders), trains_alone_on(gang, 2, 20)
    assert Store(store).latest() == 20
    assert Store(store).verify().ok
    for step in Store(store).steps():
        check_stored(store, planned(store, step, alone), step)
    if strategy is THIN:
        check_plans(store, [19, 20])


@pytest.mark.slow
def test_nodes_that_share_a_directory_hold_each_other_s_newest_too(gang, store, files):
    def held(rank):
        return (files / f"{rank}").read_text()

    runs = gang.run(shares, store, files, "ab", size=2)
    assert [run[2] for run in runs] == [[True] * 3] * 2
    assert held(0) == held(1) == "3"


def shares(store, files, nodes):
    return trains_on(files, store, nodes, last=3)


@pytest.mark.slow
def test_stores_of_two_runs_are_told(gang, folders):
    for node in "ab":
        gang.run(on_node, folders, node, trains, "fsdp2", 1, waits=True, size=1)
    outcomes = gang.outcomes(on_node, folders, "ab", trains, "fsdp2", 1, size=2)
    for outcome in outcomes:
        assert outcome.kind == "raised"
        assert "they are of different runs" in outcome.text


def copies(remote, store, nodes, last, strategy):
    """Trains to this step, which is in the remote tier then. What was restored, and the end."""
    job = zoo.build("fsdp2", RECIPE)
    with attached(job, store, nodes=nodes, strategy=strategy, tiers=Tiers(remote=remote)) as made:
        first = made.restore()
        begun = job.full_state()
        for step in range(first + 1, last + 1):
            job.train(step)
            made.step(step)
        made.wait("remote", timeout=60)
    return first, begun, job.full_state()


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["a", "b"])
def test_what_a_lost_node_has_left_in_memory_reaches_the_remote_tier(
    gang, folders, files, impatient, lost
):
    """It was due there while that was away."""
    remote = folders / "remote"
    options = {"size": 2, "strategy": "full", "tiers": Tiers(remote=remote, peers=1)}
    gang.start(on_node, folders, "ab", trains_on, files, **options)
    until(lambda: newest(files, 2) >= 3, "it did not come to that")
    remote.rename(folders / "away")
    remote.write_bytes(b"")
    before = Store(folders / "away").latest() or 0
    until(lambda: newest(files, 2) >= before + 4, "it did not come to that")
    lose(gang, folders, "ab", lost)
    (files / "0").unlink()
    remote.unlink()
    (folders / "away").rename(remote)
    gang.start(on_node, folders, "ab", restores_alone, files, **options)
    until(lambda: newest(files, 2), "it did not restore")
    first = newest(files, 2)
    assert first > before
    until(lambda: newest_of(folders, "a", "remote") == first, "it is not in the remote tier")
    assert Store(remote).verify(first).ok
    gang.kill()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["full", THIN])
def test_a_remote_tier_has_what_all_nodes_have(gang, folders, strategy):
    remote, options = folders / "remote", {"size": 2, "strategy": strategy}
    *_, saved = gang.run(on_node, folders, "ab", copies, remote, last=3, **options)[0]
    for node in "ab":
        end_node(folders, node)
        shutil.rmtree(at(folders, node))
    assert Store(remote).verify().ok
    stored = Store(remote).read(3)
    runs = gang.run(on_node, folders, "ab", copies, remote, last=4, **options)
    assert [run[0] for run in runs] == [3, 3]
    begun = runs[0][1]
    check_equal({name: stored[stored_name(name)] for name in begun}, begun)
    if strategy == "full":
        check_equal(begun, saved)
    assert Store(remote).latest() == 4


def trains_whatever_fails(files, store, nodes, last):
    """Step after step, thinned; a file tells the newest whose call has returned."""
    job = zoo.build("fsdp2", RECIPE)
    with unheard(), attached(job, store, nodes=nodes, strategy=THIN) as made:
        for step in range(1, last + 1):
            job.train(step)
            handle = made.step(step)
            note_step(files, step)
            if step % 8 == 0:
                with contextlib.suppress(EverstepError):
                    handle.wait()


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(3))
def test_thinned_saves_with_deletions_and_deaths_at_random(gang, folders, files, impatient, trial):
    """What both nodes have restores to the bytes that each tensor had at its own step."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance, last = random.Random(seed), 60
    alone = trains_alone_on(gang, 2, last)
    gang.start(on_node, folders, "ab", trains_whatever_fails, files, last=last, size=2)
    until(lambda: newest(files, 2) >= 2, "it did not come to that")
    stores = [Store(at(folders, node) / "store") for node in "ab"]
    for _ in range(30):
        time.sleep(chance.random() * 0.3)
        store, what = chance.choice(stores), chance.choice(["rm", "gc", "kill"])
        with contextlib.suppress(Missing):  # who is first deletes it
            if what == "rm" and (steps := store.steps()):
                store.delete(chance.choice([steps[-1], *steps]))
        if what == "gc":
            store.gc()
        if what == "kill":
            end_node(folders, chance.choice("ab"))
    for outcome in gang.finish():
        assert outcome.kind == "returned", outcome.text
    found = united(folders)
    steps = set(stores[0].steps()) & set(stores[1].steps())
    assert len([step for step in steps if not Store(found).manifest(step).exact]) > 2
    for step in steps:
        assert Store(found).verify(step).ok
        stored = Store(found).read(step)
        wanted = planned(found, step, alone)
        check_equal({name: stored[stored_name(name)] for name in wanted}, wanted)
