"""What log and spread refuse, when, and with which way out; nothing is lost by it, and auto, which
refuses nothing, keeps to whole states and says why."""

import logging
import os
import signal
from functools import partial

import pytest
import torch
from logs import Plain, build, check_run, train, train_in_closure, write
from runs import check_same, check_steps, checkpointer, freeze, kinds, logged, restore, snapshot
from torch import nn

import everstep
import forked
from choices import chosen
from everstep import Checkpointer, Store, Unsupported
from everstep.capture import auto

SPREAD = {"strategy": "spread", "every": 4, "window": 4}
LOG = {"strategy": "log", "base_every": 100}
EXPLICIT = pytest.mark.parametrize("options", [LOG, SPREAD], ids=["log", "spread"])
WAY_OUT = "strategy='full', or 'auto'"


class Words(nn.Module):
    """An embedding and a head, of which one alone, or neither, has sparse gradients."""

    def __init__(self, kind=nn.Embedding, sparse=True):
        super().__init__()
        self.words = kind(30, 6, sparse=sparse)
        self.head = nn.Linear(6, 60)

    def forward(self, rows):
        return self.head(self.words(rows))


class Bare(nn.Module):
    """Sparse gradients, and no module that says so before."""

    def __init__(self):
        super().__init__()
        self.words = nn.Parameter(torch.randn(30, 6))
        self.sparse = False

    def forward(self, rows):
        return nn.functional.embedding(rows, self.words, sparse=self.sparse)


def words(seed, make=Words, kind=torch.optim.SGD):
    torch.manual_seed(seed)
    model = make()
    return {"model": model, "optimizer": kind(model.parameters(), lr=0.1)}


def read(state, step=0):
    """One update on random rows."""
    state["optimizer"].zero_grad()
    state["model"](torch.randint(30, (4, 2))).square().mean().backward()
    state["optimizer"].step()


def unhooked_step(self, closure=None):
    if closure is not None:
        with torch.enable_grad():
            closure()
    self.update()


