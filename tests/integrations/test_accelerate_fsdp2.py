"""FSDP2 through Accelerate, on the CPU: its own prepare() on two ranks. On GPUs: tests/gpu."""

import functools
from importlib.util import find_spec

import pytest
import torch
from torch.distributed.tensor import DTensor

import everstep
from accelerated import (
    ACCUMULATE,
    BATCHES,
    EPOCHS,
    PER_EPOCH,
    check_fsdp2,
    fsdp2,
    llama,
    prepared,
    train,
    trains_fsdp2,
)
from harness import check_resumes, live, random_seed, trains_on_ranks, trains_on_two_ranks

pytestmark = pytest.mark.skipif(not find_spec("accelerate"), reason="accelerate is not installed")
PARTS = ["model", "optimizer", "scheduler", "accelerator"]


@pytest.mark.parametrize("strategy", ["auto", "log"])
@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_two_ranks(tmp_path, strategy, kills):
    check_fsdp2(tmp_path, ranks=2, strategy=strategy, kills=kills)


@pytest.mark.slow
def test_hsdp(tmp_path):
    check_fsdp2(tmp_path, ranks=4, shards=2)


@pytest.mark.slow
def test_what_runs_on_gpus(tmp_path):
    """All of it but the GPU."""
    check_fsdp2(tmp_path, ranks=1, method="spawn")


def trains_llama(store, trace):
    """With all that Accelerate's way of preparing a model for FSDP2 does: tied weights, loading on
    the first rank only, activation checkpointing."""
    from accelerate.utils import set_seed

    set_seed(1)
    options = {"cpu_ram_efficient_loading": True, "activation_checkpointing": True}
    accelerator = fsdp2("cpu", "LlamaDecoderLayer", **options)
    model, data = llama(tie_word_embeddings=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * 4)
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, num_workers=2)
    train(store, trace, accelerator, *accelerator.prepare(model, optimizer, loader, scheduler))


@pytest.mark.slow
def test_llama(tmp_path):
    pytest.importorskip("transformers")
    run, epoch = functools.partial(trains_on_two_ranks, trains_llama), 2  # of 4 and 1 batches
    assert epoch == -(-BATCHES // 2 // ACCUMULATE)
    check_resumes(run, tmp_path, steps=6, epoch=epoch, kills=3, seed=random_seed())


def whole(model, optimizer):
    """The values of all ranks together."""
    moments = [each for state in optimizer.state.values() for each in state.values()]
    found = [*model.state_dict().values(), *moments]
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in found]


def trains_and_tells(store, trace, only=None):
    """The whole state of each step."""
    accelerator, (model, optimizer, loader, scheduler) = prepared()

    def tell(step):
        trace.note("whole", step, whole(model, optimizer))

    parts = model, optimizer, loader, scheduler
    train(store, trace, accelerator, *parts, strategy=everstep.Full(), only=only, told=tell)


def test_a_run_of_two_ranks_goes_on_with_one_without_its_loader(tmp_path, store):
    two = functools.partial(trains_on_ranks, 2, trains_and_tells)
    one = functools.partial(trains_on_ranks, 1, functools.partial(trains_and_tells, only=PARTS))
    before = live(two, store, tmp_path, "two", kill_at=5)
    after = live(one, store, tmp_path, "one")
    (step,) = (int(step) for what, step in after if what == "resumed")
    assert step in (4, 5)
    assert after["whole", str(step)] == before["whole", str(step)]
    assert max(int(step) for what, step in after if what == "loss") > 5
    assert everstep.Store(store).latest() == step + EPOCHS * PER_EPOCH  # all epochs are begun anew


def refuses(store, trace):
    """What is restored on another number of ranks."""
    from everstep.integrations.accelerate import state_of

    accelerator, _ = prepared()
    rules = None, {"loader": "replicate"}
    for by_rank, error in zip(rules, (everstep.Mismatch, everstep.Unsupported), strict=True):
        ranks = everstep.Ranks(by_rank=by_rank)
        checkpointer = everstep.Checkpointer(store, state_of(accelerator), ranks=ranks)
        with pytest.raises(error) as raised:
            checkpointer.restore()
        trace.note(error.__name__, 0, str(raised.value))
        checkpointer.close()


def test_the_loader_of_two_ranks_is_refused_on_one(tmp_path, store):
    two = functools.partial(trains_on_ranks, 2, trains_fsdp2)
    live(two, store, tmp_path, "two", kill_at=5)
    said = live(functools.partial(trains_on_ranks, 1, refuses), store, tmp_path, "one")
    assert "'loader' was saved by 2 ranks" in said["Mismatch", "0"]
    assert "2 ranks shared its batches, here are 1" in said["Unsupported", "0"]
