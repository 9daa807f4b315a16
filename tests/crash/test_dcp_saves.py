"""A save by DCP while something fails, at each system call: a checkpoint is there, or none."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from faults import Fault
from sweep import Promises, sweep

from everstep import Keep, Store
from everstep.format.manifest import CheckpointName
from everstep.integrations import dcp as integration
from everstep.integrations.dcp import StorageReader, StorageWriter
from everstep.store import catalog
from examples import slow

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def save(disk, value):
    """By one rank, on that disk; raises what DCP wraps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(integration, "tier_at", lambda path: disk)
        state = {"w": torch.full((2000,), value), "v": torch.full((3,), value), "n": value}
        try:
            dcp.save(state, storage_writer=StorageWriter(disk.root, keep=Keep(last=2)))
        except dcp.api.CheckpointException as error:
            ((cause, _),) = error.failures.values()
            raise cause from None


def check_read(path):
    """What is the latest is of one save."""
    state = {"w": torch.zeros(2000), "v": torch.zeros(3), "n": None}
    dcp.load(state, storage_reader=StorageReader(path))
    assert {*state["w"].tolist(), *state["v"].tolist()} == {state["n"]}


@pytest.mark.parametrize(
    "fault", [Fault.KILL, *slow(Fault.EIO, Fault.ENOSPC, Fault.NO_SYNC, Fault.DEAD_DISK)]
)
def test_a_save_that_is_disturbed(folder, fault):
    def prepare(disk):
        save(disk, 1.0)
        save(disk, 2.0)
        return Promises({CheckpointName(2, 2)}, {1, 2})

    def action(disk, promises):
        save(disk, 3.0)
        newest = catalog.lineage(disk)[-1]
        promises.checkpoints = {newest}  # retention takes the one before the last
        promises.epochs.add(newest.epoch)

    def finish(disk):
        check_read(disk.root)
        assert len(Store(disk.root).steps()) == 2

    assert sweep(folder, prepare, action, fault, finish) > 20