class Unhooked(Plain):
    """Its class gets another step() once it is made."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr)
        type(self).step = unhooked_step


class ScheduleFree(Plain):
    """Swaps weights between training and evaluation, as schedule-free optimizers do."""

    @torch.no_grad()
    def eval(self):
        self.scale(2.0)

    @torch.no_grad()
    def train(self):
        self.scale(0.5)

    def scale(self, factor):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(factor)


class Slow(Plain):
    """Also updates when nobody asked it to: in zero_grad()."""

    def zero_grad(self, set_to_none=True):
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.99)
        super().zero_grad(set_to_none)


def go_over_to_a_log(monkeypatch):
    """Strategy auto does, at every chance."""
    for name, value in {"SAVES_MIN": 2, "CHEAPER": 99.0, "DEARER": 99.0, "SLOWER": 999.0}.items():
        monkeypatch.setattr(auto, name, value)


# ---- when the Checkpointer is made ---------------------------------------------------------


@EXPLICIT
@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Unhooked, ScheduleFree])
def test_an_optimizer_is_refused_at_once(store, options, kind):
    state = build(1, kind)
    with pytest.raises(Unsupported, match="recording 'optimizer'") as caught:
        checkpointer(store, state, **options)
    assert WAY_OUT in str(caught.value)
    assert not store.exists()  # nothing was made yet


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Unhooked, ScheduleFree])
@pytest.mark.parametrize("strategy", ["full", "auto"])
def test_the_way_out_leads_out(store, kind, strategy, caplog):
    caplog.set_level(logging.INFO, "everstep")
    make = partial(build, kind=kind)
    check_run(store, make, train_in_closure, "bbbbbbbb", strategy=strategy, base_every=None)
    if strategy == "auto":
        assert "strategy auto keeps to whole states: recording 'optimizer'" in caplog.text
        reason = Store(store).manifest(8).capture["auto"]["reason"]
        assert reason.startswith("full: recording 'optimizer'")


@EXPLICIT
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_sparse_embedding_is_refused_at_once(store, options, kind):
    state = words(1, partial(Words, kind))
    with pytest.raises(Unsupported, match=r"'model\.words\.weight'.*sparse=False, or use strategy"):
        checkpointer(store, state, **options)


def test_a_sparse_embedding_that_nobody_trains_is_taken(store):
    def make(seed):
        torch.manual_seed(seed)
        model = Words()
        model.words.weight.requires_grad_(False)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

    check_run(store, make, read, "brrrrrrr")


@pytest.mark.parametrize("strategy", ["full", "auto"])
def test_a_sparse_embedding_is_saved_whole(store, strategy):
    check_run(store, words, read, "bbbbbbbb", strategy=strategy, base_every=None)


# ---- at a step -----------------------------------------------------------------------------


def refused(saver, state, steps, at, frozen):
    """Train and save; the error, which must come at step `at` and at each after it."""
    raised = []
    for step in steps:
        read(state)
        try:
            if handle := saver.step(step):
                handle.wait("local")
        except Unsupported as error:
            raised.append((step, error))
        else:
            frozen[step] = snapshot(state)
    assert [step for step, _ in raised] == list(range(at, steps[-1] + 1))
    assert len({str(error) for _, error in raised}) == 1
    return raised[0][1]


def test_the_first_base_sees_a_sparse_gradient(store):
    state = words(1, Bare)
    state["model"].sparse = True
    with logged(store, state) as saver:
        error = refused(saver, state, range(1, 4), 1, {})
    assert str(error).startswith("recording 'model.words': its gradient is sparse")
    assert WAY_OUT.lower() in str(error)
    assert Store(store).steps() == []


def test_a_gradient_that_turns_sparse_is_refused_there_and_nothing_is_lost(store):
    state, frozen = words(1, Bare), {}
    with logged(store, state) as saver:  # close() does not say it again
        for step in range(1, 6):
            read(state)
            saver.step(step)
            frozen[step] = snapshot(state)
        state["model"].sparse = True
        error = refused(saver, state, range(6, 9), 6, frozen)
        assert "'model.words': its gradient is sparse" in str(error)
        assert saver.metrics.failures == 0
    assert kinds(store) == "brrrr"
    check_steps(store, words(2, Bare), frozen)
    refused_state = freeze(state)
    with checkpointer(store, state, strategy="full") as saver:
        saver.step(8).wait("local")
    assert Store(store).verify().ok
    fresh = words(2, Bare)
    assert restore(store, fresh) == 8
    check_same(freeze(fresh), refused_state)
    for step in range(1, 6):  # the way before is a branch now
        assert restore(store, fresh, f"{step}-1") == step
        check_same(freeze(fresh), frozen[step]["state"])


def test_a_window_that_meets_a_sparse_gradient(store):
    state, frozen = words(1, Bare), {}
    with checkpointer(store, state, **SPREAD) as saver:
        for step in range(1, 7):  # 4 is whole, 5 and 6 are shares of 8
            read(state)
            saver.step(step)
            frozen[step] = snapshot(state)
        state["model"].sparse = True
        refused(saver, state, range(7, 10), 7, frozen)
        saver.save(9).wait("local")  # whole, as each save() of this strategy
        frozen[9] = snapshot(state)
    assert check_steps(store, words(2, Bare), frozen) == [4, 9]


def test_auto_leaves_a_log_that_meets_a_sparse_gradient(store, monkeypatch, caplog):
    go_over_to_a_log(monkeypatch)
    make = partial(words, make=Bare)
    frozen, state = {}, make(1)
    with checkpointer(store, state, strategy="auto") as saver:
        for step in range(1, 13):
            state["model"].sparse = step > 7
            read(state)
            saver.step(step)
            frozen[step] = snapshot(state)
    check_steps(store, make(2), frozen)
    assert "r" in kinds(store)[:7]
    assert kinds(store)[7:] == "bbbbb"
    assert "strategy auto goes to full: recording 'model.words': its gradient is" in caplog.text
    assert "is sparse" in Store(store).manifest(12).capture["auto"]["reason"]


def test_auto_keeps_to_whole_states_where_a_window_meets_one(store, caplog):
    state, frozen = words(1, Bare), {}
    with checkpointer(store, state, strategy="auto", every=4, window=4) as saver:
        for step in range(1, 17):
            state["model"].sparse = step > 6
            read(state)
            saver.step(step)
            frozen[step] = snapshot(state)
    assert check_steps(store, words(2, Bare), frozen) == [4, 8, 12, 16]
    assert "strategy auto keeps to whole states: recording 'model.words'" in caplog.text
    manifest = Store(store).manifest(16)
    assert not manifest.is_spread
    assert "is sparse" in manifest.capture["reason"]
    assert "is sparse" in manifest.capture["auto"]["reason"]


# ---- who updates outside of step() ---------------------------------------------------------


def run_to_refusal(store, make, train, options, steps=20):
    """Steps until one is refused; the step, its error, and each step's snapshot."""
    state, frozen = make(1), {}
    with checkpointer(store, state, **options) as saver:
        for step in range(1, steps + 1):
            train(state, step)
            try:
                if handle := saver.step(step):
                    handle.wait("local")
            except Unsupported as error:
                return step, error, frozen
            frozen[step] = snapshot(state)
    return None, None, frozen


