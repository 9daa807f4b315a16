"""Several nodes, each with a keeper of its own, commit one checkpoint. One machine plays them all:
EVERSTEP_NODE tells them apart."""

import contextlib
import os
import signal

import pytest
import torch
import torch.distributed as dist
import zoo
from jobs import RECIPE, attached, trains

from comparing import check_equal, check_stored
from everstep import Checkpointer, Store
from everstep.errors import EverstepError
from everstep.restore import apply
from everstep.store import catalog, names
from everstep.tiers.disk import Disk
from examples import slow
from processes import until
from stores import keeper_pid

NODES = "aabb"
"""The node of each rank."""


def part_documents(store):
    return sorted(path.name for path in store.glob("checkpoints/*/part-*.json"))


@pytest.mark.parametrize(
    "more",
    [pytest.param({}, id=""), pytest.param({"check": True}, id="checked", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("layout", ["fsdp2", *slow("fsdp_tp", "hsdp")])
def test_two_nodes_commit_one_checkpoint_that_any_number_restores(gang, store, layout, more):
    options = {"nodes": NODES, "strategy": "full", **more}
    saved, *_ = gang.run(trains, layout, store, 2, waits=True, after=1, **options)
    assert keeper_pid(store, "a") not in (None, keeper_pid(store, "b"))
    check_stored(store, saved.states[2])
    assert part_documents(store) == []
    manifest = Store(store).manifest()
    assert [part.rank for part in manifest.parts] == [0, 1]
    assert len(manifest.ranks) == 4
    layouts = (layout, NODES), ("fsdp2", "aa"), ("fsdp2", "ab"), ("hsdp", "abab")
    for other, nodes in layouts:
        run, *_ = gang.run(trains, other, store, size=len(nodes), nodes=nodes, after=1)
        assert run.first == 2
        check_equal(run.begun, saved.states[2])
        assert run.losses == pytest.approx(saved.losses[2:], abs=2e-6)


def trains_on(store, nodes, steps, files, **options):
    """Step after step, each but the first when there is a file go-STEP: the step that it began
    with, why steps are not durable, and the state after each."""
    job = zoo.build("fsdp2", RECIPE)
    errors, states = {}, {}
    with attached(job, store, nodes=nodes, **{"strategy": "full", **options}) as made:
        first = made.restore() + 1
        for step in range(first, first + steps):
            if step > 1:
                until((files / f"go-{step}").exists, "it did not come to that")
            job.train(step)
            states[step] = job.full_state()
            try:
                handle = made.step(step)
                handle.wait("captured")
                if not (files / f"on-{step}").exists():
                    handle.wait("local")
                errors[step] = None
            except EverstepError as error:
                errors[step] = f"{type(error).__name__}: {error}"
            (files / f"done-{step}-{dist.get_rank()}").touch()
        with contextlib.suppress(EverstepError):
            made.wait()
    return first, errors, states


def done(files, step, ranks=range(4)):
    return lambda: all((files / f"done-{step}-{rank}").exists() for rank in ranks)


def a_node_dies(gang, store, files, node, with_keeper, dying, **options):
    """After the steps before `dying`, while those are on their way: its ranks, and its keeper. The
    other one's keeper stands still, so that nothing can be committed before."""
    gang.start(trains_on, store, NODES, 9, files, **options)
    for step in range(1, dying[0]):
        go(files, step)
        until(done(files, step), "it did not come to that")
    keepers = {each: keeper_pid(store, each) for each in "ab"}
    other = "b" if node == "a" else "a"
    os.kill(keepers[other], signal.SIGSTOP)
    for step in dying:
        (files / f"on-{step}").touch()
    go(files, *dying)
    until(done(files, dying[-1]), "it did not come to that")
    if node == "b":
        until(lambda: part_documents(store) == ["part-1.json"], "it did not come to that")
    gang.kill(*(rank for rank in range(4) if NODES[rank] == node))
    if with_keeper:
        os.kill(keepers[node], signal.SIGKILL)
    gang.kill()  # as torchrun does, when some of them have died
    os.kill(keepers[other], signal.SIGCONT)
    gang.finish()
    go(files, *range(2, 10))


def go(files, *steps):
    for step in steps:
        (files / f"go-{step}").touch()


def check_steps(store, steps):
    assert [name.step for name in catalog.lineage(Disk(store))] == steps
    assert Store(store).verify().ok


@pytest.mark.slow
@pytest.mark.parametrize("node", ["a", "b"])
def test_a_stopped_keeper_delays_the_step_on_all_nodes(gang, store, files, node):
    gang.start(trains_on, store, NODES, 2, files)
    until(done(files, 1), "it did not come to that")
    stopped = keeper_pid(store, node)
    os.kill(stopped, signal.SIGSTOP)
    go(files, 2)
    if node == "a":  # that of rank 0: the part of the other one is there before
        until(lambda: part_documents(store) == ["part-1.json"], "it did not come to that")
    assert not any((files / f"done-2-{rank}").exists() for rank in range(4))
    check_steps(store, [1])
    os.kill(stopped, signal.SIGCONT)
    outcomes = gang.finish()
    assert [outcome.value[1] for outcome in outcomes] == [{1: None, 2: None}] * 4
    check_stored(store, outcomes[0].value[2][2])
    assert part_documents(store) == []


@pytest.mark.slow
@pytest.mark.parametrize("node", ["a", "b"])
def test_a_step_whose_node_does_not_answer_in_time_fails_on_all(
    gang, store, files, impatient, node
):
    gang.start(trains_on, store, NODES, 3, files)
    until(done(files, 1), "it did not come to that")
    stopped = keeper_pid(store, node)
    os.kill(stopped, signal.SIGSTOP)
    go(files, 2)
    others = [rank for rank in range(4) if NODES[rank] != node]
    until(done(files, 2, others), "it did not come to that")
    check_steps(store, [1])
    os.kill(stopped, signal.SIGCONT)
    until(done(files, 2), "it did not come to that")
    go(files, 3)
    outcomes = gang.finish()
    for outcome in outcomes:
        first, ended, _ = outcome.value
        assert first == 1
        assert ended[1] is None
        assert ended[2].startswith("Unavailable: ")
        assert ended[3] is None
    texts = {outcome.value[1][2] for outcome in outcomes}
    assert any("did not" in text and "within 3 s" in text for text in texts), texts
    check_steps(store, [1, 3])
    check_stored(store, outcomes[0].value[2][3])
    assert part_documents(store) == []


@pytest.mark.parametrize("node", ["a", "b"])
@pytest.mark.parametrize(
    "with_keeper",
    [pytest.param(False, id="ranks", marks=pytest.mark.slow), pytest.param(True, id="keeper")],
)
@pytest.mark.parametrize("survivors", ["aabb", "aa"])
@pytest.mark.slow
def test_a_node_that_dies_between_part_and_commit(
    gang, store, files, impatient, node, with_keeper, survivors
):
    """Its step does not exist where its part was not there, else it is whole; the next save
    works."""
    a_node_dies(gang, store, files, node, with_keeper, (3,))
    size = len(survivors)
    first, ended, states = gang.run(trains_on, store, survivors, 2, files, size=size)[0]
    assert first == (3 if node == "a" and with_keeper else 4)
    assert ended == {first: None, first + 1: None}
    check_steps(store, list(range(1, first + 2)))
    check_stored(store, states[first + 1])
    manifests = [Store(store).manifest(step) for step in range(1, first + 2)]
    assert [manifest.epoch for manifest in manifests[-2:]] == [2, 2]
    assert all(manifest.epoch == 1 for manifest in manifests[:-2])
    Store(store).gc()
    assert part_documents(store) == []
    check_steps(store, list(range(1, first + 2)))
    named = {link.path for manifest in manifests for link in manifest.files}
    packs = {f"data/{path.name}" for path in store.glob("data/*.safetensors")}
    live = {path for path in packs if names.writer_of(path).epoch == 2}
    assert packs - live <= named


def sees_less(layout, store, blind, **options):
    """Which step is restored where one rank does not see the newest checkpoint (yet)."""
    there = catalog.is_there
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == blind:
            patch.setattr(catalog, "is_there", lambda disk, n: n.step < 3 and there(disk, n))
        return trains(layout, store, **options)


@pytest.mark.slow
@pytest.mark.parametrize("blind", [0, 3])
def test_all_ranks_restore_what_all_of_them_see(gang, store, blind):
    saved, *_ = gang.run(trains, "fsdp2", store, 3, nodes=NODES, strategy="full", waits=True)
    runs = gang.run(sees_less, "fsdp2", store, blind, nodes=NODES, after=1)
    assert {run.first for run in runs} == {2}
    check_equal(runs[0].begun, saved.states[2])
    assert runs[0].losses == saved.losses[2:]


def say_late(client):
    """What is left out is told when the next step has been announced: each by its own thread."""
    said, submit, leave_out = [], client.submit, client.leave_out

    def submit_first(*arguments):
        submit(*arguments)
        while said:
            leave_out(*said.pop(0))

    client.submit, client.leave_out = submit_first, lambda *arguments: said.append(arguments)


def leaves_out(store, nodes, culprit, is_late):
    """What became of three steps, the second of which one rank cannot capture."""
    os.environ["EVERSTEP_NODE"] = nodes[dist.get_rank()]
    model, held, ended = torch.nn.Linear(4, 4), {"value": 1}, []
    with Checkpointer(store, {"model": model, "held": held}, strategy="full") as made:
        if is_late:
            say_late(made._client)
        for step in range(1, 4):
            held["value"] = object() if step == 2 and dist.get_rank() == culprit else step
            try:
                made.step(step).wait("local")
                ended.append("")
            except EverstepError as error:
                ended.append(f"{type(error).__name__}: {error}")
    return ended


@pytest.mark.parametrize(
    ("nodes", "culprit", "is_late"), [(NODES, 0, False), (NODES, 3, False), ("ab", 1, True)]
)
def test_what_a_rank_leaves_out_fails_on_all_nodes_at_once(gang, store, nodes, culprit, is_late):
    runs = gang.run(leaves_out, store, nodes, culprit, is_late, size=len(nodes))
    for rank, ended in enumerate(runs):
        assert ended[::2] == ["", ""]
        assert ended[1].startswith("Unsupported" if rank == culprit else "Unavailable"), ended[1]
        why = "left it out" in ended[1] or "not all of its ranks have it" in ended[1]
        assert why or rank == culprit
    check_steps(store, [1, 3])
    assert part_documents(store) == []


def how_it_reads(layout, store, nodes):
    """Whether this rank restores through the page cache, as others of its node read the same."""
    said = []
    decide = apply._is_shared

    def note(*arguments):
        said.append(decide(*arguments))
        return said[-1]

    apply._is_shared = note
    try:
        trains(layout, store, nodes=nodes)
    finally:
        apply._is_shared = decide
    return said


@pytest.mark.slow
def test_what_ranks_of_a_node_read_alike_is_read_once(gang, store):
    gang.run(trains, "hsdp", store, 1, nodes=NODES, strategy="full")
    for layout, nodes, expected in (
        ("hsdp", "aabb", [[False]] * 4),  # replicas are on the other node
        ("fsdp2", "aaaa", [[False]] * 4),
        ("ddp", "aab", [[True], [True], [False]]),
    ):
        found = gang.run(how_it_reads, layout, store, nodes, size=len(nodes))
        assert found == expected, (layout, nodes)
