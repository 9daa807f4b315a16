"""States of several ranks that are copied over several steps: restored to the bits of the run."""

import contextlib
from functools import partial

import pytest
import torch
import torch.distributed as dist
import zoo
from deaths import _note, noted
from jobs import RECIPE, attached, check_restored, trains, trains_alone

from comparing import check_equal
from everstep import Store
from everstep.store import catalog
from everstep.tiers.disk import Disk
from processes import until
from stores import end_keeper

LOG = {"strategy": "log", "base_every": 6, "window": 3}
SPREAD = {"strategy": "spread", "every": 4, "window": 3}
LAYOUTS = ["ddp", "fsdp2", "hsdp", "tp", "fsdp_tp"]


def check(gang, layout, store, last, options):
    """A run that is stopped after `last` steps comes to the bits of one that is not, and each of
    its checkpoints to those of its step, on these ranks and on others."""
    size = zoo.SIZES[layout]
    losses, states = gang.run(trains_alone, layout, last + 3, size=size)[0]
    run, *_ = gang.run(trains, layout, store, last, size=size, kept=[], **options)
    assert (run.first, run.losses, run.errors) == (0, losses[:last], {})
    assert Store(store).verify().ok
    steps = Store(store).steps()
    saved = steps[-1]
    for other in ("dense", "fsdp2", "tp"):
        check_restored(gang, other, store, {saved: states[saved]}, **options)
    check_restored(gang, layout, store, {step: states[step] for step in steps[2:8]}, **options)
    run, *_ = gang.run(trains, layout, store, last + 3, size=size, **options)
    assert (run.first, run.losses, run.errors) == (saved, losses[saved:], {})
    for step in (saved, last + 3):
        check_equal(run.states[step], states[step])


def bases(store):
    """By step, of which steps the parts of a base beside a log's records are."""
    disk = Disk(store)
    found = {name.step: catalog.read_state(disk, name) for name in catalog.committed(disk)}
    return {step: [part.steps for part in state.parts] for step, state in found.items() if state}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bases_of_a_log_are_spread(gang, store, layout):
    check(gang, layout, store, 15, LOG)
    assert bases(store) == {7: [5, 6, 7], 13: [11, 12, 13]}
    manifests = [Store(store).manifest(step) for step in range(1, 16)]
    assert [step for step, each in enumerate(manifests, 1) if not each.records] == [1]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_states_are_spread(gang, store, layout):
    check(gang, layout, store, 14, SPREAD)
    parts = parts_by_step(store)
    assert [parts[step] for step in (4, 8, 12)] == [[4], [6, 7, 8], [10, 11, 12]]


def orthogonal(model_parameters):
    """Muon, of the matrices: it makes sums over whole ones."""
    return torch.optim.Muon([p for p in model_parameters if p.dim() == 2], lr=0.01)


MATRICES = zoo.Recipe(optimizer=orthogonal, grouped=False)


@pytest.mark.slow
def test_gradients_that_are_placed_otherwise(gang, store):
    """torch replicates those of an embedding that is cut: Muon goes by where they are."""
    options = {"recipe": MATRICES, "strategy": "log"}
    run, *_ = gang.run(trains, "tp", store, 3, size=2, **options)
    states = {step: run.states[step] for step in (1, 2, 3)}
    check_restored(gang, "tp", store, states, restore={"exact": "require"}, **options)


def is_surprised(job, step):
    """Before a step somebody on rank 1 writes to a weight what is there."""
    if step == 7 and dist.get_rank() == 1:
        with torch.no_grad():
            next(job.model.parameters()).mul_(1.0)
    return job.train(step)


def parts_by_step(store):
    """Of which steps the parts of each checkpoint are."""
    return {
        s: [part.steps for part in Store(store).manifest(s).parts] for s in Store(store).steps()
    }


