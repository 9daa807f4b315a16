"""Records of several ranks: replayed to the bits of the run, on its own layout and on others."""

from functools import partial

import pytest
import torch
import zoo
from jobs import attached, check_restored, compressed, trains, trains_alone

from comparing import check_equal, kinds
from everstep import Store, Unsupported
from examples import slow
from processes import until

STEPS, AFTER = 7, 2
LOG = {"strategy": "log", "base_every": 5}
LAYOUTS = ["tp", "ddp", "fsdp2", "hsdp", "fsdp_tp"]
"""Logs of ddp and fsdp2 are in test_windows.py and test_clipped_shards.py, too."""


@pytest.mark.parametrize("saved", LAYOUTS)
@pytest.mark.slow
def test_records_of_ranks_are_replayed(gang, store, saved):
    more = {"size": zoo.SIZES[saved], "kept": (STEPS, STEPS + AFTER)}
    losses, states = gang.run(trains_alone, saved, STEPS + AFTER, **more)[0]
    killed = gang.run(trains, saved, store, STEPS, **more, **LOG)
    assert killed[0].losses == losses[:STEPS]
    assert kinds(store) == "brrrrbr"
    assert Store(store).verify().ok
    for layout in {"dense", "fsdp2", "tp"} - {saved}:
        check_restored(gang, layout, store, {STEPS: killed[0].states[STEPS]})
    resumed = gang.run(trains, saved, store, STEPS + AFTER, **more, **LOG)
    for once, again in zip(killed, resumed, strict=True):  # each rank's generator goes on
        assert torch.equal(once.drawn[1], again.drawn[0])
    assert resumed[0].first == STEPS
    check_equal(resumed[0].begun, killed[0].states[STEPS])
    assert resumed[0].losses == losses[STEPS:]
    check_equal(resumed[0].states[STEPS + AFTER], states[STEPS + AFTER])


def restores_exactly(layout, store, optimizer):
    """What a restore says that is to be exact on these ranks."""
    job = zoo.build(layout, zoo.Recipe(optimizer=optimizer))
    with attached(job, store, strategy="log") as checkpointer:
        try:
            return checkpointer.restore(exact="require")
        except Unsupported as error:
            return str(error)


@pytest.mark.parametrize("fused", [False, *slow(True)])
def test_other_ranks_are_exact_for_what_goes_by_single_elements(gang, store, fused):
    optimizer = partial(torch.optim.AdamW, lr=0.01, fused=fused)
    recipe = zoo.Recipe(optimizer=optimizer)
    gang.run(trains, "fsdp2", store, 3, size=2, recipe=recipe, **LOG)
    assert gang.run(restores_exactly, "fsdp2", store, optimizer, size=2) == [3, 3]
    for said in gang.run(restores_exactly, "ddp", store, optimizer, size=2):
        assert "other ranks" in said if fused else said == 3


@pytest.mark.parametrize("nodes", ["", *slow("ab")])
def test_all_ranks_go_over_to_a_log_at_the_same_step(gang, store, nodes):
    outcomes = gang.run(trains, "fsdp2", store, 8, size=2, nodes=nodes, kept=[8])
    assert [run.errors for run in outcomes] == [{}, {}]
    found = kinds(store)
    assert (len(found), found[0], found[-1]) == (8, "b", "r")
    check_restored(gang, "fsdp2", store, {8: outcomes[0].states[8]}, size=2, nodes=nodes)


# ---- gradients that are compressed, clipped, or written to -------------------------------------


@pytest.mark.parametrize(
    ("kind", "options"), [*slow(("bf16", {})), ("topk", {"ratio": 0.1, "residual": "records"})]
)
def test_what_was_sent_is_replayed(gang, store, other_store, kind, options):
    state_of, last = partial(compressed, kind=kind, **options), 6
    more = {"state_of": state_of, "strategy": "log", "kept": [last + AFTER]}
    run = partial(gang.run, trains, "ddp", size=2, **more)
    straight, *_ = run(other_store, last + AFTER)
    run(store, last)
    records = [record for step in (5, last) for record in Store(store).manifest(step).records]
    assert all(call["compressed"] for record in records for call in record.calls)
    found = run(store, last + AFTER)
    assert [each.first for each in found] == [last, last]
    assert found[0].losses == straight.losses[last:]
    check_equal(found[0].states[last + AFTER], straight.states[last + AFTER])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options"), [("bf16", {}), ("topk", {"residual": "records"})])
def test_killed_ranks_go_on_with_what_they_owe(gang, store, other_store, kind, options):
    options = {"size": 2, "state_of": partial(compressed, kind=kind, **options), **LOG}
    gang.start(trains, "ddp", store, 10**6, **options)
    until(lambda: len(list(store.glob("checkpoints/*/manifest.json"))) > 6, "no six steps")
    gang.kill(1)
    gang.finish()
    last = Store(store).latest() + 4
    run, *_ = gang.run(trains, "ddp", store, last, **options)
    straight, *_ = gang.run(trains, "ddp", other_store, last, **options)
    assert run.losses == straight.losses[run.first :]
    for step in (run.first, last):
        check_equal(run.states[step], straight.states[step])
