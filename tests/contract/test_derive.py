"""derive=: parts that a rule brings forward, in the run and at the replay, byte for byte."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import check_same, checkpointer, kinds, logged, snapshot
from test_log import Places, fast
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from everstep import Corrupt, Mismatch, Store, Unsupported
from everstep.cli.main import main
from everstep.restore.materialize import materialize
from everstep.store.names import CheckpointName
from everstep.tiers.disk import Disk


def network():
    return nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Linear(40, 6))


def build(seed, make):
    """A state, and the rules of its derived parts."""
    torch.manual_seed(seed)
    model = network()
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01)}
    return state, make(state)


def train(state, step=0):
    state["optimizer"].zero_grad()
    state["model"](torch.randn(8, 6)).square().mean().backward()
    state["optimizer"].step()


# ---- ways to average ---------------------------------------------------------------------------


def averaged(state, **options):
    options = {"multi_avg_fn": get_ema_multi_avg_fn(0.9), **options}
    ema = state["ema"] = AveragedModel(state["model"], **options)
    return {"ema": lambda step: ema.update_parameters(state["model"])}


def with_buffers(state):
    return averaged(state, use_buffers=True)


def swa(state):
    return averaged(state, multi_avg_fn=None)


def now_and_then(state):
    ema = state["ema"] = AveragedModel(state["model"])
    return {"ema": lambda step: step % 3 or ema.update_parameters(state["model"])}


def by_hand(state):
    """A dict of tensors, changed in place, around the version counter."""
    ema = state["ema"] = {key: p.detach().clone() for key, p in state["model"].named_parameters()}

    def rule(step):
        for key, parameter in state["model"].named_parameters():
            ema[key].data.mul_(0.9).add_(parameter.data, alpha=0.1)

    return {"ema": rule}


def swapped(state):
    """A module whose parameters get new memory each time."""
    ema = state["ema"] = copy.deepcopy(state["model"])

    def rule(step):
        for mean, parameter in zip(ema.parameters(), state["model"].parameters(), strict=True):
            mean.data = mean.data * 0.9 + parameter.data * 0.1

    return {"ema": rule}


def anew(state):
    """A dict that gets new tensors, a count, and a decay that follows the step."""
    weights = {key: p.detach().clone() for key, p in state["model"].named_parameters()}
    ema = state["ema"] = {"weights": weights, "count": 0}

    def rule(step):
        ema["count"] += 1
        decay = min(0.9, (1 + step) / (10 + ema["count"]))
        for key, parameter in state["model"].named_parameters():
            ema["weights"][key] = ema["weights"][key] * decay + parameter.detach() * (1 - decay)

    return {"ema": rule}


class Average:
    """An object with a state_dict, of copies."""

    def __init__(self, model):
        self.model, self.count = model, 0
        self.shadow = [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def update(self, step):
        self.count += 1
        for mean, parameter in zip(self.shadow, self.model.parameters(), strict=True):
            mean.lerp_(parameter, 1 / (1 + self.count))

    def state_dict(self):
        return {"count": self.count, "shadow": [mean.clone() for mean in self.shadow]}

    def load_state_dict(self, state):
        self.count, self.shadow = state["count"], state["shadow"]


def stateful(state):
    ema = state["ema"] = Average(state["model"])
    return {"ema": ema.update}


def two_in_a_row(state):
    """The second follows from the first, and is nested in a dict with other parts."""
    first = state["ema"] = AveragedModel(state["model"], multi_avg_fn=get_ema_multi_avg_fn(0.5))
    second = AveragedModel(first, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    state["more"] = {"slow": second, "note": {"any": 3}}
    return {
        "ema": lambda step: first.update_parameters(state["model"]),
        "more.slow": lambda step: second.update_parameters(first),
    }


def of_half_precision(state):
    ema = copy.deepcopy(state["model"]).to(torch.bfloat16).requires_grad_(False)
    ema[0].to(memory_format=torch.contiguous_format)
    state["ema"] = ema

    @torch.no_grad()
    def rule(step):
        for mean, tensor in zip(
            ema.state_dict().values(), state["model"].state_dict().values(), strict=True
        ):
            if mean.is_floating_point():
                mean.mul_(0.5).add_(tensor.to(torch.bfloat16), alpha=0.5)
            else:
                mean.copy_(tensor)

    return {"ema": rule}


def strided(state):
    """Tensors that are transposed, and views of one buffer."""
    flat = torch.zeros(40 * 6 + 6)
    ema = state["ema"] = {"first": flat[:240].view(6, 40).t(), "last": flat[240:]}

    @torch.no_grad()
    def rule(step):
        ema["first"].lerp_(state["model"][0].weight, 0.3)
        ema["last"].lerp_(state["model"][2].bias, 0.3)

    return {"ema": rule}


WAYS = [
    averaged,
    with_buffers,
    swa,
    now_and_then,
    by_hand,
    swapped,
    anew,
    stateful,
    two_in_a_row,
    of_half_precision,
    strided,
]


def run(store, make, steps=9, each=train, **options):
    state, rules = build(1, make)
    frozen = {}
    with logged(store, state, derive=rules, **options) as saver:
        for step in range(1, steps + 1):
            each(state, step)
            saver.step(step)
            frozen[step] = snapshot(state)
    return frozen


def check_all(store, make, frozen, **options):
    fresh, rules = build(2, make)
    with checkpointer(store, fresh, derive=rules, **options) as restorer:
        for step in reversed(Store(store).steps()):
            assert restorer.restore(step) == step
            check_same(snapshot(fresh), frozen[step])


@pytest.mark.parametrize("audit", ["sample", "full"])
@pytest.mark.parametrize("make", WAYS)
def test_every_step_comes_back(store, make, audit):
    frozen = run(store, make, audit=audit)
    assert kinds(store) == "brrrrrrrr"
    for step in range(2, 10):
        (record,) = Store(store).manifest(step).records
        (table,) = Store(store).tables(Store(store).manifest(step))
        assert not [name for name in table.tensors if name.startswith(("ema", "more.slow"))]
        assert record.derived.keys() == build(3, make)[1].keys()
        assert all(said["rule"] for said in record.derived.values())
        assert all(
            (said["digest"] is None) == (audit == "sample") for said in record.derived.values()
        )
    check_all(store, make, frozen)


@pytest.mark.parametrize("make", WAYS)
def test_going_on_after_a_restore_is_as_if_nothing_had_been(store, make):
    """The run without everstep calls the rules itself."""
    state, rules = build(1, make)
    for step in range(1, 13):
        train(state, step)
        for rule in rules.values():
            rule(step)
    expected = snapshot(state)
    run(store, make, 6)
    fresh, rules = build(2, make)
    with logged(store, fresh, derive=rules) as saver:
        assert saver.restore() == 6
        for step in range(7, 13):
            train(fresh, step)
            saver.step(step)
    check_same(snapshot(fresh), expected)
    assert kinds(store) == "brrrrrbrrrrr"


@pytest.mark.parametrize("make", WAYS)
def test_bases_that_are_spread(store, make):
    """The last record before a base has what is derived, too; it replays like the others."""
    frozen = run(store, make, 14, base_every=4, window=3)
    whole = sorted((store / "checkpoints").glob("*/state.json"))
    assert [int(path.parent.name[:8]) for path in whole] == [5, 9, 13]
    check_all(store, make, frozen)
    whole[1].unlink()  # so that some go back behind it
    check_all(store, make, frozen)
    materialize(Disk(store), CheckpointName(5, 1))
    check_all(store, make, frozen)
    assert Store(store).verify().ok


@pytest.mark.parametrize("make", WAYS)
def test_checkpoints_that_are_spread(store, make):
    state, rules = build(1, make)
    frozen = {}
    with checkpointer(
        store, state, derive=rules, strategy="spread", every=4, window=3, audit="full"
    ) as saver:
        for step in range(1, 15):
            train(state, step)
            saver.step(step)
            frozen[step] = snapshot(state)
    assert Store(store).steps() == [4, 8, 12]
    # another walk at each step: such states are whole
    assert Store(store).manifest(8).is_spread != (make is swapped)
    check_all(store, make, frozen)
    fresh, _ = build(2, make)
    with checkpointer(store, fresh) as restorer:  # no rule is needed: what it makes is there
        assert restorer.restore(8) == 8
    check_same(snapshot(fresh), frozen[8])


@pytest.mark.parametrize("disturbed", [0, 7])
def test_auto(store, monkeypatch, disturbed):
    """Over to a log and its warnings, with rules that go on all the time."""
    monkeypatch.setattr("everstep.capture.auto.SAVES_MIN", 4)
    state, rules = build(1, averaged)
    frozen = {}
    with checkpointer(store, state, derive=rules, strategy="auto", base_every=20) as saver:
        for step in range(1, 16):
            train(state, step)
            if step == disturbed:
                rules["ema"](step)
            saver.step(step)
            frozen[step] = snapshot(state)
    assert "r" in kinds(store)
    check_all(store, averaged, frozen)


def test_an_average_need_not_make_a_log_too_large(store, other_store):
    def make(state):
        rules = averaged(state)
        state["older"] = AveragedModel(state["ema"])
        state["oldest"] = AveragedModel(state["ema"])
        return rules | {
            name: lambda step, name=name: step % 2 or state[name].update_parameters(state["ema"])
            for name in ("older", "oldest")
        }

    frozen = run(store, make)
    assert kinds(store) == "brrrrrrrr"
    check_all(store, make, frozen)
    state, _ = build(1, lambda state: make(state) and {})
    train(state)
    with pytest.raises(Unsupported, match="derive="), logged(other_store, state) as saver:  # noqa: PT012
        saver.step(1)
        train(state)
        saver.step(2)


def test_steps_without_updates_and_several_updates_in_a_step(store):
    def each(state, step):
        for _ in range(step % 3):
            train(state)

    frozen = run(store, with_buffers, each=each)
    assert kinds(store) == "brrrrrrrr"
    check_all(store, with_buffers, frozen)


@pytest.mark.parametrize("strategy", ["full", "log", "auto"])
def test_the_rule_runs_once_for_each_step(store, strategy):
    seen = []
    state, _ = build(1, averaged)
    with checkpointer(
        store, state, strategy=strategy, every=3, derive={"ema": seen.append}
    ) as saver:
        saver.save(0)
        for step in range(1, 8):
            train(state)
            saver.step(step)
            saver.save(step, tag="newest")
        assert seen == [1, 2, 3, 4, 5, 6, 7]
        assert saver.restore(3) == 3
        del seen[:]
        saver.step(3)
        train(state)
        saver.save(4)
        saver.step(4)
    assert seen == [4]


# ---- what is not right ---------------------------------------------------------------------------


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
        ({"generator": None}, "another kind"),
        ({"optimizer": None}, "no tensor"),
        ({"model.0": None}, "no tensor that no optimizer changes"),
        ({"model.7": None}, "no tensor"),
        ({"ema.module.00": None}, "no tensor"),
        ({"rng": print}, "another kind"),
        ({"rng": None}, "another kind"),
        ({"rng.torch": None}, "another kind"),
        ({"empty": print}, "holds no tensor"),
        ({"several": print}, "holds no tensor"),
        ({"ema": print, "ema.module": print}, "in it"),
    ]:
        with pytest.raises(ValueError, match=message):
            checkpointer(store, state, derive=derive)
    with pytest.raises(TypeError, match="a function of the step"):
        checkpointer(store, state, derive={"ema": 3})
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


def test_a_rule_that_the_run_did_not_have_is_not_called(store):
    frozen = run(store, lambda state: averaged(state) and {})
    fresh, _ = build(2, averaged)
    with checkpointer(store, fresh, derive={"ema": lambda step: 1 / 0}) as restorer:
        assert restorer.restore() == 9
    check_same(snapshot(fresh), frozen[9])


def test_another_rule_is_found_out(store, caplog):
    frozen = run(store, averaged)
    fresh, _ = build(2, averaged)
    ema = fresh["ema"]
    rules = {"ema": lambda step: step == 5 or ema.update_parameters(fresh["model"])}
    with checkpointer(store, fresh, derive=rules) as restorer:
        assert restorer.restore(4) == 4
        check_same(snapshot(fresh), frozen[4])
        with pytest.raises(Corrupt, match=r"step 5: the derived part 'ema' came to other bytes"):
            restorer.restore(7)
        assert restorer.restore() == 4
        check_same(snapshot(fresh), frozen[4])
    assert "Its rule is another one now" in caplog.text


def test_a_small_difference_is_found_out_by_a_full_audit(store):
    run(store, by_hand, audit="full")
    fresh, rules = build(2, by_hand)

    def rule(step):
        rules["ema"](step)
        if step == 6:
            fresh["ema"]["0.weight"][17, 3] += 1e-6

    with (
        checkpointer(store, fresh, derive={"ema": rule}) as restorer,
        pytest.raises(Corrupt, match="step 6"),
    ):
        restorer.restore(8)


def test_a_rule_that_depends_on_something_that_no_state_has(store):
    def make(state):
        ema, calls = averaged(state), []

        def rule(step):
            calls.append(step)
            return len(calls) % 3 or ema["ema"](step)

        return {"ema": rule}

    run(store, make)
    fresh, rules = build(2, make)
    with checkpointer(store, fresh, derive=rules) as restorer:
        assert restorer.restore(1) == 1
        with pytest.raises(Corrupt, match="depends on something beside"):
            restorer.restore(9)


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


def test_a_rule_that_changes_the_weights(store, caplog):
    def make(state):
        rule = averaged(state)["ema"]

        @torch.no_grad()
        def clamping(step):
            state["model"][0].weight.clamp_(-0.2, 0.2)
            rule(step)

        return {"ema": clamping}

    frozen = run(store, make)
    assert kinds(store) == "bbbbbbbbb"
    assert "'model.0.weight' changed" in caplog.text
    check_all(store, make, frozen)


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


def twice(state):
    state["ema"].update_parameters(state["model"])


def zero(state):
    state["ema"].module[0].weight.data.zero_()


def swap(state):
    weight = state["ema"].module[0].weight
    weight.data = weight.data * 2


@pytest.mark.parametrize("how", [twice, zero, swap])
@pytest.mark.parametrize("at", [2, 5])
def test_a_derived_part_that_somebody_else_changes(store, caplog, how, at):
    """As a training loop does that goes on to call what is a rule now."""

    def each(state, step):
        train(state)
        if step == at:
            how(state)

    frozen = run(store, averaged, each=each)
    assert kinds(store) == ("bbrrrrrrr" if at == 2 else "brrrbrrrr")
    assert "by something else than the rule" in caplog.text or how is swap
    assert "'ema." in caplog.text or how is swap
    check_all(store, averaged, frozen)


CHANGES = {
    "tensor": lambda ema: ema["weights"].update({"0.weight": ema["weights"]["0.weight"] + 1}),
    "number": lambda ema: ema.update(count=ema["count"] + 3),
    "new": lambda ema: ema["weights"].update(extra=torch.ones(3)),
    "gone": lambda ema: ema.update(other=ema["weights"].pop("0.bias")),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_derived_value_that_somebody_else_changes(store, caplog, what):
    def each(state, step):
        train(state)
        if step == 5:
            CHANGES[what](state["ema"])

    def make(state):
        rule = anew(state)["ema"]

        def keeping(step):
            gone = state["ema"].pop("other", None)
            if gone is not None:
                state["ema"]["weights"]["0.bias"] = gone
            rule(step)

        return {"ema": keeping}

    frozen = run(store, make, each=each)
    assert kinds(store) == "brrrbrrrr"
    assert what in ("new", "gone") or "by something else than the rule" in caplog.text
    for step in Store(store).steps():
        fresh, rules = build(2, make)
        if what == "new" and step > 4:
            fresh["ema"]["weights"]["extra"] = torch.zeros(3)
        with checkpointer(store, fresh, derive=rules) as restorer:
            assert restorer.restore(step) == step
        check_same(snapshot(fresh), frozen[step])


def test_a_part_that_gets_more_tensors_by_its_rule(store):
    def make(state):
        ema = state["ema"] = {"first": torch.zeros(3)}

        def rule(step):
            ema["first"] += state["model"][1].running_mean[:3]
            if step == 5:
                ema["second"] = torch.ones(2)

        return {"ema": rule}

    frozen = run(store, make)
    assert kinds(store) == "brrrbrrrr"
    for step in Store(store).steps():
        fresh, rules = build(2, make)
        if step > 4:
            fresh["ema"]["second"] = torch.zeros(2)
        with checkpointer(store, fresh, derive=rules) as restorer:
            assert restorer.restore(step) == step
        check_same(snapshot(fresh), frozen[step])


def test_a_stateful_part_changed_around_its_state_dict(store, caplog):
    """A full audit sees what copies in a state_dict hide."""

    def each(state, step):
        train(state)
        if step == 5:
            state["ema"].shadow[0][3, 2] += 1

    frozen = run(store, stateful, each=each, audit="full")
    assert kinds(store) == "brrrbrrrr"
    check_all(store, stateful, frozen)


class Holder:
    """Its state_dict names a derived tensor, and comes before its part."""

    def __init__(self):
        self.ema = self.seen = None

    def state_dict(self):
        return {"best": None if self.ema is None else self.ema["0.weight"]}

    def load_state_dict(self, state):
        self.seen = state["best"]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_derived_tensor_that_another_part_names(store, is_first):
    def make(state):
        holder = Holder()
        if is_first:
            state["holder"] = holder
        rules = by_hand(state)
        state["holder"] = holder
        holder.ema = state["ema"]
        return rules

    frozen = run(store, make)
    assert kinds(store)[:2] == "br"
    fresh, rules = build(2, make)
    with checkpointer(store, fresh, derive=rules) as restorer:
        for step in (9, 5, 2):
            assert restorer.restore(step) == step
            check_same(snapshot(fresh), frozen[step])
            assert torch.equal(fresh["holder"].seen, fresh["ema"]["0.weight"])


def test_it_cannot_be_made_whole_without_the_program(store, capsys):
    run(store, averaged)
    with pytest.raises(Unsupported, match="'ema' is derived by a rule"):
        materialize(Disk(store), CheckpointName(5, 1))
    assert main(["show", str(store), "5"]) == 0
    shown = capsys.readouterr().out
    assert "then ema" in shown
    assert "sample of the result kept" in shown
    assert "samples 1 (" in shown
    assert Store(store).verify().ok


# ---- against chance ------------------------------------------------------------------------------

DISTURBANCES = {
    "none": lambda state: None,
    "twice": twice,
    "weights": lambda state: state["model"][0].weight.data.mul_(0.9),
    "eval": lambda state: state["ema"].eval()(torch.randn(2, 6)),
    "train": lambda state: state["ema"].train()(torch.randn(2, 6)),
}


def _go_back(saver, store, back):
    reached = saver.restore()
    steps = [step for step in Store(store).steps() if step >= reached - back]
    return saver.restore(steps[0]) if steps else reached


@settings(fast, max_examples=15)
@given(
    make=st.sampled_from([averaged, with_buffers, swa, now_and_then, two_in_a_row]),
    moves=st.lists(
        st.tuples(st.integers(1, 6), st.sampled_from(["log", "spread", "full"]), st.integers(0, 3)),
        min_size=2,
        max_size=4,
    ),
    window=st.integers(1, 4),
    base_every=st.integers(2, 6),
    every=st.integers(1, 3),
    disturbance=st.tuples(st.sampled_from(sorted(DISTURBANCES)), st.integers(1, 12)),
    tagged=st.integers(1, 12),
)
def test_going_back_and_on(make, moves, window, base_every, every, disturbance, tagged):
    """Attachments one after another, under changing strategies; then every step is restored. Each
    is as in a run of the same steps without everstep."""
    how, at = disturbance
    total = sum(count for count, _, _ in moves)

    def update(state, step):
        train(state)
        if step == at:
            DISTURBANCES[how](state)

    state, rules = build(1, make)
    start, frozen = torch.get_rng_state(), {}
    for step in range(1, total + 1):
        update(state, step)
        for rule in rules.values():
            rule(step)
        frozen[step] = snapshot(state)
    with Places() as places:
        store, done = places.new(), 0
        for count, strategy, back in moves:
            state, rules = build(2 if done else 1, make)
            torch.set_rng_state(start)
            options = {} if strategy == "full" else {"window": window}
            if strategy == "log":
                options["base_every"] = base_every
            with checkpointer(
                store, state, strategy=strategy, every=every, derive=rules, **options
            ) as saver:
                reached = _go_back(saver, store, back)
                if reached:
                    check_same(snapshot(state), frozen[reached])
                done = min(total, reached + count)
                for step in range(reached + 1, done + 1):
                    update(state, step)
                    saver.step(step)
                    if step in (tagged, done):
                        saver.save(step, tag="newest")
                    check_same(snapshot(state), frozen[step])
        check_all(store, make, frozen)
        assert Store(store).verify().ok


# ---- what nobody changes -------------------------------------------------------------------------


def adapted(seed):
    """A frozen layer with a small trained one beside it, as LoRA has them, and a frozen table."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 400), nn.Linear(400, 6), nn.Linear(6, 6))
    model[:2].requires_grad_(False)
    state = {"model": model, "optimizer": torch.optim.AdamW(model[2].parameters())}
    state["table"] = {"rows": torch.randn(5, 5), "note": seed}
    return state


