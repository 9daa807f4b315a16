"""Updates of which neither hooks nor version counters tell, as of a CUDA graph that is replayed:
here they are made by numpy. (tests/gpu/test_cuda_graphs.py has real graphs.)"""

from functools import partial

import pytest
import torch
from logs import backward, build, check_run, train
from runs import check_steps, checkpointer, kinds, logged, snapshot


class Capturable(torch.optim.Optimizer):
    """SGD, as graphs can hold it."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr, "capturable": True})

    def step(self, closure=None):
        replay(self)


def replay(optimizer):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            flat = parameter.detach().numpy()
            flat -= group["lr"] * parameter.grad.numpy()


def train_unseen(state, step=0):
    state["optimizer"].zero_grad()
    backward(state)
    replay(state["optimizer"])


make = partial(build, kind=Capturable, width=400)


@pytest.mark.parametrize("strategy", ["full", "log", "auto"])
def test_updates_that_no_hook_has_seen(store, strategy):
    check_run(store, make, train_unseen, "bbbbbbbb", strategy=strategy, base_every=None)


def test_a_step_that_is_captured_in_the_middle_of_a_run(store, caplog):
    state, frozen = make(1), {}
    with logged(store, state) as saver:
        for step in range(1, 10):
            if step == 5:
                saver._state.optimizers[0].was_captured = True
            (train if step < 5 else train_unseen)(state)
            saver.save(step)
            frozen[step] = snapshot(state)
    check_steps(store, make(2), frozen)
    assert kinds(store) == "brrrbbbbb"
    assert "CUDA graph" in caplog.text


def test_a_window_is_given_up(store, caplog):
    plain = partial(build, kind=torch.optim.SGD, width=400)
    state, frozen = plain(1), {}
    with checkpointer(store, state, strategy="spread", every=4, window=3) as saver:
        for step in range(1, 13):
            if step == 7:
                saver._state.optimizers[0].was_captured = True
            (train if step < 7 else train_unseen)(state)
            saver.step(step)
            frozen[step] = snapshot(state)
    assert check_steps(store, plain(2), frozen) == [4, 8, 12]
    assert "CUDA graph" in caplog.text


def test_nothing_is_copied_late_where_nobody_can_hold_the_update(store):
    state = make(1)
    with checkpointer(store, state, strategy="full") as saver:
        train_unseen(state)
        assert {leaf.owner for leaf in saver._state.collect().walk.leaves} == {None}
        train(state)
        assert 0 in {leaf.owner for leaf in saver._state.collect().walk.leaves}
        saver._state.optimizers[0].was_captured = True
        assert {leaf.owner for leaf in saver._state.collect().walk.leaves} == {None}
