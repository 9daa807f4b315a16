"""Records of ranks whose parameters are boxes of other tensors, or are updated by one rank each:
fused matrices, FSDP1, ZeroRedundancyOptimizer. Replayed to the bits of the run, on any layout.
"""

from functools import partial

import pytest
import torch
import zoo
from test_mapped_layouts import build, contents, dense, fused, unfused
from test_mapped_layouts import train as train_parts

import everstep
from choices import chosen
from comparing import check_equal
from everstep import Checkpointer, Store, Unsupported
from everstep.redo.clipping import Recording
from everstep.restore.materialize import materialize
from everstep.store.names import CheckpointName
from everstep.tiers.disk import Disk
from stores import end_keeper

STEPS = 7
RECIPE = zoo.Recipe(grouped=False)
ADAMW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def attached(job, store, **more):
    state = {"model": job.model, "optimizer": job.optimizer}
    more = {"strategy": "log", "base_every": 5, "when_full": "wait", **more}
    return Checkpointer(store, state, **chosen(**more))


def trains(layout, store, last, recipe=RECIPE, verify="rolling"):
    """From what is restored up to a step: where it began, the losses and the full state."""
    job = zoo.build(layout, recipe)
    with attached(job, store, verify=verify) as checkpointer:
        first = checkpointer.restore(exact="require")
        state, losses = job.full_state(), []
        for step in range(first + 1, last + 1):
            losses.append(job.train(step))
            checkpointer.step(step)
        checkpointer.wait()
        return first, state, losses, job.full_state()


def kinds(store):
    opened = Store(store)
    return [bool(opened.manifest(step).records) for step in opened.steps()]


def straight(gang, path, layout, recipe, size):
    """The same, never interrupted."""
    try:
        (_, _, losses, final), *_ = gang.run(trains, layout, path, STEPS + 2, recipe, size=size)
    finally:
        end_keeper(path)
    return losses, final


def check(gang, store, tmp_path, saved, others, recipe=RECIPE, size=None, verify="rolling"):
    size = size or zoo.SIZES[saved]
    losses, final = straight(gang, tmp_path / "straight", saved, recipe, size)
    (_, _, before, state), *_ = gang.run(trains, saved, store, STEPS, recipe, verify, size=size)
    assert before == losses[:STEPS]
    assert kinds(store) == [False] + [True] * 4 + [False, True]
    assert Store(store).verify().ok
    for other, count in others:
        (first, found, *_), *_ = gang.run(trains, other, store, 0, recipe, size=count)
        assert first == STEPS
        check_equal(found, state)
    (first, found, after, ended), *_ = gang.run(
        trains, saved, store, STEPS + 2, recipe, verify, size=size
    )
    assert first == STEPS
    check_equal(found, state)
    assert after == losses[STEPS:]
    check_equal(ended, final)


SLOW = pytest.mark.slow
CASES = [
    pytest.param("zero1", [("fsdp1", 2), ("dense", 1)], id="zero1"),
    pytest.param("zero1", [("fsdp2", 4), ("zero1", 4)], id="zero1_on_four", marks=SLOW),
    pytest.param("fsdp1", [("fsdp1_flat", 4), ("zero1", 2), ("dense", 1)], id="fsdp1", marks=SLOW),
    pytest.param(
        "fsdp1_flat", [("fsdp1", 4), ("fsdp2", 2), ("dense", 1)], id="fsdp1_flat", marks=SLOW
    ),
    pytest.param("fsdp2", [("fsdp1", 2), ("fsdp1_flat", 4), ("zero1", 4)], id="fsdp2", marks=SLOW),
    pytest.param("dense", [("fsdp1", 4), ("fsdp1_flat", 2), ("zero1", 2)], id="dense", marks=SLOW),
]


@pytest.mark.parametrize(("saved", "others"), CASES)
def test_records_are_replayed_there_and_elsewhere(gang, store, tmp_path, saved, others):
    check(gang, store, tmp_path, saved, others)


@pytest.mark.slow
@pytest.mark.parametrize("saved", ["zero1", "fsdp1", "fsdp1_flat"])
def test_of_another_optimizer_and_number_of_ranks(gang, store, tmp_path, saved):
    recipe = zoo.Recipe(grouped=False, tied=saved != "fsdp1_flat", optimizer=MOMENTUM)
    others = [("fsdp2", 2), (saved, 2)]
    check(gang, store, tmp_path, saved, others, recipe, size=4, verify="full")


@pytest.mark.slow
@pytest.mark.parametrize("saved", ["zero1", "fsdp1"])
def test_groups_by_name(gang, store, tmp_path, saved):
    check(gang, store, tmp_path, saved, [("dense", 1), ("zero1", 2)], zoo.Recipe())