def run_adapted(store, change=lambda state, step: None, steps=9, **options):
    state, frozen = adapted(1), {}
    derive = {"model.0": None, "model.1": None, "table": None}
    with logged(store, state, **{"derive": derive, **options}) as saver:
        for step in range(1, steps + 1):
            train(state)
            state["table"]["note"] = step
            change(state, step)
            saver.step(step)
            frozen[step] = snapshot(state)
    return frozen


@pytest.mark.parametrize("audit", ["sample", "full"])
@pytest.mark.parametrize("derive", [None, {"model": None, "table": None}])
def test_frozen_weights_are_in_bases_only(store, audit, derive):
    frozen = run_adapted(store, audit=audit, **({"derive": derive} if derive else {}))
    assert kinds(store) == "brrrrrrrr"
    (table,) = Store(store).tables(Store(store).manifest(5))
    assert not [name for name in table.tensors if name.startswith(("model", "table"))]
    fresh = adapted(2)
    with checkpointer(store, fresh) as restorer:  # which needs no rule
        for step in range(9, 0, -1):
            assert restorer.restore(step) == step
            check_same(snapshot(fresh), frozen[step])
    manifest = materialize(Disk(store), CheckpointName(5, 1))
    assert manifest.exact
    with checkpointer(store, fresh) as restorer:
        for step in (6, 5):
            assert restorer.restore(step) == step
            check_same(snapshot(fresh), frozen[step])


