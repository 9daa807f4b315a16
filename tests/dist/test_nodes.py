"""Several nodes, each with a keeper of its own, commit one checkpoint. One machine plays them all:
EVERSTEP_NODE tells them apart."""

import contextlib
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
import zoo

from choices import chosen
from comparing import check_equal, check_stored
from everstep import Checkpointer, Store
from everstep.errors import EverstepError
from everstep.restore import apply
from everstep.store import catalog, names
from everstep.tiers.disk import Disk
from examples import slow
from stores import keeper_pid

RECIPE = zoo.Recipe()
NODES = "aabb"
"""The node of each rank."""


@contextlib.contextmanager
def checkpointer(job, store, nodes, **more):
    """Of this rank, on its node; `nodes`: a letter for each rank."""
    os.environ["EVERSTEP_NODE"] = nodes[dist.get_rank()]
    state = {"model": job.model, "optimizer": job.optimizer}
    with Checkpointer(store, state, **chosen(**{"strategy": "full", **more})) as made:
        yield made


def trains(layout, store, nodes, first, last, more):
    """The full state after each step, and its loss."""
    job = zoo.build(layout, RECIPE)
    losses, states = [], []
    with checkpointer(job, store, nodes, **more) as made:
        assert made.restore() == first - 1
        for step in range(first, last + 1):
            losses.append(job.train(step))
            made.step(step).wait("local")
            states.append(job.full_state())
    return losses, states


def restores(layout, store, nodes, last, step=None):
    """The step, the state, and the loss of the steps up to `last`."""
    job = zoo.build(layout, RECIPE)
    with checkpointer(job, store, nodes) as made:
        step = made.restore(step)
        state = job.full_state()
        losses = [job.train(number) for number in range(step + 1, last + 1)]
    return step, state, losses


def part_documents(store):
    return sorted(path.name for path in store.glob("checkpoints/*/part-*.json"))


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, id=""),
        pytest.param({"check": True}, id="checked", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "layout",
    ["fsdp_tp", *slow("fsdp2", "hsdp")],
)
def test_two_nodes_commit_one_checkpoint_that_any_number_restores(gang, store, layout, more):
    (losses, states), *_ = gang.run(trains, layout, store, NODES, 1, 2, more)
    assert keeper_pid(store, "a") not in (None, keeper_pid(store, "b"))
    check_stored(store, states[-1])
    assert part_documents(store) == []
    manifest = Store(store).manifest()
    assert [part.rank for part in manifest.parts] == [0, 1]
    assert len(manifest.ranks) == 4
    step, state, after = gang.run(restores, layout, store, NODES, 3)[0]
    assert step == 2
    check_equal(state, states[-1])
    for other, size, nodes in (("fsdp2", 2, "aa"), ("fsdp2", 2, "ab"), ("hsdp", 4, "abab")):
        step, state, losses = gang.run(restores, other, store, nodes, 3, size=size)[0]
        assert step == 2
        check_equal(state, states[-1])
        assert losses == pytest.approx(after, abs=2e-6)


def wait_until(holds, seconds=30.0):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.01)


def trains_on(layout, store, nodes, steps, files):
    """Step after step: each is durable, or why not; waits for `files` named go-STEP before each."""
    job = zoo.build(layout, RECIPE)
    ended = {}
    with checkpointer(job, store, nodes) as made:
        first = made.restore() + 1
        for step in range(first, first + steps):
            if step > 1:
                wait_until((files / f"go-{step}").exists)
            job.train(step)
            try:
                handle = made.step(step)
                handle.wait("captured")
                (files / f"captured-{step}-{dist.get_rank()}").touch()
                handle.wait("local")
                ended[step] = None
            except EverstepError as error:
                ended[step] = f"{type(error).__name__}: {error}"
            (files / f"done-{step}-{dist.get_rank()}").touch()
        with contextlib.suppress(EverstepError):
            made.wait()
        return first, ended, job.full_state()


def done(files, step, ranks=range(4), what="done"):
    return lambda: all((files / f"{what}-{step}-{rank}").exists() for rank in ranks)


