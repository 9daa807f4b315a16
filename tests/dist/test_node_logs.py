"""Records of several nodes: each node's keeper writes its part of each, rank 0's commits the chain.
One machine plays all nodes: EVERSTEP_NODE tells them apart."""

import contextlib
import os
import random
import resource
import signal
from functools import partial

import pytest
import torch
import torch.distributed as dist
import zoo
from test_nodes import checkpointer as saves_as
from test_nodes import done, go, kills_keepers, part_documents, trains_through
from test_nodes import wait_until as wait_for

from comparing import check_equal
from everstep import Keep, Store, clip_grad_norm_, compress
from everstep.cli.main import main as cli
from everstep.errors import EverstepError
from everstep.redo.clipping import Recording
from independent_reader import read_log
from stores import keeper_pid

RECIPE = zoo.Recipe()
LARGE = zoo.Recipe(width=128, vocabulary=512, hidden=256)
"""So large that records are packed."""

NODES = "aabb"
"""The node of each rank."""

PATIENCE_S = 120.0
"""Of a machine on which keepers start slowly."""

wait_until = partial(wait_for, seconds=PATIENCE_S)


LOG = {"strategy": "log", "base_every": 5}


def checkpointer(job, store, nodes, **more):
    """Of this rank, on its node; `nodes`: a letter for each rank."""
    return saves_as(job, store, nodes, **{**LOG, "when_full": "wait", **more})


