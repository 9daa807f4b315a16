"""States of several ranks that are copied over several steps: restored to the bits of the run."""

import time

import pytest
import torch
import torch.distributed as dist
import zoo

from choices import chosen
from comparing import check_equal
from everstep import Checkpointer, Store
from everstep.store import catalog
from everstep.tiers.disk import Disk
from examples import slow
from stores import end_keeper

RECIPE = zoo.Recipe()
LOG = {"strategy": "log", "base_every": 6, "window": 3}
SPREAD = {"strategy": "spread", "every": 4, "window": 3}
LAYOUTS = ["ddp", *slow("fsdp2", "hsdp", "tp", "fsdp_tp")]


def attached(job, store, **options):
    state = {"model": job.model, "optimizer": job.optimizer}
    return Checkpointer(store, state, **chosen(**{"when_full": "wait", **options}))


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
    check_equal(found[last], states[last])
    assert Store(store).verify().ok
    saved = Store(store).steps()[-1]
    for other in ("dense", "fsdp2", "tp"):
        ((step, there), *_), *_ = gang.run(
            restores, other, store, options, [None], size=zoo.SIZES[other]
        )
        assert step == saved
        check_equal(there, states[step])
    steps = Store(store).steps()[2:8]
    for step, there in gang.run(restores, layout, store, options, steps, size=size)[0]:
        check_equal(there, states[step])
    first, after, found, errors = gang.run(trains, layout, store, last + 3, options, size=size)[0]
    assert (first, after, errors) == (saved, losses[saved:], [])
    check_equal(found[saved], states[saved])
    check_equal(found[last + 3], states[last + 3])


def bases(store):
    """By step, of which steps the parts of a base beside a log's records are."""
    disk = Disk(store)
    found = {name.step: catalog.read_state(disk, name) for name in catalog.committed(disk)}
    return {step: [part.steps for part in state.parts] for step, state in found.items() if state}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bases_of_a_log_are_spread(gang, store, tmp_path, layout):
    check(gang, layout, store, tmp_path, 15, LOG)
    assert bases(store) == {7: [5, 6, 7], 13: [11, 12, 13]}
    manifests = [Store(store).manifest(step) for step in range(1, 16)]
    assert [step for step, each in enumerate(manifests, 1) if not each.records] == [1]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "hsdp", "tp", "fsdp_tp"])
def test_states_are_spread(gang, store, tmp_path, layout):
    check(gang, layout, store, tmp_path, 14, SPREAD)
    parts = [[part.steps for part in Store(store).manifest(s).parts] for s in (4, 8, 12)]
    assert parts == [[4], [6, 7, 8], [10, 11, 12]]


def orthogonal(model_parameters):
    """Muon, of the matrices: it makes sums over whole ones."""
    return torch.optim.Muon([p for p in model_parameters if p.dim() == 2], lr=0.01)


MATRICES = zoo.Recipe(optimizer=orthogonal, grouped=False)


def trains_matrices(store, steps):
    """Restored after each: which tensors are others than they were then."""
    job, again = zoo.build("tp", MATRICES), zoo.build("tp", MATRICES)
    with attached(job, store, strategy="log", base_every=9) as checkpointer:
        states = {}
        for step in range(1, steps + 1):
            job.train(step)
            checkpointer.step(step)
            states[step] = job.full_state()
    found = {}
    with attached(again, store) as checkpointer:
        for step, then in states.items():
            assert checkpointer.restore(step, exact="require") == step
            now = again.full_state()
            found[step] = [name for name in then if not torch.equal(then[name], now[name])]
    return found


def test_gradients_that_are_placed_otherwise(gang, store):
    """torch replicates those of an embedding that is cut: Muon goes by where they are."""
    for found in gang.run(trains_matrices, store, 3, size=zoo.SIZES["tp"]):
        assert found == {1: [], 2: [], 3: []}


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
    options = {"when_full": "wait", "derive": {"ema": rule}, **options}

    def averages():
        return {name: whole(tensor) for name, tensor in named.items()}

    with Checkpointer(store, state, **chosen(**options)) as checkpointer:
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


@pytest.mark.slow
@pytest.mark.parametrize("verify", ["full", "rolling"])
@pytest.mark.parametrize(
    ("layout", "way"),
    [
        ("ddp", "values"),
        ("ddp", "model"),
        ("fsdp2", "values"),
        ("fsdp2", "model"),
        ("hsdp", "model"),
    ],
)
def test_averages_are_derived_on_each_rank(gang, store, tmp_path, layout, way, verify):
    size, log = zoo.SIZES[layout], {**LOG, "verify": verify}
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
    check_equal(found, at)
    (first, found, last, errors), *_ = gang.run(derives, layout, store, way, 12, log, size=size)
    assert (first, errors) == (9, [])
    check_equal(found, at)
    check_equal(last, expected)


def held(store, step):
    """The names of the tensors that a step brings itself."""
    disk = Disk(store)
    manifest = Store(store).manifest(step)
    return {name for part in manifest.all_parts for name in catalog.read_table(disk, part).tensors}


def surprised(store, last, options, at):
    """As `trains`, but before a step somebody on rank 1 writes to a weight what is there."""
    job = zoo.build("ddp", RECIPE)
    with attached(job, store, **options) as checkpointer:
        first = checkpointer.restore()
        handles = []
        for step in range(first + 1, last + 1):
            if step == at and dist.get_rank() == 1:
                with torch.no_grad():
                    next(job.model.parameters()).mul_(1.0)
            job.train(step)
            handles.append(checkpointer.step(step))
            checkpointer.wait()
        return [handle.step for handle in handles if handle and not handle.error], job.full_state()


