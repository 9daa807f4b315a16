"""strategy="log" and steps that are asked for in odd ways: again, with a tag, in part, from the
beginning, into a state that does not fit."""

import pytest
import torch
from logs import Plain, build, durable, train
from runs import check_same, check_steps, checkpointer, freeze, kinds, logged, run_logged, snapshot
from torch import nn

from everstep import Conflict, Keep, Mismatch, Store, Unavailable, Unsupported
from everstep.capture.log import STATES


def test_memory_is_bounded_while_nobody_saves(store):
    state = build(1)
    with logged(store, state) as saver:
        train(state)
        saver.save(1).wait("local")
        for _ in range(100):
            train(state)
        calls = saver._captures._recorder._calls
        kept = sum(tensor.nbytes for call in calls for tensor in call.tensors.values())
        assert kept <= 4 * sum(p.nbytes for p in state["model"].parameters())
        saver.save(2)


def test_another_state_as_the_same_step(store):
    state, frozen = build(1), {}
    with logged(store, state) as saver:
        for step in (1, 2, 3):
            train(state)
            saver.step(step).wait("local")
            frozen[step] = snapshot(state)
        train(state)
        with pytest.raises(Conflict):
            saver.step(3).wait("local")
        train(state)
        saver.step(4).wait("local")
        frozen[4] = snapshot(state)
    assert kinds(store) == "brrb"
    check_steps(store, build(2), frozen)


def test_a_tag_makes_a_base(store):
    state, frozen = build(1), {}
    with logged(store, state) as saver:
        for step in range(1, 7):
            train(state)
            saver.save(step, tag="good" if step == 4 else None)
            frozen[step] = snapshot(state)
    assert kinds(store) == "brrbrr"
    assert Store(store).manifest("good").step == 4
    assert Store(store).read("good")["model.0.weight"].shape == (40, 6)
    check_steps(store, build(2), frozen)


def test_retention_bounds_what_a_log_takes(store):
    """The newest goes on from all records since its base: so that comes before they are many."""
    torch.manual_seed(1)
    model = nn.Linear(200, 200)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    with checkpointer(store, state, strategy="log", keep=Keep(last=1)) as saver:
        for step in range(1, 81):
            model(torch.ones(1, 200)).square().sum().backward()
            state["optimizer"].step()
            state["optimizer"].zero_grad()
            saver.step(step).wait("local")
        said = saver._captures.strategy.describe()
        whole, distance = said["base_interval"]["base_bytes"], said["base_every"]
    assert 10 < distance < 15  # a record is a third
    sizes = [path.stat().st_size for path in (store / "data").glob("*.safetensors")]
    assert sum(sizes) < (STATES + 3) * whole
    assert len(kinds(store)) <= 2 * distance


def test_parts_and_tensors_of_a_logged_step(store):
    state, frozen = build(1), {}
    with logged(store, state, base_every=5) as saver:
        for step in range(1, 8):
            train(state)
            saver.step(step)
            frozen[step] = freeze(state)
    assert kinds(store) == "brrrrbr"
    for step in (3, 6, 7):
        fresh = build(2)
        before = freeze(fresh)
        with checkpointer(store, fresh) as restorer:
            assert restorer.restore(step, only="model") == step
            after = freeze(fresh)
            check_same(after["model"], frozen[step]["model"])
            check_same(after["optimizer"]["state"], before["optimizer"]["state"])
            assert restorer.restore(step, only=["optimizer"]) == step
            check_same(freeze(fresh), frozen[step])


def test_a_part_of_a_log_into_buffers_of_any_kind(store):
    def make(seed):
        state = build(seed)
        repeated = torch.zeros(1, 6).expand(4, 6)
        state["model"].register_buffer("repeated", repeated)
        state["model"].register_buffer("gaps", torch.zeros(6, 4)[:, ::2])
        with torch.inference_mode():
            state["model"].register_buffer("inferred", torch.zeros(2, 3))
            state["model"].register_buffer("turned", torch.zeros(2, 3).t())
        return state

    state, frozen = make(1), {}
    with logged(store, state) as saver:
        for step in range(1, 5):
            train(state)
            with torch.inference_mode():
                state["model"].repeated.narrow(0, 0, 1).add_(1)
                state["model"].gaps.add_(2)
                state["model"].inferred.add_(3)
                state["model"].turned.add_(4)
            saver.step(step)
            frozen[step] = snapshot(state)
    assert kinds(store) == "brrr"
    check_steps(store, make(2), frozen)
    fresh = make(3)
    with checkpointer(store, fresh) as restorer:
        for step in (4, 2):
            assert restorer.restore(step, only="model") == step
            check_same(freeze(fresh["model"]), frozen[step]["state"]["model"])


def test_a_part_of_a_log_that_takes_the_program(store):
    run_logged(store, build(1, Plain), train, steps=3)
    assert kinds(store) == "brr"
    fresh = build(2, Plain)
    before = freeze(fresh)
    with checkpointer(store, fresh) as restorer:
        with pytest.raises(Unsupported, match="Plain, and only torch's own"):
            restorer.restore(3, only="model")
        with pytest.raises(Mismatch, match="no such part"):
            restorer.restore(3, only="modle")
        check_same(freeze(fresh), before)
        assert restorer.restore(1, only="model") == 1


def test_a_state_that_does_not_fit_is_left_alone(store):
    run_logged(store, build(1), train, steps=4)
    larger = build(2, torch.optim.SGD, momentum=0.9)
    larger["model"] = nn.Linear(6, 7)
    for other, step, why in ((larger, None, "differ"), (build(2, torch.optim.Adam), 4, "AdamW")):
        before = freeze(other)
        with checkpointer(store, other) as restorer, pytest.raises(Mismatch, match=why):
            restorer.restore(step)
        check_same(freeze(other), before)


def test_no_memory_for_one_record(store, monkeypatch):
    state, frozen = build(1), {}
    with logged(store, state) as saver:
        for step in range(1, 9):
            train(state)
            with monkeypatch.context() as patch:
                if step == 4:

                    def fail(*_, **__):
                        raise Unavailable("no memory")

                    patch.setattr(saver._captures.pool, "acquire", fail)
                saver.save(step)
            frozen[step] = snapshot(state)
    check_steps(store, build(2), frozen)
    assert kinds(store) == "brrbrrr"


def test_a_long_log_goes_soon_after_its_successor_has_come(store):
    """Retention looks seldom while a log grows, and often when there is a new base."""
    frozen = run_logged(store, build(1), train, steps=46, each=durable, keep=Keep(3), base_every=40)
    assert kinds(store) == "brrrrr"
    check_steps(store, build(2), {step: frozen[step] for step in range(41, 47)})
