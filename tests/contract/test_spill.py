"""The second memory: images go there while the arena is full, and are committed from there."""

import os
import signal

import pytest
import torch
from keepers import Process, Trainer, descriptors, ended, until
from runs import check_restored, check_same, checkpointer, end_keeper, freeze, restore, supervised
from test_bad_disk import mount, unmount
from torch import nn

import everstep
import forked
import forked_modules
import gated
import stores
from everstep import Checkpointer, Store, Tiers, Unavailable
from everstep.keeper.arena import Arena
from processes import stopped

PAGE = 4096


class Filler(Trainer):
    """Seals into whichever slot is free. Where it does not confirm, nothing is committed, as with a
    disk that hangs."""

    def __init__(self, store, directory, budget=None, **options):
        self.at = 0
        tiers = {"spill": str(directory), "spill_bytes": budget}
        super().__init__(store, tiers=tiers, **options)

    @property
    def slot(self):
        return self.at

    def put(self, step, follows=None):
        """Seal a step as soon as there is a slot; its sequence."""
        self.at = until(self.free_slots, f"no slot for step {step}")[0]
        return self.seal(step, follows=follows)

    def free_slots(self):
        slot = self.arena.free_slot()
        return [] if slot is None else [slot]

    def confirm_all(self):
        """Whatever was asked, and will be."""
        self.confirms = True
        for event in [each for each in self.events if each["type"] == "written"]:
            self.client.confirm(event["sequence"], None)


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "second"
    path.mkdir()
    return path


def spilled_bytes(keeper):
    """What a keeper's files without a name take, at one moment."""
    with stopped(keeper):
        named = descriptors(keeper).items()
        fds = [fd for fd, name in named if "(deleted)" in name and "memfd:" not in name]
        found = {}
        for fd in fds:
            each = os.stat(f"/proc/{keeper}/fd/{fd}")
            found[each.st_ino] = each.st_blocks * 512  # a mapping has its own, too
    return sum(found.values())


def test_images_move_while_the_arena_is_full(store, directory):
    with Filler(store, directory, confirms=False) as trainer:
        trainer.start()
        for step in range(1, 41):  # one hangs
            trainer.put(step)
        trainer.expect("spilled", count=37)
        assert Store(store).steps() == []
        assert os.listdir(directory) == []
        assert spilled_bytes(trainer.keeper) >= 37 * trainer.layout.size
        trainer.confirm_all()
        trainer.expect("local", trainer.sequence)
        assert Store(store).steps() == list(range(1, 41))
        until(lambda: spilled_bytes(trainer.keeper) <= 2 * PAGE, "memory is given back")
    assert Store(store).verify().ok
    assert_contents(store, range(1, 41))


def assert_contents(store, steps):
    """These steps have the bytes that were sealed."""
    for step in steps:
        found = Store(store).read(step)
        for spec in stores.SMALL:
            read = found[spec.name].contiguous().view(-1).numpy().tobytes()
            assert read == stores.content(spec, step), step


def test_the_budget_is_not_passed(store, directory):
    with Filler(store, directory, confirms=False) as trainer:
        trainer.start()
        size = trainer.arena.documents_size + trainer.arena.image_size + PAGE
    end_keeper(store)
    with Filler(store, directory, 3 * size, confirms=False) as trainer:
        trainer.start()
        for step in range(1, 7):
            trainer.put(step)
        trainer.expect("spilled", count=3)
        until(lambda: trainer.arena.free_slot() is None, "the arena is full")
        assert spilled_bytes(trainer.keeper) <= 3 * size
        trainer.confirm_all()
        for step in range(7, 20):
            trainer.put(step)
            assert spilled_bytes(trainer.keeper) <= 3 * size
        trainer.expect("local", trainer.sequence)
    assert Store(store).steps() == list(range(1, 20))
    assert_contents(store, range(1, 20))


@pytest.mark.parametrize("times", [1, 3])
def test_the_next_keeper_goes_on_with_what_was_spilled(store, directory, times):
    """In the order in which it was sealed: each record follows the one before it."""
    with Filler(store, directory, confirms=False) as trainer:
        trainer.start()
        trainer.put(1)
        for step in range(2, 11):
            trainer.put(step, follows=step - 1)
        trainer.expect("spilled", count=7)
        for _ in range(times):
            keeper = trainer.keeper
            os.kill(keeper, signal.SIGKILL)
            until(lambda keeper=keeper: trainer.keeper != keeper, "another keeper")
            trainer.expect("written", 1, count=1)
        trainer.confirm_all()
        for step in range(11, 16):
            trainer.put(step, follows=step - 1)
        trainer.expect("local", trainer.sequence)
        failed = [event for event in trainer.events if event["type"] == "failed"]
        assert not failed
    assert Store(store).steps() == list(range(1, 16))


FILLS = """
from test_spill import Filler
trainer = Filler(sys.argv[1], DIRECTORY, confirms=False).start()
for step in range(1, 11):
    trainer.put(step)
trainer.expect("spilled", count=7)
print(trainer.keeper, flush=True)
sys.stdin.read()
"""


