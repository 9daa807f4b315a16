"""Data loaders: their position comes back, and their forked workers disturb nobody."""

import os
import signal
import threading

import pytest
import torch
from runs import bits, check_same, checkpointer, freeze, restore, supervised
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from examples import slow

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital'"),  # torchdata's own
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
]


class Numbers(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.tensor([index, torch.randint(0, 1000, ()).item()])


class Stream(IterableDataset):
    """A data set with a state of its own, which lives in the workers."""

    def __init__(self, count):
        self.count, self.at = count, 0

    def __iter__(self):
        info = get_worker_info()
        while self.at < self.count:
            self.at += 1
            yield torch.tensor([self.at, info.id if info else -1])
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.parametrize("kind", [Numbers, Stream])
@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_data_loader(store, kind, workers):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def build(seed):
        torch.manual_seed(seed)
        options = {"shuffle": True} if kind is Numbers else {}
        generator = torch.Generator().manual_seed(seed)
        loader = torchdata.StatefulDataLoader(
            kind(24), batch_size=2, num_workers=workers, generator=generator, **options
        )
        return {"loader": loader}

    def drawn(batches):
        """Indices, and what the trainer draws meanwhile, from the generator that is everybody's."""
        return [(bits(batch[:, 0]), torch.rand(1).item()) for batch in batches]

    first = build(1)
    with checkpointer(store, first) as saver:
        batches = iter(first["loader"])
        drawn(next(batches) for _ in range(4))
        saver.save(1).wait("local")
        rest = drawn(batches)
    assert len(rest) == 8 if kind is Numbers or not workers else 20
    second = build(2)
    with checkpointer(store, second) as restorer:
        assert restorer.restore() == 1
        assert drawn(second["loader"]) == rest


@pytest.mark.parametrize("cut", [6, *slow(4, 7)])  # 6: after an epoch's last batch
@pytest.mark.parametrize(
    ("workers", "given"),
    [
        (0, "none"),
        (0, "one"),
        (0, "saved twice"),
        pytest.param(2, "one", marks=pytest.mark.slow),
        pytest.param(2, "none", marks=pytest.mark.slow),
    ],
)
def test_the_epochs_after_a_resume(store, workers, given, cut):
    """torchdata draws the seed of its workers and the order once more when it resumes."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def build(seed):
        torch.manual_seed(seed)
        generator = None if given == "none" else torch.Generator().manual_seed(seed)
        loader = torchdata.StatefulDataLoader(
            Numbers(12), batch_size=2, shuffle=True, num_workers=workers, generator=generator
        )
        return {"loader": loader} | ({"generator": generator} if given == "saved twice" else {})

    def run(state, done, save):
        """Batches up to the 19th: the order, what the data set draws, and what the trainer does."""
        drawn = []
        while done < 19:
            for batch in state["loader"]:
                done += 1
                drawn.append((bits(batch[:, 0]), bits(batch[:, 1]), torch.rand(1).item()))
                save(done)
                if done == 19:
                    break
        return drawn

    first = build(1)
    with checkpointer(store, first) as saver:
        expected = run(first, 0, saver.save)[cut:]
    second = build(2)
    with checkpointer(store, second) as restorer:
        assert restorer.restore(cut) == cut
        found = run(second, cut, lambda step: None)
    if workers:  # torchdata does not save their generators: exact from the next epoch on
        for drawn in (expected, found):
            drawn[: -cut % 6] = [(order, None, mine) for order, _, mine in drawn[: -cut % 6]]
    assert found == expected


def test_an_epoch_that_is_set_after_the_resume_counts(store):
    """The iterator is made when the loop begins, and not by restore()."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    sampler_kind = pytest.importorskip("torchdata.stateful_dataloader.sampler")

    def build():
        sampler = sampler_kind.StatefulDistributedSampler(Numbers(16), 2, 0)
        loader = torchdata.StatefulDataLoader(
            Numbers(16), batch_size=2, num_workers=2, sampler=sampler
        )
        return sampler, {"loader": loader}

    sampler, state = build()
    with checkpointer(store, state) as saver:
        sampler.set_epoch(3)
        batches = iter(state["loader"])
        next(batches)
        saver.save(1)
        rest = [bits(batch[:, 0]) for batch in batches]
    assert len(rest) == 3
    sampler, state = build()
    with checkpointer(store, state) as restorer:
        assert restorer.restore() == 1
        sampler.set_epoch(3)
        assert [bits(batch[:, 0]) for batch in state["loader"]] == rest


def test_a_sampler_that_cannot_resume_is_told(store, caplog):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    sampler = torch.utils.data.RandomSampler(Numbers(4))
    with checkpointer(store, {"loader": torchdata.StatefulDataLoader(Numbers(4), sampler=sampler)}):
        assert "cannot resume torch's RandomSampler" in caplog.text


class Slow(nn.Module):
    """Enough parameters for a copy that takes a while."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 500_000), nn.Linear(500_000, 1))

    def forward(self, inputs):
        return self.layers(inputs)


def test_workers_forked_while_saves_run(store):
    torch.manual_seed(0)
    model = Slow()
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1e-3)}
    previous = signal.getsignal(signal.SIGTERM)
    with checkpointer(store, state) as saver:
        keeper = saver._client.keeper_pid
        for step in range(1, 4):
            supervised(state)
            handle = saver.step(step)
            loader = DataLoader(Numbers(8), batch_size=2, num_workers=2)  # forks in its midst
            assert len(list(loader)) == 4
            handle.wait("local")
        frozen = freeze(state)
        assert saver._client.keeper_pid == keeper, "the keeper was not disturbed"
        assert saver.metrics.commits == 3
        assert saver.metrics.failures == 0
    assert signal.getsignal(signal.SIGTERM) == previous
    torch.manual_seed(1)
    state["model"].layers[1].reset_parameters()
    assert restore(store, state) == 3
    check_same(freeze(state), frozen)


def in_child(work):
    """The exit status of a forked child that does `work`."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_child_can_close_train_and_be_terminated(store):
    model = nn.Linear(6, 6)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with checkpointer(store, state) as saver:
        saver.step(1)

        def train_and_close():
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            state["optimizer"].step()  # no thread of the parent's is here to wait for
            saver.close()
            os._exit(3)

        def wait_for_the_end():
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(30)

        assert in_child(train_and_close) == 3
        assert in_child(wait_for_the_end) == -signal.SIGTERM
        supervised(state)
        saver.step(2).wait("local")
        assert saver.metrics.failures == 0


def test_a_users_handler_is_called_in_children_too(store):
    previous = signal.signal(signal.SIGTERM, lambda *_: os._exit(5))
    try:
        with checkpointer(store, {"x": 1}):
            assert in_child(lambda: os.kill(os.getpid(), signal.SIGTERM)) == 5
    finally:
        signal.signal(signal.SIGTERM, previous)


def test_closing_in_any_order_gives_the_signal_back(store, other_store):
    previous = signal.getsignal(signal.SIGTERM)
    first, second = checkpointer(store, {"x": 1}), checkpointer(other_store, {"x": 1})
    first.close()
    second.close()
    try:
        assert in_child(lambda: os.kill(os.getpid(), signal.SIGTERM)) == -signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, previous)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_that_has_begun_before_restore_is_told(store, workers, caplog):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    loader = torchdata.StatefulDataLoader(Numbers(24), batch_size=2, num_workers=workers)
    with checkpointer(store, {"loader": loader}) as saver:
        for _ in loader:
            saver.save(1).wait("local")
            break
        saver.restore()
        loader.state_dict()  # makes an iterator, which nobody has
        saver.restore()
        assert "a loop over it has begun" not in caplog.text
        batches = iter(loader)
        next(batches)
        saver.restore()
    assert "a loop over it has begun" in caplog.text