def go(files, *steps):
    for step in steps:
        (files / f"go-{step}").touch()


def check_steps(store, steps):
    assert [name.step for name in catalog.lineage(Disk(store))] == steps
    assert Store(store).verify().ok


@pytest.mark.slow
@pytest.mark.parametrize("node", ["a", *slow("b")])
def test_a_stopped_keeper_delays_the_step_on_all_nodes(gang, store, files, node):
    gang.start(trains_on, "fsdp2", store, NODES, 2, files)
    wait_until(done(files, 1))
    stopped = keeper_pid(store, node)
    os.kill(stopped, signal.SIGSTOP)
    go(files, 2)
    if node == "a":  # that of rank 0: the part of the other one is there before
        wait_until(lambda: part_documents(store) == ["part-1.json"])
    assert not any((files / f"done-2-{rank}").exists() for rank in range(4))
    check_steps(store, [1])
    os.kill(stopped, signal.SIGCONT)
    outcomes = gang.finish()
    assert [outcome.value[1] for outcome in outcomes] == [{1: None, 2: None}] * 4
    check_stored(store, outcomes[0].value[2])
    assert part_documents(store) == []


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setenv("EVERSTEP_PARTS_S", "3")


@pytest.mark.slow
@pytest.mark.parametrize("node", ["a", *slow("b")])
def test_a_step_whose_node_does_not_answer_in_time_fails_on_all(
    gang, store, files, impatient, node
):
    gang.start(trains_on, "fsdp2", store, NODES, 3, files)
    wait_until(done(files, 1))
    stopped = keeper_pid(store, node)
    os.kill(stopped, signal.SIGSTOP)
    go(files, 2)
    others = [rank for rank in range(4) if NODES[rank] != node]
    wait_until(done(files, 2, others))
    check_steps(store, [1])
    os.kill(stopped, signal.SIGCONT)
    wait_until(done(files, 2))
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
    check_stored(store, outcomes[0].value[2])
    assert part_documents(store) == []


@pytest.mark.parametrize("node", ["a", *slow("b")])
@pytest.mark.parametrize(
    "with_keeper",
    [pytest.param(False, id="ranks", marks=pytest.mark.slow), pytest.param(True, id="keeper")],
)
@pytest.mark.parametrize("survivors", ["aabb", *slow("aa")])
def test_a_node_that_dies_between_part_and_commit(
    gang, store, files, impatient, node, with_keeper, survivors
):
    """Its step does not exist where its part was not there, else it is whole; the next save
    works."""
    gang.start(trains_on, "fsdp2", store, NODES, 9, files)
    wait_until(done(files, 1))
    go(files, 2)
    wait_until(done(files, 2))
    keepers = {each: keeper_pid(store, each) for each in "ab"}
    other = "b" if node == "a" else "a"
    os.kill(keepers[other], signal.SIGSTOP)
    go(files, 3)
    wait_until(done(files, 3, what="captured"))
    if node == "b":
        wait_until(lambda: part_documents(store) == ["part-1.json"])
    gang.kill(*(rank for rank in range(4) if NODES[rank] == node))
    if with_keeper:
        os.kill(keepers[node], signal.SIGKILL)
    gang.kill()  # as torchrun does, when some of them have died
    os.kill(keepers[other], signal.SIGCONT)
    gang.finish()
    (first, ended, state), *_ = gang_runs_on(gang, store, files, survivors)
    assert first == (3 if node == "a" and with_keeper else 4)
    assert ended == {first: None, first + 1: None}
    check_steps(store, list(range(1, first + 2)))
    check_stored(store, state)
    manifests = [Store(store).manifest(step) for step in range(1, first + 2)]
    assert [manifest.epoch for manifest in manifests[-2:]] == [2, 2]
    assert all(manifest.epoch == 1 for manifest in manifests[:-2])
    Store(store).gc()
    assert part_documents(store) == []
    check_steps(store, list(range(1, first + 2)))
    named = {link.path for manifest in manifests for link in manifest.files}
    packs = {f"data/{path.name}" for path in store.glob("data/*.safetensors")}
    live = {path for path in packs if names.epoch_of_pack(path.rpartition("/")[2]) == 2}
    assert packs - live <= named


