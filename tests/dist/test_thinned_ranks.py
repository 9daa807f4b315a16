"""Thinned saves of several ranks: all save the same modules at one step."""

import contextlib
import os
import signal

import pytest
import torch
import torch.distributed as dist
from jobs import trains, unheard
from test_partings import Failing, Run, tensors

from everstep import EverstepError, Full, Store
from examples import slow


@pytest.mark.parametrize("layout", ["fsdp2", *slow("ddp")])
def test_each_tensor_is_the_newest_that_was_saved(gang, layout, store):
    thin = Full(thin={"model.blocks.*": 2})
    run, *_ = gang.run(trains, layout, store, 5, size=2, strategy=thin, waits=True)
    assert not run.errors
    for step in range(2, 6):
        plan = Store(store).restore_plan(step)
        assert set(plan.values()) == {step - 1, step}
        own = ((n, t) for n, t in Store(store).read(step).items() if not n.startswith("rng."))
        for name, tensor in own:
            called = name.removeprefix("optimizer.").removeprefix("model.")
            if name.startswith("optimizer."):
                called = ":".join(called.rsplit(".", 1))
            assert torch.equal(tensor, run.states[plan[name]][called]), (step, name)
    assert Store(store).verify().ok


def hears_late(store, nodes):
    """On rank 1 a step cannot be had, of which the other hears two steps later."""
    with unheard():
        if nodes:
            os.environ["EVERSTEP_NODE"] = nodes[dist.get_rank()]
        part = Failing()
        run = Run(store, {"part": part}, strategy=Full(thin={"model.*": 2}))
        run.train(4)
        run.saver.wait()
        dist.barrier()
        keeper = run.saver._client.keeper_pid
        os.kill(keeper, signal.SIGSTOP)
        dist.barrier()
        part.is_off = dist.get_rank() == 1
        with contextlib.suppress(RuntimeError):
            run.train(5)
        run.states.setdefault(5, tensors(run.model, run.optimizer))
        run.train(6)
        dist.barrier()
        os.kill(keeper, signal.SIGCONT)
        for step in range(7, 41):
            run.train(step)
            with contextlib.suppress(EverstepError):
                run.handles[step].wait()
        return run.states, run.errors()


@pytest.mark.parametrize("nodes", ["", "ab"])
def test_ranks_that_hear_of_a_failure_at_different_saves_go_on_together(gang, store, nodes):
    (states, lost), *_ = gang.run(hears_late, store, nodes, size=2)
    known = Store(store)
    assert known.steps() == [step for step in states if step not in lost]
    assert max(lost) < 10
    plans = {step: set(known.restore_plan(step).values()) for step in range(30, 41)}
    assert plans == {step: {step, step - 1} for step in plans}
    assert known.verify().ok