def rounds(optimizer, *_):
    """So that gradients have bytes that are zero: such records are packed on any disk."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = getattr(parameter.grad, "_local_tensor", parameter.grad)
            gradient.copy_(gradient.bfloat16())


def trains(layout, store, nodes, last, more, recipe=RECIPE, kind=None):
    """From what is restored up to `last`: the first step, the state then, the losses, and the state
    after each step. `kind`: of compression, or of what else records have of gradients."""
    job = zoo.build(layout, recipe)
    if recipe.width == LARGE.width:
        job.optimizer.register_step_pre_hook(rounds)
    recording = Recording()  # for as long as this is alive
    if kind == "clips":
        recording.set(True, pre_clip=True)
        weights = list(job.model.parameters())
        job.optimizer.register_step_pre_hook(lambda *_: clip_grad_norm_(weights, 0.1) and None)
    elif kind:
        compress(job.model, kind)
    with checkpointer(job, store, nodes, **more) as made:
        first = made.restore()
        begun, losses, states = job.full_state(), [], {}
        for step in range(first + 1, last + 1):
            torch.rand(dist.get_rank() + 1)
            losses.append(job.train(step))
            made.step(step)
            states[step] = job.full_state()
        made.wait()
    return first, begun, losses, states


def trains_alone(layout, last):
    """As `trains`, of a run that saves nothing."""
    job = zoo.build(layout, RECIPE)
    losses, states = [], {}
    for step in range(1, last + 1):
        losses.append(job.train(step))
        states[step] = job.full_state()
    return losses, states


def restores(layout, store, nodes, steps, recipe=RECIPE):
    """The full state at each of these steps; in whole states, as boxes have them, from there."""
    job, found = zoo.build(layout, recipe), {}
    with saves_as(job, store, nodes) as made:
        for step in steps:
            assert made.restore(step) == step
            found[step] = job.full_state()
    return found


def records_of(store):
    """How many records each step has: none is a whole state."""
    return {step: len(Store(store).manifest(step).records) for step in Store(store).steps()}


def check_all_steps(gang, store, states, layout="dense", nodes="a", recipe=RECIPE):
    """Each step is restored to those bytes; `states`: by step."""
    steps, size = sorted(states), len(nodes)
    found = gang.run(restores, layout, store, nodes, steps, recipe, size=size)[0]
    for step, state in states.items():
        check_equal(found[step], state)


@pytest.mark.parametrize(
    ("layout", "nodes"),
    [
        ("fsdp2", "ab"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("ddp", "ab"),
                ("ddp", "aabb"),
                ("fsdp2", "aabb"),
                ("fsdp2", "abab"),
                ("hsdp", "aabb"),
                ("fsdp_tp", "abab"),
            )
        ),
    ],
)
def test_records_of_nodes_are_replayed(gang, store, layout, nodes):
    size = len(nodes)
    losses, states = gang.run(trains_alone, layout, 9, size=size)[0]
    first, _, before, saved = gang.run(trains, layout, store, nodes, 7, {}, size=size)[0]
    assert first == 0
    assert before == losses[:7]
    assert records_of(store) == {1: 0, 2: 1, 3: 1, 4: 1, 5: 1, 6: 0, 7: 1}
    manifest = Store(store).manifest()
    assert [part.rank for part in manifest.records[0].parts] == [0, 1]
    assert Store(store).verify().ok
    assert part_documents(store) == []
    read_log(store)
    check_all_steps(gang, store, saved)
    for other, there in (("fsdp2", "aa"), ("fsdp1", "aa"), ("zero1", "ab")):
        check_all_steps(gang, store, {7: saved[7]}, other, there)
    first, begun, after, ended = gang.run(trains, layout, store, nodes, 9, {}, size=size)[0]
    assert first == 7
    check_equal(begun, saved[7])
    assert after == losses[7:]
    check_equal(ended[9], states[9])
    check_all_steps(gang, store, {8: ended[8], 9: states[9]})


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp2", "ddp"])
def test_each_node_packs_its_part(gang, store, layout):
    _, _, _, states = gang.run(trains, layout, store, NODES, 4, {}, LARGE)[0]
    parts = Store(store).manifest(3).records[0].parts
    assert all(part.stored for part in parts)
    assert Store(store).verify().ok
    read_log(store)
    check_all_steps(gang, store, states, recipe=LARGE)
    check_all_steps(gang, store, {4: states[4]}, layout, "aba" if layout == "ddp" else "ab", LARGE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "more", "kind"),
    [
        ("fsdp2", {"verify": "full"}, None),
        ("ddp", {"verify": "full"}, None),
        ("ddp", {}, "bf16"),
        ("ddp", {}, "topk"),
        ("ddp", {}, "clips"),
        ("fsdp2", {}, "clips"),
    ],
)
def test_what_ranks_say_of_calls_for_themselves(gang, store, layout, more, kind):
    """Digests of the result, in the order of all ranks; forms of gradients."""
    nodes = "abab"
    args = (layout, store, nodes)
    _, _, _, states = gang.run(trains, *args, 4, more, RECIPE, kind)[0]
    (call,) = Store(store).manifest().records[0].calls
    assert bool(call.get("compressed")) == (kind in ("bf16", "topk"))
    assert bool(call.get("clips")) == (kind == "clips")
    if layout == "fsdp2" and more:
        assert len({said["digest"] for said in call["ranks"]}) == 4
    first, begun, *_ = gang.run(trains, *args, 5, more, RECIPE, kind)[0]
    assert first == 4
    check_equal(begun, states[4])
    check_all_steps(gang, store, states)


def trains_on(store, nodes, steps, files):
    """Step after step, each when there is a file for it: the state after each, and why it is not
    durable."""
    job = zoo.build("fsdp2", RECIPE)
    errors, states = {}, {}
    with checkpointer(job, store, nodes) as made:
        first = made.restore() + 1
        for step in range(first, first + steps):
            wait_until((files / f"go-{step}").exists)
            job.train(step)
            states[step] = job.full_state()
            try:
                handle = made.step(step)
                handle.wait("captured")
                (files / f"captured-{step}-{dist.get_rank()}").touch()
                if not (files / f"on-{step}").exists():
                    handle.wait("local")
                errors[step] = None
            except EverstepError as error:
                errors[step] = f"{type(error).__name__}: {error}"
            (files / f"done-{step}-{dist.get_rank()}").touch()
        with contextlib.suppress(EverstepError):
            made.wait()
        return first, errors, states


def check_ended(gang, store, outcomes, records):
    """What is there is these steps, and each is what the run had."""
    assert records_of(store) == records
    assert Store(store).verify().ok
    states = outcomes[0].value[2]
    check_all_steps(gang, store, {step: states[step] for step in records})
    assert part_documents(store) == []


@pytest.mark.slow
@pytest.mark.parametrize("node", ["a", "b"])
def test_a_disk_that_fails_on_one_node_ends_the_chain_on_all(gang, store, files, node):
    gang.start(trains_on, store, NODES, 6, files)
    go(files, 1, 2)
    wait_until(done(files, 2))
    keeper = keeper_pid(store, node)
    limits = resource.prlimit(keeper, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    go(files, 3)
    wait_until(done(files, 3))
    resource.prlimit(keeper, resource.RLIMIT_FSIZE, limits)
    go(files, 4, 5, 6)
    outcomes = gang.finish(PATIENCE_S)
    for outcome in outcomes:
        errors = outcome.value[1]
        assert errors[3].startswith("Unavailable: ")
        assert [step for step, error in errors.items() if error] == [3]
    check_ended(gang, store, outcomes, {1: 0, 2: 1, 4: 0, 5: 1, 6: 1})


@pytest.mark.slow
@pytest.mark.parametrize("node", ["a", "b"])
def test_a_killed_keeper_is_followed_by_one_that_goes_on_with_the_chain(gang, store, files, node):
    gang.start(trains_on, store, NODES, 6, files)
    go(files, 1, 2)
    wait_until(done(files, 2))
    other = keeper_pid(store, "b" if node == "a" else "a")
    killed = keeper_pid(store, node)
    os.kill(other, signal.SIGSTOP)  # so that nothing can be committed before
    for step in (3, 4):  # two on their way
        (files / f"on-{step}").touch()
    go(files, 3, 4)
    wait_until(done(files, 4))
    if node == "b":
        wait_until(lambda: part_documents(store) != [])
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: keeper_pid(store, node) not in (None, killed))
    os.kill(other, signal.SIGCONT)
    go(files, 5, 6)
    outcomes = gang.finish(PATIENCE_S)
    assert [outcome.value[1] for outcome in outcomes] == [dict.fromkeys(range(1, 7))] * 4
    check_ended(gang, store, outcomes, {1: 0, 2: 1, 3: 1, 4: 1, 5: 1, 6: 0})


@pytest.mark.slow
@pytest.mark.parametrize("node", ["a", "b"])
@pytest.mark.parametrize("with_keeper", [False, True], ids=["ranks", "keeper"])
@pytest.mark.parametrize("survivors", ["aabb", "aa"])
def test_a_node_that_dies_in_the_middle_of_a_chain(
    gang, store, files, monkeypatch, node, with_keeper, survivors
):
    monkeypatch.setenv("EVERSTEP_PARTS_S", "3")
    gang.start(trains_on, store, NODES, 9, files)
    go(files, 1, 2)
    wait_until(done(files, 2))
    keepers = {each: keeper_pid(store, each) for each in "ab"}
    other = "b" if node == "a" else "a"
    os.kill(keepers[other], signal.SIGSTOP)
    for step in (3, 4):
        (files / f"on-{step}").touch()
    go(files, 3, 4)
    wait_until(done(files, 4))
    if node == "b":
        wait_until(lambda: part_documents(store) == ["part-1.json"])
    gang.kill(*(rank for rank in range(4) if NODES[rank] == node))
    if with_keeper:
        os.kill(keepers[node], signal.SIGKILL)
    gang.kill()
    os.kill(keepers[other], signal.SIGCONT)
    gang.finish(PATIENCE_S)
    go(files, *range(5, 10))
    size = len(survivors)
    first, errors, states = gang.run(trains_on, store, survivors, 2, files, size=size)[0]
    assert first == (5 if not with_keeper else 3 if node == "a" else 4)
    assert not any(errors.values())
    assert sorted(records_of(store)) == list(range(1, first + 2))
    assert Store(store).verify().ok
    expected = gang.run(trains_alone, "fsdp2", first - 1)[0][1]
    check_all_steps(gang, store, expected | states)
    Store(store).gc()
    assert part_documents(store) == []
    check_all_steps(gang, store, expected | states)


def goes_by_itself(store, nodes, last):
    """Under auto; what became of each save."""
    job = zoo.build("fsdp2", RECIPE)
    settings = {"strategy": "auto", "base_every": None}
    with checkpointer(job, store, nodes, **settings) as made:
        handles, states = [], {}
        for step in range(1, last + 1):
            job.train(step)
            handles.append(made.step(step))
            states[step] = job.full_state()
        made.wait()
        return [str(handle.error) for handle in handles if handle.error], states


@pytest.mark.slow
def test_auto_goes_over_to_a_log_on_all_nodes(gang, store):
    outcomes = gang.run(goes_by_itself, store, "ab", 24, size=2)
    assert [errors for errors, _ in outcomes] == [[], []]
    found = records_of(store)
    assert list(found) == list(range(1, 25))
    assert not found[1]
    assert found[24]
    check_all_steps(gang, store, outcomes[0][1])


@pytest.mark.slow
def test_commands_on_a_log_of_nodes(gang, store, capsys):
    _, _, _, states = gang.run(trains, "fsdp2", store, NODES, 9, {"base_every": 20})[0]
    for command in (["ls", store], ["show", store, 5], ["verify", store], ["gc", store]):
        assert cli([str(word) for word in command]) == 0, capsys.readouterr()
    assert cli(["show", str(store), "5", "--json"]) == 0
    assert cli(["rm", str(store), "8"]) != 0  # 9 goes on from there
    assert cli(["materialize", str(store), "6"]) == 0, capsys.readouterr()
    check_read(store, states[6], 6)
    assert cli(["rm", str(store), "2", "3", "4", "5", "--yes"]) == 0, capsys.readouterr()
    assert Store(store).verify().ok
    check_all_steps(gang, store, {step: states[step] for step in (1, 6, 7, 8, 9)})


def check_read(store, state, step):
    stored = Store(store).read(step)
    for name, tensor in state.items():
        parameter, _, key = name.partition(":")
        at = f"optimizer.model.{parameter}.{key}" if key else f"model.{parameter}"
        assert torch.equal(stored[at], tensor), name


@pytest.mark.slow
def test_the_host_catches_up_with_a_log_of_nodes(gang, store):
    more = {"base_every": 100, "catch_up": 4, "keep": Keep(last=3)}
    gang.start(trains, "fsdp2", store, NODES, 12, more)
    outcomes = gang.finish(PATIENCE_S)
    states = outcomes[0].value[3]
    steps = Store(store).steps()
    assert steps[-3:] == [10, 11, 12]
    check_all_steps(gang, store, {step: states[step] for step in steps})
    assert Store(store).verify().ok


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_keepers_that_die_at_any_moment(gang, store, monkeypatch, seed):
    """What is there afterwards is right; and the run goes on."""
    monkeypatch.setenv("EVERSTEP_PARTS_S", "3")
    chance = random.Random(seed)
    for life in range(2):
        gang.start(trains_through, store, NODES, 25, LOG)
        kills_keepers(store, chance)
        if life == 0:
            gang.kill()
        gang.finish(PATIENCE_S)
    assert Store(store).verify().ok
    steps = Store(store).steps()
    expected = gang.run(trains_alone, "fsdp2", max(steps, default=0))[0][1]
    check_all_steps(gang, store, {step: expected[step] for step in steps})
    assert Store(store).gc() is not None
    assert Store(store).verify().ok
    check_all_steps(gang, store, {step: expected[step] for step in steps[-1:]})
