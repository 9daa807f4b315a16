"""Bases of a log that are spread over its records, and what becomes of them."""

import pytest
import torch
from keepers import until
from runs import check_same, check_steps, checkpointer, snapshot
from spreads import make, run, run_saved

import everstep
from everstep import Store
from everstep.cli.main import main
from everstep.format.manifest import CheckpointName
from everstep.restore.materialize import materialize
from everstep.store import commit
from everstep.tiers.disk import Disk
from stores import packs_of

LOG = {"strategy": "log", "base_every": 4, "window": 3}


def bases(store):
    """The steps that have a base beside their record, and the steps of its parts."""
    names = [path.parent.name for path in (store / "checkpoints").glob("*/state.json")]
    chains = {int(name.split("-")[0]): Store(store).chain(name)[0] for name in names}
    return {step: [part.steps for part in base.parts] for step, base in sorted(chains.items())}


def test_a_logs_base_has_its_pieces_from_the_last_records(store):
    frozen = run_saved(store, 11, **LOG)
    assert bases(store) == {5: [3, 4, 5], 9: [7, 8, 9]}
    assert [len(Store(store).chain(step)) for step in (4, 5, 6, 11)] == [4, 1, 2, 3]
    other = make(2)
    with checkpointer(store, other) as restorer:
        for step in range(1, 12):
            restorer.restore(step)
            check_same(snapshot(other), frozen[step])
        restorer.restore(9)
        run(restorer, other, range(10, 12))
    assert Store(store).verify().ok


def test_a_logs_spread_base_is_made_whole(store, capsys):
    state = make(1)
    with checkpointer(store, state, **LOG) as saver:
        run(saver, state, range(1, 7))
    for step in (5, 6):
        assert main(["materialize", str(store), str(step)]) == 0
        Store(store).read(step)
    live = state["model"].state_dict()
    read = Store(store).read(6)
    assert all(torch.equal(read[f"model.{name}"], value) for name, value in live.items())
    assert Store(store).verify().ok
    capsys.readouterr()


def test_what_is_not_exact_does_not_replace_a_spread_base(store, monkeypatch):
    """As of a CUDA run: what the log goes on from is gone."""
    frozen = run_saved(store, 6, keep=everstep.Keep(last=2), **LOG)
    until(lambda: Store(store).steps() == [5, 6], "the keeper deletes what is not kept")
    monkeypatch.setattr("everstep.restore.chain.Chain.why_inexact", ["torch 1"])
    with pytest.raises(everstep.Conflict, match="exact"):
        materialize(Disk(store), CheckpointName(5, 1))
    assert not materialize(Disk(store), CheckpointName(6, 1)).exact
    assert Store(store).verify().ok
    check_steps(store, make(2), frozen, (5, 6))


def test_gc_deletes_the_parts_of_a_spread_base_that_was_made_whole(store):
    """In the epoch after it: a writer may be about to name packs of its own."""
    frozen = run_saved(store, 6, keep=everstep.Keep(last=2), **LOG)
    until(lambda: len(packs_of(store)) == 4, "records 3 to 6 are needed")
    assert materialize(Disk(store), CheckpointName(5, 1)).exact
    commit.claim_epoch(Disk(store), CheckpointName(6, 1))
    Store(store).gc()
    assert len(packs_of(store)) == 3
    assert Store(store).verify().ok
    check_steps(store, make(2), frozen, (5, 6))