def test_a_window_that_ends_on_one_rank_ends_on_all(gang, store):
    found = gang.run(surprised, store, 12, SPREAD, 7, size=2)
    assert [steps for steps, _ in found] == [[4, 8, 12], [4, 8, 12]]
    parts = [[part.steps for part in Store(store).manifest(s).parts] for s in (4, 8, 12)]
    assert parts == [[4], [8], [10, 11, 12]]
    ((step, there), *_), *_ = gang.run(restores, "tp", store, SPREAD, [None], size=2)
    assert step == 12
    check_equal(there, found[0][1])


def goes_on(layout, store, folder, last, options, at):
    """As `trains`; at a step all ranks wait until they may go on."""
    job = zoo.build(layout, RECIPE)
    with attached(job, store, **options) as checkpointer:
        first = checkpointer.restore()
        handles = []
        for step in range(first + 1, last + 1):
            job.train(step)
            handles.append(checkpointer.step(step))
            if step == at:
                checkpointer.wait()
                (folder / f"there-{dist.get_rank()}").touch()
                while not (folder / "go").exists():
                    time.sleep(0.01)
        checkpointer.wait()
        errors = [handle.step for handle in handles if handle and handle.error]
        return first, errors, job.full_state()


def wait_for(folder, ranks):
    end = time.monotonic() + 60
    while not all((folder / f"there-{rank}").exists() for rank in range(ranks)):
        assert time.monotonic() < end, "not all ranks have come"
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("options", "left"), [(SPREAD, 4), (LOG, 6)])
@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_a_rank_that_dies_within_a_window(gang, store, tmp_path, layout, options, left):
    """The window of step 8 (7) is begun at step 6 (5)."""
    size = zoo.SIZES[layout]
    gang.start(goes_on, layout, store, tmp_path, 14, options, 6, size=size)
    wait_for(tmp_path, size)
    gang.kill(1)
    (tmp_path / "go").touch()
    gang.finish(timeout=20)
    assert Store(store).steps()[-1] == left
    first, errors, found = gang.run(goes_on, layout, store, tmp_path, 14, options, 0, size=size)[0]
    assert (first, errors) == (left, [])
    assert Store(store).verify().ok
    expected = gang.run(trains, layout, tmp_path / "again", 14, {"strategy": "full"}, size=size)[0]
    end_keeper(tmp_path / "again")
    check_equal(found, expected[2][14])
    saved = Store(store).steps()[-1]
    (step, there), *_ = gang.run(restores, layout, store, options, [None], size=size)[0]
    assert step == saved
    check_equal(there, expected[2][saved])


@pytest.mark.slow
@pytest.mark.parametrize("options", [SPREAD, LOG])
def test_a_keeper_that_dies_within_a_window(gang, store, tmp_path, options):
    gang.start(goes_on, "ddp", store, tmp_path, 16, options, 6, size=2)
    wait_for(tmp_path, 2)
    end_keeper(store)
    (tmp_path / "go").touch()
    outcomes = gang.finish()
    assert [outcome.kind for outcome in outcomes] == ["returned"] * 2, outcomes
    found = outcomes[0].value[2]
    if options is SPREAD:
        assert Store(store).steps() == [4, 8, 12, 16]
    assert Store(store).steps()[-1] == 16
    assert Store(store).verify().ok
    ((step, there), *_), *_ = gang.run(restores, "tp", store, options, [None], size=2)
    assert step == 16
    check_equal(there, found)


def goes_by_the_first(store, last):
    """Ranks that have measured different things."""
    job = zoo.build("ddp", RECIPE)
    with attached(job, store, every=6) as checkpointer:
        pace = checkpointer._captures._copier._pace
        for step in range(1, last + 1):
            job.train(step)
            size = sum(parameter.nbytes for parameter in job.model.parameters())
            pace.overlap_s = 1.0  # copies of all take 2 or 5 steps
            pace.bytes_per_s = 3 * size / 2 / (2, 5)[dist.get_rank()]
            checkpointer.step(step)
        checkpointer.wait()
        return job.full_state()


@pytest.mark.slow
def test_all_ranks_go_by_what_the_first_has_measured(gang, store):
    expected = gang.run(goes_by_the_first, store, 30, size=2)[0]
    parts = {s: [p.steps for p in Store(store).manifest(s).parts] for s in Store(store).steps()}
    assert parts[6] == [6]
    assert parts[12] == [12]
    for step in (18, 24, 30):
        assert len(parts[step]) > 1, parts
    ((step, there), *_), *_ = gang.run(restores, "fsdp2", store, {"every": 6}, [None], size=4)
    assert step == 30
    check_equal(there, expected)


@pytest.mark.slow
def test_ranks_that_have_nothing_of_a_share(gang, store, tmp_path):
    check(gang, "ddp", store, tmp_path, 48, {"strategy": "spread", "every": 24, "window": 24})


@pytest.mark.slow
@pytest.mark.parametrize("options", [SPREAD, LOG])
def test_replicas_are_compared_in_windows(gang, store, options):
    options = {**options, "check": True}
    *_, errors = gang.run(trains, "ddp", store, 12, options, size=2)[0]
    assert errors == []
    manifests = [Store(store).manifest(step) for step in Store(store).steps()]
    assert bases(store) or any(len(manifest.parts) > 1 for manifest in manifests)
    assert Store(store).verify().ok
