"""Strategy auto: what it chooses, when, and that it changes nothing in what is restored."""

import pytest
import torch
from torch import nn

from choices import chosen
from everstep import Checkpointer, Store, Unsupported
from everstep.capture import auto
from everstep.capture.auto import Balance
from everstep.redo import kept


def run_of(seed, optimizer=torch.optim.AdamW):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    return {"model": model, "optimizer": optimizer(model.parameters())}


def train(state):
    loss = state["model"](torch.randn(8, 16)).square().mean()
    state["optimizer"].zero_grad()
    loss.backward()
    state["optimizer"].step()


def frozen(state):
    return [p.detach().clone() for p in state["model"].parameters()] + [
        value.clone()
        for kept in state["optimizer"].state.values()
        for value in kept.values()
        if isinstance(value, torch.Tensor)
    ]


def test_it_goes_over_to_a_log_and_every_step_is_exact(store, monkeypatch, caplog):
    monkeypatch.setattr(auto, "SAVES_MIN", 5)
    monkeypatch.setattr(auto, "SLOWER", float("inf"))  # a step takes no time here
    state, expected = run_of(1), {}
    with Checkpointer(store, state, strategy="auto") as checkpointer:
        assert not kept.is_wanted()  # which would cost memory for nothing
        for step in range(1, 21):
            train(state)
            checkpointer.step(step)
            expected[step] = frozen(state)
        assert kept.is_wanted()
    assert not kept.is_wanted()
    opened = Store(store)
    logs = [step for step in opened.steps() if opened.manifest(step).previous]
    assert opened.steps() == list(range(1, 21))
    assert logs
    assert min(logs) > 5
    assert "strategy auto goes to log" in caplog.text
    said = opened.manifest(20).capture
    assert said["strategy"] == "log"
    assert said["auto"]["reason"].startswith("log: ")
    assert opened.manifest(1).capture["strategy"] == "full"
    for step in (20, logs[0], 3):
        fresh = run_of(2)
        with Checkpointer(store, fresh) as restorer:
            assert restorer.restore(step) == step
        for found, wanted in zip(frozen(fresh), expected[step], strict=True):
            assert torch.equal(found, wanted)


def test_a_run_that_starts_again_goes_on_from_what_it_had_measured(store, monkeypatch):
    monkeypatch.setattr(auto, "SAVES_MIN", 5)
    monkeypatch.setattr(auto, "SLOWER", float("inf"))
    expected = {}
    for first in (1, 5, 9):  # each process has fewer saves than it takes
        state = run_of(first)
        with Checkpointer(store, state) as checkpointer:
            assert checkpointer.restore() == first - 1
            for step in range(first, first + 4):
                train(state)
                checkpointer.step(step)
                expected[step] = frozen(state)
    opened = Store(store)
    kinds = "".join("r" if opened.manifest(step).previous else "b" for step in range(1, 13))
    assert kinds[:4] == "bbbb"
    assert "r" in kinds[4:8]
    assert kinds[8:] == "brrr"
    for step in opened.steps():
        fresh = run_of(2)
        with Checkpointer(store, fresh) as restorer:
            assert restorer.restore(step) == step
        for found, wanted in zip(frozen(fresh), expected[step], strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    "said",
    [
        None,
        "log",
        {"saves_seen": 99, "state_bytes": 300, "record_bytes": "1"},
        {"saves_seen": 99, "state_bytes": 300, "record_bytes": 1, "refusal": "slow"},
    ],
)
def test_it_does_not_go_on_from_anything_else(said):
    balance = Balance(1)
    balance.resume(said)
    assert not balance.decide(100)
    balance.note_state(300, 100)
    balance.resume({"saves_seen": 99, "state_bytes": 1, "record_bytes": 1, "is_log": True})
    assert not balance.is_log
    assert balance.figures()["state_bytes"] == 300


@pytest.mark.parametrize(
    ("every", "state", "record", "is_log"),
    [(1, 300, 100, True), (3, 300, 100, False), (2, 300, 100, False), (2, 300, 40, True)],
)
def test_it_compares_bytes_per_step(every, state, record, is_log):
    chosen = Balance(every)
    for _ in range(auto.SAVES_MIN):
        assert not chosen.decide(100)
        chosen.note_state(state, record)
    assert chosen.decide(100) is is_log


