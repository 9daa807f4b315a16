"""What a replay does not do: hash what nobody compares, take more memory than for two records and a
half, wait for all of the base before its first update, or for all of the last record."""

import threading

import pytest
import torch
from derived import averaged, check_all, run
from keepers import until
from logs import build, train
from runs import check_steps, kinds, run_logged
from torch import nn

from everstep.format.tables import is_gradient
from everstep.restore import apply, derived, portions, records
from everstep.restore.buffer_pool import Slabs
from everstep.restore.load import Loader
from everstep.state.optimizers import OptimizerState


@pytest.fixture
def slabs(monkeypatch):
    """Of each replay its slabs, with how many bytes there were at most."""
    found = []

    class Counted(Slabs):
        def __init__(self):
            super().__init__()
            self.most = 0
            found.append(self)

        def tensors(self, entries):
            tensors = super().tensors(entries)
            self.most = max(self.most, sum(map(len, self._slabs)))
            return tensors

    monkeypatch.setattr(records, "Slabs", Counted)
    return found


@pytest.mark.parametrize(("verify", "passes"), [("rolling", 0), ("full", 6)])
def test_all_bytes_are_hashed_only_where_the_record_says_what_they_were(
    store, monkeypatch, verify, passes
):
    frozen = run_logged(store, build(1), train, steps=7, verify=verify)
    assert kinds(store) == "brrrrrr"
    digest, calls = OptimizerState.digest, []
    monkeypatch.setattr(
        OptimizerState, "digest", lambda self: calls.append(self.name) or digest(self)
    )
    check_steps(store, build(2), frozen, steps=[7])
    assert len(calls) == passes


def test_memory_for_two_records_and_none_afterwards(store, slabs, monkeypatch):
    frozen = run_logged(store, build(1), train, steps=9)
    check_steps(store, build(2), frozen, steps=[9, 2])
    monkeypatch.setattr(portions, "MIN_BYTES", 1 << 20)
    check_steps(store, build(2), frozen, steps=[9, 2])
    *in_portions, two, one = [each.most for each in slabs]
    assert one > 0
    assert two == 2 * one
    assert max(in_portions) < 3 * one  # two and a half, and each portion has the samples with it
    until(lambda: not any(each._slabs for each in slabs), "memory that is given back")


def test_updates_begin_before_all_of_the_base_is_read(store, monkeypatch):
    """Its later portions are not read before the first one's update is made; what no optimizer
    changes comes with the first."""
    frozen = run_logged(store, build(1), train, steps=3)
    load, redo, events = Loader.load, apply.redo, []
    is_updated = threading.Event()

    def load_late(self, part, sources, destinations, *details):
        names = {entry.spec.name for entry, _ in destinations}
        if "optimizer.model.2.weight.exp_avg" in names:
            assert is_updated.wait(60)
        load(self, part, sources, destinations, *details)
        if any(name.startswith("optimizer.") for name in names):
            events.append(names)

    def redo_noted(loaded, optimizers):
        redo(loaded, optimizers)
        events.append((loaded.step, loaded.is_last, loaded.is_comparable))
        is_updated.set()

    monkeypatch.setattr(Loader, "load", load_late)
    monkeypatch.setattr(apply, "redo", redo_noted)
    check_steps(store, build(2), frozen, steps=[3])
    first, *others = events
    assert {"model.0.weight", "optimizer.model.0.weight.exp_avg", "model.1.running_mean"} <= first
    assert others[0] == (2, False, False)
    assert (2, True, True) in others
    later = [names for names in others if isinstance(names, set)]
    assert later
    assert all(first.isdisjoint(names) for names in later)


class Summed(nn.Sequential):
    """Its extra state says what its weights are, and is looked at where that is restored."""

    def sums(self):
        return [parameter.detach().double().sum().item() for parameter in self.parameters()]

    def get_extra_state(self):
        return {"sums": self.sums()}

    def set_extra_state(self, state):
        self.seen = (state["sums"], self.sums())
        assert state["sums"] == self.sums()


def test_what_looks_at_the_weights_sees_all_of_the_base(store, monkeypatch):
    def build_summed(seed):
        torch.manual_seed(seed)
        model = Summed(nn.Linear(6, 40), nn.Linear(40, 6))
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01)}

    frozen = run_logged(store, build_summed(1), train, steps=3)
    state, load = build_summed(2), Loader.load

    def load_late(self, part, sources, destinations, *details):
        names = {entry.spec.name for entry, _ in destinations}
        if "optimizer.model.1.weight.exp_avg" in names and "model.0.weight" not in names:
            until(lambda: hasattr(state["model"], "seen"), "extra state that has been restored")
        load(self, part, sources, destinations, *details)

    monkeypatch.setattr(Loader, "load", load_late)
    check_steps(store, state, frozen, steps=[3])


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
    first, *others = [[event for event in events if event[0] == step] for step in (2, 3, 4)]
    assert [len(found) for found in others[:1]] == [1]  # neither the first nor the last
    for found in (first, *others):
        assert found[-1][1:] == (True, True)
        assert set(found[:-1]) <= {(found[0][0], False, False)}
    assert len(first) > 1
    assert len(others[1]) > 1


@pytest.mark.parametrize("verify", ["rolling", "full"])
def test_derived_parts_are_hashed_only_where_the_record_says_what_they_were(
    store, monkeypatch, verify
):
    frozen = run(store, averaged, verify=verify)
    digest, calls = derived.digest_of, []
    monkeypatch.setattr(derived, "digest_of", lambda found: calls.append(1) or digest(found))
    check_all(store, averaged, frozen)
    assert bool(calls) == (verify == "full")