@pytest.mark.parametrize(
    "layout", ["fsdp1_flat", pytest.param("zero1", marks=SLOW), pytest.param("fsdp1", marks=SLOW)]
)
def test_it_is_made_whole_without_the_program(gang, store, layout):
    (_, _, _, state), *_ = gang.run(trains, layout, store, 4, size=2)
    assert kinds(store)[-1]
    with pytest.raises(Unsupported, match="everstep materialize"):
        Store(store).read(4)
    materialize(Disk(store), CheckpointName(4, 1))
    found = Store(store).read(4)
    for name, tensor in state.items():
        parameter, _, key = name.partition(":")
        full = f"optimizer.model.{parameter}.{key}" if key else f"model.{parameter}"
        assert torch.equal(found[full], tensor), full


# ---- fused matrices ----------------------------------------------------------------------------


def records(make, store, last, strategy="log"):
    """Train from what there is up to a step."""
    model, optimizer, layout = build(make)
    state = {"model": model, "optimizer": optimizer}
    with Checkpointer(
        store, state, **chosen(strategy=strategy, base_every=5, layout=layout)
    ) as checkpointer:
        first = checkpointer.restore(exact="require")
        for step in range(first + 1, last + 1):
            train_parts(model, optimizer, layout, step)
            checkpointer.step(step)
        checkpointer.wait()
        return first


@pytest.mark.slow
@pytest.mark.parametrize(("make", "size"), [(dense, 1), (fused, 2), (fused, 4), (unfused, 2)])
def test_fused_matrices_with_grouped_queries(gang, store, tmp_path, make, size):
    reference = tmp_path / "reference"
    gang.run(records, dense, reference, 4, "full", size=1)
    gang.run(records, make, store, 3, size=size)
    assert kinds(store) == [False, True, True]
    for number, (other, count) in enumerate([(dense, 1), (fused, 2), (fused, 4), (unfused, 2)]):
        copy = tmp_path / f"copy{number}"
        gang.run(goes_on_whole, other, store, copy, size=count)
        check_equal(contents(copy, 4), contents(reference, 4))
        end_keeper(copy)
    end_keeper(reference)


def goes_on_whole(make, source, store):
    model, optimizer, layout = build(make)
    state = {"model": model, "optimizer": optimizer}
    with Checkpointer(
        store, state, strategy="full", ranks=everstep.Ranks(layout=layout)
    ) as checkpointer:
        assert checkpointer.restore(from_store=source, exact="require") == 3
        train_parts(model, optimizer, layout, 4)
        checkpointer.step(4)


# ---- gradients from before clipping ------------------------------------------------------------


def clips(store):
    """Raw gradients, of which each rank writes its part."""
    job = zoo.build("fsdp2", RECIPE)
    recording = Recording()
    recording.set(True, pre_clip=True)
    with attached(job, store) as checkpointer:
        for step in range(1, 4):
            inputs, targets = job.batch(step)
            job.optimizer.zero_grad()
            zoo.loss_of(job.model(inputs), targets).backward()
            everstep.clip_grad_norm_(job.model.parameters(), 0.1)
            job.optimizer.step()
            checkpointer.step(step)
        checkpointer.wait()
        return job.full_state()


@pytest.mark.slow
def test_raw_gradients_are_clipped_where_they_are_boxes(gang, store):
    state, *_ = gang.run(clips, store, size=2)
    (record,) = Store(store).manifest(3).records
    assert record.calls[0]["clips"]
    for layout, size in (("fsdp1", 2), ("fsdp1_flat", 4), ("zero1", 2), ("dense", 1)):
        (first, found, *_), *_ = gang.run(trains, layout, store, 0, size=size)
        assert first == 3
        check_equal(found, state)


# ---- what is refused ---------------------------------------------------------------------------


def records_alone(store):
    """A store of its own for each rank, while the optimizer deals out its updates to all."""
    job = zoo.build("zero1", RECIPE)
    job.train(1)
    said = []
    for strategy in ("log", "auto"):
        state = {"model": job.model, "optimizer": job.optimizer}
        try:
            with Checkpointer(
                f"{store}-{torch.rand(1)}",
                state,
                strategy=strategy,
                ranks=everstep.Ranks(alone=True),
            ):
                said.append("")
        except Unsupported as error:
            said.append(str(error))
    return said


def test_one_rank_alone_cannot_record_what_others_update(gang, store):
    for log, auto in gang.run(records_alone, store, size=2):
        assert "other ranks make some of its updates" in log
        assert auto == ""
