"""What does not fit is refused with a clear error of the right class, and nothing is changed."""

import logging
import re
import threading

import numpy as np
import pytest
import torch
from runs import bits, check_same, checkpointer, freeze, restore, save, supervised
from torch import nn
from torch.utils.data import DataLoader

import everstep
from everstep import (
    Checkpointer,
    Conflict,
    Keep,
    Mismatch,
    Missing,
    Store,
    Unavailable,
    Unsupported,
)
from everstep.capture import copier


def build(seed, width=6):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.Linear(width, 2))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "note": {"n": seed}}


# ---- a state that does not fit ---------------------------------------------------------------


def test_all_that_does_not_fit_is_listed_at_once_and_nothing_changes(store):
    supervised(first := build(1))
    save(store, first)
    model = nn.Sequential(
        nn.Linear(6, 7), nn.BatchNorm1d(6), nn.Linear(6, 2).half(), nn.Linear(2, 2)
    )
    del model[1]._parameters["bias"]
    model[1].affine = False
    state = {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "scheduler": torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters()), 3),
        "generator": torch.Generator(),
    }
    before, random_state = freeze(state), bits(torch.get_rng_state())
    with checkpointer(store, state) as restorer:
        with pytest.raises(Mismatch) as caught:
            restorer.restore()
        check_same(freeze(state), before)
        assert bits(torch.get_rng_state()) == random_state
        for expected in (
            "shape: 'model.0.weight' is [7, 6] in the state, [6, 6] in the checkpoint",
            "dtype: 'model.2.bias' is float16 in the state, float32 in the checkpoint",
            "missing: the checkpoint has no tensor 'model.3.weight'",
            "extra: the state has no tensor 'model.1.bias'",
            "the checkpoint has no 'scheduler'",
            "the checkpoint has no 'generator'",
            "the state has no 'note'",
            "the state's optimizer does not have 'model.1.bias'",
            "this checkpoint changed nothing",
            "only=[",
        ):
            assert expected in str(caught.value), expected
        supervised({"model": build(1)["model"], "optimizer": build(1)["optimizer"]})
        restorer.save(2).wait("local")  # and it can be saved for all that


def changed(change):
    """A state that is saved once, and then `change(state)` is done to it."""
    state = {**build(1), "more": {"loss": 1.0, "models": [nn.Linear(2, 2)]}}
    supervised(state)
    return state, lambda: change(state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.update(model=build(2)["model"]), "'model' is another object"),
        (lambda state: state.pop("optimizer"), "it had 'model', 'optimizer', 'note', 'more'"),
        (lambda state: state.update(new=1), "has the parts 'model', .* 'new'"),
        (lambda state: state.update(more=dict(state["more"])), "'more' is another object"),
        (lambda state: state["more"].update(new=1), r"'more' has the parts .* 'new'"),
        (lambda state: state["more"]["models"].append(1), r"'more\.models' has the parts 0, 1, it"),
        (
            lambda state: state["more"]["models"].__setitem__(0, nn.Linear(2, 2)),
            r"'more\.models\.0' is another object",
        ),
    ],
)
def test_a_state_that_has_other_parts_than_it_was_given_with(store, change, message):
    """They would be saved as they were, or not at all."""
    state, change = changed(change)
    saver = checkpointer(store, state)
    saver.save(1).wait("local")
    state["note"], state["more"]["loss"] = {"n": 2}, 0.5  # values may change
    saver.save(2).wait("local")
    change()
    for call in (lambda: saver.save(3), lambda: saver.restore(1), saver.close):
        with pytest.raises(Unsupported, match=message):
            call()
    assert Store(store).manifest(2).objects["note"] == {"n": 2}
    assert Store(store).steps() == [1, 2]


def test_what_an_optimizers_state_dict_returned(store, caplog):
    state = build(1)
    state["optimizer"] = state["optimizer"].state_dict()
    save(store, state)
    assert "'optimizer' is what state_dict() of an optimizer returned" in caplog.text


def test_a_store_of_which_nothing_is_restored(store, other_store, caplog):
    save(store, build(1))
    save(other_store, build(1))
    assert "left behind" not in caplog.text
    with checkpointer(store, build(1)) as saver:
        saver.restore()
        saver.save(2).wait("local")
    assert "left behind" not in caplog.text
    with checkpointer(store, build(1)) as saver:
        for step in (1, 2):
            saver.save(step).wait("local")
    assert (
        caplog.text.count(
            f"nothing was restored, and the checkpoints of {store}, up to step 2, are"
        )
        == 1
    )
    restore(store, build(1), from_store=other_store)
    assert f"{store} has 4 checkpoints of its own, which are left behind" in caplog.text


