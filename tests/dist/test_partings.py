"""Ranks that come apart, with steps so quick that the others go on before they hear of it: a log
ends for a few steps, and goes on."""

import contextlib
import os
import signal
from functools import partial

import pytest
import torch
import torch.distributed as dist
from jobs import unheard
from torch import nn

from choices import chosen
from comparing import check_equal
from everstep import Checkpointer, EverstepError, Store
from everstep.keeper import client
from examples import slow

RANKS = 3
LAST, AT = 160, 40
WITHIN = 40
"""Steps from the surprise to where all are together again, at most."""


def build(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(65, 65), nn.Linear(65, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def tensors(model, optimizer):
    found = dict(model.state_dict())
    for number, state in optimizer.state_dict()["state"].items():
        found |= {f"{number}.{key}": value for key, value in state.items()}
    return {name: tensor.clone() for name, tensor in found.items()}


class Run:
    """No collective holds the ranks together; equal seeds keep them alike."""

    def __init__(self, store, more=None, **options):
        self.model, self.optimizer = build(1)
        state = {"model": self.model, "optimizer": self.optimizer, **(more or {})}
        self.saver = Checkpointer(
            store, state, **chosen(**{"strategy": "log", "base_every": 50, **options})
        )
        self.handles, self.states = {}, {}

    def train(self, last, tag=None):
        """Up to this step. `tag`: of each."""
        for step in range(len(self.states) + 1, last + 1):
            self.model(torch.randn(4, 65)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            save = partial(self.saver.save, tag=tag) if tag else self.saver.step
            self.handles[step] = save(step)
            self.states[step] = tensors(self.model, self.optimizer)

    def touch(self):
        """On rank 1: write to a weight what is there."""
        if dist.get_rank() == 1:
            with torch.no_grad():
                self.model[0].weight.mul_(1.0)

    def errors(self):
        """By step, when all is saved or has failed."""
        self.saver.close()
        return {step: str(made.error) for step, made in self.handles.items() if made and made.error}


def is_surprised(store, steps, options, nodes=""):
    """After these steps somebody on rank 1 writes to a weight. `nodes`: of each rank."""
    with unheard(), pytest.MonkeyPatch.context() as patch:
        if nodes:
            patch.setenv("EVERSTEP_NODE", nodes[dist.get_rank()])
        run = Run(store, **options)
        for step in steps:
            run.train(step)
            run.touch()
        run.train(LAST)
        return run.states, run.errors()


class Failing:
    """Its state cannot be had once."""

    is_off = False

    def state_dict(self):
        if self.is_off:
            self.is_off = False
            raise RuntimeError("its state cannot be had")
        return {}

    def load_state_dict(self, state):
        pass


def fails_at_one_call(store):
    """On rank 1; the step is saved again then, which is a new save only there."""
    with unheard():
        part = Failing()
        run = Run(store, {"part": part})
        run.train(AT - 1)
        part.is_off = dist.get_rank() == 1
        with contextlib.suppress(RuntimeError):
            run.train(AT)
        with contextlib.suppress(EverstepError):
            run.saver.save(AT, tag="again")
        run.states.setdefault(AT, tensors(run.model, run.optimizer))
        run.train(LAST)
        return run.states, run.errors()


def names_alone(store, times):
    """Rank 1 gives a step a name, which makes it a whole state, and no other rank does."""
    with unheard():
        run = Run(store)
        for number in range(1, times + 1):
            run.train(number * WITHIN - 1)
            run.train(number * WITHIN, tag=f"best-{number}" if dist.get_rank() == 1 else None)
        run.train((times + 1) * WITHIN)
        is_on = run.saver._captures.strategy.describe()["strategy"] == "log"
        run.errors()
        return is_on


def hangs(store):
    """After a step the keeper stands still, until all ranks have trained on for a while."""
    client.STALL_S, before = 1.0, client.STALL_S
    try:
        with unheard():
            run = Run(store)
            run.train(AT)
            run.saver.wait()
            dist.barrier()
            os.kill(run.saver._client.keeper_pid, signal.SIGSTOP)
            dist.barrier()
            run.train(AT + 60)
            dist.barrier()
            os.kill(run.saver._client.keeper_pid, signal.SIGCONT)
            for handle in run.handles.values():
                with contextlib.suppress(EverstepError):
                    handle.wait()
            dist.barrier()
            run.train(LAST)
            return run.states, run.errors()
    finally:
        client.STALL_S = before


def restores(store, steps, more):
    model, optimizer = build(2)
    state = {"model": model, "optimizer": optimizer, **(more or {})}
    with Checkpointer(store, state) as saver:
        return [(saver.restore(step), tensors(model, optimizer)) for step in steps]


def check(gang, store, states, lost, since, more=None):
    """All steps that are there can be restored, and from `since` on there is a log again."""
    known = Store(store)
    assert known.steps() == [step for step in states if step not in lost]
    later = [step for step in known.steps() if step >= since]
    assert len(later) == LAST - since + 1
    bases = [step for step in later if known.manifest(step).previous is None]
    assert len(bases) <= 1 + (LAST - since) // 50
    steps = [AT - 1, *later[-20:]]
    for step, found in gang.run(restores, store, steps, more, size=2)[0]:
        check_equal(found, states[step])


@pytest.mark.parametrize("size", slow(2, 3))
def test_a_log_goes_on_after_a_surprise_on_one_rank(gang, store, size):
    (states, lost), *_ = gang.run(is_surprised, store, [AT], {}, size=size)
    assert min(lost) == AT + 1
    assert max(lost) < AT + WITHIN
    check(gang, store, states, lost, AT + WITHIN)


@pytest.mark.slow
def test_each_surprise_counts_once(gang, store):
    """Two of them, of the three that end a log."""
    (states, lost), *_ = gang.run(is_surprised, store, [AT, AT + WITHIN], {}, size=2)
    check(gang, store, states, lost, AT + 2 * WITHIN)


@pytest.mark.parametrize("nodes", ["", *slow("ab")])
@pytest.mark.parametrize("every", [3, *slow(1)])
def test_a_log_that_ends_on_one_rank_ends_on_all(gang, store, nodes, every):
    """And what is due from then on is saved: ranks that have ended save at fewer steps than those
    that have not heard."""
    options = {"every": every, "when_full": "wait"}
    gang.run(is_surprised, store, [20, 40, 60], options, nodes, size=2, timeout=100)
    due = {step for step in range(60 + WITHIN, LAST + 1) if step % every == 0}
    known = Store(store)
    assert {step for step in known.steps() if step >= 60 + WITHIN} == due
    assert all(known.manifest(step).previous is None for step in due)


@pytest.mark.slow
def test_calls_are_the_same_where_one_rank_saves_once_more(gang, store):
    (states, _), *_ = gang.run(fails_at_one_call, store, size=2)
    lost = states.keys() - Store(store).steps()
    assert lost <= set(range(AT, AT + WITHIN))
    check(gang, store, states, lost, AT + WITHIN, more={"part": Failing()})


@pytest.mark.parametrize(("times", "is_on"), [(4, False), (1, True)])
@pytest.mark.slow
def test_ranks_that_come_apart_again_and_again(gang, store, times, is_on):
    assert gang.run(names_alone, store, times, size=2, timeout=100) == [is_on] * 2
    known = Store(store)
    last = range(times * WITHIN + WITHIN // 2, (times + 1) * WITHIN + 1)
    assert set(last) <= set(known.steps())
    assert any(known.manifest(step).previous for step in last) == is_on


@pytest.mark.slow
def test_a_disk_that_hangs_holds_each_rank_up_once(gang, store):
    found = gang.run(hangs, store, size=2)
    for _, lost in found:
        assert sum("after 1 s" in error for error in lost.values()) <= 1
        assert min(lost) > AT
    states, lost = found[0]
    check(gang, store, states, lost, AT + 60 + WITHIN)