def gang_runs_on(gang, store, files, nodes):
    go(files, *range(2, 9))
    size = len(nodes)
    layout = "fsdp2"
    return gang.run(trains_on, layout, store, nodes, 2, files, size=size)


def sees_less(layout, store, nodes, blind):
    """Which step is restored where one rank does not see the newest checkpoint (yet)."""
    if dist.get_rank() == blind:
        seen = catalog.committed
        catalog.committed = lambda disk: [name for name in seen(disk) if name.step < 3]
    try:
        return restores(layout, store, nodes, 3)
    finally:
        if dist.get_rank() == blind:
            catalog.committed = seen


@pytest.mark.slow
@pytest.mark.parametrize("blind", [0, *slow(3)])
def test_all_ranks_restore_what_all_of_them_see(gang, store, blind):
    (losses, states), *_ = gang.run(trains, "fsdp2", store, NODES, 1, 3, {})
    results = gang.run(sees_less, "fsdp2", store, NODES, blind)
    assert {step for step, *_ in results} == {2}
    check_equal(results[0][1], states[1])
    assert results[0][2] == losses[2:]


def leaves_out(store, nodes, culprit):
    """What became of three steps, the second of which one rank cannot capture."""
    os.environ["EVERSTEP_NODE"] = nodes[dist.get_rank()]
    model, held, ended = torch.nn.Linear(4, 4), {"value": 1}, []
    with Checkpointer(store, {"model": model, "held": held}, strategy="full") as made:
        for step in range(1, 4):
            held["value"] = object() if step == 2 and dist.get_rank() == culprit else step
            try:
                made.step(step).wait("local")
                ended.append("")
            except EverstepError as error:
                ended.append(f"{type(error).__name__}: {error}")
    return ended


@pytest.mark.parametrize("culprit", [0, 3])
def test_what_a_rank_leaves_out_fails_on_all_nodes_at_once(gang, store, culprit):
    for rank, ended in enumerate(gang.run(leaves_out, store, NODES, culprit)):
        assert ended[::2] == ["", ""]
        assert ended[1].startswith("Unsupported" if rank == culprit else "Unavailable"), ended[1]
        why = "left it out" in ended[1] or "not all of its ranks have it" in ended[1]
        assert why or rank == culprit
    check_steps(store, [1, 3])
    assert part_documents(store) == []


class Stages(torch.nn.Module):
    """A model of which each rank has one layer, under its own name."""

    def __init__(self, rank):
        super().__init__()
        setattr(self, f"stage{rank}", torch.nn.Linear(3, 3))


def trains_stages(store, nodes, restores):
    """The weights of this rank's stage; a draw; and a value that ranks differ in."""
    rank = dist.get_rank()
    os.environ["EVERSTEP_NODE"] = nodes[rank]
    torch.manual_seed(rank)
    model, held = Stages(rank), {"seen": 10 + rank, "same": True}
    rates = [0.5, 0.25, 0.25, 0.125]
    groups = [
        {"params": [getattr(model, f"stage{rank}").weight], "lr": rates[rank]},
        {"params": [getattr(model, f"stage{rank}").bias], "lr": 1.0},
    ]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    state = {"model": model, "optimizer": optimizer, "held": held}
    with Checkpointer(store, state, strategy="full") as made:
        if restores:
            held["seen"] = None
            assert made.restore(only=["held", "rng"]) == 1
        else:
            sum(p.square().sum() for p in model.parameters()).backward()
            optimizer.step()
            made.step(1).wait("local")
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    return parameters, torch.rand(3), dict(held)


