"""Updates of which neither hooks nor version counters tell, as of a CUDA graph that is replayed:
here they are made by numpy. (tests/gpu/test_cuda_graphs.py has real graphs.)"""

from functools import partial
from threading import Event

import pytest
import torch
from logs import backward, build, check_run, train
from runs import check_steps, checkpointer, kinds, logged, snapshot

from everstep import Store, Unsupported
from everstep.capture import copier


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


@pytest.mark.parametrize("strategy", ["full", "auto"])
def test_updates_that_no_hook_has_seen(store, strategy):
    check_run(store, make, train_unseen, "bbbbbbbb", strategy=strategy, base_every=None)


def test_updates_that_no_hook_has_seen_are_in_no_record(store, caplog):
    """Not at once: a step without an update looks the same."""
    check_run(store, make, train_unseen, "bbbbbbbb")
    assert caplog.text.count("may come from a CUDA graph, unseen. A whole state is saved") == 3


def capture_at(saver, state, step, at):
    """A step of a run whose optimizer's step() goes into a graph at one of them."""
    if step == at:
        saver._state.optimizers[0].was_captured = True
    (train if step < at else train_unseen)(state)


def test_a_step_that_is_captured_in_the_middle_of_a_log(store):
    state, frozen = make(1), {}
    with logged(store, state) as saver:
        for step in range(1, 10):
            capture_at(saver, state, step, 5)
            saver.save(step)
            frozen[step] = snapshot(state)
    check_steps(store, make(2), frozen)
    assert kinds(store) == "brrrbbbbb"


@pytest.mark.parametrize("strategy", ["spread", "auto"])
@pytest.mark.parametrize("at", [1, 4, 7, 8])
def test_a_step_that_is_captured_in_the_middle_of_a_window(store, at, strategy):
    plain = partial(build, kind=torch.optim.SGD, width=400)
    state, frozen = plain(1), {}
    with checkpointer(store, state, strategy=strategy, every=4, window=3) as saver:
        for step in range(1, 13):
            capture_at(saver, state, step, at)
            saver.step(step)
            frozen[step] = snapshot(state)
    assert check_steps(store, plain(2), frozen) == [4, 8, 12]


def test_nothing_is_copied_late_where_nobody_can_hold_the_update(store):
    state = make(1)
    with checkpointer(store, state, strategy="full") as saver:
        train_unseen(state)
        assert {leaf.owner for leaf in saver._state.collect().walk.leaves} == {None}
        train(state)
        assert 0 in {leaf.owner for leaf in saver._state.collect().walk.leaves}
        saver._state.optimizers[0].was_captured = True
        assert {leaf.owner for leaf in saver._state.collect().walk.leaves} == {None}


def test_a_graph_waits_for_copies_and_not_for_the_keeper(store):
    """What is still copied breaks its capture; a save that cannot be sealed yet does not."""
    go, state = Event(), build(1)
    with logged(store, state) as saver:
        copies = saver._captures._copier
        seal = copies._seal
        copies._seal = lambda capture: (go.wait(), seal(capture))
        train(state)
        handle = saver.step(1)
        copies.await_copies()
        assert copies._last.copied.is_set()
        assert handle.level is None
        go.set()
    assert Store(store).steps() == [1]


def test_a_graph_does_not_wait_for_ever(store, monkeypatch):
    monkeypatch.setattr(copier, "COPIES_S", 0.1)
    go, state, frozen = Event(), build(1), {}
    with checkpointer(store, state, strategy="full") as saver:
        copies = saver._captures._copier
        announce = copies._announce
        for step in (1, 2, 3):
            train(state)
            if step == 2:
                copies._announce = lambda capture: (go.wait(), announce(capture))[1]
            handle = saver.step(step)
            frozen[step] = snapshot(state)
            if step == 2:
                copies.await_copies()
                copies._announce = announce
                go.set()
                with pytest.raises(Unsupported, match="step 2: it was not copied within 0 s"):
                    handle.wait("local")
        handle.wait("local")
    assert check_steps(store, build(2), frozen) == [1, 3]