@pytest.mark.parametrize("alone", [False, True])
def test_a_rank_without_a_process_group(store, monkeypatch, caplog, alone):
    monkeypatch.setenv("WORLD_SIZE", "2")
    checkpointer(store, build(1), alone=alone).close()
    assert ("Make it after torch.distributed.init_process_group()" in caplog.text) is not alone


@pytest.mark.parametrize("call", ["step", "save"])
def test_steps_that_go_back(store, caplog, call):
    with checkpointer(store, build(1)) as saver:
        for step in (1, 2, 10, 3, 4):
            getattr(saver, call)(step).wait("local")
        assert caplog.text.count("step 3 comes after step 10") == 1
        caplog.clear()
        assert saver.restore(2) == 2
        saver.save(3).wait("local")
    assert "comes after" not in caplog.text


def test_a_part_that_does_not_fit(store, tmp_path):
    save(store, {"model": nn.Linear(3, 3), "other": nn.Linear(2, 2)})
    with pytest.raises(Mismatch, match=r"extra: the state has no tensor 'model\.bias'"):
        restore(
            store, {"model": nn.Linear(3, 3, bias=False), "other": nn.Linear(2, 2)}, only="model"
        )
    with pytest.raises(Mismatch, match="no such part"):
        restore(store, {"model": nn.Linear(3, 3)}, only="modle")
    with pytest.raises(Mismatch, match=r"restoring \['modle'\]: the state has no such part"):
        restore(store, {"model": nn.Linear(3, 3)}, only=["model", "modle"])
    with pytest.raises(Mismatch, match=r"restoring \['modle'\]: the state has no such part"):
        restore(tmp_path / "empty", {"model": nn.Linear(3, 3)}, only="modle")
    for only in ([], 3, [3]):
        with pytest.raises(ValueError, match="only must be names"):
            restore(store, {"model": nn.Linear(3, 3)}, only=only)
    assert restore(store, {"model": nn.Linear(3, 3)}, only=["model"]) == 1


def test_restoring_the_model_only_leaves_the_rest_alone(store):
    supervised(first := build(1))
    save(store, first)
    supervised(second := build(2))
    before = freeze(second)
    assert restore(store, second, only="model") == 1
    after = freeze(second)
    assert after["model"] == freeze(first)["model"]
    assert after["note"] == before["note"]
    assert after["optimizer"]["state"] == before["optimizer"]["state"]


def test_a_new_run_starts_from_another_store(store, other_store):
    supervised(first := build(1))
    save(other_store, first, step=7)
    second = build(2)
    with checkpointer(store, second) as saver:
        assert saver.restore(from_store=other_store) == 7
        check_same(freeze(second), freeze(first))
        saver.step(8)
    assert Store(store).steps() == [8]
    assert Store(other_store).steps() == [7]
    with pytest.raises(Missing, match="there is no store"):
        restore(store, second, from_store=other_store / "missing")
    assert not (other_store / "missing").exists()


