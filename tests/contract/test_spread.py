"""strategy="spread": windows of several steps, what is in them, and what ends them."""

import json
import logging
import threading

import pytest
import torch
from keepers import until
from plans import OPTIMIZERS
from runs import check_same, check_steps, checkpointer, end_keeper, snapshot
from spreads import SPREAD, check_newest, make, run, run_saved, train
from torch import nn

import everstep
from everstep import Store, Unsupported
from everstep.capture.copies import Batch
from everstep.cli.main import main
from stores import packs_of

TORCHS = {name: known for name, known in OPTIMIZERS.items() if name != "own"}


def matrices(model):
    """Which Muon takes, too."""
    return [parameter for parameter in model.parameters() if parameter.dim() == 2]


def test_pieces_are_copied_over_the_window_and_gradients_only_for_them(store):
    run_saved(store, 8, **SPREAD)
    first, second = (Store(store).manifest(step) for step in (4, 8))
    assert (len(first.parts), first.records) == (1, ())
    assert [part.steps for part in second.parts] == [6, 7, 8]
    assert [record.step for record in second.records] == [7, 8]
    tables = Store(store).tables(second)
    pieces = [{name for name in table.tensors if name[0] != "@"} for table in tables]
    assert not pieces[0] & pieces[1]
    assert not (pieces[0] | pieces[1]) & pieces[2]
    assert set.union(*pieces) == set(Store(store).tables(first)[0].tensors)
    copied = set()
    for table, own in zip(tables, pieces, strict=True):
        recorded = {name.partition(".")[2] for name in table.tensors if name.startswith("@0.")}
        assert recorded == {name for name in copied if not name.startswith("optimizer.")}
        for name in own - copied:  # a parameter comes with all of its state
            if name.startswith("model.layers") or name == "model.norm.weight":
                assert {f"optimizer.{name}.{key}" for key in ("step", "exp_avg")} <= own
        copied |= own


def test_an_update_waits_for_the_last_pieces_but_not_for_the_last_gradients(store, monkeypatch):
    copy, is_due, updated, was_awaited = Batch.copy_from_cpu, [], threading.Event(), []

    def copy_pieces_only(batch, *places, **options):
        is_lazy = is_due and threading.current_thread().name == "everstep-copy"
        if is_lazy and is_due.pop() == "gradients":
            was_awaited.append(not updated.wait(10))
        copy(batch, *places, **options)

    monkeypatch.setattr(Batch, "copy_from_cpu", copy_pieces_only)
    with checkpointer(store, state := make(1), **SPREAD) as saver:
        frozen = run(saver, state, range(1, 8))
        train(state)
        is_due += ["gradients", "pieces"]
        assert saver.step(8)
        frozen[8] = snapshot(state)
        train(state)
        updated.set()
    assert was_awaited == [False]
    check_newest(store, make(2), frozen, 8)


def test_it_is_read_when_it_was_made_whole(store, capsys):
    state = make(1)
    with checkpointer(store, state, **SPREAD) as saver:
        frozen = run(saver, state, range(1, 9))
        live = {name: value.clone() for name, value in state["model"].state_dict().items()}
    with pytest.raises(Unsupported, match=f"everstep materialize {store} 8"):
        Store(store).state(8)
    read = Store(store).read(8)  # replayed
    assert all(torch.equal(read[f"model.{name}"], value) for name, value in live.items())
    assert main(["show", str(store), "8"]) == 0
    shown = capsys.readouterr().out
    assert "replays        2 records, of steps 7 to 8: its parts were copied" in shown
    assert main(["show", str(store), "8", "--json"]) == 0
    assert [each["step"] for each in json.loads(capsys.readouterr().out)["records"]] == [7, 8]
    other = make(2)
    with checkpointer(store, other) as restorer:
        assert restorer.restore(8, only="model") == 8
        check_same(snapshot(other)["state"]["model"], frozen[8]["state"]["model"])
        assert main(["materialize", str(store), "8"]) == 0
        read = Store(store).read(8)
        assert all(torch.equal(read[f"model.{name}"], value) for name, value in live.items())
        restorer.restore(8, only="model")
        assert restorer.restore(8) == 8
    check_same(snapshot(other), frozen[8])
    assert Store(store).verify().ok
    Store(store).delete(8)
    Store(store).delete(4)
    assert not packs_of(store)
    capsys.readouterr()


@pytest.mark.parametrize("name", ["exp_avg", "weight"])
def test_a_change_behind_the_optimizer_ends_the_window(store, name, caplog):
    state = make(1)
    with checkpointer(store, state, **SPREAD) as saver:
        frozen = run(saver, state, range(1, 7))
        saver.wait()
        weight = state["model"].layers[0].weight
        changed = weight if name == "weight" else state["optimizer"].state[weight][name]
        with torch.no_grad():
            changed.mul_(0.5)
        with caplog.at_level(logging.WARNING, "everstep"):
            run(saver, state, range(7, 13), frozen)
    assert "no record is made of step" in caplog.text
    assert "layers.0.weight" in caplog.text
    assert [Store(store).manifest(step).is_spread for step in (4, 8, 12)] == [False, False, True]
    check_steps(store, make(2), frozen, (8, 12))


def test_another_walk_ends_the_window(store):
    state = make(1)
    with checkpointer(store, state, **SPREAD) as saver:
        run(saver, state, range(1, 7))
        state["model"].extra = nn.Linear(2, 2)
        state["optimizer"].add_param_group({"params": state["model"].extra.parameters()})
        frozen = run(saver, state, range(7, 9))
    assert not Store(store).manifest(8).is_spread
    other = make(2)
    other["model"].extra = nn.Linear(2, 2)
    other["optimizer"].add_param_group({"params": other["model"].extra.parameters()})
    check_newest(store, other, frozen, 8)


