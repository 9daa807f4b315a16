"""Ranks of two nodes whose keepers encode what they write: one checkpoint, for any layout."""

import os

import pytest
import zoo
from jobs import RECIPE, attached, check_restored

import coded
import forked_modules
from comparing import check_stored
from everstep import Store

NODES = "aabb"


def trains_encoded(store, strategy, nodes):
    job, states = zoo.build("fsdp2", RECIPE), {}
    try:
        with attached(job, store, nodes=nodes, strategy=strategy) as saver:
            for step in (1, 2, 3):
                job.train(step)
                saver.save(step).wait("local")
                states[step] = job.full_state()
    finally:
        os.environ.pop("EVERSTEP_NODE", None)
    return states


@pytest.mark.parametrize("strategy", ["full", "log"])
@pytest.mark.slow
def test_nodes_encode_each_its_part(gang, store, monkeypatch, strategy):
    forked_modules.begin_with(monkeypatch, coded.choose, ("planes", "zstd", "raw"), 512)
    states = gang.run(trains_encoded, store, strategy, NODES)[0]
    manifest = Store(store).manifest(3)
    codecs = {each.codec for part in manifest.all_parts for each in part.encoded or ()}
    assert len(manifest.all_parts) == 2
    assert "planes" in codecs
    assert Store(store).verify().ok
    if strategy == "full":
        check_stored(store, states[3], 3)
    check_restored(gang, "ddp", store, {step: states[step] for step in (2, 3)}, size=1)


def test_ranks_of_one_node_have_differences(gang, store, monkeypatch):
    forked_modules.begin_with(monkeypatch, coded.choose, ("planes", "difference"), 512)
    states = gang.run(trains_encoded, store, "full", "")[0]
    (part,) = Store(store).manifest(3).parts
    assert part.base.step == 2
    assert "difference" in {each.codec for each in part.encoded}
    check_stored(store, states[3], 3)
    check_restored(gang, "ddp", store, {step: states[step] for step in (2, 3)}, size=1)