def test_a_trainer_that_dies_loses_nothing_that_was_spilled(store, directory):
    process = Process(store, FILLS.replace("DIRECTORY", repr(str(directory))))
    keeper = int(process.read())
    process.kill()
    until(lambda: Store(store).steps() == list(range(1, 11)), "the keeper finishes")
    assert_contents(store, range(1, 11))
    until(lambda: spilled_bytes(keeper) == 0, "all memory is given back")


@pytest.mark.slow
def test_nothing_is_left_behind_when_both_die(store, directory):
    process = Process(store, FILLS.replace("DIRECTORY", repr(str(directory))))
    keeper = int(process.read())
    os.kill(keeper, signal.SIGKILL)
    process.kill()
    assert ended(keeper)
    assert os.listdir(directory) == []
    with Trainer(store) as trainer:
        assert trainer.client.settle() == []


def test_a_full_directory_holds_training_up_and_nothing_else(store, tmp_path):
    path = tmp_path / "small"
    mount(path, "size=256k")
    try:
        with Filler(store, path, 1 << 30, confirms=False) as trainer:
            trainer.start()
            size = trainer.arena.documents_size + trainer.arena.image_size + PAGE
            steps = range(1, (256 << 10) // size + trainer.arena.slot_count + 1)
            for step in steps:
                trainer.put(step)
            until(lambda: trainer.arena.free_slot() is None, "all is full")
            trainer.confirm_all()
            trainer.expect("local", trainer.sequence)
        assert Store(store).steps() == list(steps)
        assert_contents(store, steps)
    finally:
        end_keeper(store)
        unmount(path)


def test_a_directory_that_does_not_serve_is_refused(store, tmp_path):
    for path in (tmp_path / "missing", "/proc"):
        with pytest.raises(Unavailable, match="spilling to"):
            Checkpointer(store, {"x": 1}, tiers=Tiers(spill=path))
    with pytest.raises(ValueError, match="spill_bytes"):
        Tiers(spill=tmp_path, spill_bytes=0)


def test_a_file_with_a_name_is_no_arena_of_the_spill(tmp_path):
    path = tmp_path / "arena"
    arena = Arena.create(1, 4096, 4096, str(tmp_path))
    Arena(os.dup(arena.fd)).close()
    path.write_bytes(os.pread(arena.fd, os.fstat(arena.fd).st_size, 0))
    with pytest.raises(everstep.Corrupt):
        Arena(os.open(path, os.O_RDWR))


# ---- with a true trainer -------------------------------------------------------------------------


@pytest.fixture
def gate(tmp_path, monkeypatch):
    """While this file is there, nothing becomes durable."""
    path = tmp_path / "gate"
    forked_modules.begin_with(monkeypatch, gated.shut, str(path))
    return path


def build(seed):
    torch.manual_seed(seed)
    model = nn.Linear(6, 8000)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


@pytest.mark.parametrize("strategy", ["full", "log"])
def test_training_does_not_wait_for_a_disk_that_hangs(store, directory, gate, strategy):
    state, frozen = build(1), {}
    options = {"strategy": strategy, "tiers": Tiers(spill=directory)}
    with checkpointer(store, state, **options) as saver:
        saver.save(1).wait("local")
        frozen[1] = freeze(state)
        gate.touch()
        for step in range(2, 21):  # hangs here where nothing is spilled
            supervised(state)
            saver.step(step)
            frozen[step] = freeze(state)
        assert Store(store).latest() == 1
        assert saver.metrics.spills >= 15
        gate.unlink()
        saver.wait("local")
        assert saver.metrics.failures == saver.metrics.skips == 0
    assert Store(store).steps() == list(range(1, 21))
    for step in (2, 9, 18, 20):
        check_restored(store, build(2), frozen[step], step)


def spills_and_dies(store, directory, gate):
    state = build(1)
    saver = checkpointer(store, state, strategy="full", tiers=Tiers(spill=directory))
    saver.save(1).wait("local")
    gate.touch()
    for step in range(2, 16):
        supervised(state)
        saver.step(step)
        if step == 10:
            keeper = saver._client.keeper_pid
            os.kill(keeper, signal.SIGKILL)
            until(lambda old=keeper: saver._client.keeper_pid != old, "another keeper")
    saver._saves.newest.wait("held")
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_keeper_and_then_the_trainer_die_while_steps_are_in_the_spill(store, directory, gate):
    """All that was sealed becomes durable when the disk does its work again."""
    died = forked.run(spills_and_dies, store, directory, gate)
    assert died.returncode == -signal.SIGKILL, died
    assert Store(store).latest() == 1
    gate.unlink()
    until(lambda: Store(store).latest() == 15, "the keeper finishes")
    expected = build(1)
    for _ in range(14):
        supervised(expected)
    fresh = build(2)
    assert Store(store).steps() == list(range(1, 16))
    assert restore(store, fresh) == 15
    check_same(freeze(fresh), freeze(expected))