def test_pieces_of_a_way_that_was_left_are_of_no_window(store):
    state = make(1)
    with checkpointer(store, state, **SPREAD) as saver:
        run(saver, state, range(1, 7))
        saver.step(9)  # the window of step 8 has its first step, and no other comes
        assert saver.restore() == 4
        torch.manual_seed(5)
        frozen = run(saver, state, range(5, 9))
    assert [part.steps for part in Store(store).manifest(8).parts] == [6, 7, 8]
    assert Store(store).manifest(8).epoch == 2
    assert len(packs_of(store)) == 4
    check_newest(store, make(2), frozen, 8)


class Coupled(torch.optim.SGD):
    """A user's own: nobody knows whether its parameters can be stepped one by one."""


def test_what_may_couple_parameters_is_copied_at_one_step(store, caplog):
    state = make(1, Coupled)
    with checkpointer(store, state, **SPREAD) as saver:
        for step in range(1, 9):
            loss = lambda: state["model"](torch.ones(5, 12)).square().mean()  # noqa: E731

            def closure(loss=loss):
                state["optimizer"].zero_grad()
                value = loss()
                value.backward()
                return value

            state["optimizer"].step(closure)
            saver.step(step)
    manifest = Store(store).manifest(8)
    assert not manifest.is_spread
    assert "nobody here knows" in manifest.capture["reason"]
    assert "strategy='spread' copies each state at one step here" in caplog.text


def test_all_of_torchs_optimizers_are_spread(store):
    def build(seed):
        models = {name: make(seed)["model"] for name in TORCHS}
        return {
            "models": models,
            "optimizers": {
                name: kind(matrices(models[name]), lr=0.01, **options)
                for name, (kind, options) in TORCHS.items()
            },
        }

    state = build(1)
    with checkpointer(store, state, **SPREAD) as saver:
        for step in range(1, 9):
            for name, optimizer in state["optimizers"].items():
                train({"model": state["models"][name], "optimizer": optimizer})
            saver.step(step)
        frozen = {8: snapshot(state)}
    assert Store(store).manifest(8).is_spread
    check_newest(store, build(2), frozen, 8)


class Looking(nn.Module):
    """Shares memory with what an optimizer updates."""

    def __init__(self, weight):
        super().__init__()
        self.register_buffer("view", weight.detach()[:3])


def test_what_is_shared_or_without_state_comes_last(store):
    state = make(1)
    state["model"].layers[2].weight.requires_grad_(False)  # never updated: no state
    state["other"] = Looking(state["model"].layers[1].weight)
    with checkpointer(store, state, **SPREAD) as saver:
        frozen = run(saver, state, range(1, 9))
    manifest = Store(store).manifest(8)
    last = Store(store).tables(manifest)[-1].tensors
    assert manifest.is_spread
    assert {"model.layers.1.weight", "other.view"} <= last.keys()
    assert "optimizer.model.layers.1.weight.exp_avg" in last
    other = make(2)
    other["model"].layers[2].weight.requires_grad_(False)
    other["other"] = Looking(other["model"].layers[1].weight)
    check_newest(store, other, frozen, 8)


def test_steps_that_are_told_only_when_due_are_saved_whole(store):
    state = make(1)
    with checkpointer(store, state, **SPREAD) as saver:
        for step in range(1, 9):
            train(state)
            if step % 4 == 0:
                saver.step(step)
    assert [Store(store).manifest(step).is_spread for step in (4, 8)] == [False, False]


def test_what_is_left_of_a_window_is_deleted(store):
    state = make(1)
    with checkpointer(store, state, **SPREAD) as saver:
        run(saver, state, range(1, 8))  # the window of step 8 has two of its three steps
        saver.wait()
        assert len(packs_of(store)) == 3
    until(lambda: len(packs_of(store)) == 1, "the keeper deletes it")
    with checkpointer(store, make(2), **SPREAD) as saver:
        assert saver.restore() == 4
        saver.save(5).wait("local")
    assert Store(store).verify().ok


def test_what_is_left_of_a_window_by_a_dead_keeper_is_swept(store):
    state = make(1)
    with checkpointer(store, state, **SPREAD) as saver:
        run(saver, state, range(1, 8))
        saver.wait()
        end_keeper(store)
    with checkpointer(store, make(2), **SPREAD) as saver:
        assert saver.restore() == 4
        saver.save(5).wait("local")
    assert Store(store).verify().ok
    Store(store).gc()
    assert len(packs_of(store)) == 2


def test_retention_keeps_what_a_spread_checkpoint_needs(store):
    frozen = run_saved(store, 24, keep=everstep.Keep(last=2), **SPREAD)
    until(lambda: Store(store).steps() == [20, 24], "the keeper deletes what is not kept")
    assert Store(store).verify().ok
    until(lambda: len(packs_of(store)) == 6, "and its files")
    check_steps(store, make(2), frozen, (20, 24))


def test_a_keeper_that_dies_between_two_shares(store):
    state = make(1)
    with checkpointer(store, state, **SPREAD) as saver:
        frozen = run(saver, state, range(1, 7))
        saver.wait()
        before = saver._client.losses
        end_keeper(store)
        until(lambda: saver._client.losses > before, "another keeper")
        run(saver, state, range(7, 9), frozen)
        saver.wait()
    assert not Store(store).manifest(8).is_spread
    check_newest(store, make(2), frozen, 8)
