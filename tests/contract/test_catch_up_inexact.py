"""keep_exact=False: a state that was made whole with other last bits stands for its log."""

import json

import pytest
import torch
from runs import check_same, checkpointer, difference, logged, restore, snapshot
from wholes import advance, build, fill, whole_steps

from everstep import Keep, Store, Unsupported
from everstep.cli.main import main
from everstep.restore import materialize as materializing
from everstep.restore.materialize import materialize
from everstep.store import catalog, claims, retain
from everstep.store.names import CheckpointName
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
    monkeypatch.setattr("everstep.restore.materialize.differing_from", lambda logs: {"torch 1"})


def make_whole(store, step, keep_exact=False):
    made = materialize(Disk(store), CheckpointName(step, 1), keep_exact=keep_exact)
    assert not made.exact
    assert made.ends_chain is not keep_exact
    return made


def weight_after(store, step):
    state = build(2)
    assert restore(store, state, step) == step
    return state, state["model"][0].weight.detach().clone()


def run_json(capsys, *args):
    capsys.readouterr()
    assert main([*map(str, args), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


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


@pytest.mark.parametrize("only", [None, "model"])
def test_an_exact_restore_refuses_it(store, elsewhere, only):
    frozen = fill(store)
    make_whole(store, 5)
    state = build(2)
    before = snapshot(state)
    with checkpointer(store, state) as restorer:
        for step in (5, 8):
            with pytest.raises(Unsupported, match=r"exact: false.*or exact='allow'"):
                restorer.restore(step, exact="require", only=only)
        check_same(snapshot(state), before)
        assert restorer.restore(4, exact="require") == 4
    check_same(snapshot(state), frozen[4])


def test_parts_come_from_it_too(store, elsewhere, caplog):
    fill(store)
    make_whole(store, 5)
    _, weight = weight_after(store, 8)
    state = build(2)
    with checkpointer(store, state) as restorer:
        restorer.restore(8, only="model")
    assert torch.equal(state["model"][0].weight, weight)
    assert caplog.text.count("(exact: false)") == 2


def test_what_goes_on_from_it_is_not_exact_either(store, elsewhere, monkeypatch):
    fill(store)
    make_whole(store, 4)
    retain.apply(Disk(store), Keep(last=5))
    monkeypatch.setattr("everstep.restore.materialize.differing_from", lambda logs: set())
    made = make_whole(store, 6)
    assert "step 4, where it begins, is not exact" in made.topology["replayed"]["differs"]


def test_digests_of_the_run_are_not_compared_with_it(store, elsewhere):
    """verify="full" has one in each record, of bytes that are not these."""
    state = build(1)
    with logged(store, state, base_every=1000, verify="full") as saver:
        frozen = advance(saver, state, range(1, 9))
    make_whole(store, 5)
    state, _ = weight_after(store, 8)
    assert difference(snapshot(state), frozen[8])
    assert restore(store, state, 4) == 4
    check_same(snapshot(state), frozen[4])


def test_retention_deletes_what_is_behind_it(store, elsewhere, capsys):
    frozen = fill(store)
    disk = Disk(store)
    make_whole(store, 5)
    with claims.hold(disk, CheckpointName(4, 1)):  # somebody reads before it
        retain.apply(disk, Keep(last=1))
        assert Store(store).steps() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert retain.apply(disk, Keep(last=2)) > 0
    assert Store(store).steps() == [5, 6, 7, 8]
    verdict = Store(store).verify()
    assert verdict.ok, verdict.problems
    assert Store(store).gc() == (0, 0)
    assert Store(store).verify(7).ok
    assert len(packs_of(store)) == 5
    _, weight = weight_after(store, 8)
    assert torch.equal(weight_after(store, 8)[1], weight)
    rows = {row["step"]: row for row in run_json(capsys, "ls", store)["checkpoints"]}
    assert [rows[step]["exact"] for step in (5, 6, 8)] == [False, False, False]
    assert [rows[step]["base"]["step"] for step in (5, 6, 8)] == [5, 5, 5]
    assert main(["ls", str(store)]) == 0
    text = capsys.readouterr().out
    assert "log, whole (inexact)" in text
    assert "log of 5 (inexact)" in text
    assert run_json(capsys, "show", store, 8)["exact"] is False
    assert main(["show", str(store), "5"]) == 0
    text = capsys.readouterr().out
    assert "not exact" in text
    assert "but for last bits: a restore takes it" in text
    assert frozen.keys() > set(Store(store).steps())
    for step in (8, 7, 6, 5):  # the log that it stood for goes with it
        assert Store(store).delete(step) > 0
    assert not packs_of(store)


def test_it_stays_where_a_later_one_would_have_been_enough(store, elsewhere):
    """One that stands for its log is no extra copy, which goes when the next comes."""
    fill(store)
    make_whole(store, 3)
    make_whole(store, 5, keep_exact=True)
    make_whole(store, 6, keep_exact=True)
    retain.apply(Disk(store), Keep(last=1))
    assert Store(store).steps() == [3, 4, 5, 6, 7, 8]
    assert whole_steps(store) == [3, 6]
    assert Store(store).verify().ok
    weight_after(store, 8)


def test_an_exact_one_says_nothing_of_it(store):
    fill(store, 4)
    made = materialize(Disk(store), CheckpointName(3, 1), keep_exact=False)
    assert made.exact
    assert not made.replaces_log
    found = catalog.read_state(Disk(store), CheckpointName(3, 1))
    assert found == made
