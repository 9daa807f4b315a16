"""Records of several nodes: each node's keeper writes its part of each, rank 0's commits the chain.
One machine plays all nodes: EVERSTEP_NODE tells them apart."""

import contextlib
import os
import random
import resource
import signal
import time
from functools import partial

import pytest
import zoo
from jobs import attached, check_restored, clipped, parts_of, sends_compressed, trains, trains_alone
from test_nodes import a_node_dies, done, go, part_documents, trains_on

from comparing import check_equal, check_stored, kinds
from everstep import Keep, Store
from everstep.cli.main import main as cli
from everstep.errors import EverstepError
from everstep.redo.rolling_digest import PREFIX
from everstep.store import catalog
from everstep.tiers.disk import Disk
from independent_reader import read_log
from processes import until
from stores import keeper_pid

LARGE = zoo.Recipe(width=128, vocabulary=512, hidden=256)
"""So large that records are packed."""

NODES = "aabb"
"""The node of each rank."""

LOG = {"strategy": "log", "base_every": 5}
PATIENCE_S = 120.0
"""Of a machine on which keepers start slowly."""


def rounds(optimizer, *_):
    """So that gradients have bytes that are zero: such records are packed on any disk."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = getattr(parameter.grad, "_local_tensor", parameter.grad)
            gradient.copy_(gradient.bfloat16())


def rounded(job):
    job.optimizer.register_step_pre_hook(rounds)
    return parts_of(job)


def check_all_steps(gang, store, states, layout="dense", nodes="a", **options):
    """Each step is restored to those bytes; `states`: by step."""
    check_restored(gang, layout, store, states, size=len(nodes), nodes=nodes, **options)


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
@pytest.mark.slow
def test_records_of_nodes_are_replayed(gang, store, layout, nodes):
    size = len(nodes)
    losses, states = gang.run(trains_alone, layout, 9, size=size)[0]
    run, *_ = gang.run(trains, layout, store, 7, size=size, nodes=nodes, **LOG)
    assert (run.first, run.losses) == (0, losses[:7])
    assert kinds(store) == "brrrrbr"
    manifest = Store(store).manifest()
    assert [part.rank for part in manifest.records[0].parts] == [0, 1]
    assert Store(store).verify().ok
    assert part_documents(store) == []
    read_log(store)
    saved = {step: run.states[step] for step in range(1, 8)}
    check_all_steps(gang, store, saved)
    for other, there in (("fsdp2", "aa"), ("fsdp1", "aa"), ("zero1", "ab")):
        check_all_steps(gang, store, {7: saved[7]}, other, there)
    run, *_ = gang.run(trains, layout, store, 9, size=size, nodes=nodes, **LOG)
    assert (run.first, run.losses) == (7, losses[7:])
    check_equal(run.begun, saved[7])
    check_equal(run.states[9], states[9])
    check_all_steps(gang, store, {8: run.states[8], 9: states[9]})


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp2", "ddp"])
def test_each_node_packs_its_part(gang, store, layout):
    large = {"recipe": LARGE, "state_of": rounded}
    run, *_ = gang.run(trains, layout, store, 4, nodes=NODES, **large, **LOG)
    parts = Store(store).manifest(3).records[0].parts
    assert all(part.stored for part in parts)
    assert Store(store).verify().ok
    read_log(store)
    states = {step: run.states[step] for step in range(1, 5)}
    check_all_steps(gang, store, states, recipe=LARGE)
    other = "aba" if layout == "ddp" else "ab"
    check_all_steps(gang, store, {4: states[4]}, layout, other, recipe=LARGE)


BF16, TOPK = (partial(sends_compressed, kind=kind) for kind in ("bf16", "topk"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "verify", "state_of"),
    [
        *((layout, "full", parts_of) for layout in ("fsdp2", "ddp")),
        *(("ddp", None, state_of) for state_of in (BF16, TOPK, clipped)),
        ("fsdp2", None, clipped),
    ],
)
def test_what_ranks_say_of_calls_for_themselves(gang, store, layout, verify, state_of):
    """Digests of the result, in the order of all ranks; forms of gradients."""
    options = {"nodes": "abab", "state_of": state_of, "verify": verify, **LOG}
    saved, *_ = gang.run(trains, layout, store, 4, **options)
    (record,) = Store(store).manifest().records
    (call,) = record.calls
    assert bool(call.get("compressed")) == (state_of in (BF16, TOPK))
    assert bool(call.get("clips")) == (state_of is clipped)
    if layout == "fsdp2" and verify:
        tables = [catalog.read_table(Disk(store), part) for part in record.parts]
        names = [name for table in tables for name in table.tensors if name.startswith(PREFIX)]
        assert len(names) == len(set(names)) == 4
    run, *_ = gang.run(trains, layout, store, 5, **options)
    assert run.first == 4
    check_equal(run.begun, saved.states[4])
    check_all_steps(gang, store, {step: saved.states[step] for step in range(1, 5)})


def logs_on(store, nodes, steps, files):
    return trains_on(store, nodes, steps, files, **LOG)


def check_ended(gang, store, outcomes, records):
    """What is there is these steps, and each is what the run had."""
    assert {
        step: "r" if Store(store).manifest(step).records else "b" for step in Store(store).steps()
    } == records
    assert Store(store).verify().ok
    states = outcomes[0].value[2]
    check_all_steps(gang, store, {step: states[step] for step in records})
    assert part_documents(store) == []


@pytest.mark.slow
@pytest.mark.parametrize("node", ["a", "b"])
def test_a_disk_that_fails_on_one_node_ends_the_chain_on_all(gang, store, files, node):
    gang.start(logs_on, store, NODES, 6, files)
    go(files, 1, 2)
    until(done(files, 2), "it did not come to that")
    keeper = keeper_pid(store, node)
    limits = resource.prlimit(keeper, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    go(files, 3)
    until(done(files, 3), "it did not come to that")
    resource.prlimit(keeper, resource.RLIMIT_FSIZE, limits)
    go(files, 4, 5, 6)
    outcomes = gang.finish(PATIENCE_S)
    for outcome in outcomes:
        errors = outcome.value[1]
        assert errors[3].startswith("Unavailable: ")
        assert [step for step, error in errors.items() if error] == [3]
    check_ended(gang, store, outcomes, {1: "b", 2: "r", 4: "b", 5: "r", 6: "r"})


@pytest.mark.slow
@pytest.mark.parametrize("node", ["a", "b"])
def test_a_killed_keeper_is_followed_by_one_that_goes_on_with_the_chain(gang, store, files, node):
    gang.start(logs_on, store, NODES, 6, files)
    go(files, 1, 2)
    until(done(files, 2), "it did not come to that")
    other = keeper_pid(store, "b" if node == "a" else "a")
    killed = keeper_pid(store, node)
    os.kill(other, signal.SIGSTOP)  # so that nothing can be committed before
    for step in (3, 4):  # two on their way
        (files / f"on-{step}").touch()
    go(files, 3, 4)
    until(done(files, 4), "it did not come to that")
    if node == "b":
        until(lambda: part_documents(store) != [], "it did not come to that")
    os.kill(killed, signal.SIGKILL)
    until(lambda: keeper_pid(store, node) not in (None, killed), "it did not come to that")
    os.kill(other, signal.SIGCONT)
    go(files, 5, 6)
    outcomes = gang.finish(PATIENCE_S)
    assert [outcome.value[1] for outcome in outcomes] == [dict.fromkeys(range(1, 7))] * 4
    check_ended(gang, store, outcomes, {1: "b", 2: "r", 3: "r", 4: "r", 5: "r", 6: "b"})


@pytest.mark.slow
@pytest.mark.parametrize("node", ["a", "b"])
@pytest.mark.parametrize("with_keeper", [False, True], ids=["ranks", "keeper"])
@pytest.mark.parametrize("survivors", ["aabb", "aa"])
def test_a_node_that_dies_in_the_middle_of_a_chain(
    gang, store, files, impatient, node, with_keeper, survivors
):
    a_node_dies(gang, store, files, node, with_keeper, (3, 4), **LOG)
    size = len(survivors)
    first, errors, states = gang.run(logs_on, store, survivors, 2, files, size=size)[0]
    assert first == (5 if not with_keeper else 3 if node == "a" else 4)
    assert not any(errors.values())
    assert Store(store).steps() == list(range(1, first + 2))
    assert Store(store).verify().ok
    expected = gang.run(trains_alone, "fsdp2", first - 1)[0][1]
    del expected[0]
    check_all_steps(gang, store, expected | states)
    Store(store).gc()
    assert part_documents(store) == []
    check_all_steps(gang, store, expected | states)


@pytest.mark.slow
def test_commands_on_a_log_of_nodes(gang, store, capsys):
    run, *_ = gang.run(trains, "fsdp2", store, 9, nodes=NODES, strategy="log", base_every=20)
    states = run.states
    for command in (["ls", store], ["show", store, 5], ["verify", store], ["gc", store]):
        assert cli([str(word) for word in command]) == 0, capsys.readouterr()
    assert cli(["show", str(store), "5", "--json"]) == 0
    assert cli(["rm", str(store), "8"]) != 0  # 9 goes on from there
    assert cli(["materialize", str(store), "6"]) == 0, capsys.readouterr()
    check_stored(store, states[6], 6)
    assert cli(["rm", str(store), "2", "3", "4", "5", "--yes"]) == 0, capsys.readouterr()
    assert Store(store).verify().ok
    check_all_steps(gang, store, {step: states[step] for step in (1, 6, 7, 8, 9)})


@pytest.mark.slow
def test_a_replica_writes_the_bases_of_a_log_of_nodes(gang, store):
    more = {"strategy": "log", "base_every": 4, "replica": True, "keep": Keep(last=3)}
    run, *_ = gang.run(trains, "fsdp2", store, 12, nodes=NODES, timeout=PATIENCE_S, **more)
    states = run.states
    steps = Store(store).steps()
    assert steps[-3:] == [10, 11, 12]
    check_all_steps(gang, store, {step: states[step] for step in steps})
    assert Store(store).verify().ok


def trains_through(store, nodes, steps):
    """Steps that are not waited for."""
    job = zoo.build("fsdp2")
    with attached(job, store, nodes=nodes, **LOG) as made:
        first = made.restore() + 1
        for step in range(first, first + steps):
            job.train(step)
            made.step(step).wait("captured")
        with contextlib.suppress(EverstepError):
            made.wait()


def kills_keepers(store, chance):
    """Four times one of a node, at random moments."""
    for _ in range(4):
        time.sleep(chance.uniform(0.0, 0.4))  # the moment is what is tried
        if pid := keeper_pid(store, chance.choice("ab")):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_keepers_that_die_at_any_moment(gang, store, monkeypatch, seed):
    """What is there afterwards is right; and the run goes on."""
    monkeypatch.setenv("EVERSTEP_PARTS_S", "3")
    chance = random.Random(seed)
    for life in range(2):
        gang.start(trains_through, store, NODES, 25)
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
