"""The workload of the demo: equal runs are equal, and its loader goes on where it was."""

import torch

from everstep.cli import workload
from everstep.cli.workload import GPT, SHAPES, Loader

TEXT = bytes(range(256)) * 20


def losses(steps: int) -> list[float]:
    run = workload.build(TEXT, seed=1, steps=steps, size="tiny")
    return [run.train_step() for _ in range(steps)]


def test_two_runs_are_equal_bit_for_bit() -> None:
    assert losses(5) == losses(5)


def test_loader_goes_on_where_it_was() -> None:
    loader, other = (Loader(TEXT, batch=2, sequence=8, seed=3) for _ in range(2))
    loader.next()
    other.load_state_dict(loader.state_dict())
    for one, two in zip(loader.next(), other.next(), strict=True):
        assert torch.equal(one, two)


def test_default_text_is_the_same_each_time() -> None:
    assert workload.load_text() == workload.load_text()
    assert len(workload.load_text()) > 1_000_000


def test_size_and_tied_head() -> None:
    with torch.device("meta"):
        model = GPT(SHAPES["25m"])
    assert 24e6 < sum(parameter.numel() for parameter in model.parameters()) < 26e6
    assert model.head.weight is model.embed.weight
