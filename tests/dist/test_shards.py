"""Layouts that no DTensor tells of, into each other: ranges, stages, experts, fused matrices."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import zoo
from torch.distributed import fsdp

import everstep
from comparing import check_equal, check_stored
from everstep import Checkpointer, Store
from examples import slow

STEPS = 2
RECIPE = zoo.Recipe()
UNGROUPED = zoo.Recipe(grouped=False)
LAYOUTS = ["dense", "pipeline", "zero1", "fsdp1", "fsdp2"]


def checkpointer_of(job, store, strategy="full"):
    layout = None
    if hasattr(job, "canonical"):

        def layout(name, tensor):
            return f"model.{job.canonical(name.removeprefix('model.'))}"

    state = {"model": job.model, "optimizer": job.optimizer}
    return Checkpointer(store, state, strategy=strategy, ranks=everstep.Ranks(layout=layout))


def trains_and_saves(layout, recipe, store):
    """The full state after STEPS steps, and the losses of the steps after them."""
    job = zoo.build(layout, recipe)
    with checkpointer_of(job, store) as checkpointer:
        for step in range(1, STEPS + 1):
            job.train(step)
            checkpointer.step(step)
        checkpointer.wait()
        state = job.full_state()
    return state, [job.train(step) for step in range(STEPS + 1, STEPS + 3)]


def goes_on(layouts, recipe, store):
    """For each layout the step that is restored, what is there then, and the losses after it."""
    found = []
    for layout in layouts:
        job = zoo.build(layout, recipe)
        with checkpointer_of(job, store) as checkpointer:
            step = checkpointer.restore()
            state = job.full_state()
            found.append((step, state, [job.train(step) for step in range(STEPS + 1, STEPS + 3)]))
    return found


def check(gang, saved, loads, recipe, store):
    (state, losses), *_ = gang.run(trains_and_saves, saved, recipe, store, size=zoo.SIZES[saved])
    check_stored(store, state)
    for size in sorted({zoo.SIZES[loaded] for loaded in loads}):
        layouts = [loaded for loaded in loads if zoo.SIZES[loaded] == size]
        (found, *_) = gang.run(goes_on, layouts, recipe, store, size=size)
        for loaded, (step, restored, after) in zip(layouts, found, strict=True):
            assert step == STEPS, loaded
            check_equal(restored, state)
            if loaded == saved:
                assert after == losses
            assert after == pytest.approx(losses, abs=2e-6), loaded


@pytest.mark.parametrize("saved", [*LAYOUTS[:-1], *slow(LAYOUTS[-1])])
def test_what_one_layout_saved_goes_on_in_all_others(gang, store, saved):
    check(gang, saved, LAYOUTS, RECIPE, store)


@pytest.mark.slow
@pytest.mark.parametrize("saved", ["fsdp1_flat", "pipeline"])
def test_flat_parameters(gang, store, saved):
    check(gang, saved, ["dense", "fsdp1_flat", "fsdp1", "pipeline"], UNGROUPED, store)


# ---- what else FSDP1 can be told ----------------------------------------------------------------


def fsdp1(use_orig_params, **options):
    """As the zoo makes it, but for these options."""
    made = fsdp.FullyShardedDataParallel
    if options["sharding_strategy"] is fsdp.ShardingStrategy.HYBRID_SHARD:
        # Said, since without a GPU torch makes each rank a node.
        shard, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
        replicate, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
        options["process_group"] = shard, replicate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp, "FullyShardedDataParallel", partial(made, **options))
        layout = "fsdp1" if use_orig_params else "fsdp1_flat"
        return zoo.build(layout, zoo.Recipe(grouped=False, tied=True))


def saves_after_a_look(use_orig_params, options, store):
    """Saved after a forward without backward, which leaves parameters whole; what the run, which
    does not see any of it, came to."""
    job = fsdp1(use_orig_params, **options)
    with checkpointer_of(job, store) as checkpointer:
        for step in range(1, STEPS + 1):
            job.train(step)
            job.model.eval()
            with torch.no_grad():
                before = job.model(job.batch(step)[0])
            handle = checkpointer.step(step)
            with torch.no_grad():
                assert torch.equal(job.model(job.batch(step)[0]), before)
            job.model.train()
            assert handle.step == step
        checkpointer.wait()
    losses = [job.train(step) for step in range(STEPS + 1, STEPS + 3)]
    job = fsdp1(use_orig_params, **options)
    with checkpointer_of(job, store) as checkpointer:
        job.train(9)
        with torch.no_grad():
            job.model.eval()(job.batch(1)[0])
        job.model.train()
        assert checkpointer.restore() == STEPS
    return losses, [job.train(step) for step in range(STEPS + 1, STEPS + 3)]


def trains_dense(store):
    job = zoo.build("dense", zoo.Recipe(grouped=False, tied=True))
    with checkpointer_of(job, store) as checkpointer:
        assert checkpointer.restore() == STEPS
        return [job.train(step) for step in range(STEPS + 1, STEPS + 3)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "use_orig_params"),
    [
        ("FULL_SHARD", True),
        ("FULL_SHARD", False),
        ("HYBRID_SHARD", True),
        pytest.param("HYBRID_SHARD", False, marks=pytest.mark.slow),
        pytest.param("SHARD_GRAD_OP", True, marks=pytest.mark.slow),
        ("SHARD_GRAD_OP", False),
        pytest.param("NO_SHARD", True, marks=pytest.mark.slow),
        ("NO_SHARD", False),
    ],
)
def test_ways_of_fsdp1(gang, store, strategy, use_orig_params):
    options = {"sharding_strategy": fsdp.ShardingStrategy[strategy]}
    size = 4 if strategy == "HYBRID_SHARD" else 2
    for losses, again in gang.run(saves_after_a_look, use_orig_params, options, store, size=size):
        assert again == losses
    (dense,) = gang.run(trains_dense, store, size=1)
    assert dense == pytest.approx(losses, abs=2e-6)
    assert Store(store).verify().ok


# ---- logs --------------------------------------------------------------------------------------


def logs(layout, strategy, store):
    job = zoo.build(layout, UNGROUPED)
    with checkpointer_of(job, store, strategy) as checkpointer:
        for step in range(1, 5):
            job.train(step)
            checkpointer.step(step)
            checkpointer.wait()  # else one may be skipped
        return job.full_state()


def reads_logs(layout, strategy, store):
    job = zoo.build(layout, UNGROUPED)
    with checkpointer_of(job, store, strategy) as checkpointer:
        return checkpointer.restore(), job.full_state()


@pytest.mark.slow
def test_a_log_of_stages(gang, store):
    state, _ = gang.run(logs, "pipeline", "log", store, size=2)
    for layout, size in (("pipeline", 2), ("dense", 1)):
        (step, found), *_ = gang.run(reads_logs, layout, "log", store, size=size)
        assert step == 4
        check_equal(found, state)