@pytest.mark.parametrize(
    ("size", "said"),
    [(3_000_000, "MB a step: 1.0 in records"), (3000, "kB a step: 1.0 in records")],
)
def test_its_figures_are_not_all_zero(size, said):
    chosen = Balance(1)
    for _ in range(auto.SAVES_MIN):
        chosen.note_state(size, size // 3)
    assert said in chosen.weigh(100)[1]


def test_it_goes_back_only_when_the_log_is_clearly_dearer():
    chosen = Balance(1)
    for _ in range(auto.SAVES_MIN):
        chosen.note_state(300, 100)
    assert chosen.decide(1000)
    for _ in range(2 * auto.SAVES_MIN):
        chosen.note_record(210)  # 0.7: between the two bounds
        assert chosen.decide(1000)
    for _ in range(2 * auto.SAVES_MIN):
        chosen.note_record(280)
    assert not chosen.decide(1000)
    assert chosen.reason.startswith("full: ")


def test_where_no_log_is_possible_it_stays_full(store):
    state = run_of(1, torch.optim.LBFGS)
    weights = state["model"]
    with Checkpointer(store, state, strategy="auto") as checkpointer:

        def closure():
            state["optimizer"].zero_grad()
            loss = weights(torch.ones(2, 16)).square().mean()
            loss.backward()
            return loss

        state["optimizer"].step(closure)
        checkpointer.step(1).wait()
    assert Store(store).manifest(1).previous is None


def test_frozen_weights_keep_it_full(store, monkeypatch, caplog):
    monkeypatch.setattr(auto, "SAVES_MIN", 2)
    model = nn.Sequential(nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 2))
    state = {"model": model, "optimizer": torch.optim.SGD(model[1].parameters(), lr=0.1)}
    with Checkpointer(store, state, strategy="auto") as checkpointer:
        for step in range(1, 8):
            model(torch.randn(2, 64)).sum().backward()
            state["optimizer"].step()
            checkpointer.step(step)
    opened = Store(store)
    assert not any(opened.manifest(step).previous for step in opened.steps())
    assert "belong to no optimizer" in opened.manifest(7).capture["auto"]["reason"]
    assert "goes to log" not in caplog.text


class Memory:
    """What a library has beside the model, behind its own methods."""

    def __init__(self):
        self.rows = torch.zeros(300, 300)

    def state_dict(self):
        return {"rows": self.rows}

    def load_state_dict(self, state):
        self.rows = state["rows"]


@pytest.mark.parametrize("make", [Memory, lambda: {"rows": torch.zeros(300, 300)}])
def test_large_tensors_that_no_module_has_keep_it_full(store, other_store, monkeypatch, make):
    monkeypatch.setattr(auto, "SAVES_MIN", 2)

    def run(path, **options):
        state = {**run_of(1, torch.optim.AdamW), "memory": make()}
        with Checkpointer(path, state, **chosen(**options)) as checkpointer:
            for step in range(1, 8):
                state["model"](torch.randn(2, 16)).sum().backward()
                state["optimizer"].step()
                checkpointer.step(step)
        opened = Store(path)
        return [opened.manifest(step) for step in opened.steps()]

    manifests = run(store, strategy="auto")
    assert len(manifests) == 7
    assert not any(manifest.previous for manifest in manifests)
    assert manifests[-1].capture["auto"]["state_bytes"] > 360_000 - (64 << 10)
    with pytest.raises(Unsupported, match="belong to no optimizer"):
        run(other_store, strategy="log")


def test_it_leaves_a_log_for_good_where_steps_take_longer():
    chosen = Balance(1)
    for _ in range(auto.SAVES_MIN):
        chosen.note_step(1.0)
        chosen.note_state(300, 100)
    assert chosen.decide(100)
    for _ in range(auto.SAVES_MIN):
        assert chosen.decide(100)
        chosen.note_step(1.2)
        chosen.note_record(100)
    assert not chosen.decide(100)
    assert "1.20 times as long" in chosen.reason
    for _ in range(2 * auto.SAVES_MIN):
        chosen.note_state(300, 100)
        assert not chosen.decide(100)


def test_until_then_it_spreads(store):
    state = run_of(1)
    options = {"strategy": "auto", "every": 3, "window": 2, "when_full": "wait"}
    with Checkpointer(store, state, **chosen(**options)) as checkpointer:
        for step in range(1, 7):
            train(state)
            checkpointer.step(step)
        expected = frozen(state)
    assert [Store(store).manifest(step).is_spread for step in (3, 6)] == [False, True]
    assert Store(store).manifest(6).capture["strategy"] == "spread"
    fresh = run_of(2)
    with Checkpointer(store, fresh) as restorer:
        assert restorer.restore() == 6
    for found, wanted in zip(frozen(fresh), expected, strict=True):
        assert torch.equal(found, wanted)


class Coupled(torch.optim.SGD):
    """Each parameter's update depends on the gradients of all."""

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        scale = 0.1 / (1 + sum(p.grad.abs().sum() for p in parameters))
        for parameter in parameters:
            parameter.sub_(parameter.grad * scale)


def test_it_leaves_a_log_between_two_due_steps(store, monkeypatch):
    """No window begins where the other strategy would not have begun one."""
    state, expected = run_of(1, Coupled), {}
    wanted = False
    monkeypatch.setattr(
        Balance, "decide", lambda self, distance: setattr(self, "is_log", wanted) or wanted
    )
    options = {"strategy": "auto", "every": 4, "when_full": "wait"}
    with Checkpointer(store, state, **chosen(**options)) as checkpointer:
        for step in range(1, 17):
            wanted = 4 <= step < 9
            train(state)
            checkpointer.step(step)
            expected[step] = frozen(state)
    assert Store(store).steps() == [4, 5, 6, 7, 8, 12, 16]
    fresh = run_of(2, Coupled)
    with Checkpointer(store, fresh) as restorer:
        for step in Store(store).steps():
            assert restorer.restore(step) == step
            for found, known in zip(frozen(fresh), expected[step], strict=True):
                assert torch.equal(found, known)
