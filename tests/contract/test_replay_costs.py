"""What a replay does not do: hash what nobody compares, take more memory than for two records, and
wait for all of the last record before its first update."""

import threading

import pytest
from derived import averaged, check_all, run
from keepers import until
from logs import build, train
from runs import check_steps, kinds, run_logged

from everstep.format.tables import is_gradient
from everstep.restore import apply, derived, portions, records
from everstep.restore.slabs import Slabs
from everstep.state.optimizers import OptimizerState


@pytest.fixture
def slabs(monkeypatch):
    """Of each replay its slabs, with how many regions there were at most."""
    found = []

    class Counted(Slabs):
        def __init__(self):
            super().__init__()
            self.most = 0
            found.append(self)

        def tensors(self, entries):
            tensors = super().tensors(entries)
            self.most = max(self.most, len(self._slabs))
            return tensors

    monkeypatch.setattr(records, "Slabs", Counted)
    return found


@pytest.mark.parametrize(("audit", "passes"), [("sample", 0), ("full", 6)])
def test_all_bytes_are_hashed_only_where_the_record_says_what_they_were(
    store, monkeypatch, audit, passes
):
    frozen = run_logged(store, build(1), train, steps=7, audit=audit)
    assert kinds(store) == "brrrrrr"
    digest, calls = OptimizerState.digest, []
    monkeypatch.setattr(
        OptimizerState, "digest", lambda self: calls.append(self.name) or digest(self)
    )
    check_steps(store, build(2), frozen, steps=[7])
    assert len(calls) == passes


def test_memory_for_two_records_and_none_afterwards(store, slabs, monkeypatch):
    monkeypatch.setattr(portions, "MIN_BYTES", 1 << 20)
    frozen = run_logged(store, build(1), train, steps=9)
    check_steps(store, build(2), frozen, steps=[9, 2])
    assert [each.most for each in slabs] == [2, 1]
    until(lambda: [each._slabs for each in slabs] == [[], []], "memory that is given back")


def test_the_last_record_is_updated_while_it_is_read(store, monkeypatch):
    """Its later portions are not read before the first one's update is made."""
    frozen = run_logged(store, build(1), train, steps=4)
    load, redo, events = records.load_record, apply.redo, []
    is_updated = threading.Event()

    def load_late(candidate, record, *details):
        loaded = load(candidate, record, *details)
        gradients = {name for name in loaded.tensors if is_gradient(name)}
        if record.step == 4 and "@0.model.0.weight" not in gradients:
            assert is_updated.wait(60)
        return loaded

    def redo_noted(loaded, optimizers):
        redo(loaded, optimizers)
        events.append((loaded.step, loaded.is_last, loaded.is_comparable))
        if loaded.step == 4:
            is_updated.set()

    monkeypatch.setattr(records, "load_record", load_late)
    monkeypatch.setattr(apply, "redo", redo_noted)
    check_steps(store, build(2), frozen, steps=[4])
    assert events[:2] == [(2, True, True), (3, True, True)]
    assert events[2:-1] == [(4, False, False)] * (len(events) - 3)
    assert events[-1] == (4, True, True)
    assert len(events) > 3


@pytest.mark.parametrize("audit", ["sample", "full"])
def test_derived_parts_are_hashed_only_where_the_record_says_what_they_were(
    store, monkeypatch, audit
):
    frozen = run(store, averaged, audit=audit)
    digest, calls = derived.digest_of, []
    monkeypatch.setattr(derived, "digest_of", lambda found: calls.append(1) or digest(found))
    check_all(store, averaged, frozen)
    assert bool(calls) == (audit == "full")