def test_frozen_weights_and_bases_that_are_spread(store):
    frozen = run_adapted(store, steps=14, base_every=4, window=3)
    whole = sorted((store / "checkpoints").glob("*/state.json"))
    assert len(whole) == 3
    fresh = adapted(2)
    for gone in (None, whole[1]):
        if gone:
            gone.unlink()
        with checkpointer(store, fresh) as restorer:
            for step in range(14, 0, -1):
                assert restorer.restore(step) == step
                check_same(snapshot(fresh), frozen[step])
    for step in (5, 7, 10, 13, 14):
        assert materialize(Disk(store), CheckpointName(step, 1)).exact
        found = Store(store).read(step)
        assert torch.equal(found["model.0.weight"], fresh["model"][0].weight)
        with checkpointer(store, fresh) as restorer:
            assert restorer.restore(step) == step
            check_same(snapshot(fresh), frozen[step])


FROZEN = {
    "in place": lambda state: state["model"][0].weight.mul_(1),
    "data": lambda state: state["model"][1].weight.data.mul_(2),
    "swap": lambda state: setattr(state["model"][0].bias, "data", state["model"][0].bias + 0),
    "value": lambda state: state["table"].update(rows=torch.ones(5, 5)),
    "value in place": lambda state: state["table"]["rows"].add_(1),
}


