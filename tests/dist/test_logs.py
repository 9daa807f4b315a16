"""Records of several ranks: replayed to the bits of the run, on its own layout and on others."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import zoo

from choices import chosen
from comparing import check_equal
from everstep import Checkpointer, Store, Unsupported
from examples import slow
from stores import end_keeper

STEPS = 7
RECIPE = zoo.Recipe()
LAYOUTS = [
    *slow("ddp", "fsdp2", "tp", "hsdp"),
    "fsdp_tp",  # the others' logs are in test_windows.py and test_clipped_shards.py, too
]


def attached(job, store, **more):
    state = {"model": job.model, "optimizer": job.optimizer}
    return Checkpointer(store, state, **chosen(strategy="log", **more))


def trains(layout, store, last):
    """From what is restored up to a step: where it began, the losses and the full state."""
    job = zoo.build(layout, RECIPE)
    with attached(job, store, base_every=5) as checkpointer:
        first = checkpointer.restore()
        state, losses, drawn = job.full_state(), [], [torch.get_rng_state()]
        for step in range(first + 1, last + 1):
            torch.rand(dist.get_rank() + 1)
            losses.append(job.train(step))
            checkpointer.step(step)
        checkpointer.wait()
        drawn.append(torch.get_rng_state())
        return first, state, losses, job.full_state(), drawn


@pytest.mark.parametrize("saved", LAYOUTS)
def test_records_of_ranks_are_replayed(gang, store, tmp_path, saved):
    size = zoo.SIZES[saved]
    straight = tmp_path / "straight"
    try:
        (_, _, losses, final, _), *_ = gang.run(trains, saved, straight, STEPS + 2, size=size)
    finally:
        end_keeper(straight)
    killed = gang.run(trains, saved, store, STEPS, size=size)
    _, _, before, state, _ = killed[0]
    assert before == losses[:STEPS]
    manifests = [Store(store).manifest(step) for step in range(1, STEPS + 1)]
    assert [bool(manifest.records) for manifest in manifests] == [False] + [True] * 4 + [
        False,
        True,
    ]
    assert Store(store).verify().ok
    others = [layout for layout in ("dense", "fsdp2", "tp") if layout != saved]
    for layout in others:
        (first, found, *_), *_ = gang.run(trains, layout, store, 0, size=zoo.SIZES[layout])
        assert first == STEPS
        check_equal(found, state)
    resumed = gang.run(trains, saved, store, STEPS + 2, size=size)
    first, found, after, ended, _ = resumed[0]
    for once, again in zip(killed, resumed, strict=True):  # each rank's generator goes on
        assert torch.equal(once[4][1], again[4][0])
    assert first == STEPS
    check_equal(found, state)
    assert after == losses[STEPS:]
    check_equal(ended, final)


def restores_exactly(layout, store, optimizer):
    """What a restore says that is to be exact on these ranks."""
    job = zoo.build(layout, zoo.Recipe(optimizer=optimizer))
    with attached(job, store) as checkpointer:
        try:
            return checkpointer.restore(exact="require")
        except Unsupported as error:
            return str(error)


def trains_with(layout, store, optimizer):
    job = zoo.build(layout, zoo.Recipe(optimizer=optimizer))
    with attached(job, store, base_every=5) as checkpointer:
        for step in range(1, 4):
            job.train(step)
            checkpointer.step(step)


@pytest.mark.parametrize("fused", [False, True])
def test_other_ranks_are_exact_for_what_goes_by_single_elements(gang, store, fused):
    optimizer = partial(torch.optim.AdamW, lr=0.01, fused=fused)
    gang.run(trains_with, "fsdp2", store, optimizer, size=2)
    assert gang.run(restores_exactly, "fsdp2", store, optimizer, size=2) == [3, 3]
    for said in gang.run(restores_exactly, "ddp", store, optimizer, size=2):
        assert "other ranks" in said if fused else said == 3


def goes_by_itself(store, last):
    """Under auto; what became of each save."""
    job = zoo.build("fsdp2", RECIPE)
    state = {"model": job.model, "optimizer": job.optimizer}
    with Checkpointer(store, state) as checkpointer:
        first = checkpointer.restore()
        found, handles = job.full_state(), []
        for step in range(first + 1, last + 1):
            job.train(step)
            handles.append(checkpointer.step(step))
        checkpointer.wait()
        errors = [str(handle.error) for handle in handles if handle.error]
        return first, errors, found, job.full_state()


def test_all_ranks_go_over_to_a_log_at_the_same_step(gang, store):
    outcomes = gang.run(goes_by_itself, store, 24, size=2)
    assert [errors for _, errors, _, _ in outcomes] == [[], []]
    manifests = [Store(store).manifest(step) for step in Store(store).steps()]
    assert len(manifests) == 24
    assert not manifests[0].records
    assert manifests[-1].records
    (first, _, found, _), *_ = gang.run(goes_by_itself, store, 0, size=2)
    assert first == 24
    check_equal(found, outcomes[0][3])
