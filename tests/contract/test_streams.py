"""Objects that give their content piece by piece: larger than memory, or rarely changing."""

import json
import os
import resource
import signal
import subprocess
import sys
import threading

import pytest
import torch
from keepers import stopped, until

import everstep
from everstep import (
    Corrupt,
    EverstepError,
    Keep,
    Mismatch,
    Missing,
    Store,
    Tiers,
    Unavailable,
    Unsupported,
)
from everstep.capture.streams import write_stream
from everstep.cli.main import main
from everstep.format.manifest import CheckpointName
from everstep.state.streams import StreamState
from everstep.store import catalog, commit, retain
from everstep.tiers.disk import Disk
from everstep.tiers.tier import tier_at
from examples import slow
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
def local(stores):
    return stores("store")


@pytest.fixture(params=["directory", "bucket"])
def store(request, local):
    return local if request.param == "directory" else request.getfixturevalue("bucket")


def large_packs(path):
    return [name for name in packs_of(path) if (path / name).stat().st_size > 1 << 20]


@pytest.mark.parametrize("strategy", ["full", *slow("spread", "log")])
@pytest.mark.parametrize("is_immutable", [False, True])
def test_it_is_written_where_its_version_changes(local, strategy, is_immutable):
    state = build()
    replay = state["replay"]
    replay.immutable = is_immutable
    written = {}
    with everstep.Checkpointer(local, state, strategy=strategy, keep=Keep(100)) as checkpointer:
        for step in range(1, 10):
            train(state)
            replay.version = step // 4
            handle = checkpointer.step(step)
            handle.wait(timeout=60)
            written[step] = handle.bytes
    assert replay.reads == 3
    assert [step for step, size in written.items() if size > 1 << 20] == [1, 4, 8]
    assert len(large_packs(local)) == 3
    added = {step: catalog.added_bytes(Store(local).manifest(step)) for step in range(1, 10)}
    assert [step for step, size in added.items() if size > 1 << 20] == [1, 4, 8]
    for step in (3, 4, 9):
        state = build()
        with everstep.Checkpointer(local, state) as checkpointer:
            assert checkpointer.restore(step) == step
        check_loaded(state["replay"], step // 4)
    verdict = Store(local).verify()
    assert verdict.ok
    packs = [path for path in (local / "data").iterdir() if path.is_file()]
    assert verdict.bytes == sum(path.stat().st_size for path in packs)  # each once


def test_a_run_that_comes_back_does_not_write_it_again(store, capsys):
    for last in (2, 4):
        state = build(Replay(7))
        with everstep.Checkpointer(store, state, strategy="full") as checkpointer:
            start = checkpointer.restore()
            assert start == last - 2
            for step in range(start + 1, last + 1):
                train(state)
                checkpointer.step(step).wait(timeout=60)
        assert state["replay"].reads == (last == 2)
    check_loaded(state["replay"], 7)
    if not isinstance(store, str):
        assert len(large_packs(store)) == 1
    for step, share in ((1, 0), (4, 1)):
        main(["show", str(store), str(step), "--json"])
        said = json.loads(capsys.readouterr().out)["streams"]["replay"]
        assert said["size"] > 5 << 20
        assert said["referenced"] == share * said["size"]
        main(["show", str(store), str(step)])
        assert ("of an earlier checkpoint" in capsys.readouterr().out) == share


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
    commit.claim_epoch(disk, CheckpointName(4, 1))
    retain.sweep(disk)
    assert Store(local).verify().ok


def test_damage_is_found_and_another_tier_serves(local, tmp_path):
    tiers = Tiers(remote=tmp_path / "remote")
    with everstep.Checkpointer(local, build(Replay(3)), tiers=tiers) as checkpointer:
        checkpointer.save(1).wait("remote", timeout=60)
    end_keeper(local)
    [path] = large_packs(local)
    with open(local / path, "r+b") as file:
        file.seek(9000)
        file.write(b"damage")
    assert not Store(local).verify().ok
    with everstep.Checkpointer(local, build()) as checkpointer, pytest.raises(Corrupt):
        checkpointer.restore(1)
    end_keeper(local)
    state = build()
    with everstep.Checkpointer(local, state, tiers=tiers) as checkpointer:
        assert checkpointer.restore() == 1
    check_loaded(state["replay"], 3)


def breaks():
    yield "good", [b"some"]
    raise ValueError("of the user's")


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"stream": breaks}, ValueError, "of the user's"),
        ({"stream": breaks, "immutable": True}, EverstepError, "of the user's"),
        ({"stream": lambda: iter([("counts", [b"some", 5])])}, Unsupported, "'counts' is neither"),
        ({"version": object()}, (TypeError, ValueError, Unsupported), r"replay\.version"),
    ],
)
def test_what_fails_is_told_and_the_next_one_is_saved(local, change, error, match):
    state = build()
    vars(state["replay"]).update(change)
    with everstep.Checkpointer(local, state, strategy="full") as checkpointer:
        with pytest.raises(error, match=match):
            checkpointer.save(1).wait(timeout=60)
        vars(state["replay"]).clear()
        state["replay"].__init__(1)
        checkpointer.save(2).wait(timeout=60)
    assert Store(local).steps() == [2]
    assert len(large_packs(local)) == 1


