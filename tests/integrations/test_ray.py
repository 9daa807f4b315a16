"""A TorchTrainer of Ray Train on this machine, one of whose workers is killed."""

import os
import signal
import sys

import pytest
import torch

import everstep
from stores import end_keeper

pytest.importorskip("ray.train")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Ray's own
    pytest.mark.timeout(400),  # it starts a dozen processes
]
STEPS = 8


@pytest.fixture
def ray(monkeypatch):
    import ray

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    here = os.pathsep.join(sys.path)
    options = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 100 << 20}
    ray.init(**options, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": here}})
    yield ray
    ray.shutdown()


def trains(config):
    """On each worker. The first is killed once, after a save that nobody has reported."""
    from ray import train

    from everstep.integrations.ray import report

    store, is_first = config["store"], train.get_context().get_world_rank() == 0
    torch.manual_seed(0)
    model = train.torch.prepare_model(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with everstep.Checkpointer(store, {"model": model, "optimizer": optimizer}) as checkpointer:
        start = checkpointer.restore()
        for step in range(start + 1, STEPS + 1):
            loss = model(torch.randn(4, 8)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            handle = checkpointer.step(step)
            if is_first and step == 5 and start == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            metrics = {"loss": loss.item(), "start": start}
            report(metrics, handle if step % 2 == 0 else None, store=store)
    lost = everstep.SaveHandle(STEPS + 1)
    lost.fail(everstep.Unavailable("the disk is full"))
    report(metrics, lost)


def train(ray, folder):
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    return TorchTrainer(
        trains,
        train_loop_config={"store": f"{folder}/store"},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(
            name="run",
            storage_path=f"{folder}/ray",
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


def undisturbed():
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        loss = model(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def test_a_killed_worker_resumes_and_the_checkpoint_names_a_durable_step(ray, tmp_path):
    from everstep.integrations.ray import Pointer

    store = tmp_path / "store"
    try:
        result = train(ray, tmp_path)
        assert result.error is None
        assert result.metrics["loss"] == undisturbed()
        assert result.metrics["start"] in (4, 5)
        assert [Pointer.of(each) for each, _ in result.best_checkpoints] == [
            Pointer(STEPS, str(store)),
            Pointer(STEPS + 1, error="the disk is full"),
        ]
        assert everstep.Store(store).latest() == STEPS
    finally:
        end_keeper(store)
