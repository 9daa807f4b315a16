"""derive= with names and rules that are not right: told at once, or found out at the replay."""

import pytest
import torch
from derived import averaged, build, by_hand, check_all, run, with_buffers
from logs import train
from runs import check_same, checkpointer, freeze, kinds, logged, snapshot

from everstep import Corrupt, Mismatch, Unsupported


def test_what_can_be_derived(store):
    state, rules = build(1, averaged)
    state |= {"generator": torch.Generator(), "empty": {"a": 1}, "several": {"ema": {"b": [1]}}}
    for derive, message in [
        ({"emma": print}, "no such part"),
        ({"ema.module": print}, "no such part"),
        ({"em": print}, "no such part"),
        ({"model": print}, "'optimizer' changes 'model.0.weight'"),
        ({"optimizer": print}, "another kind"),
        ({"generator": print}, "another kind"),
        ({"rng": print}, "another kind"),
        ({"empty": print}, "holds no tensor"),
        ({"several": print}, "holds no tensor"),
        ({"ema": print, "ema.module": print}, "in it"),
    ]:
        with pytest.raises(ValueError, match=message):
            checkpointer(store, state, derive=derive)
    with pytest.raises(TypeError, match="a function of the step"):
        checkpointer(store, state, derive={"ema": 3})
    with pytest.raises(TypeError, match="a function of the step"):
        checkpointer(store, state, derive={"ema": None})
    with checkpointer(store, state, derive=rules):
        pass


def test_a_log_is_not_replayed_without_the_rule_or_under_another_name(store):
    frozen = run(store, averaged)
    fresh, rules = build(2, averaged)
    before = snapshot(fresh)
    with checkpointer(store, fresh) as restorer:
        with pytest.raises(Mismatch, match="'ema' was derived by a rule"):
            restorer.restore()
        check_same(snapshot(fresh), before)
        assert restorer.restore(1) == 1
        check_same(snapshot(fresh), frozen[1])
    renamed, _ = build(2, averaged)
    renamed["mean"] = renamed.pop("ema")
    before = snapshot(renamed)
    with checkpointer(store, renamed, derive={"mean": rules["ema"]}) as restorer:
        with pytest.raises(Mismatch, match="'ema' was derived by a rule"):
            restorer.restore()
        check_same(snapshot(renamed), before)


def test_parts_that_no_rule_derives_need_none(store):
    frozen = run(store, with_buffers, base_every=6)
    assert kinds(store) == "brrrrrbrr"
    fresh, _ = build(2, with_buffers)
    before = snapshot(fresh)["state"]
    with checkpointer(store, fresh) as restorer:
        for step in (9, 4):
            with pytest.raises(Unsupported, match="'ema' is derived by a rule"):
                restorer.restore(step, only=["model", "ema"])
            check_same(snapshot(fresh)["state"]["ema"], before["ema"])
            assert restorer.restore(step, only=["model", "optimizer"]) == step
            after = snapshot(fresh)["state"]
            check_same(after, {**frozen[step]["state"], "ema": before["ema"]})
    model = build(3, with_buffers)[0]["model"]
    with checkpointer(store, {"model": model}) as restorer:
        assert restorer.restore(5, only="model") == 5
    check_same(freeze(model), frozen[5]["state"]["model"])


def test_a_rule_that_the_run_did_not_have_is_not_called(store):
    frozen = run(store, lambda state: averaged(state) and {})
    fresh, _ = build(2, averaged)
    with checkpointer(store, fresh, derive={"ema": lambda step: 1 / 0}) as restorer:
        assert restorer.restore() == 9
    check_same(snapshot(fresh), frozen[9])


def test_another_rule_is_found_out(store, caplog):
    frozen = run(store, averaged, verify="full")
    fresh, _ = build(2, averaged)
    ema = fresh["ema"]
    rules = {"ema": lambda step: step == 5 or ema.update_parameters(fresh["model"])}
    with checkpointer(store, fresh, derive=rules) as restorer:
        assert restorer.restore(4) == 4
        check_same(snapshot(fresh), frozen[4])
        with pytest.raises(Corrupt, match=r"step 5: 'ema' came to other bytes"):
            restorer.restore(7)
        assert restorer.restore() == 4
        check_same(snapshot(fresh), frozen[4])
    assert "Its rule is another one now" in caplog.text


def test_a_tensor_that_the_rule_loses_at_the_replay(store):
    run(store, by_hand)
    fresh, rules = build(2, by_hand)

    def rule(step):
        rules["ema"](step)
        if step == 4:
            del fresh["ema"]["0.bias"]

    with (
        checkpointer(store, fresh, derive={"ema": rule}) as restorer,
        pytest.raises(Corrupt, match=r"has no tensor 'ema\.0\.bias'"),
    ):
        restorer.restore(8)


def test_a_rule_that_raises(store, caplog):
    def make(state):
        rule = averaged(state)["ema"]

        def raising(step):
            if state.get("raises") == step:
                with torch.no_grad():
                    next(state["ema"].parameters()).zero_()
                raise FloatingPointError("an average of nothing")
            rule(step)

        state["raises"] = 0
        return {"ema": raising}

    state, rules = build(1, make)
    frozen = {}
    with logged(store, state, derive=rules) as saver:
        for step in range(1, 9):
            train(state)
            state["raises"] = step if step == 5 else 0
            if step == 5:
                with pytest.raises(FloatingPointError) as caught:
                    saver.step(step)
                assert "'ema', at step 5" in caught.value.__notes__[0]
                state["raises"] = 0
            saver.step(step)
            frozen[step] = snapshot(state)
    assert kinds(store) == "brrrbrrr"
    assert "a rule raised (derive= has some for 'ema')" in caplog.text
    check_all(store, make, frozen)
    fresh, rules = build(2, make)

    def failing(step):
        return 1 / (3 - step) and rules["ema"](step)

    with (
        checkpointer(store, fresh, derive={"ema": failing}) as restorer,
        pytest.raises(ZeroDivisionError),
    ):
        restorer.restore(4)


def test_a_rule_that_draws_random_numbers(store, caplog):
    def make(state):
        rule = by_hand(state)["ema"]
        return {"ema": lambda step: torch.rand(()) < 0.5 and rule(step)}

    frozen = run(store, make)
    assert kinds(store) == "bbbbbbbbb"
    assert "drew random numbers" in caplog.text
    check_all(store, make, frozen)


def test_a_rule_that_changes_the_weights(store, other_store, caplog):
    def make(state):
        rule = averaged(state)["ema"]

        @torch.no_grad()
        def clamping(step):
            if step >= since:
                state["model"][0].weight.clamp_(-0.2, 0.2)
            rule(step)

        return {"ema": clamping}

    since = 3
    frozen = run(store, make)
    assert kinds(store) == "brbbbbbbb"
    assert "'model.0.weight' changed" in caplog.text
    check_all(store, make, frozen)
    since = 1  # from the first step on: there is no log to be had
    frozen = run(other_store, make)
    assert kinds(other_store) == "bbbbbbbbb"
    check_all(other_store, make, frozen)


def test_a_restore_that_fails_leaves_the_rules_due(store):
    run(store, averaged)
    fresh, rules = build(2, averaged)
    seen = []

    def rule(step):
        seen.append(step)
        if step == 5:
            raise FloatingPointError
        rules["ema"](step)

    with checkpointer(store, fresh, derive={"ema": rule}) as saver:
        with pytest.raises(FloatingPointError):
            saver.restore(7)
        del seen[:]
        assert saver.restore(3) == 3
        train(fresh)
        saver.step(4)
    assert seen == [2, 3, 4]
