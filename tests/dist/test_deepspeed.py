"""DeepSpeed's ZeRO on two ranks: killed, and restored into the same, others, and plain layouts."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
import zoo
from torch import nn
from zoo_model import BATCH, batch, decoder, loss_of, mean, optimizer_of

import everstep
from comparing import check_equal
from everstep import Checkpointer, Store
from stores import end_keeper

RECIPE = zoo.Recipe()
STEPS = 2
COMPILES_S = 400.0
"""DeepSpeed compiles an extension on a machine where it never ran."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def store(tmp_path, monkeypatch):
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    yield tmp_path / "store"
    end_keeper(tmp_path / "store")


class Job:
    """The model of the zoo in an engine. `frozen`: all numbers of a weight that is not trained."""

    def __init__(self, stage, dtype="float32", frozen=None, **options):
        import deepspeed

        model = decoder(RECIPE)
        if frozen is not None:
            nn.init.constant_(model.head.weight, frozen).requires_grad_(False)
        model.share = dist.get_world_size() / BATCH
        config = {
            "train_micro_batch_size_per_gpu": BATCH // dist.get_world_size(),
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": dtype == "bfloat16"},
            **options,
        }
        optimizer = optimizer_of(RECIPE, model)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def train(self, step):
        inputs, targets = batch(RECIPE, step)
        share = BATCH // dist.get_world_size()
        mine = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)
        loss = loss_of(self.engine(inputs[mine]).float(), targets[mine])
        self.engine.backward(loss)
        self.engine.step()
        losses = [None] * dist.get_world_size()
        dist.all_gather_object(losses, loss.item())
        return mean(losses)

    def checkpointer(self, store, strategy="full"):
        from everstep.integrations import deepspeed

        state, layout = deepspeed.parts(self.engine)
        return Checkpointer(store, state, strategy=strategy, ranks=everstep.Ranks(layout=layout))

    def whole(self):
        """All parameters, as the module has them and in fp32, by DeepSpeed's own means."""
        import deepspeed
        from deepspeed.utils import safe_get_full_fp32_param

        found = {}
        for name, parameter in self.engine.module.named_parameters():
            is_spread = hasattr(parameter, "ds_id")
            with deepspeed.zero.GatheredParameters([parameter], enabled=is_spread):
                found[name] = parameter.detach().clone()
            found[f"{name}:fp32"] = safe_get_full_fp32_param(parameter).clone()
        return found


def trains_plain():
    """The full state of the same training without DeepSpeed."""
    job = zoo.build("ddp", RECIPE)
    for step in range(1, STEPS + 1):
        job.train(step)
    return job.full_state()


def trains_and_dies(store, out, kind, strategy="full"):
    job = Job(*kind)
    checkpointer = job.checkpointer(store, strategy)
    for step in range(1, STEPS + 1):
        job.train(step)
        checkpointer.step(step)
    checkpointer.wait()
    whole = job.whole()
    losses = [job.train(step) for step in range(STEPS + 1, STEPS + 4)]
    torch.save((whole, losses, job.engine.global_steps), out / f"{dist.get_rank()}")
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def goes_on(store, kind, strategy="full"):
    job = Job(*kind)
    job.train(7)  # something else, which a restore has to undo
    with job.checkpointer(store, strategy) as checkpointer:
        step = checkpointer.restore(exact="require")
        steps = job.engine.global_steps
        whole = job.whole()
        return step, whole, [job.train(step) for step in range(STEPS + 1, STEPS + 4)], steps


def goes_on_plain(store, layout):
    job = zoo.build(layout, RECIPE)
    state = {"model": job.model, "optimizer": job.optimizer}
    with Checkpointer(store, state, strategy="full") as checkpointer:
        step = checkpointer.restore(only=["model", "optimizer"])
        return step, job.full_state(), [job.train(step) for step in range(STEPS + 1, STEPS + 4)]


KINDS = [(1, "float32"), (2, "float32"), (2, "bfloat16"), (3, "float32")]


def killed(gang, store, tmp_path, kind, strategy="full"):
    gang.start(trains_and_dies, store, tmp_path, kind, strategy, size=2, timeout=COMPILES_S)
    outcomes = gang.finish(COMPILES_S, grace=5)
    assert all(outcome.killed for outcome in outcomes), "\n".join(each.text for each in outcomes)
    return torch.load(tmp_path / "0")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}")
def test_a_killed_run_goes_on_in_the_same_and_in_plain_layouts(gang, store, tmp_path, kind):
    whole, losses, steps = killed(gang, store, tmp_path, kind)
    assert Store(store).verify().ok
    stored = Store(store).read()
    for name, tensor in whole.items():
        parameter, _, key = name.partition(":")
        if key == "fp32":
            assert torch.equal(stored[f"model.{parameter}"], tensor), name
    (step, found, after, counted), *_ = gang.run(goes_on, store, kind, size=2, timeout=COMPILES_S)
    assert (step, counted) == (STEPS, steps - 3)
    check_equal(found, whole)
    assert after == losses
    gang.kill()
    plain, *_ = gang.run(trains_plain, size=2)
    moments = {name: tensor for name, tensor in plain.items() if ":" in name}
    for layout, size in (("ddp", 2), ("dense", 1), ("fsdp2", 4)):
        (step, state, after), *_ = gang.run(goes_on_plain, store, layout, size=size)
        assert step == STEPS
        for name, tensor in whole.items():
            if name.endswith(":fp32"):
                assert torch.equal(state[name.removesuffix(":fp32")], tensor), name
        for name, tensor in moments.items():
            parameter, _, key = name.partition(":")
            assert torch.equal(state[name], stored[f"optimizer.model.{parameter}.{key}"]), name
            if kind[1] == "float32":
                assert torch.allclose(state[name], tensor, atol=2e-6), name
        if kind[1] == "float32":
            assert after == pytest.approx(losses, abs=1e-5)


def test_one_stage_goes_on_in_another(gang, store, tmp_path):
    whole, losses, _ = killed(gang, store, tmp_path, (2, "float32"))
    for stage, size in ((3, 2), (1, 2), (3, 4)):
        (step, found, after, _), *_ = gang.run(
            goes_on, store, (stage,), size=size, timeout=COMPILES_S
        )
        gang.kill()
        assert step == STEPS
        check_equal(found, whole)
        assert after == pytest.approx(losses, abs=1e-5)