@pytest.mark.slow
def test_ranks_of_different_nodes_keep_their_own(gang, store):
    """Hyperparameters by name though each node counts its sets from 0; generators; objects."""
    saved = gang.run(trains_stages, store, NODES, False)
    found = gang.run(trains_stages, store, NODES, True)
    stored = Store(store).read()
    for (parameters, draw, held), (_, draw2, held2) in zip(saved, found, strict=True):
        for name, parameter in parameters.items():
            assert torch.equal(stored[f"model.{name}"], parameter)
        assert torch.equal(draw, draw2)
        assert held == held2
        assert type(held2["same"]) is bool
    manifest = Store(store).manifest()
    sets = manifest.hyperparameters["optimizer"]
    groups = {}
    for table in Store(store).tables(manifest):
        groups |= table.optimizers["optimizer"]["groups"]
    for rank, rate in enumerate([0.5, 0.25, 0.25, 0.125]):
        assert sets[groups[f"model.stage{rank}.weight"]]["lr"] == rate
        assert sets[groups[f"model.stage{rank}.bias"]]["lr"] == 1.0


def changes_a_replica(store, nodes, culprit):
    """What became of three steps, at the second of which one rank has other bytes."""
    job = zoo.build("hsdp", RECIPE)
    ended = []
    with checkpointer(job, store, nodes, check=True) as made:
        for step in range(1, 4):
            job.train(step)
            local = job.optimizer.param_groups[0]["params"][2].detach().to_local()
            before = local.clone()
            if step == 2 and dist.get_rank() == culprit:
                local.view(-1)[0] += 1
            try:
                made.step(step).wait("local")
                ended.append("")
            except EverstepError as error:
                ended.append(f"{type(error).__name__}: {error}")
            local.copy_(before)
    return ended


@pytest.mark.slow
@pytest.mark.parametrize("culprit", [1, *slow(2)])
def test_replicas_on_different_nodes_are_compared(gang, store, culprit):
    for ended in gang.run(changes_a_replica, store, NODES, culprit):
        assert ended[::2] == ["", ""]
        for part in ("blocks.0", "has other bytes on"):
            assert part in ended[1]
    check_steps(store, [1, 3])


@pytest.mark.slow
def test_a_node_may_have_one_rank(gang, store):
    (_, states), *_ = gang.run(trains, "fsdp2", store, "ab", 1, 2, {}, size=2)
    check_stored(store, states[-1])
    manifest = Store(store).manifest()
    assert [part.rank for part in manifest.parts] == [0, 1]
    step, state, _ = gang.run(restores, "ddp", store, "ba", 2, size=2)[0]
    assert step == 2
    check_equal(state, states[-1])


def how_it_reads(layout, store, nodes):
    """Whether this rank restores through the page cache, as others of its node read the same."""
    said = []
    decide = apply._is_shared

    def note(*arguments):
        said.append(decide(*arguments))
        return said[-1]

    apply._is_shared = note
    try:
        restores(layout, store, nodes, 1)
    finally:
        apply._is_shared = decide
    return said


@pytest.mark.slow
def test_what_ranks_of_a_node_read_alike_is_read_once(gang, store):
    gang.run(trains, "hsdp", store, NODES, 1, 1, {})
    for layout, nodes, expected in (
        ("hsdp", "aabb", [[False]] * 4),  # replicas are on the other node
        ("hsdp", "abab", [[True]] * 4),
        ("fsdp2", "aaaa", [[False]] * 4),
        ("ddp", "aab", [[True], [True], [False]]),
    ):
        found = gang.run(how_it_reads, layout, store, nodes, size=len(nodes))
        assert found == expected, (layout, nodes)


def trains_through(store, nodes, steps, more):
    """Steps that are not waited for; the first one of them, and the newest save's error."""
    job = zoo.build("fsdp2", RECIPE)
    with checkpointer(job, store, nodes, **more) as made:
        first = made.restore() + 1
        for step in range(first, first + steps):
            job.train(step)
            newest = made.step(step)
            newest.wait("captured")
        with contextlib.suppress(EverstepError):
            made.wait()
    return first, newest.error and str(newest.error)


def kills_keepers(store, chance):
    """Four times one of a node, at random moments."""
    for _ in range(4):
        time.sleep(chance.uniform(0.0, 0.4))  # the moment is what is tried
        if pid := keeper_pid(store, chance.choice("ab")):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