# ---- values and tensors that cannot be stored ------------------------------------------------


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LazyLinear(3)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda: {"a": [0, object()]}, r"part\.a\.1: a builtins\.object cannot be stored"),
        (lambda: DataLoader([1, 2]), r"DataLoader cannot be stored.*use torchdata's Stateful"),
        (lambda: torch.eye(3).to_sparse(), r"'part': it has layout torch\.sparse_coo"),
        (
            lambda: {"deep": [torch.empty(2, device="meta")]},
            r"'part\.deep\.0': it lies on device meta",
        ),
        (
            lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8),
            r"dtype torch\.qint8",
        ),
        (Lazy, r"'part\.layer\.weight': it has no shape yet"),
        (lambda: nn.Linear(2, 2, device="meta"), r"'part\.weight': it lies on device meta"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*quantize")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_cannot_be_stored(store, value, message):
    state = {"part": value()}
    with pytest.raises(Unsupported, match=message), checkpointer(store, state) as saver:
        saver.save(1)
    assert Store(store).steps() == []


def test_a_sparse_buffer_is_refused_and_a_later_save_works(store):
    model = nn.Linear(2, 2)
    model.register_buffer("graph", torch.eye(3).to_sparse())
    with checkpointer(store, {"model": model}) as saver:
        with pytest.raises(Unsupported, match=r"'model\.graph'"):
            saver.save(1)
        model.graph = torch.eye(3)
        saver.save(2).wait("local")


def test_a_state_dict_that_raises_is_the_users_own_error(store):
    class Broken:
        def state_dict(self):
            raise KeyError("mine")

        def load_state_dict(self, state):
            pass

    with pytest.raises(KeyError, match="mine"), checkpointer(store, {"b": Broken()}) as saver:
        saver.save(1)


# ---- arguments ---------------------------------------------------------------------------------


WRONG = [
    *(({name: value}, ValueError, "must be") for name, value in (
        ("every", 0), ("every", 1.5), ("every", True), ("strategy", "logs"), ("when_full", "block"),
        ("memory_bytes", 0), ("memory_bytes", 1e9),
    )),
    ({"keep": 3}, TypeError, "keep must be an everstep.Keep"),
    ({"derive": 3}, TypeError, "derive must be a dict by names"),
    *(({name: 3}, TypeError, now) for name, now in (  # names that are gone tell the new ones
        ("audit", "Log(verify="),
        ("base_every", "Log(base_every="),
        ("window", "Spread(window="),
        ("under_pressure", "when_full="),
        ("memory_budget", "memory_bytes="),
        ("check_replicas", "Ranks(check="),
        ("rng", "generators are always captured"),
        ("evry", "no argument 'evry'"),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("options", "error", "message"), WRONG, ids=str)
def test_wrong_arguments(store, options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        Checkpointer(store, {"x": 1}, **options)
    assert not store.exists()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Keep(last=1.5), TypeError, "Keep needs"),
        (lambda: Keep(last="3"), TypeError, "Keep needs"),
        (lambda: Keep(last=True), TypeError, "Keep needs"),
        (lambda: Keep(tags="x"), TypeError, "Keep needs"),
        (lambda: everstep.Log(verify="sample"), ValueError, "must be"),
        (lambda: everstep.Log(base_every=0), ValueError, "must be"),
        (lambda: everstep.Log(replica=1), TypeError, "must be"),
        (lambda: everstep.Spread(window=True), ValueError, "must be"),
        (lambda: everstep.Spread(window=0), ValueError, "must be"),
        (lambda: Checkpointer("", build(1)), ValueError, "store must be a directory"),
    ],
)
def test_options_of_wrong_kinds(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("ranks", "message"),
    [({"by_rank": 3}, "by_rank must be a dict by names"), ({"layout": 3}, "layout must be a func")],
)
def test_ranks_of_wrong_kinds(store, ranks, message):
    with pytest.raises(TypeError, match=message):
        Checkpointer(store, {"x": 1}, ranks=everstep.Ranks(**ranks))
    assert not store.exists()


def test_wrong_states_and_steps(store):
    for state in ([nn.Linear(1, 1)], {1: "x"}):
        with pytest.raises(TypeError, match="names to models"):
            Checkpointer(store, state)
    with pytest.raises(ValueError, match="'rng' is that of"):
        Checkpointer(store, {"rng": 1})
    for name in ("model", "optimizer"):
        with pytest.raises(ValueError, match=f"by_rank: '{name}' is a model or an optimizer"):
            Checkpointer(store, build(1), ranks=everstep.Ranks(by_rank={name: "exact"}))
    with pytest.raises(ValueError, match="several parts"):
        Checkpointer(store, {"a": {"b": nn.Linear(1, 1)}, "a.b": nn.Linear(1, 1)})
    with checkpointer(store, {"x": 1}) as saver:
        for step in (-1, 1.0, "1", True, None):
            with pytest.raises(ValueError, match="step must be"):
                saver.step(step)
        saver.step(np.int64(0)).wait("local")
        for tag in ("", "12", "a/b", "../x", 12):
            with pytest.raises(ValueError, match="cannot be a tag"):
                saver.save(1, tag=tag)
        with pytest.raises(ValueError, match="level must be"):
            saver.wait("remote")
        with pytest.raises(ValueError, match="metrics must be a dict"):
            saver.save(1, metrics=[1])
        with pytest.raises(ValueError, match="level must be"):
            saver.save(1).wait("remote")
        for reference in (1.0, True, b"1"):
            with pytest.raises(ValueError, match="step must be"):
                saver.restore(reference)
        for reference in (3, "best", "1-7"):
            with pytest.raises(Missing):
                saver.restore(reference)
    for call in (lambda: saver.save(2), lambda: saver.step(2), saver.restore):
        with pytest.raises(ValueError, match="closed"):
            call()
    saver.close()


# ---- a step that is there --------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["full", "log", "auto"])
def test_a_step_saved_twice(store, strategy, caplog):
    state = build(1)
    with checkpointer(store, state, strategy=strategy) as saver:
        first = saver.step(1)
        again = saver.save(1, tag="best", metrics={"loss": 1.0})
        assert "step 1 is saved already" in caplog.text
        again.wait("local")
        first.wait("local")
        assert Store(store).manifest("best").step == 1
        supervised(state)
        other = saver.save(1)
        with pytest.raises(Conflict, match="saved already with other content"):
            other.wait("local")
        assert isinstance(other.error, Conflict)
        assert saver.metrics.failures == 1
        with pytest.raises(Conflict):
            saver.wait()
        saver.step(2)
    assert Store(store).steps() == [1, 2]
    assert Store(store).verify().ok


def test_closing_raises_the_newest_error_but_never_masks_the_users(store):
    state = build(1)
    with pytest.raises(Conflict), checkpointer(store, state) as saver:  # noqa: PT012
        saver.save(1)
        supervised(state)
        saver.save(1)
    with pytest.raises(ZeroDivisionError), checkpointer(store, state) as saver:  # noqa: PT012
        assert saver.restore() == 1
        saver.save(2)
        supervised(state)
        saver.save(2)
        raise ZeroDivisionError


def test_tags_metrics_and_retention_while_saving(store):
    state = {"x": torch.zeros(2)}
    with checkpointer(store, state, keep=Keep(last=2, every=4, tags=True)) as saver:
        for step in range(1, 11):
            state["x"] += 1
            saver.save(step, tag="best" if step in (2, 3) else None, metrics={"loss": 1 / step})
        saver.wait("local")
        assert saver.restore("best") == 3
        assert state["x"].tolist() == [3.0, 3.0]
    assert Store(store).steps() == [3, 4, 8, 9, 10]
    assert Store(store).manifest("best").metrics == {"loss": 1 / 3}
    assert Store(store).verify().ok


def test_a_tag_that_cannot_be_set_is_told_and_the_step_is_saved(store):
    """tags is a file, so that no tag can be written; the checkpoint does not suffer."""
    saver = checkpointer(store, {"x": torch.zeros(2)})
    (store / "tags").write_text("in the way")
    handle = saver.save(1, tag="best")
    with pytest.raises(Unavailable, match="is saved, but not tagged 'best'"):
        saver.close()
    assert handle.level == "local"
    assert Store(store).steps() == [1]


# ---- memory ----------------------------------------------------------------------------------


def test_a_memory_budget_that_is_too_small(store):
    saver = checkpointer(store, {"x": torch.zeros(5000)}, memory_bytes=4096)
    assert saver.step(1).done()
    assert saver.metrics.failures == 1
    with pytest.raises(Unavailable, match="memory_bytes=4096 bytes is too small"):
        saver.close()


def test_saves_that_are_skipped_are_counted_and_said(store, caplog, monkeypatch):
    monkeypatch.setattr(copier, "_SEAL_S", 0.05)
    gate = threading.Event()
    state = {"x": torch.zeros(1000), "model": nn.Linear(2, 2)}
    optimizer = torch.optim.SGD(state["model"].parameters())
    with checkpointer(store, {**state, "o": optimizer}, when_full="skip") as saver:
        seal = saver._captures._copier._seal
        monkeypatch.setattr(
            saver._captures._copier, "_seal", lambda capture: gate.wait(60) and seal(capture)
        )
        with caplog.at_level(logging.WARNING, "everstep"):
            handles = [saver.step(step) for step in range(1, 6)]
        skipped = [handle for handle in handles if isinstance(handle.error, Unavailable)]
        assert len(skipped) == saver.metrics.skips == 2
        assert "when_full='wait'" in str(skipped[0].error)
        assert caplog.text.count("skipped") >= 1
        gate.set()
        saver.wait("local")
    assert Store(store).steps() == [1, 2, 3]
    assert "closing: the newest is not saved: saving step 5: skipped" in caplog.text
    caplog.clear()
    gate.clear()
    with checkpointer(store, {**state, "o": optimizer}, when_full="skip") as saver:
        saver.restore()
        seal = saver._captures._copier._seal
        monkeypatch.setattr(
            saver._captures._copier, "_seal", lambda capture: gate.wait(60) and seal(capture)
        )
        for step in range(4, 9):
            saver.step(step)
        gate.set()
        saver.wait("local")
        saver.step(9).wait("local")
    assert "closing: 2 of 6 saves were skipped" in caplog.text
