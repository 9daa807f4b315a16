"""Any layout saved, any other loaded: the same state, and training that goes on as if it had always
been so. Of DTensors, and of what no DTensor tells of: ranges, stages, parameters of one rank each.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import zoo
from jobs import attached, trains, trains_alone
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from comparing import check_equal, check_stored
from everstep import Store
from examples import slow

STEPS, AFTER = 2, 2
UNGROUPED = zoo.Recipe(grouped=False)
DTENSORS = ["fsdp_tp", "dense", "ddp", "fsdp2", "tp", "hsdp"]
OTHERS = ["pipeline", "dense", "zero1", "fsdp1", "fsdp2"]
FLAT = ["fsdp1_flat", "pipeline", "dense", "fsdp1"]


class App:
    """Model and optimizer as torch.distributed.checkpoint wants them."""

    def __init__(self, job):
        self.job = job

    def state_dict(self):
        model, optimizer = get_state_dict(self.job.model, self.job.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state):
        set_state_dict(
            self.job.model,
            self.job.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )


def app_of(job):
    return {"app": App(job)}


def go_on(layouts, store, **options):
    """What each of these layouts has, and comes to."""
    return [trains(layout, store, after=AFTER, strategy="full", **options) for layout in layouts]


def check(gang, saved, loads, store, **more):
    """`saved` goes on in all of `loads`; the state that it had."""
    options = {"after": AFTER, "strategy": "full", **more}
    run, *_ = gang.run(trains, saved, store, STEPS, size=zoo.SIZES[saved], **options)
    losses = run.losses[STEPS:]
    for size in sorted({zoo.SIZES[loaded] for loaded in loads}):
        layouts = [loaded for loaded in loads if zoo.SIZES[loaded] == size]
        for layout, found in zip(
            layouts, gang.run(go_on, layouts, store, size=size, **more)[0], strict=True
        ):
            assert found.first == STEPS, layout
            check_equal(found.begun, run.states[STEPS])
            expected = losses if layout == saved else pytest.approx(losses, abs=2e-6)
            assert found.losses == expected, layout
    return run.states[STEPS]


@pytest.mark.parametrize(
    ("saved", "loads"),
    [
        *slow(*((saved, DTENSORS) for saved in DTENSORS)),
        *((saved, OTHERS) for saved in OTHERS[:2]),
        *slow(*((saved, OTHERS) for saved in OTHERS[2:])),
    ],
)
def test_what_one_layout_saved_goes_on_in_all_others(gang, store, saved, loads):
    check_stored(store, check(gang, saved, loads, store))


@pytest.mark.slow
@pytest.mark.parametrize("saved", FLAT[:2])
def test_flat_parameters(gang, store, saved):
    check_stored(store, check(gang, saved, FLAT, store, recipe=UNGROUPED))


@pytest.mark.parametrize("saved", slow("fsdp_tp", "fsdp2", "tp", "hsdp"))
def test_a_state_dict_of_dtensors_goes_on_in_others(gang, store, saved):
    """As programs have it that come from torch.distributed.checkpoint: one object for all."""
    check(gang, saved, [saved, "dense", "hsdp"], store, state_of=app_of)


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
    with attached(job, store, strategy="full") as checkpointer:
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
    with attached(job, store, strategy="full") as checkpointer:
        job.train(9)
        with torch.no_grad():
            job.model.eval()(job.batch(1)[0])
        job.model.train()
        assert checkpointer.restore() == STEPS
    return losses, [job.train(step) for step in range(STEPS + 1, STEPS + 3)]


@pytest.mark.slow
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_ways_of_fsdp1(gang, store, strategy, use_orig_params):
    options = {"sharding_strategy": fsdp.ShardingStrategy[strategy]}
    size = 4 if strategy == "HYBRID_SHARD" else 2
    for losses, again in gang.run(saves_after_a_look, use_orig_params, options, store, size=size):
        assert again == losses
    recipe = zoo.Recipe(grouped=False, tied=True)
    (dense,) = gang.run(trains, "dense", store, size=1, recipe=recipe, after=AFTER)
    assert dense.first == STEPS
    assert dense.losses == pytest.approx(losses, abs=2e-6)
    assert Store(store).verify().ok


# ---- logs --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_log_of_stages(gang, store):
    options = {"recipe": UNGROUPED, "strategy": "log"}
    run, _ = gang.run(trains, "pipeline", store, 4, size=2, **options)
    for layout, size in (("pipeline", 2), ("dense", 1)):
        found, *_ = gang.run(trains, layout, store, size=size, **options)
        assert found.first == 4
        check_equal(found.begun, run.states[4])


@pytest.mark.slow
def test_stages_of_tensor_parallel_ranks_and_back(gang, store):
    """PP2 x TP2, then FSDP2 on two ranks, then one process, and back: each saves a step."""
    layouts = (("pipeline_tp", 4), ("fsdp2", 2), ("dense", 1), ("pipeline_tp", 4))
    last, state = 0, None
    for number, (layout, size) in enumerate(layouts, STEPS):
        run = gang.run(trains, layout, store, number, size=size, strategy="full")[0]
        assert (run.first, run.errors) == (last, {})
        if state is not None:
            check_equal(run.begun, state)
        last, state = number, run.states[number]
        check_stored(store, state, number)
    alone = gang.run(trains_alone, "dense", last, size=1)[0]
    assert run.losses[-1:] == pytest.approx(alone[0][-1:], abs=2e-6)
