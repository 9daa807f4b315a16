"""Accelerate: loaders in every form, and a whole run."""

import functools
import gc
import itertools
import time
import warnings
from importlib.util import find_spec

import pytest
import torch
from torch import nn

import everstep
from accelerated import ACCUMULATE, EPOCHS, PER_EPOCH, Noisy, llama, train
from examples import slow
from harness import check_resumes, random_seed, trains_on_two_ranks

pytestmark = pytest.mark.skipif(not find_spec("accelerate"), reason="accelerate is not installed")


def trains(store, trace):
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    set_seed(1)
    accelerator = Accelerator(
        cpu=True, mixed_precision="bf16", gradient_accumulation_steps=ACCUMULATE
    )
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, EPOCHS * PER_EPOCH)
    loader = torch.utils.data.DataLoader(Noisy(), batch_size=4, shuffle=True)
    parts = accelerator.prepare(model, optimizer, loader, scheduler)
    train(store, trace, accelerator, *parts)


def trains_llama(store, trace):
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    set_seed(1)
    accelerator = Accelerator(
        cpu=True, mixed_precision="bf16", gradient_accumulation_steps=ACCUMULATE
    )
    model, data = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * PER_EPOCH)
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, num_workers=2)
    parts = accelerator.prepare(model, optimizer, loader, scheduler)
    train(store, trace, accelerator, *parts)


@pytest.mark.parametrize(
    ("run", "kills"),
    [(trains, 1), pytest.param(trains_llama, 3, marks=pytest.mark.slow)],
    ids=["short", "llama"],
)
def test_run(tmp_path, run, kills):
    steps = EPOCHS * PER_EPOCH
    check_resumes(run, tmp_path, steps=steps, epoch=PER_EPOCH, kills=kills, seed=random_seed())


@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_two_ranks(tmp_path, kills):
    run, steps = functools.partial(trains_on_two_ranks, trains), EPOCHS * 2  # of 4 and 1 batches
    check_resumes(run, tmp_path, steps=steps, epoch=2, kills=kills, seed=random_seed())


class Stream(torch.utils.data.IterableDataset):
    """Some numbers."""

    def __iter__(self):
        return iter(torch.rand(12, 2))


@pytest.fixture
def accelerator():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from accelerate import Accelerator, DataLoaderConfiguration
        from accelerate.state import AcceleratorState, GradientState, PartialState

        def make(**options):
            for shared in (AcceleratorState, GradientState, PartialState):
                shared._reset_state()
            return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))

        yield make


KINDS = list(itertools.product(["shuffled", "own", "stream"], [0, 2], [False, True], [False, True]))
QUICK = {
    ("shuffled", 0, False, True),
    ("own", 2, False, False),
    ("shuffled", 2, True, True),
    ("stream", 2, True, True),
}


def drawn(batches):
    """What they are, and what the trainer draws meanwhile."""
    return [(batch.sum(1).tolist(), torch.rand(1).item()) for batch in batches]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "workers", "stateful", "seedable"),
    [*sorted(QUICK), *slow(*(each for each in KINDS if each not in QUICK))],
)
def test_the_next_batch_is_the_next_batch(store, accelerator, kind, workers, stateful, seedable):
    def build(seed):
        torch.manual_seed(seed)
        made = accelerator(use_stateful_dataloader=stateful, use_seedable_sampler=seedable)
        generator = torch.Generator().manual_seed(seed) if kind == "own" else None
        data = Stream() if kind == "stream" else torch.arange(24.0).view(12, 2)
        options = {} if kind == "stream" else {"shuffle": True}
        loader = torch.utils.data.DataLoader(
            data,
            batch_size=3,
            num_workers=workers,
            generator=generator,
            persistent_workers=kind == "own" and workers > 0,
            **options,
        )
        return made, made.prepare(loader)

    _check_loader(store, build)


def _check_loader(store, build):
    from everstep.integrations.accelerate import state_of

    first, loader = build(1)
    expected, steps = [], 0
    with everstep.Checkpointer(store, state_of(first)) as checkpointer:
        for _ in range(3):
            for batch in loader:
                steps += 1
                expected += drawn([batch])
                checkpointer.save(steps).wait("local")
    epoch = steps // 3
    for step in (1, epoch - 1, epoch, epoch + 1, 2 * epoch):
        again, loader = build(2)
        with everstep.Checkpointer(store, state_of(again)) as checkpointer:
            assert checkpointer.restore(step) == step
            assert loader.iteration == step // epoch
            found = [each for _ in range(loader.iteration, 3) for each in drawn(loader)]
        assert found == expected[step:], step


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3")
def test_workers_of_a_forgotten_loader_are_not_waited_for():
    """In garbage torch's queues go first, so that workers hear of their end after 5 s, and are
    waited for one after the other."""
    from everstep.integrations.loaders import LoaderPosition

    loader = torch.utils.data.DataLoader(torch.arange(4), num_workers=3, persistent_workers=True)
    position = LoaderPosition(loader)
    list(loader)
    del loader, position
    began = time.monotonic()
    gc.collect()
    assert time.monotonic() - began < 10  # not 15


@pytest.mark.filterwarnings("ignore")
def test_an_epoch_that_is_left_begins_anew(store, accelerator):
    from everstep.integrations.accelerate import state_of

    def build(seed):
        torch.manual_seed(seed)
        made = accelerator()
        data = torch.arange(24.0).view(12, 2)
        return made, made.prepare(torch.utils.data.DataLoader(data, batch_size=3, shuffle=True))

    first, loader = build(1)
    with everstep.Checkpointer(store, state_of(first)) as checkpointer:
        for _ in loader:
            break
        checkpointer.save(1)
        expected = drawn(loader)
    again, loader = build(2)
    with everstep.Checkpointer(store, state_of(again)) as checkpointer:
        checkpointer.restore()
        assert drawn(loader) == expected


@pytest.mark.filterwarnings("ignore")
def test_what_is_being_iterated_is_refused(store, accelerator):
    from everstep.integrations.accelerate import state_of

    made = accelerator()
    loader = made.prepare(torch.utils.data.DataLoader(torch.arange(24.0), batch_size=3))
    batches = iter(loader)
    next(batches)
    with pytest.raises(everstep.Unsupported, match="right after"):
        state_of(made)
    list(batches)
    with everstep.Checkpointer(store, state_of(made)) as checkpointer:
        for _ in loader:
            checkpointer.save(1)
            with pytest.raises(everstep.Unsupported, match="is being iterated"):
                checkpointer.restore()
            break


@pytest.mark.filterwarnings("ignore")
def test_deepspeed_is_refused(accelerator):
    from accelerate import DistributedType

    from everstep.integrations.accelerate import state_of

    made = accelerator()
    made.state.distributed_type = DistributedType.DEEPSPEED  # which is not installed
    with pytest.raises(everstep.Unsupported, match=r"parts\(engine\)"):
        state_of(made)


@pytest.mark.filterwarnings("ignore")
def test_a_loader_without_state_of_is_refused(store, accelerator):
    loader = accelerator().prepare(torch.utils.data.DataLoader(torch.arange(24.0), batch_size=3))
    with pytest.raises(everstep.Unsupported, match=r"state_of\(accelerator\)"):
        everstep.Checkpointer(store, {"loader": loader})
