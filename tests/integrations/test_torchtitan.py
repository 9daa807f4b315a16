"""torchtitan's own Trainer and Llama, whole, on the CPU, with an FSDP2 of one rank."""

import os

import pytest
import torch

import everstep
import forked
from stores import end_keeper
from titans import check_trainer, config_of, on_the_cpu, watch_losses

pytest.importorskip("triton")
pytest.importorskip("torchtitan")


@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_trainer(tmp_path, kills):
    check_trainer(tmp_path, kills=kills)


@pytest.mark.slow
def test_what_runs_on_a_gpu(tmp_path):
    """All of it but the GPU."""
    check_trainer(tmp_path, method="spawn")


def trains_with(folder, manager, steps, options):
    """With torchtitan's own manager, or everstep's; prints all losses."""
    on_the_cpu()
    from torchtitan.components.checkpointer import CheckpointManager

    from everstep.integrations.torchtitan import EverstepCheckpointManager

    kind = {"own": CheckpointManager, "everstep": EverstepCheckpointManager}[manager]
    options = {"enable": True, "last_save_model_only": False, **options}
    trainer = config_of(folder, kind.Config(**options), steps=steps).build()
    watch_losses(trainer, lambda step, loss: print("loss", step, loss.item().hex(), flush=True))
    trainer.train()
    trainer.close()


def losses_of(*arguments):
    ended = forked.run(trains_with, *arguments)
    assert ended.returncode == 0, ended.stdout
    return [line for line in ended.stdout.splitlines() if line.startswith("loss")]


@pytest.mark.slow
def test_a_run_goes_on_from_torchtitans_own_checkpoint_and_is_exported_as_one(tmp_path):
    expected = losses_of(tmp_path / "whole", "own", 4, {})
    own, other = tmp_path / "own", tmp_path / "other"
    first = losses_of(own, "own", 2, {})
    taken = {
        "initial_load_path": f"{own}/checkpoint/step-2",
        "initial_load_model_only": False,
        "last_save_model_only": True,
    }
    try:
        assert first + losses_of(other, "everstep", 4, taken) == expected
        assert everstep.Store(other / "checkpoint").steps() == [3, 4]
        assert (other / "checkpoint-export" / "step-4" / ".metadata").is_file()
        assert losses_of(other, "everstep", 4, {"load_step": 3}) == expected[3:]
    finally:
        end_keeper(other / "checkpoint")


def says(folder):
    """What is refused, and that a disabled manager does nothing."""
    on_the_cpu()
    from torchtitan.components.checkpointer import BaseCheckpointManager

    from everstep.integrations.torchtitan import EverstepCheckpointManager

    def made(parts=1, **options):
        config = EverstepCheckpointManager.Config(**options)
        names = "dataloader", "optimizers", "lr_schedulers", "sd_adapter"
        others = dict.fromkeys(names) | {
            "states": {},
            "model_parts": [torch.nn.Linear(1, 1)] * parts,
        }
        return config.build(base_folder=str(folder), **others)

    for options in ({"parts": 2}, {"folder": "s3://there"}, {"create_seed_checkpoint": True}):
        try:
            made(**options)
        except everstep.Unsupported as error:
            print(error)
    disabled = made(enable=False)
    assert isinstance(disabled, BaseCheckpointManager)
    assert not disabled.load()
    assert not disabled.save(1)
    disabled.maybe_wait_for_saving()
    disabled.close()
    print(os.listdir(folder))


def test_what_has_no_counterpart_is_refused(tmp_path):
    ended = forked.run(says, tmp_path)
    assert ended.returncode == 0
    *refused, folder = ended.stdout.splitlines()
    for words, line in zip(("2 stages", "'s3://there' is remote", "seed"), refused, strict=True):
        assert words in line
    assert folder == "[]"
