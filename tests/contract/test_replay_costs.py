"""What a replay does not do: take more memory than for two records."""

import pytest
import torch
from keepers import until
from logs import build, train
from runs import check_steps, run_logged
from torch import nn

from everstep.restore import records
from everstep.restore.buffer_pool import Slabs


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


def test_memory_for_two_records_and_none_afterwards(store, slabs):
    frozen = run_logged(store, build(1), train, steps=9)
    check_steps(store, build(2), frozen, steps=[9, 2])
    two, one = [each.most for each in slabs]
    assert one > 0
    assert two == 2 * one
    until(lambda: not any(each._slabs for each in slabs), "memory that is given back")


class Summed(nn.Sequential):
    """Its extra state says what its weights are, and is looked at where that is restored."""

    def sums(self):
        return [parameter.detach().double().sum().item() for parameter in self.parameters()]

    def get_extra_state(self):
        return {"sums": self.sums()}

    def set_extra_state(self, state):
        self.seen = (state["sums"], self.sums())
        assert state["sums"] == self.sums()


def test_what_looks_at_the_weights_sees_all_of_the_base(store):
    def build_summed(seed):
        torch.manual_seed(seed)
        model = Summed(nn.Linear(6, 40), nn.Linear(40, 6))
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01)}

    frozen = run_logged(store, build_summed(1), train, steps=3)
    check_steps(store, build_summed(2), frozen, steps=[3])
