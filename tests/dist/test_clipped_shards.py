"""everstep.clip_grad_norm_ over ranks: torch's bytes, and records of what was there before."""

import contextlib
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import zoo
from torch.distributed.tensor import DTensor
from zoo_model import loss_of

from comparing import check_equal
from everstep import Checkpointer, EverstepError, Store, clip_grad_norm_
from everstep.format.tables import is_gradient
from everstep.redo import clipping
from everstep.redo.kept import Interest
from everstep.sharding.layout import local_of
from everstep.store.catalog import read_table
from everstep.tiers.disk import Disk
from examples import slow

STEPS = 6
MAX_NORM = 0.05
RECIPE = zoo.Recipe()
torch_clip = torch.nn.utils.clip_grad_norm_
SHARDED = [
    "fsdp2",
    *slow("tp", "hsdp", "fsdp_tp"),
]
SIZES = {**zoo.SIZES, "fsdp2": 2}


def lists_of(model, least=0):
    """The parameters that torch can clip together: those of one mesh, and those of none."""
    lists = {}
    for parameter in model.parameters():
        if parameter.numel() >= least:
            lists.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(lists.values())


def backward(job, step, micro_batches=1):
    for _ in range(micro_batches):
        inputs, targets = job.batch(step)
        loss = loss_of(job.model(inputs), targets) / micro_batches
        loss.backward()
    return loss.item()


def bytes_of(tensor):
    memory = local_of(tensor).detach().contiguous()
    return bytes(memory.view(-1).view(torch.uint8).numpy()) if memory.numel() else b""


def seen(tensor):
    """All that can be told of it here."""
    memory = local_of(tensor)
    placed = (tensor.placements, tensor.device_mesh) if isinstance(tensor, DTensor) else None
    forms = tensor.shape, tensor.stride(), memory.shape, memory.stride(), memory.dtype
    return type(tensor), str(placed), forms, bytes_of(tensor)


def clips_as_torch(layout, keep_views, options):
    """Whether results are torch's; how many gradients were kept, and how many of them copied."""
    mine, theirs = zoo.build(layout, RECIPE), zoo.build(layout, RECIPE)
    counts = Counter()
    interest = Interest()
    interest.set(True)
    for step in range(1, 4):
        for job in (mine, theirs):
            backward(job, step, micro_batches=step)
        held = [local_of(p.grad)[:1] for p in mine.model.parameters()] if keep_views else []
        least = 4 if options.get("norm_type") == float("inf") else 0  # of nothing torch has none
        for own, others in zip(
            lists_of(mine.model, least), lists_of(theirs.model, least), strict=True
        ):
            before = [seen(parameter.grad) for parameter in own]
            places = [local_of(parameter.grad).data_ptr() for parameter in own]
            found, expected = clip_grad_norm_(own, **options), torch_clip(others, **options)
            assert seen(found) == seen(expected)
            for parameter, other, was, place in zip(own, others, before, places, strict=True):
                assert seen(parameter.grad) == seen(other.grad)
                kept = clipping.raw_gradient(parameter)
                if type(found) is DTensor and any(each.is_partial() for each in found.placements):
                    assert kept is None  # of each rank's largest: torch multiplies and reduces
                    continue
                assert kept is not None
                assert seen(kept.raw) == was
                assert type(kept.coefficient) is torch.Tensor
                again = clipping.scale([local_of(kept.raw)], kept.coefficient, kept.foreach)
                assert bytes_of(again[0]) == bytes_of(other.grad)
                counts["kept"] += 1
                counts["copied"] += place and local_of(parameter.grad).data_ptr() == place
        del held
        for job in (mine, theirs):
            job.optimizer.step()
            for parameter in job.model.parameters():
                parameter.grad = None if step < 2 else parameter.grad.zero_()
    interest.set(False)
    states = mine.full_state(), theirs.full_state()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])
    return counts


