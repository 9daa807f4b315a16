"""Keepers that are killed again and again, at any moment, while images go to the spill and are
committed from there: each step is committed, with its bytes."""

import os
import random
import signal

import pytest
from test_spill import Filler, assert_contents, spilled_bytes

from everstep import Store
from examples import slow
from processes import until

LAST = 60


class Killer(Filler):
    """Kills its keeper when the slot that `put` found was used, with some probability, and lets
    commits go on for a while now and then."""

    def __init__(self, store, directory, seed):
        super().__init__(store, directory, confirms=False)
        self.draw = random.Random(seed)
        self.kills = 0

    def put(self, step, follows=None):
        super().put(step, follows)
        if self.draw.random() < 0.15:
            self.kill()
        if self.draw.random() < 0.1:
            self.confirm_all()
        elif self.draw.random() < 0.3:
            self.confirms = False

    def kill(self):
        before = self.keeper
        os.kill(before, signal.SIGKILL)
        self.kills += 1
        until(lambda: self.keeper != before, "another keeper")


@pytest.mark.parametrize("seed", [0, *slow(*range(1, 12))])
@pytest.mark.parametrize("is_log", [False, True])
def test_keepers_that_die_lose_nothing(store, tmp_path, monkeypatch, seed, is_log):
    monkeypatch.setattr("everstep.keeper.client.LOSSES_MAX", 1000)  # else it rests after five
    with Killer(store, tmp_path, seed) as trainer:
        trainer.start()
        for step in range(1, LAST + 1):
            trainer.put(step, follows=step - 1 if is_log and step > 1 else None)
        trainer.confirm_all()
        trainer.expect("local", trainer.sequence)
        assert trainer.kills
        assert not [event for event in trainer.events if event["type"] == "failed"]
        assert [event for event in trainer.events if event["type"] == "spilled"]
        assert Store(store).steps() == list(range(1, LAST + 1))
        one = (64 << 10) + trainer.layout.size  # the newest stays, where that was spilled
        until(lambda: spilled_bytes(trainer.keeper) <= 16384 + one, "memory is given back")
    if not is_log:
        assert_contents(store, range(1, LAST + 1))
    assert Store(store).verify().ok