@pytest.mark.parametrize("how", FROZEN)
def test_frozen_weights_that_somebody_changes(store, caplog, how):
    def change(state, step):
        if step == 5:
            with torch.no_grad():
                FROZEN[how](state)

    frozen = run_adapted(store, change)
    assert kinds(store) == "brrrbrrrr"
    assert "changed between two steps" in caplog.text
    fresh = adapted(2)
    with checkpointer(store, fresh) as restorer:
        for step in range(9, 0, -1):
            assert restorer.restore(step) == step
            check_same(snapshot(fresh), frozen[step])


def test_one_number_of_frozen_weights_changed_around_the_version_counter(store, other_store):
    """A sample of bytes misses it, but perhaps not the replay's; a full audit sees it at once."""

    def change(state, step):
        if step == 5:
            state["model"][0].weight.data[217, 3] += 1

    frozen = run_adapted(store, change, audit="full")
    assert kinds(store) == "brrrbrrrr"
    fresh = adapted(2)
    with checkpointer(store, fresh) as restorer:
        for step in range(9, 0, -1):
            assert restorer.restore(step) == step
            check_same(snapshot(fresh), frozen[step])
    run_adapted(other_store, change)
    assert kinds(other_store) == "brrrrrrrr"


def test_frozen_weights_and_buffers_of_one_module(store):
    """Running statistics change around the version counter: a sample of bytes shows it."""

    def step(state, number):
        train(state)

    state, _ = build(1, averaged)
    frozen = {}
    with logged(store, state, derive={"model": None, "ema": None}) as saver:
        for number in range(1, 7):
            step(state, number)
            saver.step(number)
            frozen[number] = snapshot(state)
    assert kinds(store) == "bbbbbb"
    fresh, _ = build(2, averaged)
    with checkpointer(store, fresh) as restorer:
        for number in range(6, 0, -1):
            assert restorer.restore(number) == number
            check_same(snapshot(fresh), frozen[number])
