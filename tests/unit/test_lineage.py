"""Epochs and branches."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everstep.format.manifest import CheckpointName
from everstep.restore.choose import Candidate, candidates
from everstep.restore.restores import in_common
from everstep.sharding.world import World
from everstep.store import catalog, lineage, names
from everstep.store.lineage import Epoch
from everstep.tiers.disk import Disk
from stores import go_on, make_store

ONE, TWO = Epoch(1, None, 0), Epoch(2, 1, 80)


def current(epochs, checkpoints):
    """By rising step."""
    return [*lineage.current(epochs, sorted(checkpoints, reverse=True))][::-1]


def _names(epoch: int, *steps: int) -> list[CheckpointName]:
    return [CheckpointName(step, epoch) for step in steps]


def test_a_fork_leaves_a_branch_behind():
    checkpoints = _names(1, 1, 40, 80, 120) + _names(2, 81, 100)
    assert current({1: ONE, 2: TWO}, checkpoints) == _names(1, 1, 40, 80) + _names(2, 81, 100)


def test_the_newest_epoch_leads_before_its_first_checkpoint():
    assert current({1: ONE, 2: TWO}, _names(1, 40, 80, 120)) == _names(1, 40, 80)


def test_an_ancestor_counts_up_to_the_lowest_fork():
    epochs = {1: ONE, 2: TWO, 3: Epoch(3, 2, 10)}
    checkpoints = _names(1, 5, 20, 80) + _names(2, 90) + _names(3, 11)
    assert current(epochs, checkpoints) == _names(1, 5) + _names(3, 11)


def test_a_start_from_nothing_is_a_run_of_its_own():
    epochs = {1: ONE, 2: Epoch(2, None, 0)}
    assert current(epochs, _names(1, 1, 2)) == []


def test_the_higher_epoch_counts_where_both_have_a_step():
    assert current({1: ONE, 2: TWO}, _names(1, 80) + _names(2, 80)) == _names(2, 80)


def test_nothing():
    assert current({}, _names(1, 1)) == []
    assert current({1: ONE}, []) == []


@given(st.data())
def test_going_on_is_like_a_list_that_is_cut_and_extended(data):
    """The model: the run as a plain dict of steps; a fork forgets what is beyond it."""
    epochs: dict[int, Epoch] = {}
    checkpoints: list[CheckpointName] = []
    run: dict[int, CheckpointName] = {}
    for number in range(1, data.draw(st.integers(1, 5)) + 1):
        parent = data.draw(st.sampled_from([None, *run.values()]))
        fork = parent.step if parent else 0
        # a run goes on from what it restored: the parent's own line, up to the fork
        run = {step: name for step, name in run.items() if parent and step <= fork}
        epochs[number] = Epoch(number, parent.epoch if parent else None, fork)
        if parent:
            limits = _ancestors(epochs, number)
            run = {step: name for step, name in run.items() if name.epoch in limits}
        for step in sorted(data.draw(st.sets(st.integers(fork + 1, fork + 6), max_size=4))):
            name = CheckpointName(step, number)
            checkpoints.append(name)
            run[step] = name
        found = current(epochs, checkpoints)
        assert found == [run[step] for step in sorted(run)]


def _ancestors(epochs: dict[int, Epoch], number: int | None) -> set[int]:
    found = set()
    while number is not None:
        found.add(number)
        number = epochs[number].parent
    return found


@pytest.mark.parametrize("steps", [(1, 2, 3), (99_999_999, 100_000_000)])
def test_the_newest_is_found_without_asking_for_the_others(tmp_path, steps):
    trainer = make_store(tmp_path, list(steps[:-1]))
    go_on(trainer, steps[-2], [steps[-1]])
    for name in ("00000007-0002", "something else"):  # of a save that did not end; of nobody
        (tmp_path / names.CHECKPOINTS / name).mkdir()
    disk = Disk(tmp_path)
    found = catalog.newest_first(disk)
    assert next(found) == catalog.find(disk, None) == (steps[-1], 2)
    shutil.rmtree(tmp_path / names.CHECKPOINTS / str(CheckpointName(steps[-2], 1)))
    assert [name.step for name in found] == [*steps[:-2]][::-1]
    assert catalog.lineage(disk) == [*catalog.newest_first(disk)][::-1]


def test_a_replica_is_taken_before_its_log_unless_somebody_has_gone_on_elsewhere(tmp_path):
    trainer, newest = make_store(tmp_path, [1, 2, 3]), CheckpointName(3, 1)
    held = {newest: SimpleNamespace(log_digest="of the log", is_committed=True)}
    found = candidates(trainer.disk, None, held)
    assert [next(found).name, next(found).name] == [newest, newest]  # from memory, then its log
    assert [each.name.step for each in found] == [2, 1]
    held[CheckpointName(4, 1)] = SimpleNamespace(log_digest=None, is_committed=False)
    assert next(candidates(trainer.disk, None, held)).name == (4, 1)
    del held[CheckpointName(4, 1)]
    go_on(trainer, 2, [])
    assert [each.name.step for each in candidates(trainer.disk, None, held)] == [2, 1]


@given(st.lists(st.sets(st.integers(1, 12)), min_size=1, max_size=4))
def test_ranks_try_what_all_of_them_can_see_from_the_newest_on(seen):
    """Each rank in a thread, with a store as torch's process groups have."""
    store = torch.distributed.HashStore()

    def tried(rank: int) -> list[CheckpointName]:
        world = World(rank, len(seen), store)
        names = _names(1, *sorted(seen[rank], reverse=True))
        own = (Candidate(name, Disk("nowhere")) for name in names)
        return [each.name for each in in_common(world, lambda: own)]

    with ThreadPoolExecutor(len(seen)) as ranks:
        found = list(ranks.map(tried, range(len(seen))))
    common = sorted(set.intersection(*seen), reverse=True)
    assert found == [_names(1, *common)] * len(seen)
