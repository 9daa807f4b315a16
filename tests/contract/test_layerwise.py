"""Gradients that are copied while backward still runs: the records have the bits that updates
consumed, whatever is done to gradients after backward."""

import os

import pytest
import torch
from runs import check_steps, kinds, logged, snapshot
from torch import nn

import everstep
from everstep import Store
from everstep.capture import layerwise
from forked import run

SIZE = 48


@pytest.fixture(autouse=True, params=[12_000, pytest.param(1, marks=pytest.mark.slow)])
def group_bytes(request, monkeypatch):
    """Some are copied only when step() comes; or each is at once."""
    monkeypatch.setattr(layerwise, "GROUP_BYTES", request.param)


def build(seed, count=3):
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(count)))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01)}


def backward(state):
    (3 * state["model"](torch.randn(8, SIZE)) - 1).square().mean().backward()


def plain(state, _):
    state["optimizer"].zero_grad()
    backward(state)
    state["optimizer"].step()


def in_place(state, _):
    state["optimizer"].zero_grad(set_to_none=False)
    backward(state)
    state["optimizer"].step()


def clipped(state, _):
    state["optimizer"].zero_grad()
    backward(state)
    torch.nn.utils.clip_grad_norm_(state["model"].parameters(), 0.01)
    state["optimizer"].step()


def clipped_now_and_then(state, step):
    state["optimizer"].zero_grad()
    backward(state)
    if step % 4 == 3:
        torch.nn.utils.clip_grad_norm_(state["model"][1].parameters(), 0.01)
    state["optimizer"].step()


def added_up(state, step):
    """One time more often in a later step."""
    state["optimizer"].zero_grad()
    for _ in range(4 if step == 6 else 3):
        backward(state)
    state["optimizer"].step()


def replaced(state, step):
    state["optimizer"].zero_grad()
    backward(state)
    if step > 4:
        for parameter in state["model"].parameters():
            parameter.grad = 2 * parameter.grad
    state["optimizer"].step()


def memory_replaced(state, step):
    state["optimizer"].zero_grad()
    backward(state)
    if step > 4:
        for parameter in state["model"].parameters():
            parameter.grad.data = 2 * parameter.grad
    state["optimizer"].step()


def left_out(state, step):
    """Some have no gradient, and others come back."""
    for number, layer in enumerate(state["model"]):
        layer.requires_grad_(number == 2 or (step // 3 + number) % 2 == 0)
    plain(state, step)


def with_closure(state, _):
    def closure():
        state["optimizer"].zero_grad()
        backward(state)

    state["optimizer"].step(closure)


def updated_twice(state, step):
    """From step 6 on, so that records lie otherwise then, and into the same memory."""
    for _ in range(1 + (step > 5)):
        in_place(state, step)


def trained(store, train, steps=12, waits=True, state=None, **options):
    """The run's states by step, and how many gradients of each record were there early."""
    state, frozen, early = state or build(1), {}, []
    with logged(store, state, layerwise=True, **options) as saver:
        for step in range(1, steps + 1):
            train(state, step)
            handle = saver.save(step, tag="seven") if step == 7 else saver.step(step)
            if waits:
                handle.wait()
            early.append(len(saver._captures._recorder.early))
            frozen[step] = snapshot(state)
    return frozen, early


@pytest.mark.parametrize(
    ("train", "count"),
    [
        (plain, 7),
        (in_place, 7),
        (clipped, 0),
        (clipped_now_and_then, 1),
        (added_up, 1),
        (replaced, 1),
        (memory_replaced, 1),
        (left_out, 1),
        (with_closure, 7),
        (updated_twice, 1),
    ],
)
def test_records_have_what_was_consumed(store, train, count):
    """A whole state comes in between, for its tag."""
    frozen, early = trained(store, train)
    assert kinds(store) == ("brbrrrbrrrrr" if train is left_out else "brrrrrbrrrrr")
    assert sum(map(bool, early)) >= count, early
    assert check_steps(store, build(2), frozen) == list(range(1, 13))


def test_gradients_with_a_conjugate_bit(store):
    """Their memory has other bytes than they."""

    def make(seed):
        torch.manual_seed(seed)
        weight = nn.Parameter(torch.randn(SIZE, SIZE, dtype=torch.complex64))
        model = nn.ParameterDict({"weight": weight})
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.01)}

    state, frozen = make(1), {}
    with logged(store, state, layerwise=True) as saver:
        for step in range(1, 8):
            state["optimizer"].zero_grad()
            weight = state["model"]["weight"]
            torch.view_as_real(weight.conj() * torch.randn_like(weight)).sum().backward()
            assert weight.grad.is_conj()
            state["optimizer"].step()
            saver.step(step).wait()
            frozen[step] = snapshot(state)
        assert saver._captures._recorder.early
    assert kinds(store) == "brrrrrr"
    assert check_steps(store, make(2), frozen) == list(range(1, 8))


