"""Logs of what other files of tests have each for itself: nodes, windows with raw
gradients and compared replicas, and the layouts where such logs are restored."""

import os

import pytest
import torch.distributed as dist
import zoo

from choices import chosen
from comparing import check_equal
from everstep import Checkpointer, Store, clip_grad_norm_, compress
from everstep.redo.clipping import Recording
from independent_reader import read_log
from stores import end_keeper

RECIPE = zoo.Recipe(grouped=False)
SLOW = pytest.mark.slow


@pytest.fixture
def store(tmp_path):
    path = tmp_path / "store"
    yield path
    for node in ("", "a", "b"):
        end_keeper(path, node)


def trains(layout, store, nodes, last, options, clips: bool | str = False, wanted=None):
    """From what is restored up to a step: where it began, the state then, the state after each
    step, and what failed. `clips`: or how gradients are compressed."""
    if nodes:
        os.environ["EVERSTEP_NODE"] = nodes[dist.get_rank()]
    job = zoo.build(layout, RECIPE)
    if isinstance(clips, str):
        compress(job.model, clips)
    recording = Recording()  # for as long as this is alive
    if clips is True:
        recording.set(True, pre_clip=True)
        weights = list(job.model.parameters())
        job.optimizer.register_step_pre_hook(lambda *_: clip_grad_norm_(weights, 0.1) and None)
    state = {"model": job.model, "optimizer": job.optimizer}
    options = {"strategy": "log", "base_every": 5, "when_full": "wait", **options}
    with Checkpointer(store, state, **chosen(**options)) as made:
        first = made.restore(wanted)
        begun, states, handles = job.full_state(), {}, []
        for step in range(first + 1, last + 1):
            job.train(step)
            handles.append(made.step(step))
            states[step] = job.full_state()
        made.wait()
    return first, begun, states, [str(each.error) for each in handles if each and each.error]


AUTO = {"strategy": "auto", "base_every": None}
"""What boxes and ZeRO take, which keep no logs."""

WINDOWS = [
    {"base_every": 6, "window": 3, "check": True},
    {"strategy": "spread", "every": 4, "window": 3, "check": True, "base_every": None},
]


@SLOW
@pytest.mark.parametrize("options", WINDOWS)
@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "hsdp"])
def test_raw_gradients_in_windows_of_compared_replicas(gang, store, layout, options):
    size = zoo.SIZES[layout]
    first, _, states, errors = gang.run(trains, layout, store, "", 14, options, True, size=size)[0]
    assert (first, errors) == (0, [])
    assert Store(store).verify().ok
    if options["base_every"]:
        read_log(store)
    steps = Store(store).steps()
    for other in ("dense", layout):
        for step in steps[-2:]:
            found = gang.run(trains, other, store, "", 0, {}, False, step, size=zoo.SIZES[other])[0]
            check_equal(found[1], states[step])


@SLOW
@pytest.mark.parametrize("options", WINDOWS)
@pytest.mark.parametrize("kind", ["bf16", "topk"])
def test_compressed_gradients_in_windows(gang, store, kind, options):
    _, _, states, errors = gang.run(trains, "ddp", store, "", 14, options, kind, size=2)[0]
    assert errors == []
    assert Store(store).verify().ok
    steps = Store(store).steps()[-3:]
    for other in ("dense", "fsdp2", "fsdp1_flat"):
        size = zoo.SIZES[other]
        for step in steps:
            found = gang.run(trains, other, store, "", 0, AUTO, False, step, size=size)[0]
            check_equal(found[1], states[step])


@SLOW
@pytest.mark.parametrize("options", [{"base_every": 6, "window": 3}, WINDOWS[1]])
@pytest.mark.parametrize("other", ["fsdp1", "fsdp1_flat", "zero1"])
def test_spread_bases_where_parameters_are_boxes(gang, store, other, options):
    _, _, states, errors = gang.run(trains, "fsdp2", store, "", 9, options, size=2)[0]
    assert errors == []
    step = Store(store).steps()[-1]
    found = gang.run(trains, other, store, "", 0, AUTO, size=2)[0]
    assert found[0] == step
    check_equal(found[1], states[step])
