"""Thinned saves of several ranks, on one node and on several: all save the same modules at one
step, and what a checkpoint names of earlier ones is there."""

import contextlib
import os
import signal

import pytest
import torch
import torch.distributed as dist
from jobs import trains, trains_alone, unheard
from test_nodes import NODES, a_node_dies, check_steps, part_documents, trains_on
from test_partings import Failing, Run, tensors

from commands import run as command
from commands import run_json
from comparing import check_equal, check_stored, stored_name
from everstep import EverstepError, Full, Keep, Store
from examples import slow

THIN = Full(thin={"model.blocks.*": 2})
ALL = [("fsdp2", "ab"), *slow(("fsdp2", ""), ("ddp", ""), ("ddp", "ab"), ("fsdp2", "aabc"))]


def planned(store, step, states):
    """The state of a step, each tensor as it was at the step that the plan says."""
    plan = Store(store).restore_plan(step)
    assert set(plan.values()) <= set(states)
    return {name: states[plan[stored_name(name)]][name] for name in states[step]}


def check_plans(store, steps):
    """Halves of the blocks are of their own step, the others of the one before, each in all of its
    pieces; all else is of its own step."""
    for step in steps:
        plan = Store(store).restore_plan(step)
        assert set(plan.values()) == {step - 1, step}
        assert all(".blocks." in name for name, of in plan.items() if of != step)
        assert not Store(store).manifest(step).exact


@pytest.mark.parametrize(("layout", "nodes"), ALL)
def test_each_tensor_is_the_newest_that_was_saved(gang, capsys, store, layout, nodes):
    options = {"size": len(nodes) or 2, "nodes": nodes}
    saved, *_ = gang.run(trains, layout, store, 5, strategy=THIN, waits=True, **options)
    assert not saved.errors
    check_plans(store, range(2, 6))
    for step in range(1, 6):
        check_stored(store, planned(store, step, saved.states), step)
    assert part_documents(store) == []
    shown = run_json(capsys, "show", store, 5)
    assert shown["exact"] is False
    assert shown["thinned"] == [4, 5]
    plan = Store(store).restore_plan(5)
    assert {each["name"]: each["step"] for each in shown["tensors"]} == plan
    assert command("show", store, 5) == 0
    assert "4, 5" in capsys.readouterr().out
    for other, own in ((layout, nodes), ("fsdp2", "")):
        run, *_ = gang.run(trains, other, store, size=len(own) or 2, nodes=own)
        assert run.first == 5
        check_equal(run.begun, planned(store, 5, saved.states))


@pytest.mark.parametrize("nodes", ["ab", *slow("aabc")])
def test_no_reference_dangles(gang, store, tmp_path, nodes):
    """Neither retention, nor rm, nor gc takes what a later one, or a fork, refers to."""
    options = {"size": len(nodes), "nodes": nodes, "strategy": THIN, "waits": True}
    saved, *_ = gang.run(trains, "fsdp2", store, 7, keep=Keep(last=2), **options)
    assert Store(store).steps() == [6, 7]
    Store(store).delete(6)
    Store(store).gc()
    check_stored(store, planned(store, 7, saved.states), 7)
    again, *_ = gang.run(trains, "fsdp2", store, 10, **options)
    assert again.first == 7
    assert not again.errors
    states = {**saved.states, **again.states}
    assert Store(store).manifest(8).exact
    check_plans(store, [9, 10])
    for step in (8, 9, 10):
        check_stored(store, planned(store, step, states), step)
    assert command("fork", store, 10, tmp_path / "fork") == 0
    for step in (7, 8, 9):
        Store(store).delete(step)
    Store(store).gc()
    for there in (store, tmp_path / "fork"):
        check_stored(there, planned(there, 10, states), 10)


@pytest.mark.slow
@pytest.mark.parametrize("with_keeper", [True, False])
@pytest.mark.parametrize("node", ["b", "a"])
def test_a_node_that_dies_between_thinned_saves(gang, store, files, impatient, node, with_keeper):
    """What it had told of a save counts or does not; the next run begins with all."""
    a_node_dies(gang, store, files, node, with_keeper, (4,), strategy=THIN)
    _, alone = gang.run(trains_alone, "fsdp2", 4)[0]
    first, ended, states = gang.run(trains_on, store, NODES, 3, files, strategy=THIN)[0]
    assert first in (4, 5)
    assert set(ended.values()) == {None}
    check_steps(store, list(range(1, first + 3)))
    check_plans(store, [*range(2, first), first + 1, first + 2])
    states = {**alone, **states}
    for step in range(1, first + 3):
        check_stored(store, planned(store, step, states), step)
    Store(store).gc()
    check_steps(store, list(range(1, first + 3)))


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
    name, plan = "model.0.weight", known.restore_plan(40)
    assert torch.equal(known.read(40)[name], states[plan[name]]["0.weight"])
    assert known.verify().ok
