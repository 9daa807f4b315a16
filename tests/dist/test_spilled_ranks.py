"""Ranks of one node whose disk hangs: each spills its own part, over the death of the keeper."""

import os
import signal

import pytest
import torch.distributed as dist
import zoo
from jobs import RECIPE, attached, check_restored

import forked_modules
import gated
from everstep import Store, Tiers
from processes import until
from stores import keeper_pid

RANKS = 2
LAST = 14


def trains_while_the_disk_hangs(store, directory, gate):
    job, rank, states = zoo.build("fsdp2", RECIPE), dist.get_rank(), {}
    with attached(job, store, strategy="full", tiers=Tiers(spill=directory)) as saver:
        for step in range(1, LAST + 1):
            job.train(step)
            handle = saver.step(step)
            states[step] = job.full_state()
            if step == 1:
                handle.wait("local")
                gate.touch()
            dist.barrier()
            if step == LAST - 4 and rank == 0:
                os.kill(keeper_pid(store), signal.SIGKILL)
        assert saver.metrics.spills >= LAST - 8
        until(lambda: handle.times.get("held"), "the newest is not sealed")
        dist.barrier()
        if rank == 0:
            assert Store(store).steps() == [1]
            gate.unlink()
        saver.wait("local")
        assert saver.metrics.failures == 0
    return states


@pytest.mark.slow
def test_each_rank_spills_its_part(gang, store, tmp_path, monkeypatch):
    directory, gate = tmp_path / "second", tmp_path / "gate"
    directory.mkdir()
    forked_modules.begin_with(monkeypatch, gated.shut, str(gate))
    states = gang.run(trains_while_the_disk_hangs, store, directory, gate)[0]
    assert Store(store).steps() == list(range(1, LAST + 1))
    check_restored(gang, "ddp", store, {step: states[step] for step in (2, 7, LAST)}, size=1)
