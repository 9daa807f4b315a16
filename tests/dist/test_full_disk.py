"""A disk that is full, for all ranks of a node: what it did not take is in the keeper's memory,
also when all ranks have died, and for another number of ranks."""

import os
import shutil
import subprocess

import deaths
import pytest
import torch.distributed as dist
import zoo
from deaths import LAYOUT, RECIPE, die, opened
from jobs import trains

from comparing import check_equal
from everstep import Store, Unavailable
from examples import slow
from stores import end_keeper


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "everstep-test", str(path)]
    if os.getuid() != 0 or not shutil.which("mount") or subprocess.run(command).returncode:
        pytest.skip("mounting is not allowed here")
    yield path
    end_keeper(path / "store")
    subprocess.run(["umount", "-l", str(path)], check=True)


def fill(path):
    with (path / "filler").open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return


def fails_and_dies(small, lonely=()):
    """Step 1 is durable, 2 and 3 are in memory only; of 3 nothing comes from the ranks `lonely`."""
    job, rank = zoo.build(LAYOUT, RECIPE), dist.get_rank()
    saver = opened(job, small / "store")
    for step in (1, 2, 3):
        job.train(step)
        if step == 3 and rank in lonely:
            dist.barrier()
            die()
        handle = saver.step(step)
        if step == 1:
            handle.wait("local")
        elif not (step == 3 and lonely):
            with pytest.raises(Unavailable, match="No space left"):
                handle.wait("local")
        dist.barrier()
        if step == 1 and rank == 0:
            fill(small)
        if step < 3:
            dist.barrier()
    if lonely:
        with pytest.raises(Unavailable):
            handle.wait("local")
    die()


@pytest.fixture(scope="module")
def reference(gang):
    return gang.run(deaths.states, 3, size=2)[0]


@pytest.mark.parametrize("ranks", [*slow(2, 4), 1])
def test_memory_holds_what_no_disk_took(gang, small, reference, ranks):
    store = small / "store"
    assert all(outcome.killed for outcome in gang.outcomes(fails_and_dies, small, size=2))
    assert Store(store).steps() == [1]
    for _ in range(2):  # who only looks takes nothing away
        run, *others = gang.run(trains, LAYOUT, store, size=ranks)
        assert [run.first] + [other.first for other in others] == [3] * ranks
        check_equal(run.begun, reference[3])
    (small / "filler").unlink()
    run, *_ = gang.run(trains, LAYOUT, store, 4, size=ranks, strategy="full")
    assert run.first == 3
    check_equal(run.begun, reference[3])
    assert Store(store).steps() == [1, 4]
    assert Store(store).verify().ok


@pytest.mark.slow
def test_a_step_that_is_not_there_of_all_ranks_is_nothing(gang, small, reference):
    gang.outcomes(fails_and_dies, small, [1], size=2)
    run, other = gang.run(trains, LAYOUT, small / "store", size=2)
    assert run.first == other.first == 2
    check_equal(run.begun, reference[2])