def test_a_window_that_ends_on_one_rank_ends_on_all(gang, store):
    options = {"train": is_surprised, "waits": True, **SPREAD}
    runs = gang.run(trains, "ddp", store, 12, size=2, **options)
    assert [[step for step in (4, 8, 12) if step in run.errors] for run in runs] == [[], []]
    assert parts_by_step(store) == {4: [4], 8: [8], 12: [10, 11, 12]}
    check_restored(gang, "tp", store, {12: runs[0].states[12]}, **SPREAD)


def stops(job, step, folder):
    """Before step 7 all ranks wait until they may go on."""
    if step == 7:
        _note(folder, "there", step)
        until((folder / "go").exists, "nobody says go")
    return job.train(step)


@contextlib.contextmanager
def stopped_within_a_window(gang, layout, store, folder, last, options):
    """That of step 8 (7) is begun at step 6 (5)."""
    size = zoo.SIZES[layout]
    train = partial(stops, folder=folder)
    gang.start(trains, layout, store, last, size=size, train=train, waits=True, **options)
    until(lambda: all(noted(folder, "there", size)), "not all ranks have come")
    yield
    (folder / "go").touch()


@pytest.mark.slow
@pytest.mark.parametrize(("options", "left"), [(SPREAD, 4), (LOG, 6)])
@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_a_rank_that_dies_within_a_window(gang, store, tmp_path, layout, options, left):
    with stopped_within_a_window(gang, layout, store, tmp_path, 14, options):
        gang.kill(1)
    gang.finish(timeout=20)
    assert Store(store).steps()[-1] == left
    run, *_ = gang.run(trains, layout, store, 14, size=zoo.SIZES[layout], **options)
    assert (run.first, run.errors) == (left, {})
    assert Store(store).verify().ok
    _, expected = gang.run(trains_alone, layout, 14, size=zoo.SIZES[layout])[0]
    check_equal(run.states[14], expected[14])
    saved = Store(store).steps()[-1]
    check_restored(gang, layout, store, {saved: expected[saved]}, **options)


@pytest.mark.slow
@pytest.mark.parametrize("options", [SPREAD, LOG])
def test_a_keeper_that_dies_within_a_window(gang, store, tmp_path, options):
    with stopped_within_a_window(gang, "ddp", store, tmp_path, 16, options):
        end_keeper(store)
    outcomes = gang.finish()
    assert [outcome.kind for outcome in outcomes] == ["returned"] * 2, outcomes
    if options is SPREAD:
        assert Store(store).steps() == [4, 8, 12, 16]
    assert Store(store).steps()[-1] == 16
    assert Store(store).verify().ok
    check_restored(gang, "tp", store, {16: outcomes[0].value.states[16]}, **options)


def goes_by_the_first(store, last):
    """Ranks that have measured different things."""
    job = zoo.build("ddp", RECIPE)
    with attached(job, store, every=6) as checkpointer:
        pace = checkpointer._captures._copier._pace
        for step in range(1, last + 1):
            job.train(step)
            size = sum(parameter.nbytes for parameter in job.model.parameters())
            pace.overlap_s = 1.0  # copies of all take 2 or 5 steps
            pace.bytes_per_s = 3 * size / 2 / (2, 5)[dist.get_rank()]
            checkpointer.step(step)
        checkpointer.wait()
        return job.full_state()


@pytest.mark.slow
def test_all_ranks_go_by_what_the_first_has_measured(gang, store):
    expected = gang.run(goes_by_the_first, store, 30, size=2)[0]
    parts = parts_by_step(store)
    assert parts[6] == [6]
    assert parts[12] == [12]
    for step in (18, 24, 30):
        assert len(parts[step]) > 1, parts
    check_restored(gang, "fsdp2", store, {30: expected}, every=6)


@pytest.mark.slow
def test_ranks_that_have_nothing_of_a_share(gang, store):
    check(gang, "ddp", store, 48, {"strategy": "spread", "every": 24, "window": 24})
