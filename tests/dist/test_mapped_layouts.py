"""Memory of which `layout=` tells, saved on so many ranks and restored on others.

Fused matrices with grouped queries, experts, stages with replicas. Gradients are elementwise
functions of global names, so that all layouts train to the same bits as one process.
"""

import zlib
from functools import partial
from math import prod

import pytest
import torch
import torch.distributed as dist
from torch import nn

import everstep
from comparing import check_equal
from everstep import Checkpointer, Mismatch, Shard, Store
from everstep.format.boxes import Box
from examples import slow


def numbers(name, shape, step):
    begin = zlib.crc32(name.encode()) % 1000 + 17 * step
    return torch.sin(torch.arange(begin, begin + prod(shape)) * 0.37).view(shape)


class Parts(nn.Module):
    """Parameters by name; "." is a dot of the name of a child."""

    def __init__(self, tensors):
        super().__init__()
        for name, tensor in tensors.items():
            *path, last = name.split(".")
            module = self
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            setattr(module, last, nn.Parameter(tensor))


def fill(layout, name, memory, step):
    """What is at these places of the global tensors."""
    found = layout(name, memory)
    if found is None or isinstance(found, str):
        memory.copy_(numbers(found or name, memory.shape, step))
        return
    for shard in found:
        inside = shard.box.slices_in(Box.whole(shard.shape))
        shard.tensor.copy_(numbers(shard.name, shard.shape, step)[inside])


def build(make):
    """A training of what `make` gives: tensors, their layout, and the learning rate of each."""
    tensors, layout, rate_of = make()
    with torch.no_grad():
        for name, tensor in tensors.items():
            fill(layout, f"model.{name}", tensor, 0)
    model = Parts(tensors)
    groups = {}
    for name, parameter in model.named_parameters():
        groups.setdefault(rate_of(f"model.{name}"), []).append(parameter)
    groups = [{"params": members, "lr": rate} for rate, members in groups.items()]
    return model, torch.optim.AdamW(groups, lr=0.5), layout


def train(model, optimizer, layout, step, but=()):
    for name, parameter in model.named_parameters():
        parameter.grad = torch.zeros_like(parameter)
        fill(layout, f"model.{name}", parameter.grad, step)
        found = layout(f"model.{name}", parameter)
        if found in but:
            parameter.grad = None
    optimizer.step()


def saver_of(model, optimizer, layout, store, strategy="full"):
    state = {"model": model, "optimizer": optimizer}
    return Checkpointer(store, state, strategy=strategy, ranks=everstep.Ranks(layout=layout))


def trains(make, store, steps, but=(), strategy="full"):
    """Train `steps`, from what there is; save each."""
    job = _, optimizer, _ = build(make)
    with saver_of(*job, store, strategy) as checkpointer:
        assert checkpointer.restore() == steps[0] - 1
        for step in steps:
            train(*job, step, but if step == 1 else ())
            checkpointer.step(step)
            checkpointer.wait()
    return [group["lr"] for group in optimizer.param_groups]


def contents(store, step):
    found = Store(store).read(step).items()
    return {name: tensor.clone() for name, tensor in found if not name.startswith("rng.")}


def check(gang, makes, stores, but=()):
    """Each layout's second step is that of one process, whoever made the first. `makes`: what is
    made, on how many ranks; the first one is on one, without a layout."""
    reference = stores("reference")
    gang.run(trains, makes[0][0], reference, [1], but, size=1)
    gang.run(trains, makes[0][0], reference, [2], size=1)
    expected = [contents(reference, 1), contents(reference, 2)]
    for number, (make, size) in enumerate(makes):
        first = stores(f"first{number}")
        gang.run(trains, make, first, [1], but, size=size)
        check_equal(contents(first, 1), expected[0])
        for other, (make_other, size_other) in enumerate(makes):
            if number != 0 and other != (number + 1) % len(makes):
                continue
            second = stores(f"second{number}{other}")
            gang.run(copied, make_other, first, second, size=size_other)
            check_equal(contents(second, 2), expected[1])
            assert Store(second).verify().ok


def copied(make, source, store, step=2):
    """A step after those of another run."""
    job = build(make)
    with saver_of(*job, store) as checkpointer:
        assert checkpointer.restore(from_store=source, exact="require") == step - 1
        train(*job, step)
        checkpointer.step(step)


# ---- fused query, key and value, with fewer heads of keys than of queries ----------------------

HEADS, GROUPS, SIZE, WIDTH = 4, 2, 3, 5
ROWS = (HEADS + 2 * GROUPS) * SIZE


