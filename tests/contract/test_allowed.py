"""What a log records is known when the Checkpointer is made; auto saves the rest whole, and says
why."""

from functools import partial

import pytest
import torch
from logs import Plain, build, check_run, train, train_in_closure, write
from runs import check_steps, checkpointer, kinds, logged, snapshot
from torch import nn

import everstep
from everstep import Checkpointer, Store, Unsupported
from examples import slow

NAMES = [
    "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam",
    "RMSprop", "Rprop", "SGD",
]  # fmt: skip


class Words(nn.Module):
    """An embedding with sparse gradients, and a head."""

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


def words(seed, make=Words):
    torch.manual_seed(seed)
    model = make()
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def read(state, step=0):
    """One update on random rows."""
    state["optimizer"].zero_grad()
    state["model"](torch.randint(30, (4, 2))).square().mean().backward()
    state["optimizer"].step()


class Like(torch.optim.AdamW):
    """A subclass is not its base."""


def boxed(store, strategy):
    """Weights in one flat tensor, of which layout= tells."""
    state = {"model": nn.Linear(4, 4, bias=False)}
    state["optimizer"] = torch.optim.SGD(state["model"].parameters(), lr=0.1)
    ranks = everstep.Ranks(layout=lambda name, tensor: everstep.Shard.flat(name, (2, 8), tensor, 0))
    return Checkpointer(store, state, strategy=strategy, ranks=ranks)


@pytest.mark.parametrize("foreach", [False, *slow(True)])
def test_torchs_own_are_recorded(store, foreach):
    """Beside more statistics of BatchNorm than are looked at in a step: torch counts no write."""

    def make(seed):
        found = {}
        for name in NAMES:
            options = {} if name == "Rprop" else {"weight_decay": 0.01}
            kind = getattr(torch.optim, name)
            found[name] = build(seed, kind, foreach=foreach, **options)
        return found

    def train_all(state, step):
        for each in state.values():
            train(each)

    check_run(store, make, train_all, "brrrr", steps=5)


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        (torch.optim.LBFGS, {}, r"torch\.optim\.lbfgs\.LBFGS, whose updates"),
        (torch.optim.SparseAdam, {}, "whose updates nobody here knows"),
        (Like, {}, r"say so: strategy=everstep\.Log\(optimizers=\[Like\]\)"),
        (torch.optim.SGD, {"differentiable": True}, "makes differentiable updates"),
    ],
)
def test_an_optimizer_is_refused_at_once(store, kind, options, why):
    state = build(1, kind, **options)
    with pytest.raises(Unsupported, match=f"'optimizer' .*{why}"):
        Checkpointer(store, state, strategy="log")
    assert not store.exists()  # nothing was made yet


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_compiled_update_is_refused_at_once(store):
    state = build(1)
    state["optimizer"].step = torch.compile(state["optimizer"].step)
    with pytest.raises(Unsupported, match="is compiled"):
        Checkpointer(store, state, strategy="log")


@pytest.mark.parametrize("strategy", ["full", "spread", "auto"])
@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Like])
def test_other_strategies_save_it_whole(store, caplog, kind, strategy):
    make = partial(build, kind=kind)
    check_run(store, make, train_in_closure, "bbbbb", steps=5, strategy=strategy, base_every=None)
    if strategy == "auto":
        assert "strategy auto saves whole states: 'optimizer' is a" in caplog.text
        assert "'optimizer' is a" in Store(store).manifest(5).capture["auto"]["reason"]


class Lion(torch.optim.Optimizer):
    """As it stands on the web."""

    def __init__(self, parameters, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.1):
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                update = state["exp_avg"] * beta1 + p.grad * (1 - beta1)
                p.add_(update.sign_(), alpha=-group["lr"])
                state["exp_avg"].mul_(beta2).add_(p.grad, alpha=1 - beta2)


@pytest.mark.parametrize("kind", [Plain, Lion])
def test_on_the_users_word(store, kind):
    check_run(store, partial(build, kind=kind), train, "brrrrrrr", optimizers=[kind])


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_sparse_embedding_is_refused_at_once(store, kind):
    state = words(1, partial(Words, kind))
    with pytest.raises(Unsupported, match=r"'model\.words' was made with sparse=True"):
        Checkpointer(store, state, strategy="log")


def test_a_sparse_embedding_that_nobody_trains_is_taken(store):
    def make(seed):
        torch.manual_seed(seed)
        model = Words()
        model.words.weight.requires_grad_(False)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

    check_run(store, make, read, "brrrrrrr")


def test_one_optimizer_under_two_names(store):
    state = build(1)
    with pytest.raises(Unsupported, match="has two optimizers, 'optimizer' and 'twin'"):
        Checkpointer(store, {**state, "twin": state["optimizer"]}, strategy="log")


# ---- what shows later costs whole states -----------------------------------------------------


def test_a_gradient_that_turns_sparse(store, caplog):
    def train(state, step):
        state["model"].sparse = step > 4
        read(state)

    check_run(store, partial(words, make=Bare), train, "brrrbbbbb", steps=9)
    assert caplog.text.count("no record is made of step") == 3
    assert "sparse" in caplog.text
    assert "and from now on" in caplog.text
    assert "3 surprises" in Store(store).manifest(9).capture["reason"]


@pytest.mark.parametrize(
    ("strategy", "saved"), [("log", "bbbbbbbb"), ("auto", "bbbbbbbb")], ids=["log", "auto"]
)
def test_weights_that_are_always_changed_outside_of_updates(store, caplog, strategy, saved):
    def train_and_clamp(state, step):
        train(state)
        write(state, "in place")

    check_run(store, build, train_and_clamp, saved, strategy=strategy, base_every=None)
    assert caplog.text.count("no record is made of step") == 3
    assert "'model.0.weight' changed between two calls of 'optimizer'" in caplog.text


def test_a_base_interval_without_a_surprise_forgives(store, caplog):
    def clamp(state, step):
        train(state)
        if step in (3, 11, 19, 27):
            write(state, "in place")

    check_run(store, build, clamp, steps=30, base_every=3)
    assert caplog.text.count("no record is made of step") == 4
    assert "from now on" not in caplog.text
    assert kinds(store)[-3:].count("r") == 2


def test_windows_that_are_surprised(store, caplog):
    state, frozen = build(1), {}
    with checkpointer(store, state, strategy="spread", every=4, window=4) as saver:
        for step in range(1, 25):
            train(state)
            write(state, "in place")
            saver.step(step)
            frozen[step] = snapshot(state)
        capture = saver._captures.strategy.describe()
    assert check_steps(store, build(2), frozen) == [4, 8, 12, 16, 20, 24]
    assert capture["strategy"] == "full"
    assert caplog.text.count("no record is made of step") == 3


def test_a_surprise_at_the_very_end_is_saved(store):
    state, frozen = build(1), {}
    with logged(store, state) as saver:
        for step in range(1, 6):
            train(state)
            frozen[step] = snapshot(state)
            saver.step(step)
        write(state, "data")
        train(state)
        saver.save(6, tag="end").wait("local")
        frozen[6] = snapshot(state)
    assert kinds(store) == "brrrrb"
    check_steps(store, build(2), frozen)