@pytest.mark.parametrize(
    ("is_enabled", "fused", "unscales", "is_early"),
    [
        (True, False, False, False),
        (True, True, False, True),
        (True, True, True, False),
        (False, False, False, True),
    ],
)
def test_gradients_that_a_scaler_unscales(store, is_enabled, fused, unscales, is_early):
    """torch does not count that as a write. The first row is zeros, which it leaves as they are. A
    fused optimizer does it in its update."""

    def make(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Embedding(9, SIZE, padding_idx=0), nn.Linear(SIZE, SIZE))
        scaler = torch.amp.GradScaler("cpu", enabled=is_enabled)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        return {"model": model, "optimizer": optimizer, "scaler": scaler}

    def train(state, _):
        scaler, optimizer = state["scaler"], state["optimizer"]
        optimizer.zero_grad()
        scaler.scale(state["model"](torch.randint(9, (8,))).square().mean()).backward()
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    frozen, early = trained(store, train, state=make(1))
    assert kinds(store) == "brrrrrbrrrrr"
    assert any(early) is is_early, early
    assert check_steps(store, make(2), frozen) == list(range(1, 13))


def test_what_was_changed_is_not_copied_early_again(store):
    _, early = trained(store, clipped_now_and_then)
    assert early == [0, 0, 0, *[6] * 4, 0, *[4] * 4]


def test_parameters_that_have_grown(store):
    """Their gradients have no room in the record that was expected."""
    torch.manual_seed(1)
    model = nn.ParameterDict({"weight": nn.Parameter(torch.randn(SIZE * SIZE))})
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.01)}

    def train(state, step):
        if step == 7:
            model["weight"].data = torch.randn(1000 * SIZE * SIZE)
        state["optimizer"].zero_grad()
        model["weight"].square().sum().backward()
        state["optimizer"].step()

    _, early = trained(store, train, state=state)
    assert early[3:6] == [1] * 3
    assert kinds(store) == "brrrrrbrrrrr"
    assert Store(store).verify().ok


def test_a_replica_is_brought_on_by_them(store):
    frozen, early = trained(store, plain, replica=True)
    assert early[3:7] == [6] * 4
    assert check_steps(store, build(2), frozen) == list(range(1, 13))


def test_memory_that_is_short(store):
    """Of two slots one has the newest state: there is often none while backward runs."""
    frozen, _ = trained(store, plain, waits=False, memory_bytes=5 << 20)
    assert check_steps(store, build(2), frozen) == list(range(1, 13))
    assert kinds(store) == "brrrrrbrrrrr"


def test_close_in_the_midst_of_a_step(store):
    state = build(1)
    with logged(store, state, layerwise=True) as saver:
        for step in range(1, 6):
            plain(state, step)
            saver.step(step)
        state["optimizer"].zero_grad()
        backward(state)
    plain(state, 6)  # nothing of everstep's is left on the parameters
    assert not any(each._post_accumulate_grad_hooks for each in state["model"].parameters())
    assert Store(store).verify().ok


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_copies_nothing(store):
    """Its memory for captures is the parent's."""
    state, frozen = build(1), {}
    with logged(store, state, layerwise=True) as saver:
        for step in range(1, 10):
            state["optimizer"].zero_grad()
            backward(state)
            if step > 5 and (child := os.fork()) == 0:
                layers = saver._captures._layerwise
                seen = layers._turns.total()
                state["optimizer"].zero_grad()
                backward(state)
                os._exit(layers._turns.total() != seen)
            assert step <= 5 or os.waitpid(child, 0)[1] == 0
            state["optimizer"].step()
            saver.step(step).wait()
            frozen[step] = snapshot(state)
        assert saver._captures._recorder.early
    assert check_steps(store, build(2), frozen) == list(range(1, 10))


def test_an_option_that_is_no_flag():
    with pytest.raises(TypeError, match="layerwise"):
        everstep.Log(layerwise="yes")


def in_a_group_of_two(store):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    how = {"strategy": everstep.Log(layerwise=True), "ranks": everstep.Ranks(alone=True)}
    with pytest.raises(everstep.Unsupported, match="and several ranks"):
        everstep.Checkpointer(store, build(1), **how)


def test_it_is_refused_where_gradients_are_reduced_by_hand(store):
    """Collectives count no write."""
    assert run(in_a_group_of_two, store).returncode == 0
