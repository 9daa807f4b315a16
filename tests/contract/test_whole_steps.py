"""Steps of a log that are made whole: they are the run's, and what is before them can go."""

import pytest
import torch
from runs import check_steps, logged, snapshot
from torch import nn
from wholes import advance, build, fill, same, tensors_of, train

import everstep
from everstep import Store, Unsupported
from everstep.format.manifest import CheckpointName
from everstep.restore.materialize import materialize
from everstep.tiers.disk import Disk
from examples import slow

CLIPS = {
    "torch": nn.utils.clip_grad_norm_,
    "everstep": everstep.clip_grad_norm_,
    "by value": nn.utils.clip_grad_value_,
}


@pytest.mark.parametrize(
    ("kind", "options", "clip"),
    [
        (torch.optim.AdamW, {"foreach": True}, "everstep"),
        (torch.optim.AdamW, {"fused": True}, None),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, "everstep"),
        (torch.optim.Adafactor, {}, None),
        *slow(
            (torch.optim.AdamW, {"foreach": False}, "torch"),
            (torch.optim.AdamW, {"amsgrad": True, "maximize": True}, "by value"),
            (torch.optim.SGD, {"momentum": 0.9, "fused": True}, "everstep"),
            (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}, "everstep"),
            (torch.optim.RAdam, {}, None),
            (torch.optim.Adagrad, {}, None),
        ),
    ],
    ids=str,
)
def test_what_is_made_whole_is_the_run(store, kind, options, clip):
    """Groups, a schedule, buffers; from a base, and from what was made whole before."""
    state, frozen, live = build(1, kind, **options), {}, {}
    with logged(store, state, base_every=100) as saver:
        for step in range(1, 13):
            train(state, CLIPS.get(clip))
            saver.step(step)
            live[step], frozen[step] = tensors_of(state), snapshot(state)
    for step in (7, 12):
        same(Store(store).read(step), live[step])  # replayed, and nothing is written
        assert Store(store).manifest(step).records
        made = materialize(Disk(store), CheckpointName(step, 1))
        assert made.exact
        assert made.hyperparameters == Store(store).manifest(step).hyperparameters
        same(Store(store).read(step), live[step])
    assert [manifest.step for manifest in Store(store).chain(11)] == [7, 8, 9, 10, 11]
    assert check_steps(store, build(2, kind, **options), frozen) == list(range(1, 13))
    assert Store(store).verify().ok


def test_the_settings_of_then_are_adopted(store):
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    torch.set_default_dtype(torch.float64)
    try:
        with logged(store, state := build(1)) as saver:
            frozen = advance(saver, state, range(1, 5))
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(torch.float32)
    assert materialize(Disk(store), CheckpointName(4, 1)).exact
    assert torch.get_num_threads() == threads
    assert torch.get_default_dtype() == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert frozen.keys() == {*check_steps(store, build(2), frozen)}
    finally:
        torch.set_default_dtype(torch.float32)


def test_where_denormals_were_flushed_it_is_not_exact(store, caplog):
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot")
    try:
        with logged(store, state := build(1)) as saver:
            advance(saver, state, range(1, 4))
    finally:
        torch.set_flush_denormal(False)
    Store(store).read(3)
    assert "it may not be just what the run had: denormals" in caplog.text
    assert not materialize(Disk(store), CheckpointName(3, 1)).exact


def test_a_log_has_no_state_of_its_own(store):
    fill(store)
    with pytest.raises(Unsupported, match=f"Make it whole with: everstep materialize {store} 4$"):
        Store(store).state(4)
    assert Store(store).state(1).step == 1
