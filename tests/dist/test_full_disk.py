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
from gang import Gang

from comparing import check_equal
from everstep import Store, Unavailable
from examples import slow
from stores import end_keeper


@pytest.fixture(scope="module")
def gang():
    with Gang(4) as made:
        yield made


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


def goes_on(small, to=None):
    """The step that is restored and the state there; then on to step `to`, if that is said."""
    job = zoo.build(LAYOUT, RECIPE)
    with opened(job, small / "store") as saver:
        first = saver.restore()
        found = job.full_state()
        for step in range(first + 1, (to or 0) + 1):
            job.train(step)
            saver.step(step).wait("local")
    return first, found


@pytest.fixture(scope="module")
def reference(gang):
    return gang.run(deaths.states, 3, size=2)[0]


@pytest.mark.parametrize("ranks", [2, *slow(4), 1])
def test_memory_holds_what_no_disk_took(gang, small, reference, ranks):
    assert all(outcome.killed for outcome in gang.outcomes(fails_and_dies, small, size=2))
    assert Store(small / "store").steps() == [1]
    for _ in range(2):  # who only looks takes nothing away
        (step, found), *others = gang.run(goes_on, small, size=ranks)
        assert [step] + [other for other, _ in others] == [3] * ranks
        check_equal(found, reference[3])
    (small / "filler").unlink()
    (step, found), *_ = gang.run(goes_on, small, 4, size=ranks)
    assert step == 3
    check_equal(found, reference[3])
    assert Store(small / "store").steps() == [1, 4]
    assert Store(small / "store").verify().ok


@pytest.mark.slow
def test_a_step_that_is_not_there_of_all_ranks_is_nothing(gang, small, reference):
    gang.outcomes(fails_and_dies, small, [1], size=2)
    (step, found), (other, _) = gang.run(goes_on, small, size=2)
    assert step == other == 2
    check_equal(found, reference[2])
