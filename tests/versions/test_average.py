"""everstep average, beside a loop over states."""

import pytest
import torch
from torch import nn

from commands import run, run_json
from everstep import Checkpointer, Log, Mismatch, Store
from examples import slow

torch.set_num_threads(1)


def model(dtype):
    torch.manual_seed(2)
    made = nn.Sequential(nn.Linear(40, 300), nn.BatchNorm1d(300), nn.Linear(300, 5))
    return made.to(dtype)


def trained(store, dtype, steps, **options):
    """The states of each step."""
    net, states = model(dtype), {}
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    with Checkpointer(store, {"model": net, "optimizer": optimizer}, **options) as checkpointer:
        for step in range(1, steps + 1):
            x = torch.randn(8, 40, generator=torch.Generator().manual_seed(step)).to(dtype)
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.save(step).wait("local", timeout=60)
            states[step] = {name: each.clone() for name, each in net.state_dict().items()}
    return states


def mean(states, shares):
    """In float64, rounded once."""
    found = {}
    for name, last in states[-1].items():
        total = sum(
            state[name].double() * share for state, share in zip(states, shares, strict=True)
        )
        is_number = last.is_floating_point()
        found[name] = (total / sum(shares)).to(last.dtype) if is_number else last
    return found


@pytest.mark.parametrize(
    ("dtype", "strategy"),
    [(torch.bfloat16, "full"), *slow((torch.float32, "full"), (torch.float32, Log(base_every=9)))],
)
def test_it_is_that_of_a_loop(store, tmp_path, capsys, dtype, strategy):
    states = trained(store, dtype, 7, strategy=strategy)
    said = run_json(capsys, "average", store, "--last", 3, "--every", 2, "--to", tmp_path / "a")
    assert [int(row["checkpoint"][:8]) for row in said["of"]] == [2, 4, 6]
    weights = ("--weights", 0.2, 0.7)
    assert run("average", store, 3, 7, *weights, "--to", tmp_path / "b") == 0
    assert run("verify", tmp_path / "b") == 0
    assert run("average", store, 7, 3, "--weights", 0.7, 0.2, "--to", tmp_path / "c") == 0
    of_two = (3, 7), (0.2, 0.7)
    for place, steps, shares in (("a", (2, 4, 6), (1.0,) * 3), ("b", *of_two), ("c", *of_two)):
        expected = mean([states[step] for step in steps], shares)
        net = model(dtype)
        optimizer = torch.optim.AdamW(net.parameters())
        with Checkpointer(tmp_path / "new", {"model": net, "optimizer": optimizer}) as checkpointer:
            with pytest.raises(Mismatch, match="the checkpoint has no optimizer"):
                checkpointer.restore(from_store=tmp_path / place)
            checkpointer.restore(from_store=tmp_path / place, only=["model"])
        for name, tensor in net.state_dict().items():
            assert torch.equal(tensor, expected[name]), name


def test_where_it_goes_and_what_cannot_be(store, other_store, capsys):
    trained(store, torch.float32, 3, strategy="full")
    assert run("average", store) == 0
    place = f"{store}-average-3"
    assert place in capsys.readouterr().out
    assert Store(place).manifest(3).capture["from"].count("1 × 0000000") == 3
    assert run("average", store) == 1
    assert "checkpoints already" in capsys.readouterr().err
    for words in (
        ("--every", 5),
        ("--weights", 1),
        (1, 2, "--weights", 1, -1),
        (9,),
        ("--last", 0),
        (1, 3, "--every", 3),
    ):
        assert run("average", store, *words, "--to", other_store) == 1
        assert not other_store.exists()