def test_it_is_read_by_name_without_the_object(store, tmp_path, caplog):
    with everstep.Checkpointer(store, build(Replay(3))) as checkpointer:
        checkpointer.save(1, tag="best").wait(timeout=60)
    reader = Replay()
    reader.load_stream(Store(store).read_stream("replay", "best"))
    check_loaded(reader, 3)
    with pytest.raises(Missing, match=r"'model'.*its streams are \['replay'\]"):
        Store(store).read_stream("model")
    assert main(["export", str(store), "--to", "safetensors", str(tmp_path / "out")]) == 0
    assert "streams stay where they are: replay" in caplog.text


@pytest.mark.parametrize(
    "change", [lambda state: state.pop("replay"), lambda state: state.update(other=Replay())]
)
def test_a_state_that_has_other_streams(local, change):
    with everstep.Checkpointer(local, build()) as checkpointer:
        checkpointer.save(1)
    state = build()
    change(state)
    with everstep.Checkpointer(local, state) as checkpointer, pytest.raises(Mismatch):
        checkpointer.restore()


class Slow(Replay):
    """Is read while training goes on; what it has is changed meanwhile."""

    immutable = True

    def stream(self):
        self.is_read = threading.Event()
        self.may_go_on = threading.Event()
        yield "one", [b"%d" % self.version]
        self.is_read.set()
        assert self.may_go_on.wait(60)
        yield "two", [b"%d" % self.version]


def test_an_immutable_one_that_changes_while_it_is_read_fails_the_save(local):
    state = build(Slow(1))
    replay = state["replay"]
    with everstep.Checkpointer(local, state, strategy="full") as checkpointer:
        handle = checkpointer.save(1)
        until(lambda: replay.__dict__.get("is_read"), "the thread has begun")
        assert replay.is_read.wait(60)
        replay.version = 2
        replay.may_go_on.set()
        with pytest.raises(Unsupported, match="its version went from 1 to 2"):
            handle.wait(timeout=60)
        handle = checkpointer.save(2)
        until(lambda: not replay.may_go_on.is_set(), "the thread has begun again")
        replay.may_go_on.set()
        handle.wait(timeout=60)
    assert Store(local).steps() == [2]


ENDS = """
import concurrent.futures.thread as pools, sys, time, everstep

class Replay:
    version, immutable = 1, True
    def stream(self):
        yield "first", [bytes(5 << 20)]
        while not pools._shutdown:
            time.sleep(0.01)
        yield "second", [bytes(20 << 20)]
    def load_stream(self, content):
        pass

checkpointer = everstep.Checkpointer(sys.argv[1], {"replay": Replay()}, strategy="full")
checkpointer.save(1)
"""


def test_a_program_that_ends_meanwhile_streams_to_its_end(local):
    subprocess.run([sys.executable, "-c", ENDS, local], check=True, timeout=60)
    end_keeper(local)
    assert Store(local).steps() == [1]
    assert Store(local).verify().ok