OPTIONS = [
    {"max_norm": MAX_NORM},
    {"max_norm": MAX_NORM, "foreach": True},
    {"max_norm": MAX_NORM, "foreach": False},
    {"max_norm": 1e9, "norm_type": float("inf")},
    {"max_norm": 0.01, "norm_type": float("inf"), "foreach": False},
    {"max_norm": 0.3, "norm_type": 1.0, "error_if_nonfinite": True},
    {"max_norm": torch.tensor(0.3), "norm_type": 3.5, "foreach": True},
]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp2", "tp", "hsdp", "fsdp_tp"])
def test_results_are_torchs(gang, layout):
    size = SIZES[layout]
    for options in OPTIONS:
        is_kept = options.get("norm_type") != float("inf")
        for found in gang.run(clips_as_torch, layout, False, options, size=size):
            assert found["kept"] > 50 or not is_kept
            if layout != "fsdp_tp":  # where lists of two meshes share buffers
                assert not found["copied"]
        for found in gang.run(clips_as_torch, layout, True, options, size=size):
            assert found["copied"] > 50 or not is_kept  # others see them: clipped where they are


def not_finite(layout):
    """torch's error, and nothing changed."""
    job = zoo.build(layout, RECIPE)
    interest = Interest()
    interest.set(True)
    backward(job, 1)
    for parameters in lists_of(job.model):
        local_of(parameters[0].grad).fill_(float("nan"))
        before = [seen(parameter.grad) for parameter in parameters]
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)
        assert [seen(parameter.grad) for parameter in parameters] == before
        assert not any(map(clipping.raw_gradient, parameters))
    interest.set(False)


@pytest.mark.slow
def test_not_finite_is_torchs_error(gang):
    gang.run(not_finite, "fsdp2", size=2)


def trains(layout, store, last, foreach=None, edit=None, settings=None):
    """From what is restored up to a step, clipped by everstep: where it began, the state there, and
    at the end; without a store by torch. `edit`: of gradients of a step, after clipping."""
    job = zoo.build(layout, RECIPE)
    state = {"model": job.model, "optimizer": job.optimizer}
    settings = settings or {"strategy": "log", "base_every": 20}
    checkpointer = store and Checkpointer(store, state, under_pressure="wait", **settings)
    first = checkpointer.restore() if checkpointer else 0
    begun = job.full_state()
    for step in range(first + 1, last + 1):
        job.optimizer.zero_grad()
        backward(job, step, micro_batches=1 + step % 2)
        for parameters in lists_of(job.model):
            (clip_grad_norm_ if store else torch_clip)(parameters, MAX_NORM, foreach=foreach)
        if edit:
            edit(job, step)
        job.optimizer.step()
        if checkpointer:
            handle = checkpointer.step(step)
            if edit:  # it may not be saved, which is known before the next step then
                with contextlib.suppress(EverstepError):
                    handle.wait("local")
    if checkpointer:
        checkpointer.wait()
        checkpointer.close()
    return first, begun, job.full_state()


def gradients_of(store, step):
    """By kind ("": as consumed, "!": from before clipping) the gradients of a record."""
    counts = Counter()
    record = Store(store).manifest(step).records[0]
    table = read_table(Disk(store), record.part)
    for name in table.tensors:
        if is_gradient(name):
            counts[name.partition(".")[0].lstrip("@0123456789")] += 1
    coefficients = [row["coefficient"] for call in record.calls for row in call.get("clips", ())]
    assert sorted(coefficients) == sorted(name for name in table.tensors if "!clip." in name)
    return counts, len(coefficients)


@pytest.mark.parametrize("layout", SHARDED)
def test_raw_gradients_are_replayed(gang, store, layout):
    size = SIZES[layout]
    plain = gang.run(trains, layout, None, STEPS, size=size)[0]
    _, _, ended = gang.run(trains, layout, store, STEPS, size=size)[0]
    check_equal(ended, plain[2])
    lists = {"fsdp2": 1, "hsdp": 1, "tp": 2, "fsdp_tp": 2}[layout]
    for step in range(2, STEPS + 1):
        counts, coefficients = gradients_of(store, step)
        if layout != "tp":
            assert counts == {"!": 25}
            assert coefficients == lists
        else:  # its norms are plain: each of them is one rank's
            assert counts == {"!": 18, "": 7}
    assert Store(store).verify().ok
    others = {"fsdp2": ["dense"], "tp": ["fsdp2"]}.get(layout, ["dense", "tp", "fsdp2"])
    for other in (layout, *others):
        first, found, _ = gang.run(trains, other, store, 0, size=SIZES[other])[0]
        assert first == STEPS
        check_equal(found, ended)
    straight = gang.run(trains, layout, None, STEPS + 2, size=size)[0]
    check_equal(gang.run(trains, layout, store, STEPS + 2, size=size)[0][2], straight[2])


