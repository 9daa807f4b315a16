"""Bases of a log that are spread over its records, and what becomes of them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from keepers import until
from runs import check_same, check_steps, checkpointer, difference, end_keeper, snapshot
from spreads import make, run, run_saved
from test_log import Places, _steps, build, fast, possible

import everstep
from everstep import Store
from everstep.cli.main import main
from everstep.restore.materialize import materialize
from everstep.store.names import CheckpointName
from everstep.tiers.disk import Disk
from examples import examples
from stores import packs_of

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of")
LOG = {"strategy": "log", "base_every": 4, "window": 3}


@settings(fast, max_examples=examples(20))
@given(plan=possible, base_every=st.integers(2, 6), window=st.integers(2, 4))
def test_bases_of_a_log_are_spread_too(plan, base_every, window):
    """Every step of the log comes back, whichever base it goes back to; and goes on."""
    last = 12
    with Places() as places:
        store = places.new()
        state = build(plan, plan.seed)
        options = {"strategy": "log", "window": window, "base_every": base_every}
        with checkpointer(store, state, **options) as saver:
            _, frozen = _steps(plan, state, range(1, last + 1), saver)
        assert Store(store).steps() == list(range(1, last + 1))
        assert Store(store).verify().ok
        fresh = build(plan, plan.seed + 1)
        with checkpointer(store, fresh) as restorer:
            for step in range(last, 0, -1):
                assert restorer.restore(step) == step
                found = difference(snapshot(fresh), frozen[step], f"step {step}")
                assert found is None, f"{plan}: {found}"


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
    monkeypatch.setattr("everstep.restore.materialize.differing_from", lambda logs: {"torch 1"})
    with pytest.raises(everstep.Conflict, match="exact"):
        materialize(Disk(store), CheckpointName(5, 1))
    assert not materialize(Disk(store), CheckpointName(6, 1)).exact
    assert Store(store).verify().ok
    check_steps(store, make(2), frozen, (5, 6))


def test_a_spread_base_that_was_made_whole_leaves_nothing(store):
    frozen = run_saved(store, 6, keep=everstep.Keep(last=2), **LOG)
    until(lambda: len(packs_of(store)) == 4, "records 3 to 6 are needed")
    assert materialize(Disk(store), CheckpointName(5, 1)).exact
    assert len(packs_of(store)) == 3
    assert Store(store).verify().ok
    check_steps(store, make(2), frozen, (5, 6))


def test_audit_of_a_log_with_spread_bases(store):
    frozen = run_saved(store, 8, verify="full", **LOG)
    check_steps(store, make(2), frozen, (5, 7, 8))


def test_a_log_whose_keeper_dies_within_a_window(store):
    state = make(1)
    with checkpointer(store, state, **LOG) as saver:
        frozen = run(saver, state, range(1, 5))
        saver.wait()
        end_keeper(store)
        run(saver, state, range(5, 15), frozen)
        saver.wait()
    assert Store(store).verify().ok
    check_steps(store, make(2), frozen, Store(store).steps())
    assert 14 in Store(store).steps()
