"""What a replay does not do: hash what nobody compares, and take more memory than for two
records."""

import pytest
from derived import averaged, check_all, run
from logs import build, train
from runs import check_steps, kinds, run_logged

from everstep.restore import derived, records
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


def test_memory_for_two_records_and_none_afterwards(store, slabs):
    frozen = run_logged(store, build(1), train, steps=9)
    check_steps(store, build(2), frozen, steps=[9, 2])
    assert [each.most for each in slabs] == [2, 1]
    assert [each._slabs for each in slabs] == [[], []]


@pytest.mark.parametrize("audit", ["sample", "full"])
def test_derived_parts_are_hashed_only_where_the_record_says_what_they_were(
    store, monkeypatch, audit
):
    frozen = run(store, averaged, audit=audit)
    digest, calls = derived.digest_of, []
    monkeypatch.setattr(derived, "digest_of", lambda found: calls.append(1) or digest(found))
    check_all(store, averaged, frozen)
    assert bool(calls) == (audit == "full")
