"""A fault at every system call of records that are committed together: what is there is always the
first so many of the chain, with the bytes that were sealed."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from faults import Fault, FaultySystem, Medium
from sweep import Promises, leaves, sweep

from everstep import Conflict, EverstepError, Unavailable, Unsupported
from everstep.format.manifest import CheckpointName
from everstep.keeper.writer import Outcome
from everstep.store import catalog, commit
from everstep.tiers.disk import Disk
from examples import slow
from stores import Trainer, content, image_of, make_store, packs_of

GROUP = (3, 4, 5, 6)
FAULTS = [Fault.KILL, *slow(*(fault for fault in Fault if fault is not Fault.KILL))]


@dataclass
class Prefix(Promises):
    """And nothing is missing in between, and all of it has the right bytes."""

    def check(self, base: Path) -> None:
        super().check(base)
        disk = Disk(base / "store")
        committed = catalog.committed(disk)
        assert [name.step for name in committed] == list(range(1, len(committed) + 1))
        layout = Trainer(disk).layout
        for name in committed:
            *_, manifest = catalog.read_chain(disk, name)
            (part,) = manifest.all_parts
            found = b"".join(disk.read(link.path) for link in part.packs)
            specs = layout.specs
            assert found == image_of(layout, {s.name: content(s, name.step) for s in specs})


def _begun(disk: Disk) -> Prefix:
    """A state and a record."""
    make_store(disk.root, [1], system=disk._system).record(2, follows=1)
    return Prefix({CheckpointName(1, 1), CheckpointName(2, 1)}, {1})


def _trainer(disk: Disk) -> Trainer:
    return Trainer(disk, epoch=1, parent=CheckpointName(2, 1), slots=8)


def _note(promises: Promises, steps: tuple[int, ...], ended: list[Outcome | Exception]) -> None:
    """What was told to be durable is promised; what failed ends the group. Raises its error."""
    failed = [isinstance(each, Exception) for each in ended]
    assert failed == sorted(failed)
    for step, each in zip(steps, ended, strict=False):
        if isinstance(each, Exception):
            raise each
        promises.checkpoints.add(CheckpointName(step, 1))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_group(folder, fault):
    def save(disk: Disk, promises: Promises) -> None:
        _note(promises, GROUP, _trainer(disk).group(GROUP))

    assert sweep(folder, _begun, save, fault, leaves(GROUP[-1])) > 40


@pytest.mark.parametrize("fault", slow(Fault.KILL, Fault.EIO))
def test_two_groups(folder, fault):
    """The second goes on from what became of the first."""

    def save(disk: Disk, promises: Promises) -> None:
        trainer = _trainer(disk)
        for steps in (GROUP[:2], GROUP[2:]):
            try:
                _note(promises, steps, trainer.group(steps))
            except EverstepError:
                if steps == GROUP[:2] and CheckpointName(4, 1) not in catalog.committed(disk):
                    with pytest.raises(EverstepError):
                        _note(promises, GROUP[2:], trainer.group(GROUP[2:]))
                raise

    assert sweep(folder, _begun, save, fault, leaves(GROUP[-1])) > 40


def test_what_a_group_shares(tmp_path):
    """Five syncs for a record: its data, data/, checkpoints/, its manifest, its directory. A group
    shares two of them; nothing else can be left out, as manifests lie in directories of their own,
    and each must be durable before the next."""
    system = FaultySystem(Medium(tmp_path))
    _begun(Disk(tmp_path / "store", system))
    trainer = _trainer(Disk(tmp_path / "store", system))
    trainer.group((3,))  # from now on the tier knows its directories

    def syncs(steps: tuple[int, ...]) -> list[str]:
        before = len(system.calls)
        assert all(isinstance(each, Outcome) for each in trainer.group(steps))
        return [call for call in system.calls[before:] if call.startswith("fsync")]

    assert len(syncs((4,))) == 5
    together = syncs((5, 6, 7, 8, 9))
    assert len(together) == 3 * 5 + 2
    assert ["safetensors" in call for call in together] == [True] * 5 + [False] * 12
    assert together.count("fsync data") == together.count("fsync checkpoints") == 1


@pytest.mark.parametrize("torn", [0, 1, 3])
def test_a_torn_record_in_a_group(tmp_path, torn):
    """The trainer says so of one: those before it are committed, and none after it."""
    _begun(Disk(tmp_path / "store"))
    trainer = _trainer(Disk(tmp_path / "store"))
    jobs = [trainer.seal(step, follows=step - 1) for step in GROUP]
    jobs[torn].answer("something has written to it")
    ended = trainer.commit_all(jobs)
    assert [isinstance(each, Outcome) for each in ended] == [at < torn for at in range(4)]
    assert isinstance(ended[torn], Unsupported)
    assert all(isinstance(each, Unavailable) for each in ended[torn + 1 :])
    assert all("which it follows, was not saved" in str(each) for each in ended[torn + 1 :])
    promises = Prefix({CheckpointName(step, 1) for step in (1, 2, *GROUP[:torn])}, {1})
    promises.check(tmp_path)
    assert len(packs_of(tmp_path / "store")) == 2 + torn
    assert isinstance(trainer.group((7,))[0], Unavailable)  # the chain has ended
    trainer.save(7)


def test_a_record_that_cannot_be_read_ends_the_group(tmp_path):
    _begun(Disk(tmp_path / "store"))
    trainer = _trainer(Disk(tmp_path / "store"))
    jobs = [trainer.seal(step, follows=step - 1) for step in GROUP]
    row = trainer.arena.row(jobs[2].slot)
    trainer.arena.descriptor(jobs[2].slot, row)[0] ^= 1
    ended = trainer.commit_all(jobs)
    assert len(ended) == 3  # the last has a turn of its own, and fails there
    assert [isinstance(each, Outcome) for each in ended] == [True, True, False]
    assert isinstance(trainer.commit_all(jobs[3:])[0], Unavailable)
    Prefix({CheckpointName(4, 1)}, {1}).check(tmp_path)


def test_a_group_that_was_committed_in_part(tmp_path):
    """By a keeper that died: what is there already is recognised, and the rest goes on from it."""
    disk = Disk(tmp_path / "store")
    _begun(disk)
    _trainer(disk).group(GROUP[:2])
    before = packs_of(disk.root)
    assert all(isinstance(each, Outcome) for each in _trainer(disk).group(GROUP))
    assert len(packs_of(disk.root) - before) == 2
    Prefix({CheckpointName(6, 1)}, {1}).check(tmp_path)


def test_a_superseded_writer_commits_no_group(tmp_path):
    disk = Disk(tmp_path / "store")
    _begun(disk)
    trainer = _trainer(disk)
    commit.claim_epoch(disk, CheckpointName(2, 1))
    assert isinstance(trainer.group(GROUP)[0], Conflict)
    assert len(packs_of(disk.root)) == 2
    assert catalog.committed(disk) == [CheckpointName(1, 1), CheckpointName(2, 1)]
