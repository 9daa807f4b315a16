"""Ranks of which one has a surprise, with steps so quick that the others go on before they hear of
it: a log ends for a few steps, and goes on."""

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn

from comparing import check_equal
from everstep import Checkpointer, Store

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


def trains(store):
    """No collective holds these ranks together; equal seeds keep them alike. After a step somebody
    on rank 1 writes to a weight what is there. The states, and the steps that were not saved."""
    logging.getLogger("everstep").setLevel(logging.CRITICAL)
    try:
        model, optimizer = build(1)
        states, handles = {}, []
        state = {"model": model, "optimizer": optimizer}
        with Checkpointer(store, state, strategy="log", base_every=50) as saver:
            for step in range(1, LAST + 1):
                model(torch.randn(4, 65)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                handles.append(saver.step(step))
                states[step] = tensors(model, optimizer)
                if step == AT and dist.get_rank() == 1:
                    with torch.no_grad():
                        model[0].weight.mul_(1.0)
    finally:
        logging.getLogger("everstep").setLevel(logging.NOTSET)
    return states, [handle.step for handle in handles if handle.error]


def restores(store, steps):
    model, optimizer = build(2)
    with Checkpointer(store, {"model": model, "optimizer": optimizer}) as saver:
        return [(saver.restore(step), tensors(model, optimizer)) for step in steps]


@pytest.mark.parametrize("size", [2, 3])
def test_a_log_goes_on_after_a_surprise_on_one_rank(gang, store, size):
    (states, lost), *_ = gang.run(trains, store, size=size)
    assert lost[0] == AT + 1
    assert lost[-1] < AT + WITHIN
    known = Store(store)
    assert known.steps() == [step for step in states if step not in lost]
    later = [step for step in known.steps() if step >= AT + WITHIN]
    bases = [step for step in later if known.manifest(step).previous is None]
    assert len(bases) <= 1 + (LAST - AT) // 50
    steps = [AT, *known.steps()[-20:]]
    for step, found in gang.run(restores, store, steps, size=size)[0]:
        check_equal(found, states[step])
