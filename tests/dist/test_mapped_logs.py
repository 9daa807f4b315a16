"""Ranks whose parameters are boxes of other tensors, or are updated by one rank each: fused
matrices, FSDP1, ZeroRedundancyOptimizer. Logs of other layouts are replayed there, to the bits of
the run; they keep none themselves. (Logs that they kept once: tests/golden.)
"""

import pytest
import zoo
from test_mapped_layouts import build, contents, dense, fused, unfused
from test_mapped_layouts import train as train_parts

import everstep
from choices import chosen
from comparing import check_equal
from everstep import Checkpointer, Store, Unsupported
from everstep.redo.clipping import Recording
from examples import slow
from stores import end_keeper

STEPS = 7
RECIPE = zoo.Recipe(grouped=False)


def attached(job, store, **more):
    state = {"model": job.model, "optimizer": job.optimizer}
    more = {"strategy": "log", "base_every": 5, "when_full": "wait", **more}
    return Checkpointer(store, state, **chosen(**more))


def trains(layout, store, last, recipe=RECIPE, strategy="log"):
    """From what is restored up to a step: where it began, the losses and the full state."""
    job = zoo.build(layout, recipe)
    base_every = 5 if strategy == "log" else None
    with attached(job, store, strategy=strategy, base_every=base_every) as checkpointer:
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


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("saved", "others", "recipe"),
    [
        pytest.param("fsdp2", [("fsdp1_flat", 4), ("zero1", 4)], RECIPE, marks=SLOW),
        pytest.param("fsdp2", [("fsdp1", 2), ("zero1", 2)], zoo.Recipe(), marks=SLOW),
        ("dense", [("fsdp1_flat", 2), ("zero1", 2)], RECIPE),
    ],
    ids=["fsdp2", "groups", "dense"],
)
def test_records_are_replayed_elsewhere(gang, store, saved, others, recipe):
    size = zoo.SIZES[saved]
    (_, _, _, state), *_ = gang.run(trains, saved, store, STEPS, recipe, size=size)
    assert kinds(store) == [False] + [True] * 4 + [False, True]
    for other, count in others:
        (first, found, *_), *_ = gang.run(trains, other, store, 0, recipe, "auto", size=count)
        assert first == STEPS
        check_equal(found, state)


def refusal(layout, store):
    job = zoo.build(layout, RECIPE)
    with pytest.raises(Unsupported) as caught:
        attached(job, store)
    return str(caught.value)


@pytest.mark.parametrize("layout", ["zero1", *slow("fsdp1", "fsdp1_flat")])
def test_no_log_is_kept(gang, store, tmp_path, layout):
    size = zoo.SIZES[layout]
    for message in gang.run(refusal, layout, tmp_path / "refused", size=size):
        assert "log" in message
    gang.run(trains, layout, store, 4, RECIPE, "auto", size=size)
    assert kinds(store) == [False] * 4


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
def test_fused_matrices_with_grouped_queries(gang, store, tmp_path):
    reference = tmp_path / "reference"
    gang.run(records, dense, reference, 4, "full", size=1)
    gang.run(records, dense, store, 3, size=1)
    assert kinds(store) == [False, True, True]
    for number, (other, count) in enumerate([(fused, 2), (fused, 4), (unfused, 2)]):
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
        (first, found, *_), *_ = gang.run(trains, layout, store, 0, RECIPE, "auto", size=size)
        assert first == 3
        check_equal(found, state)
