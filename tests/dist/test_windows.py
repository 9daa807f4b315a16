"""States of several ranks that are copied over several steps: restored to the bits of the run."""

import pytest
import torch
import zoo

from everstep import Checkpointer, Store
from everstep.store import catalog
from everstep.tiers.disk import Disk
from stores import end_keeper

RECIPE = zoo.Recipe()
LOG = {"strategy": "log", "base_every": 6, "window": 3}
SPREAD = {"strategy": "spread", "every": 4, "window": 3}
SLOW = [
    pytest.param(layout, marks=pytest.mark.slow)
    for layout in ("ddp", "hsdp", "tp", "fsdp_tp", "fsdp2")
]


def attached(job, store, **options):
    state = {"model": job.model, "optimizer": job.optimizer}
    return Checkpointer(store, state, **{"under_pressure": "wait", **options})


def trains(layout, store, last, options):
    """From what is restored up to a step: where it began, the losses, the full state of each step,
    and what failed."""
    job = zoo.build(layout, RECIPE)
    with attached(job, store, **options) as checkpointer:
        first = checkpointer.restore()
        losses, states, handles = [], {first: job.full_state()}, []
        for step in range(first + 1, last + 1):
            losses.append(job.train(step))
            handles.append(checkpointer.step(step))
            states[step] = job.full_state()
        checkpointer.wait()
        errors = [str(handle.error) for handle in handles if handle and handle.error]
        return first, losses, states, errors


def restores(layout, store, options, steps):
    """Where each restore came to, and the full state there."""
    job = zoo.build(layout, RECIPE)
    with attached(job, store, **options) as checkpointer:
        return [(checkpointer.restore(step), job.full_state()) for step in steps]


def equal(found, expected):
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert found[name].equal(tensor), name


def check(gang, layout, store, tmp_path, last, options):
    """A run that is stopped after `last` steps comes to the bits of one that is not, and each of
    its checkpoints to those of its step, on these ranks and on others."""
    size, straight = zoo.SIZES[layout], tmp_path / "straight"
    full = {"strategy": "full"}
    try:
        (_, losses, states, _), *_ = gang.run(trains, layout, straight, last + 3, full, size=size)
    finally:
        end_keeper(straight)
    first, before, found, errors = gang.run(trains, layout, store, last, options, size=size)[0]
    assert (first, before, errors) == (0, losses[:last], [])
    equal(found[last], states[last])
    assert Store(store).verify().ok
    saved = Store(store).steps()[-1]
    for other in ("dense", "fsdp2", "tp"):
        ((step, there), *_), *_ = gang.run(
            restores, other, store, options, [None], size=zoo.SIZES[other]
        )
        assert step == saved
        equal(there, states[step])
    steps = Store(store).steps()
    for step, there in gang.run(restores, layout, store, options, steps, size=size)[0]:
        equal(there, states[step])
    first, after, found, errors = gang.run(trains, layout, store, last + 3, options, size=size)[0]
    assert (first, after, errors) == (saved, losses[saved:], [])
    equal(found[saved], states[saved])
    equal(found[last + 3], states[last + 3])


def bases(store):
    """By step, of which steps the parts of a base beside a log's records are."""
    disk = Disk(store)
    found = {name.step: catalog.read_state(disk, name) for name in catalog.committed(disk)}
    return {step: [part.steps for part in state.parts] for step, state in found.items() if state}


@pytest.mark.parametrize("layout", ["fsdp2", *SLOW[:4]])
def test_bases_of_a_log_are_spread(gang, store, tmp_path, layout):
    check(gang, layout, store, tmp_path, 15, LOG)
    assert bases(store) == {7: [5, 6, 7], 13: [11, 12, 13]}
    manifests = [Store(store).manifest(step) for step in range(1, 16)]
    assert [step for step, each in enumerate(manifests, 1) if not each.records] == [1]


@pytest.mark.parametrize("layout", ["ddp", *SLOW[1:]])
def test_states_are_spread(gang, store, tmp_path, layout):
    check(gang, layout, store, tmp_path, 14, SPREAD)
    parts = [[part.steps for part in Store(store).manifest(s).parts] for s in (4, 8, 12)]
    assert parts == [[4], [6, 7, 8], [10, 11, 12]]


def averaged(job, layout, way):
    """An average of the weights, in the layout of these, and the rule that brings it forward."""
    weights = bare(job.model)
    if way == "model":
        ema = zoo.build(layout, RECIPE).model
        named = bare(ema)
    else:
        named = ema = {name: weight.detach().clone() for name, weight in weights.items()}

    @torch.no_grad()
    def rule(step):
        for name, weight in weights.items():
            named[name].lerp_(weight, 1 / (1 + step))

    return ema, named, rule


def derives(layout, store, way, steps, options, wanted=None):
    """From what is restored on; where that was, the averages there and at the end, what failed."""
    job = zoo.build(layout, RECIPE)
    ema, named, rule = averaged(job, layout, way)
    state = {"model": job.model, "optimizer": job.optimizer, "ema": ema}
    options = {"under_pressure": "wait", "derive": {"ema": rule}, **options}

    def averages():
        return {name: whole(tensor) for name, tensor in named.items()}

    with Checkpointer(store, state, **options) as checkpointer:
        first = checkpointer.restore(wanted)
        found, handles = averages(), []
        for step in range(first + 1, steps + 1):
            job.train(step)
            handles.append(checkpointer.step(step))
        checkpointer.wait()
        errors = [str(handle.error) for handle in handles if handle and handle.error]
        return first, found, averages(), errors


def bare(model):
    return {name.removeprefix("module."): each for name, each in model.named_parameters()}


def whole(tensor):
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


@pytest.mark.parametrize("audit", ["full", pytest.param("sample", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("layout", "way"),
    [
        ("ddp", "values"),
        pytest.param("ddp", "model", marks=pytest.mark.slow),
        pytest.param("fsdp2", "values", marks=pytest.mark.slow),
        pytest.param("fsdp2", "model", marks=pytest.mark.slow),
        pytest.param("hsdp", "model", marks=pytest.mark.slow),
    ],
)
def test_averages_are_derived_on_each_rank(gang, store, tmp_path, layout, way, audit):
    size, log = zoo.SIZES[layout], {**LOG, "audit": audit}
    straight = tmp_path / "straight"
    try:
        _, _, expected, _ = gang.run(
            derives, layout, straight, way, 12, {"strategy": "full"}, size=size
        )[0]
    finally:
        end_keeper(straight)
    (first, _, at, errors), *_ = gang.run(derives, layout, store, way, 9, log, size=size)
    assert (first, errors) == (0, [])
    assert bases(store) == {7: [5, 6, 7]}
    owned = {name for step in (3, 9) for name in held(store, step)}
    assert not any(name.startswith("ema.") for name in owned)
    other = "fsdp2" if layout == "ddp" else "ddp"
    (first, found, _, _), *_ = gang.run(derives, other, store, way, 0, log, size=zoo.SIZES[other])
    assert first == 9
    equal(found, at)
    (first, found, last, errors), *_ = gang.run(derives, layout, store, way, 12, log, size=size)
    assert (first, errors) == (9, [])
    equal(found, at)
    equal(last, expected)


def held(store, step):
    """The names of the tensors that a step brings itself."""
    disk = Disk(store)
    manifest = Store(store).manifest(step)
    return {name for part in manifest.all_parts for name in catalog.read_table(disk, part).tensors}
