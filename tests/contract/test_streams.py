"""Objects that give their content piece by piece: larger than memory, or rarely changing."""

import os
import resource
import signal

import pytest
import torch

import everstep
from everstep import Corrupt, EverstepError, Keep, Mismatch, Store, Tiers, Unsupported
from everstep.store import catalog, commit, retain
from everstep.tiers.tier import tier_at
from forked import Forked, run
from stores import end_keeper, packs_of


class Replay:
    """A replay buffer: tensors and bytes that follow from its version."""

    def __init__(self, version=0):
        self.version = version
        self.reads = 0
        self.loaded = []

    def stream(self):
        self.reads += 1
        generator = torch.Generator().manual_seed(self.version)
        yield "frames", (torch.randn(3, 700, 700, generator=generator) for _ in range(3))
        yield "empty", iter(())
        yield "flags", [torch.tensor(True), torch.arange(5, dtype=torch.bfloat16), torch.ones(0, 3)]
        yield "text", [b"version %d" % self.version, bytearray(b""), memoryview(b"x" * (5 << 20))]

    def load_stream(self, content):
        self.loaded = [(name, list(pieces)) for name, pieces in content]


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bytes(one) == bytes(other)


def check_loaded(replay, version):
    expected = [(name, list(pieces)) for name, pieces in Replay(version).stream()]
    assert [name for name, _ in replay.loaded] == ["frames", "empty", "flags", "text"]
    for (_, found), (_, pieces) in zip(replay.loaded, expected, strict=True):
        assert all(map(equal, found, pieces))
        assert len(found) == len(pieces)


def build(replay=None):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return {"model": model, "optimizer": optimizer, "replay": replay or Replay()}


def train(state):
    state["optimizer"].zero_grad()
    state["model"](torch.ones(4, 8)).square().mean().backward()
    state["optimizer"].step()


@pytest.fixture
def local(tmp_path):
    yield tmp_path / "store"
    end_keeper(tmp_path / "store")


@pytest.fixture(params=["directory", "bucket"])
def store(request, local):
    return local if request.param == "directory" else request.getfixturevalue("bucket")


def large_packs(path):
    return [name for name in packs_of(path) if (path / name).stat().st_size > 1 << 20]