def fused():
    """[q; k; v] of this rank's heads; two ranks of four share a head of keys."""
    rank, size = dist.get_rank(), dist.get_world_size()
    queries = HEADS // size
    groups = max(1, GROUPS // size)
    group = rank * GROUPS // size

    def layout(name, tensor):
        if name != "model.qkv":
            return None
        q, k, v = tensor.detach().split([SIZE * queries, SIZE * groups, SIZE * groups])
        key, value = HEADS * SIZE, (HEADS + GROUPS) * SIZE
        rows = (rank * SIZE * queries, key + group * SIZE, value + group * SIZE)
        return [
            Shard("model.qkv", (ROWS, WIDTH), (row, 0), part)
            for row, part in zip(rows, (q, k, v), strict=True)
        ]

    rows = SIZE * (queries + 2 * groups)
    return {"qkv": torch.zeros(rows, WIDTH), "norm": torch.zeros(WIDTH)}, layout, rate


def dense():
    return (
        {"qkv": torch.zeros(ROWS, WIDTH), "norm": torch.zeros(WIDTH)},
        lambda name, tensor: None,
        rate,
    )


def unfused():
    """Three matrices that are one globally, on rows that are split between the ranks as well."""
    rank, size = dist.get_rank(), dist.get_world_size()
    counts = {"q": HEADS * SIZE, "k": GROUPS * SIZE, "v": GROUPS * SIZE}
    starts = {"q": 0, "k": counts["q"], "v": counts["q"] + counts["k"]}
    tensors = {name: torch.zeros(count // size, WIDTH) for name, count in counts.items()}

    def layout(name, tensor):
        part = name.removeprefix("model.")
        if part not in counts:
            return None
        row = starts[part] + rank * (counts[part] // size)
        return [Shard("model.qkv", (ROWS, WIDTH), (row, 0), tensor.detach())]

    return tensors | {"norm": torch.zeros(WIDTH)}, layout, rate


def rate(name):
    return 0.1


@pytest.mark.parametrize("more", [[], *slow([(fused, 2), (fused, 1)])])
def test_fused_matrices_with_grouped_queries(gang, stores, more):
    check(gang, [(dense, 1), (fused, 4), *more, (unfused, 2)], stores)


# ---- experts, and stages with replicas ---------------------------------------------------------

EXPERTS = 4


def experts(size):
    """`size` ranks have all experts together, by local numbers; if there are more, as replicas."""
    mine = range(EXPERTS // size)
    first = dist.get_rank() % size * len(mine)

    def layout(name, tensor):
        if ".experts." not in name:
            return None
        head, number, rest = name.rsplit(".", 2)
        return f"{head}.{int(number) + first}.{rest}"

    tensors = {f"layer.experts.{n}.weight": torch.zeros(3, 4) for n in mine}
    return (
        tensors | {"router": torch.zeros(EXPERTS, 4)},
        layout,
        lambda name: expert_rate(layout(name, None) or name),
    )


def expert_rate(name):
    """One of its own for each expert."""
    return 0.01 * int(name.split(".")[-2]) + 0.02 if "experts" in name else 0.1


EVERY = ((1, 1), (2, 2), (2, 4), (4, 4))
"""By which all experts are had, on so many ranks."""
UNASKED = ("model.layer.experts.3.weight",)


@pytest.mark.parametrize(
    ("but", "ways"), [(UNASKED, EVERY[::2]), *slow((UNASKED, EVERY), ((), EVERY))]
)
def test_experts(gang, stores, but, ways):
    """With `but`, one that nobody asked in the first step: it has no optimizer state then."""
    check(gang, [(partial(experts, of), size) for of, size in ways], stores, but)


LAYERS = 4


def stages(size):
    """Stages of a pipeline of so many, each with layers from number 0 on, its own learning rate,
    and replicas on the other ranks; the head is tied to the embedding."""
    stage = dist.get_rank() % size
    count = LAYERS // size

    def layout(name, tensor):
        if name == "model.head":
            return "model.embedding"
        if not name.startswith("model.layers."):
            return None
        number, _, rest = name.removeprefix("model.layers.").partition(".")
        return f"model.layers.{int(number) + stage * count}.{rest}"

    tensors = {f"layers.{number}.weight": torch.zeros(3, 2) for number in range(count)}
    if stage == 0:
        tensors["embedding"] = torch.zeros(7, 2)
    elif stage == size - 1:
        tensors["head"] = torch.zeros(7, 2)
    return tensors, layout, lambda name: stage_rate(layout(name, None) or name)


def stage_rate(name):
    return 0.05 if "layers" not in name else 0.1 if int(name.split(".")[2]) < 2 else 0.2


@pytest.mark.slow
def test_stages_with_replicas(gang, stores):
    check(gang, [(partial(stages, of), size) for of, size in EVERY], stores)


def restores_tied(source):
    """On one process, where embedding and head are one parameter under both names."""
    tensors, _, _ = stages(1)
    model = Parts(tensors)
    model.head = model.embedding
    optimizer = torch.optim.AdamW([{"params": [p], "lr": 1.0} for p in model.parameters()], lr=1.0)
    with saver_of(model, optimizer, None, source) as checkpointer:
        checkpointer.restore()
    names = [name for name, _ in model.named_parameters()]
    rates = dict(zip(names, [group["lr"] for group in optimizer.param_groups], strict=True))
    return model.head.detach().clone(), rates


def mismatch(source, size, but):
    """What is wrong with all parameters in one group, and no layer `but`."""
    tensors, layout, _ = stages(size)
    model = Parts({name: tensor for name, tensor in tensors.items() if name != but})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    with (
        saver_of(model, optimizer, layout, source) as checkpointer,
        pytest.raises(Mismatch) as raised,
    ):
        checkpointer.restore()
    return str(raised.value)


def test_tied_weights_of_a_pipeline_and_rates_by_name(gang, stores):
    first = stores("first")
    gang.run(trains, partial(stages, 2), first, [1], size=2)
    (found, rates), *_ = gang.run(restores_tied, first, size=1)
    assert torch.equal(found, contents(first, 1)["model.embedding"])
    assert rates == {name: stage_rate(f"model.{name}") for name in rates}
    (problem,) = gang.run(mismatch, first, 1, None, size=1)
    assert "parameters in group 0 of 'optimizer' have different hyperparameters" in problem


def test_what_no_rank_takes_is_an_error_on_all(gang, stores):
    """They hear of it, though none but one could have had it."""
    first = stores("first")
    gang.run(trains, partial(stages, 2), first, [1], size=2)
    for problem in gang.run(mismatch, first, 2, "layers.1.weight", size=2):
        for name in ("model.layers.1.weight", "model.layers.3.weight"):
            assert f"extra: the state has no tensor '{name}'" in problem
            assert f"the state's optimizer does not have '{name}'" in problem
        assert "'model.layers.0.weight'" not in problem
        assert "'model.layers.2.weight'" not in problem
