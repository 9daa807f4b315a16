"""Ranks that come apart, with steps so quick that the others go on before they hear of it: a log
ends for a few steps, and goes on."""

import contextlib
import logging
import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn

from comparing import check_equal
from everstep import Checkpointer, EverstepError, Store, captures

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

    def __init__(self, store):
        self.model, self.optimizer = build(1)
        state = {"model": self.model, "optimizer": self.optimizer}
        self.saver = Checkpointer(store, state, strategy="log", base_every=50)
        self.handles, self.states = {}, {}

    def train(self, last):
        """Up to this step."""
        for step in range(len(self.handles) + 1, last + 1):
            self.model(torch.randn(4, 65)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.handles[step] = self.saver.step(step)
            self.states[step] = tensors(self.model, self.optimizer)

    def errors(self):
        """By step, when all is saved or has failed."""
        self.saver.close()
        return {step: str(handle.error) for step, handle in self.handles.items() if handle.error}


@contextlib.contextmanager
def unheard():
    """What is said of each step that is lost is of no interest within."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def is_surprised(store):
    """After a step somebody on rank 1 writes to a weight what is there."""
    with unheard():
        run = Run(store)
        run.train(AT)
        if dist.get_rank() == 1:
            with torch.no_grad():
                run.model[0].weight.mul_(1.0)
        run.train(LAST)
        return run.states, run.errors()


def hangs(store):
    """After a step the keeper stands still, until all ranks have trained on for a while."""
    captures.RECORD_PATIENCE_S, before = 1.0, captures.RECORD_PATIENCE_S
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
        captures.RECORD_PATIENCE_S = before


def restores(store, steps):
    model, optimizer = build(2)
    with Checkpointer(store, {"model": model, "optimizer": optimizer}) as saver:
        return [(saver.restore(step), tensors(model, optimizer)) for step in steps]


def check(gang, store, states, lost, since):
    """All steps that are there can be restored, and from `since` on there is a log again."""
    known = Store(store)
    assert known.steps() == [step for step in states if step not in lost]
    later = [step for step in known.steps() if step >= since]
    assert len(later) == LAST - since + 1
    bases = [step for step in later if known.manifest(step).previous is None]
    assert len(bases) <= 1 + (LAST - since) // 50
    steps = [AT, *later[-20:]]
    for step, found in gang.run(restores, store, steps, size=2)[0]:
        check_equal(found, states[step])


@pytest.mark.parametrize("size", [2, 3])
def test_a_log_goes_on_after_a_surprise_on_one_rank(gang, store, size):
    (states, lost), *_ = gang.run(is_surprised, store, size=size)
    assert min(lost) == AT + 1
    assert max(lost) < AT + WITHIN
    check(gang, store, states, lost, AT + WITHIN)


def test_a_disk_that_hangs_holds_each_rank_up_once(gang, store):
    found = gang.run(hangs, store, size=2)
    for _, lost in found:
        assert sum("after 1 s" in error for error in lost.values()) <= 1
        assert min(lost) > AT
    states, lost = found[0]
    check(gang, store, states, lost, AT + 60 + WITHIN)
