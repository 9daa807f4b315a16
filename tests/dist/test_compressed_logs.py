"""Ranks that send their gradients compressed, and record them so, in one store."""

import pytest
import torch
import zoo

from everstep import Checkpointer, Store, compress
from stores import end_keeper

LAST, MORE = 6, 9


def trains(store, kind, options, last):
    job = zoo.build("ddp", zoo.Recipe())
    hook = compress(job.model, kind, **options)
    state = {"model": job.model, "optimizer": job.optimizer, "hook": hook}
    with Checkpointer(store, state, strategy="log") as checkpointer:
        first = checkpointer.restore()
        losses = []
        for step in range(first + 1, last + 1):
            losses.append(job.train(step))
            checkpointer.step(step)
        checkpointer.wait()
    return first, losses, job.full_state()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("bf16", {}),
        ("topk", {"density": 0.1}),
    ],
)
def test_what_was_sent_is_replayed(gang, store, tmp_path, kind, options):
    straight = tmp_path / "straight"
    try:
        (_, losses, final), *_ = gang.run(trains, straight, kind, options, MORE, size=2)
    finally:
        end_keeper(straight)
    gang.run(trains, store, kind, options, LAST, size=2)
    records = [
        record for step in (LAST - 1, LAST) for record in Store(store).manifest(step).records
    ]
    assert all(call["compressed"] for record in records for call in record.calls)
    found = gang.run(trains, store, kind, options, MORE, size=2)
    assert [first for first, _, _ in found] == [LAST, LAST]
    assert found[0][1] == losses[LAST:]
    assert all(torch.equal(found[0][2][name], tensor) for name, tensor in final.items())
