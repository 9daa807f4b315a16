"""Checkpoints of FSDP1 and FSDP2 on two ranks, by DCP and whole, imported and trained on."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import zoo
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

from commands import run_json
from everstep import Checkpointer, Store
from examples import slow

RECIPE = zoo.Recipe(tied=True)
STEPS = 2
AFTER = range(STEPS + 1, STEPS + 4)


def saves(folder, layout, whole):
    job = zoo.build(layout, RECIPE)
    for step in range(1, STEPS + 1):
        job.train(step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of what it calls old
        if whole:
            _save_whole(folder, job)
        else:
            weights, moments = get_state_dict(job.model, job.optimizer)
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    return job.full_state(), [job.train(step) for step in AFTER]


def _save_whole(folder, job):
    with FullyShardedDataParallel.state_dict_type(job.model, StateDictType.FULL_STATE_DICT):
        weights = job.model.state_dict()
        moments = FullyShardedDataParallel.optim_state_dict(job.model, job.optimizer)
    if dist.get_rank() == 0:
        torch.save({"model": weights, "optimizer": moments}, folder)


def goes_on(store, layout):
    job = zoo.build(layout, RECIPE)
    job.train(7)
    with Checkpointer(store, {"model": job.model, "optimizer": job.optimizer}) as checkpointer:
        assert checkpointer.restore() == STEPS
        return [job.train(step) for step in AFTER]


@pytest.mark.parametrize("layout", ["fsdp2", *slow("fsdp1")])
def test_what_dcp_has_saved(gang, store, tmp_path, capsys, layout):
    (state, losses), *_ = gang.run(saves, tmp_path / "saved", layout, False, size=2)
    capsys.readouterr()
    said = run_json(capsys, "import", tmp_path / "saved", store, "--step", f"{STEPS}")
    assert (said["from"], said["left_out"]) == ("dcp", {})
    found = Store(store).read()
    for name, tensor in state.items():
        parameter, _, key = name.partition(":")
        stored = f"optimizer.model.{parameter}.{key}" if key else f"model.{parameter}"
        assert torch.equal(found[stored], tensor), name
    mine, *_ = gang.run(goes_on, store, layout, size=2)
    assert mine == losses
    for other, size in (("fsdp2", 2), ("dense", 1)):
        mine, *_ = gang.run(goes_on, store, other, size=size)
        assert mine == pytest.approx(losses, abs=1e-5)


def test_what_fsdp1_has_gathered(gang, store, tmp_path, capsys):
    """torch's own optim_state_dict() gives exp_avg_sq for exp_avg here: so the file counts."""
    gang.run(saves, tmp_path / "saved", "fsdp1", True, size=2)
    capsys.readouterr()
    said = run_json(capsys, "import", tmp_path / "saved", store, "--step", f"{STEPS}")
    assert (said["from"], said["left_out"]) == ("torch", {})
    saved, found = torch.load(tmp_path / "saved"), Store(store).read()
    for name, tensor in saved["model"].items():
        assert torch.equal(found[f"model.{name}"], tensor)
    for name, own in saved["optimizer"]["state"].items():
        for key, tensor in own.items():
            assert torch.equal(found[f"optimizer.model.{name}.{key}"], tensor)
    assert len(gang.run(goes_on, store, "fsdp1", size=2)[0]) == len(AFTER)