def test_an_optimizer_that_updates_outside_of_step_is_refused_by_log(store, caplog):
    make = partial(build, kind=Slow)
    step, error, frozen = run_to_refusal(store, make, train, LOG)
    assert step == 4  # whole states, with a warning, at 2 and 3
    assert caplog.text.count("the log ends before step") == 2
    assert "changed between two calls of 'optimizer'" in str(error)
    assert "'model.0.weight'" in str(error)
    assert WAY_OUT in str(error)
    assert kinds(store) == "bbb"
    check_steps(store, make(2), frozen)


def test_and_by_spread(store, caplog):
    def train_and_clamp(state, step):
        train(state)
        write(state, "in place")

    make = partial(build, kind=torch.optim.AdamW)
    step, error, frozen = run_to_refusal(store, make, train_and_clamp, SPREAD, 40)
    assert step == 14  # the windows of 8 and 12 were given up
    assert caplog.text.count("cannot be spread") == 2
    assert "'model.0.weight'" in str(error)
    assert check_steps(store, make(2), frozen) == [4, 8, 12]


@pytest.mark.parametrize("every", [1, 4])
def test_auto_goes_to_whole_states(store, monkeypatch, caplog, every):
    go_over_to_a_log(monkeypatch)
    make = partial(build, kind=torch.optim.AdamW)

    def train_and_clamp(state, step):
        train(state)
        write(state, "in place")

    options = {"strategy": "auto", "every": every, **({"window": 4} if every > 1 else {})}
    step, _, frozen = run_to_refusal(store, make, train_and_clamp, options, 40)
    assert step is None
    check_steps(store, make(2), frozen)
    capture = Store(store).manifest(40).capture
    assert capture["strategy"] == "full"
    assert "outside of step()" in capture["auto"]["reason"]
    assert "outside of step()" in caplog.text


def test_who_recorded_something_is_not_refused_later(store, caplog):
    """A program that changes weights now and then, as this one says when it happens."""

    def clamp(state, step):
        train(state)
        if step in (3, 4, 5, 6, 7):
            write(state, "in place")

    check_run(store, build, clamp, "brbbbbbbbb", steps=10)
    assert caplog.text.count("the log ends before step") == 3
    assert "from now on" in caplog.text


def test_two_changes_at_the_begin_are_not_how_it_is_made(store):
    def clamp(state, step):
        train(state)
        if step in (2, 3):
            write(state, "in place")

    check_run(store, build, clamp, "bbbrrrrr")


def is_preempted(store):
    state = build(1)
    with Checkpointer(store, state, strategy=everstep.Log(base_every=100)) as saver:
        for step in range(1, 9):
            train(state)
            write(state, "in place")
            if step == 6:
                os.kill(os.getpid(), signal.SIGTERM)
            try:
                saver.step(step)
            except Unsupported:
                assert step in (4, 5)
    print("not reached")


def test_a_step_before_the_end_is_saved_and_not_refused(store):
    done = forked.run(is_preempted, store)
    assert done.returncode == -signal.SIGTERM
    assert Store(store).steps() == [1, 2, 3, 6]
    assert kinds(store) == "bbbb"


def test_what_was_taken_for_a_record_that_is_refused_is_in_none(store):
    """Too much beside the optimizers' tensors for one step: that step's updates are not missing in
    a record of the next."""
    state, frozen = {**build(1), "rows": torch.zeros(0)}, {}
    with logged(store, state) as saver:
        for step in range(1, 8):
            train(state)
            size = 2_000_000 if step == 4 else 0
            state["rows"].data = torch.zeros(size)
            if step == 4:
                with pytest.raises(Unsupported, match="belong to no optimizer"):
                    saver.step(step)
                continue
            saver.step(step)
            frozen[step] = snapshot(state)
    check_steps(store, {**build(2), "rows": torch.zeros(0)}, frozen)


@EXPLICIT
def test_one_optimizer_under_two_names(store, options):
    state = build(1)
    with pytest.raises(Unsupported, match="'twin': it is the same optimizer as 'optimizer'"):
        Checkpointer(store, {**state, "twin": state["optimizer"]}, **chosen(**options))