@pytest.mark.parametrize("strategy", ["full", "spread", "log"])
@pytest.mark.parametrize("is_immutable", [False, True])
def test_it_is_written_where_its_version_changes(local, strategy, is_immutable):
    state = build()
    replay = state["replay"]
    replay.immutable = is_immutable
    with everstep.Checkpointer(local, state, strategy=strategy, keep=Keep(100)) as checkpointer:
        for step in range(1, 10):
            train(state)
            replay.version = step // 4
            checkpointer.step(step).wait(timeout=60)
    assert replay.reads == 3
    assert len(large_packs(local)) == 3
    for step in (3, 4, 9):
        state = build()
        with everstep.Checkpointer(local, state) as checkpointer:
            assert checkpointer.restore(step) == step
        check_loaded(state["replay"], step // 4)
    assert Store(local).verify().ok


def test_a_run_that_comes_back_does_not_write_it_again(store):
    for until in (2, 4):
        state = build(Replay(7))
        with everstep.Checkpointer(store, state, strategy="full") as checkpointer:
            start = checkpointer.restore()
            assert start == until - 2
            for step in range(start + 1, until + 1):
                train(state)
                checkpointer.step(step).wait(timeout=60)
        assert state["replay"].reads == (until == 2)
    check_loaded(state["replay"], 7)
    if not isinstance(store, str):
        assert len(large_packs(store)) == 1


def dies(store):
    state = build(Replay(1))
    with everstep.Checkpointer(store, state) as checkpointer:
        for step in (1, 2, 3):
            train(state)
            state["replay"].version = step
            handle = checkpointer.step(step)
        handle.wait(timeout=60)
        os.kill(os.getpid(), signal.SIGKILL)


def test_after_a_kill_it_comes_from_the_store(local):
    with Forked(dies, local) as process:
        assert process.wait() == -signal.SIGKILL
    state = build()
    with everstep.Checkpointer(local, state) as checkpointer:
        assert checkpointer.restore() == 3
    check_loaded(state["replay"], 3)


def test_it_goes_to_other_tiers_and_with_the_last_that_names_it(local, tmp_path):
    remote = str(tmp_path / "remote")
    state = build()
    tiers = Tiers(remote=remote)
    with everstep.Checkpointer(local, state, strategy="full", tiers=tiers) as checkpointer:
        for step in range(1, 5):
            train(state)
            state["replay"].version = step // 3
            checkpointer.step(step)
        checkpointer.wait("remote", timeout=60)
    end_keeper(local)
    assert Store(remote).verify().ok
    state = build()
    with everstep.Checkpointer(tmp_path / "other", state) as checkpointer:
        assert checkpointer.restore(4, from_store=remote) == 4
    end_keeper(tmp_path / "other")
    check_loaded(state["replay"], 1)
    disk = tier_at(local)
    retain.delete(disk, [name for name in catalog.committed(disk) if name.step < 4])
    assert len(large_packs(local)) == 1
    commit.claim_epoch(disk, 1, 4)
    retain.sweep(disk)
    assert Store(local).verify().ok


def test_damage_is_found(local):
    state = build()
    with everstep.Checkpointer(local, state) as checkpointer:
        train(state)
        checkpointer.step(1).wait(timeout=60)
    end_keeper(local)
    [path] = large_packs(local)
    with open(local / path, "r+b") as file:
        file.seek(9000)
        file.write(b"damage")
    assert not Store(local).verify().ok
    with (
        everstep.Checkpointer(local, build()) as checkpointer,
        pytest.raises(Corrupt),
    ):
        checkpointer.restore(1)


class Broken(Replay):
    def stream(self):
        yield "good", [b"some"]
        raise ValueError("of the user's")


def test_what_the_programs_own_code_raises_is_raised(local):
    state = build(Broken())
    with everstep.Checkpointer(local, state, strategy="full") as checkpointer:
        with pytest.raises(ValueError, match="of the user's"):
            checkpointer.save(1)
        state["replay"].__class__ = Replay
        checkpointer.save(2).wait(timeout=60)
    assert Store(local).steps() == [2]
    assert len(large_packs(local)) == 1


def test_an_immutable_one_that_fails_fails_the_save(local):
    state = build(Broken())
    state["replay"].immutable = True
    with everstep.Checkpointer(local, state, strategy="full") as checkpointer:
        with pytest.raises(EverstepError, match="of the user's"):
            checkpointer.save(1).wait(timeout=60)
        state["replay"].__class__ = Replay
        checkpointer.save(2).wait(timeout=60)
    assert Store(local).steps() == [2]


def test_bad_ones(local):
    state = build()
    state["replay"].version = object()
    with everstep.Checkpointer(local, state) as checkpointer:
        with pytest.raises((TypeError, ValueError, Unsupported), match=r"replay\.version"):
            checkpointer.save(1)
        state["replay"].version = 1
        checkpointer.save(2).wait(timeout=60)
    state = build()
    del state["replay"]
    with everstep.Checkpointer(local, state) as checkpointer, pytest.raises(Mismatch):
        checkpointer.restore()
    state = build()
    state["other"] = Replay()
    with everstep.Checkpointer(local, state) as checkpointer, pytest.raises(Mismatch):
        checkpointer.restore()


SIZE, PIECE = 8 << 30, 16 << 20


class Large:
    """More than memory should hold; each piece is one value."""

    version = 1

    def __init__(self, size):
        self.size, self.memory = size, torch.empty(PIECE // 4, dtype=torch.int32)

    def stream(self):
        yield "pieces", (self.memory.fill_(number) for number in range(self.size // PIECE))

    def load_stream(self, content):
        [(_, pieces)] = content
        count = 0
        for number, piece in enumerate(pieces):
            assert bool((piece == number).all())
            count += 1
        assert count == self.size // PIECE


def streams_much(store, size):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with everstep.Checkpointer(store, {"large": Large(size)}) as checkpointer:
        checkpointer.save(1).wait(timeout=600)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, flush=True)
        assert checkpointer.restore() == 1
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


@pytest.mark.parametrize(
    "size", [256 << 20, pytest.param(SIZE, marks=pytest.mark.slow)], ids=["small", "8GB"]
)
def test_it_takes_little_memory(local, size):
    for kib in run(streams_much, local, size).stdout.split():
        assert int(kib) < 300 << 10
