"""Derived parts on a GPU."""

import pytest
import torch
from test_cuda import build, state_bytes, train
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import everstep


def averaged(seed, **options):
    state = build(seed, width=256, layers=2, **options)
    ema = AveragedModel(state["model"], multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    return {**state, "ema": ema}, {"ema": lambda step: ema.update_parameters(state["model"])}


def all_bytes(state):
    mean = {f"ema.{key}": tensor.cpu() for key, tensor in state["ema"].state_dict().items()}
    return state_bytes(state) | {
        name: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in mean.items()
    }


@pytest.mark.parametrize("verify", ["rolling", "full"])
@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=str)
def test_an_average_follows_at_the_replay(tmp_path, options, verify):
    state, derive = averaged(0, **options)
    expected = {}
    with everstep.Checkpointer(
        tmp_path / "run", state, derive=derive, strategy=everstep.Log(verify=verify)
    ) as checkpointer:
        for step in range(1, 7):
            train(state)
            checkpointer.step(step)
            expected[step] = all_bytes(state)
    store = everstep.Store(tmp_path / "run")
    manifests = [store.manifest(step) for step in range(1, 7)]
    assert [manifest.previous is None for manifest in manifests] == [True] + [False] * 5
    fresh, derive = averaged(1, **options)
    with everstep.Checkpointer(tmp_path / "run", fresh, derive=derive) as checkpointer:
        for step in range(6, 0, -1):
            assert checkpointer.restore(step) == step
            assert all_bytes(fresh) == expected[step], step
