"""Ranks whose parameters are boxes of other tensors, or are updated by one rank each: fused
matrices, FSDP1, ZeroRedundancyOptimizer. Logs of other layouts are replayed there, to the bits of
the run; they keep none themselves. (Logs that they kept once: tests/golden.)
"""

import pytest
import zoo
from jobs import attached, clipped, trains

from comparing import check_equal, kinds
from everstep import Store, Unsupported
from examples import slow

RECIPE = zoo.Recipe(grouped=False)
LOG = {"strategy": "log", "base_every": 5}


def check_elsewhere(gang, store, state, step, others, recipe=RECIPE):
    """That step is exact on these layouts, each of so many ranks."""
    for other, size in others:
        found, *_ = gang.run(
            trains, other, store, size=size, recipe=recipe, restore={"exact": "require"}
        )
        assert found.first == step
        check_equal(found.begun, state)


@pytest.mark.parametrize(
    ("saved", "others", "recipe"),
    [
        *slow(
            ("fsdp2", [("fsdp1_flat", 4), ("zero1", 4)], RECIPE),
            ("fsdp2", [("fsdp1", 2), ("zero1", 2)], zoo.Recipe()),
        ),
        ("dense", [("fsdp1_flat", 2), ("zero1", 2)], RECIPE),
    ],
)
def test_records_are_replayed_elsewhere(gang, store, saved, others, recipe):
    run, *_ = gang.run(trains, saved, store, 7, size=zoo.SIZES[saved], recipe=recipe, **LOG)
    assert kinds(store) == "brrrrbr"
    check_elsewhere(gang, store, run.states[7], 7, others, recipe)


def refusal(layout, store):
    job = zoo.build(layout, RECIPE)
    with pytest.raises(Unsupported) as caught:
        attached(job, store, strategy="log")
    return str(caught.value)


@pytest.mark.parametrize("layout", ["zero1", *slow("fsdp1", "fsdp1_flat")])
def test_no_log_is_kept(gang, store, other_store, layout):
    size = zoo.SIZES[layout]
    for message in gang.run(refusal, layout, other_store, size=size):
        assert "log" in message
    gang.run(trains, layout, store, 4, size=size, recipe=RECIPE)
    assert kinds(store) == "bbbb"


@pytest.mark.slow
def test_raw_gradients_are_clipped_where_they_are_boxes(gang, store):
    run, *_ = gang.run(trains, "fsdp2", store, 3, size=2, recipe=RECIPE, state_of=clipped, **LOG)
    (record,) = Store(store).manifest(3).records
    assert record.calls[0]["clips"]
    others = [("fsdp1", 2), ("fsdp1_flat", 4), ("zero1", 2), ("dense", 1)]
    check_elsewhere(gang, store, run.states[3], 3, others)
