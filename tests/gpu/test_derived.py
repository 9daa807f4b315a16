"""Derived parts on a GPU."""

from functools import partial

import pytest
import torch
from test_cuda import build, check_steps, saved, state_bytes, train
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from comparing import kinds


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
def test_an_average_follows_at_the_replay(store, options, verify):
    state, derive = averaged(0, **options)
    log = {"strategy": "log", "verify": verify, "derive": derive}
    expected = saved(store, state, partial(train, state), 6, all_bytes, **log)
    assert kinds(store) == "brrrrr"
    fresh, derive = averaged(1, **options)
    check_steps(store, fresh, expected, all_bytes, derive=derive)