def test_what_is_skipped_is_not_streamed(local):
    state = build()
    state["history"] = torch.zeros(300_000)
    with everstep.Checkpointer(
        local, state, strategy="full", when_full="skip", keep=Keep(100)
    ) as checkpointer:
        checkpointer.save(1).wait(timeout=60)
        with stopped(checkpointer._client.keeper_pid):
            for step in range(2, 10):
                state["replay"].version = step
                checkpointer.save(step)
        checkpointer.wait(timeout=60)
        assert checkpointer.metrics.skips
    assert state["replay"].reads == len(Store(local).steps())


def test_of_a_window_the_last_step_alone_streams(local):
    state = build()
    strategy = everstep.Spread(window=3)
    with everstep.Checkpointer(local, state, strategy=strategy, every=4) as checkpointer:
        for step in range(1, 9):
            state["replay"].version = step
            train(state)
            checkpointer.step(step)
        checkpointer.wait(timeout=60)
    assert len(Store(local).manifest(8).parts) > 1
    assert state["replay"].reads == len(large_packs(local)) == 2
    state = build()
    with everstep.Checkpointer(local, state) as checkpointer:
        assert checkpointer.restore(8) == 8
    check_loaded(state["replay"], 8)


class Full(Disk):
    """It takes what is large, and then no document."""

    def create(self, path, document):
        raise Unavailable(f"creating {path}: no space left")


def test_nothing_is_left_of_one_whose_table_has_no_place(tmp_path):
    with pytest.raises(Unavailable):
        write_stream(Full(tmp_path), CheckpointName(1, 1), StreamState("replay", Replay()), 0)
    assert not packs_of(tmp_path)


class Growing(Replay):
    """Its content is its history: a version says which only within one history."""

    def __init__(self):
        super().__init__()
        self.history = []

    def add(self, value):
        self.history.append(value)
        self.version = len(self.history)

    def stream(self):
        yield "history", [bytes(self.history)]

    def load_stream(self, content):
        [(_, [history])] = [(name, list(pieces)) for name, pieces in content]
        self.history = list(bytes(history))
        self.version = len(self.history)


def test_a_version_that_comes_again_after_a_restore_has_other_content(local):
    state = build(Growing())
    with everstep.Checkpointer(local, state, strategy="full", keep=Keep(100)) as checkpointer:
        for step in (1, 2, 3):
            state["replay"].add(step)
            checkpointer.save(step).wait(timeout=60)
        assert checkpointer.restore(2) == 2
        assert state["replay"].history == [1, 2]
        state["replay"].add(30)
        checkpointer.save(3).wait(timeout=60)
    state = build(Growing())
    with everstep.Checkpointer(local, state) as checkpointer:
        assert checkpointer.restore() == 3
    assert state["replay"].history == [1, 2, 30]


class Counting(Growing):
    """Its version counts the changes that this process has made."""

    def add(self, value):
        self.history.append(value)
        self.version += 1

    def load_stream(self, content):
        [(_, [history])] = [(name, list(pieces)) for name, pieces in content]
        self.history = list(bytes(history))


@pytest.mark.parametrize("strategy", ["full", *slow("log")])
def test_versions_that_begin_again_in_a_new_process_have_other_content(local, strategy):
    for step in (1, 2, 3):
        state = build(Counting())
        with everstep.Checkpointer(local, state, strategy=strategy) as checkpointer:
            assert checkpointer.restore() == step - 1
            assert state["replay"].history == list(range(1, step))
            train(state)
            state["replay"].add(step)
            checkpointer.save(step).wait(timeout=60)


def test_the_stream_of_another_store_is_written_here(local, tmp_path):
    other = tmp_path / "other"
    with everstep.Checkpointer(other, build(Replay(5))) as checkpointer:
        checkpointer.save(1).wait(timeout=60)
    end_keeper(other)
    state = build(Replay(5))
    with everstep.Checkpointer(local, state, strategy="full") as checkpointer:
        checkpointer.save(1).wait(timeout=60)
        assert checkpointer.restore(from_store=other) == 1
        checkpointer.save(2).wait(timeout=60)
    assert Store(local).verify().ok


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
@pytest.mark.slow
def test_it_takes_little_memory(local, size):
    for kib in run(streams_much, local, size).stdout.split():
        assert int(kib) < 300 << 10
