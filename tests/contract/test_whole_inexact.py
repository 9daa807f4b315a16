"""Old stores (keep_exact=False): a state with other last bits that stands for its log."""

from dataclasses import replace

import pytest
import torch
from runs import check_same, checkpointer, difference, restore, snapshot
from wholes import build, fill

from everstep import Keep, Store, Unsupported
from everstep.format.manifest import CheckpointName, encode_manifest
from everstep.restore import materialize as materializing
from everstep.restore.materialize import materialize
from everstep.store import names, retain
from everstep.tiers.disk import Disk
from stores import packs_of

pytestmark = pytest.mark.timeout(300)  # workers give way to whatever else this machine does

WEIGHT = "model.0.weight"


@pytest.fixture
def elsewhere(monkeypatch):
    """What is made whole comes to other last bits, as on another machine."""
    rebuilt = materializing.rebuilt

    def replay(*args, **options):
        found = rebuilt(*args, **options)
        bits = found[WEIGHT].detach().view(torch.int32)
        bits[0, 0] ^= 1
        return found

    monkeypatch.setattr(materializing, "rebuilt", replay)
    monkeypatch.setattr("everstep.restore.chain.Chain.why_inexact", ["torch 1"])


def make_whole(store, step):
    """As everstep did until it always kept the log of what is not exact."""
    disk, name = Disk(store), CheckpointName(step, 1)
    made = materialize(disk, name)
    assert not made.exact
    assert not made.ends_chain
    disk.replace(names.state_path(name), encode_manifest(replace(made, replaces_log=True)))


def weight_after(store, step):
    state = build(2)
    assert restore(store, state, step) == step
    return state, state["model"][0].weight.detach().clone()


def test_it_is_what_a_restore_takes_and_says_so(store, elsewhere, caplog):
    frozen = fill(store)
    make_whole(store, 5)
    assert [manifest.step for manifest in Store(store).chain(7)] == [5, 6, 7]
    state, weight = weight_after(store, 5)
    found = difference(snapshot(state), frozen[5])
    assert found
    assert "0.weight" in found
    assert torch.equal(weight, Store(store).read(5, [WEIGHT])[WEIGHT])
    assert "restoring step 5: " in caplog.text
    assert "(exact: false). It was made whole by a replay elsewhere" in caplog.text
    state, _ = weight_after(store, 8)
    assert difference(snapshot(state), frozen[8])
    assert "Step 5, from which it goes on, was made whole" in caplog.text
    caplog.clear()
    state, _ = weight_after(store, 4)  # from the base
    check_same(snapshot(state), frozen[4])
    assert "exact" not in caplog.text


def test_an_exact_restore_refuses_it(store, elsewhere):
    frozen = fill(store)
    make_whole(store, 5)
    state = build(2)
    before = snapshot(state)
    with checkpointer(store, state) as restorer:
        for step in (5, 8):
            with pytest.raises(Unsupported, match=r"exact: false.*or exact='allow'"):
                restorer.restore(step, exact="require")
        check_same(snapshot(state), before)
        assert restorer.restore(4, exact="require") == 4
    check_same(snapshot(state), frozen[4])


def test_retention_deletes_what_is_behind_it(store, elsewhere):
    fill(store)
    disk = Disk(store)
    make_whole(store, 5)
    assert retain.apply(disk, Keep(last=2)) > 0
    assert Store(store).steps() == [5, 6, 7, 8]
    verdict = Store(store).verify()
    assert verdict.ok, verdict.problems
    assert Store(store).gc() == (0, 0)
    assert Store(store).verify(7).ok
    assert len(packs_of(store)) == 5
    _, weight = weight_after(store, 8)
    assert torch.equal(weight_after(store, 8)[1], weight)
    for step in (8, 7, 6, 5):  # the log that it stood for goes with it
        assert Store(store).delete(step) > 0
    assert not packs_of(store)