def trains_without_room(store, last):
    """Rank 1 has no memory for copies, and all gradients would have to be copied."""
    held = []
    room = clipping.has_room
    if dist.get_rank() == 1:
        clipping.has_room = lambda tensors: not list(tensors)
    job = zoo.build("fsdp2", RECIPE)
    state = {"model": job.model, "optimizer": job.optimizer}
    try:
        with Checkpointer(store, state, strategy="log", under_pressure="wait") as checkpointer:
            handles = []
            for step in range(1, last + 1):
                job.optimizer.zero_grad()
                backward(job, step)
                held[:] = [local_of(parameter.grad) for parameter in job.model.parameters()]
                clip_grad_norm_(job.model.parameters(), MAX_NORM)
                job.optimizer.step()
                handles.append(checkpointer.step(step))
                with contextlib.suppress(EverstepError):
                    handles[-1].wait("local")
            return [str(handle.error or "") for handle in handles], job.full_state()
    finally:
        clipping.has_room = room


@pytest.mark.slow
def test_ranks_agree_on_what_is_kept(gang, store):
    (errors, ended), (others, _) = gang.run(trains_without_room, store, STEPS, size=2)
    for found in (errors, others):
        assert "hole: nobody wrote" in found[1]
        assert [bool(error) for error in found] == [False, True] + [False] * (STEPS - 2)
    kinds = [gradients_of(store, step)[0] for step in range(4, STEPS + 1)]
    assert kinds == [{"": 25}] * len(kinds)
    first, found, _ = gang.run(trains, "dense", store, 0, size=1)[0]
    assert first == STEPS
    check_equal(found, ended)


def edits(job, step):
    """Behind the version counters' back, on one rank, where the sample sees it."""
    if step == 4 and dist.get_rank() == 0:
        gradient = local_of(job.model.head.weight.grad)
        gradient.numpy().fill(0.5)


@pytest.mark.slow
def test_a_gradient_that_one_rank_changes_afterwards(gang, store):
    ended = gang.run(trains, "fsdp2", store, STEPS, None, edits, size=2)[0][2]
    assert 4 not in Store(store).steps()  # raw on one rank, and as consumed on the other
    for layout in ("fsdp2", "dense"):
        first, found, _ = gang.run(trains, layout, store, 0, size=SIZES[layout])[0]
        assert first == STEPS
        check_equal(found, ended)


@pytest.mark.slow
@pytest.mark.parametrize("foreach", [False, True])
def test_raw_gradients_in_windows(gang, store, foreach):
    settings = {"strategy": "spread", "every": 4, "window": 3}
    (_, _, ended), *_ = gang.run(trains, "fsdp2", store, 8, foreach, None, settings, size=2)
    records = Store(store).manifest(8).records
    assert [bool(call.get("clips")) for record in records for call in record.calls] == [True] * 2
    for layout in ("fsdp2", "dense"):
        size = SIZES[layout]
        outcomes = gang.run(trains, layout, store, 0, foreach, None, settings, size=size)
        assert outcomes[0][0] == 8
        check_equal(outcomes[0][1], ended)


def test_digests_of_each_rank_beside_raw_gradients(gang, store):
    """Where ranks say other things of a call, each finds its own; what all have clipped is one."""
    settings = {"strategy": "log", "base_every": 20, "audit": "full"}
    size = SIZES["fsdp2"]
    ended = gang.run(trains, "fsdp2", store, 3, None, None, settings, size=size)[0][2]
    assert gradients_of(store, 3)[0] == {"!": 25}
    first, found, _ = gang.run(trains, "fsdp2", store, 0, None, None, settings, size=size)[0]
    assert first == 3
    check_equal(found, ended)
