"""The gang of these tests: its worlds, and what it says of failures, deaths and hangs."""

import ctypes
import os
import signal
import threading
import warnings

import pytest
import torch
import torch.distributed as dist
from gang import GangError
from torch.distributed._functional_collectives import wait_tensor


def adds(number):
    total = torch.tensor([number + dist.get_rank()])
    dist.all_reduce(total)
    assert int(os.environ["RANK"]) == dist.get_rank()
    return dist.get_world_size(), total


def test_a_world_of_any_size_for_each_call(gang):
    for size, total in ((4, 46), (2, 21), (3, 33), (1, 10), (4, 46)):
        assert gang.run(adds, 10, size=size) == [(size, torch.tensor([total]))] * size


def fails(rank, how):
    print(f"this is rank {dist.get_rank()}", "." * 4000, "up to its end")
    if dist.get_rank() == rank:
        if how == "raise":
            raise ValueError("not this one")
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "thread":
            thread = threading.Thread(target=lambda: 1 / 0)
            thread.start()
            thread.join()
            return
        if how == "warn":
            warnings.warn_explicit("old", DeprecationWarning, "x.py", 1, "everstep.x")
    dist.barrier()


def dies_in_gloo(folder, where):
    if dist.get_rank() == 1 and not (folder / "died").exists():
        (folder / "died").touch()
        if where == "thread":  # a thread of C, as gloo's are, that jumps to address 0
            ctypes.CDLL(None).pthread_create(ctypes.byref(ctypes.c_ulong()), None, None, None)
            signal.pause()
        torch.ops._c10d_functional.wait_tensor = lambda _: os.kill(os.getpid(), signal.SIGSEGV)
        wait_tensor(torch.zeros(1))
    return dist.get_rank()


@pytest.mark.parametrize("where", ["thread", "call"])
def test_a_crash_of_torchs_own_collectives_is_no_failure(gang, tmp_path, where):
    assert gang.run(dies_in_gloo, tmp_path, where, size=2) == [0, 1]
    assert (tmp_path / "died").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", "ValueError: not this one"),
        ("die", "rank 1 of 2 died: signal SIGKILL"),
        ("thread", "ZeroDivisionError"),
        ("warn", "DeprecationWarning: old"),
    ],
)
def test_a_failure_says_who_and_what(gang, how, said):
    with pytest.raises(GangError, match=said) as raised:
        gang.run(fails, 1, how, size=2)
    text = str(raised.value)
    if how in ("raise", "warn"):  # else rank 0 may be the first to notice
        assert text.index("rank 1 of 2") < text.index("rank 0 of 2")
    assert "test_gang.fails on 2 ranks" in text
    assert "rank 1 printed:\nthis is rank 1" in text
    assert "up to its end" in text
    assert ("rank 0 of 2 hung: it was at" in text) == (how in ("raise", "warn"))
    assert gang.run(adds, 1)[0][1].item() == 10  # it goes on


def hangs(rank):
    if dist.get_rank() == rank:
        threading.Event().wait()


@pytest.mark.slow
def test_a_hang_shows_the_stacks_of_those_who_hang(gang):
    with pytest.raises(GangError, match=r"rank 2 of 4 hung(.|\n)*in hangs") as raised:
        gang.run(hangs, 2, timeout=1)
    assert "returned: rank 0, 1, 3" in str(raised.value)
    assert "rank 3 of" not in str(raised.value)
