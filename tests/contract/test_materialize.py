"""Whole states made of log steps: the same bytes, readable without a model."""

import json

import pytest
import torch
from torch import nn

import everstep
from everstep import Checkpointer, Corrupt, Keep, Missing, Store, Unsupported
from everstep.cli.main import main
from everstep.restore.materialize import materialize
from everstep.store.names import CheckpointName
from everstep.tiers.disk import Disk
from independent_reader import Damaged
from independent_reader import read as read_independently

OPTIMIZERS = [
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {"foreach": False, "amsgrad": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.Adafactor, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.Adagrad, {}),
]


def build(seed, kind, options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.Linear(24, 12, bias=False))
    model[2].weight = nn.Parameter(model[0].weight.detach().t().clone())
    groups = [
        {"params": [model[0].weight, model[2].weight]},
        {"params": [model[0].bias, model[1].weight, model[1].bias], "weight_decay": 0.0},
    ]
    optimizer = kind(groups, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def train(state):
    loss = (state["model"](torch.randn(8, 12)) - 1).square().mean()
    state["optimizer"].zero_grad()
    loss.backward()
    state["optimizer"].step()
    state["scheduler"].step()


def fill(store, kind=torch.optim.AdamW, options=None, steps=7, keep=None):
    """A run with a base at 1 and records after it; the weights and state of each step."""
    state, frozen = build(1, kind, options or {}), {}
    with Checkpointer(
        store, state, strategy=everstep.Log(base_every=100), keep=keep
    ) as checkpointer:
        for step in range(1, steps + 1):
            train(state)
            checkpointer.step(step)
            frozen[step] = {
                f"model.{key}": value.clone() for key, value in state["model"].state_dict().items()
            }
            for key, parameter in state["model"].named_parameters():
                for kind_of, value in state["optimizer"].state[parameter].items():
                    frozen[step][f"optimizer.model.{key}.{kind_of}"] = value.clone()
    return frozen


def same(found, expected):
    assert all(torch.equal(found[key], value) for key, value in expected.items())


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS, ids=str)
def test_it_has_the_bytes_of_the_run(store, kind, options):
    frozen = fill(store, kind, options)
    opened = Store(store)
    with pytest.raises(Unsupported, match=f"everstep materialize {store} 5"):
        opened.read(5)
    manifest = materialize(Disk(store), CheckpointName(5, 1))
    assert manifest.exact
    same(opened.read(5), frozen[5])
    verdict = opened.verify()
    assert verdict.ok, verdict.problems
    assert opened.steps() == list(range(1, 8))
    for step in (5, 6, 7):  # from the state of 5 on
        fresh = build(2, kind, options)
        with Checkpointer(store, fresh) as restorer:
            assert restorer.restore(step) == step
        same(
            {f"model.{k}": v for k, v in fresh["model"].state_dict().items()},
            {key: value for key, value in frozen[step].items() if key.startswith("model.")},
        )
    assert len(opened.chain(6)) == 2


def test_the_command(store, capsys):
    frozen = fill(store)
    assert main(["materialize", str(store), "4", "7", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)["made"]
    assert [row["step"] for row in made] == [4, 7]
    assert all(row["exact"] for row in made)
    same(Store(store).read(7), frozen[7])
    before = sorted(store.rglob("*"))
    assert main(["materialize", str(store), "1", "7"]) == 0
    assert capsys.readouterr().out.count("whole state already") == 2
    assert main(["materialize", str(store), "5", "99"]) == 1  # then none is made
    assert sorted(store.rglob("*")) == before
    with pytest.raises(SystemExit):
        main(["materialize", str(store)])
    with pytest.raises(Missing):
        materialize(Disk(store), CheckpointName(99, 1))


def test_twice_is_once(store):
    fill(store)
    for _ in range(2):
        materialize(Disk(store), CheckpointName(5, 1))
    packs = {path.name for path in (store / "data").glob("00000005-*.safetensors")}
    assert len(packs) == 2  # the record's and the state's


def test_it_goes_with_its_step(store):
    fill(store)
    materialize(Disk(store), CheckpointName(7, 1))
    before = sum(path.stat().st_size for path in (store / "data").glob("*.safetensors"))
    freed = Store(store).delete(7)
    after = sum(path.stat().st_size for path in (store / "data").glob("*.safetensors"))
    assert before - after == freed
    assert not list((store / "data").glob("00000007-*"))
    assert not (store / "checkpoints" / "00000007-0001").exists()


def test_gc_and_retention_leave_it(store):
    fill(store)
    materialize(Disk(store), CheckpointName(3, 1))
    fresh = build(3, torch.optim.AdamW, {})
    with Checkpointer(store, fresh, keep=Keep(last=2)) as checkpointer:
        checkpointer.restore(3)
        for step in (4, 5):
            train(fresh)
            checkpointer.step(step)
    opened = Store(store)
    opened.gc()
    assert opened.verify().ok
    assert opened.steps()[-2:] == [4, 5]


def test_a_damaged_state_is_found(store, caplog):
    """The newest before it is restored; the step itself by its number is not."""
    frozen = fill(store)
    materialize(Disk(store), CheckpointName(5, 1))
    path = store / "checkpoints" / "00000005-0001" / "state.json"
    path.write_bytes(path.read_bytes()[:-5])
    assert not Store(store).verify().ok
    with pytest.raises(Corrupt):
        Store(store).read(5)
    fresh = build(2, torch.optim.AdamW, {})
    with Checkpointer(store, fresh) as restorer:
        with pytest.raises(Corrupt, match="restoring step 5"):
            restorer.restore(5)
        assert restorer.restore() == 4
    same(
        {f"model.{key}": value for key, value in fresh["model"].state_dict().items()},
        {key: value for key, value in frozen[4].items() if key.startswith("model.")},
    )


def test_gradients_of_another_dtype(store):
    torch.manual_seed(1)
    weight = nn.Parameter(torch.randn(40, dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    state = {"weight": weight, "optimizer": torch.optim.SGD([weight], lr=0.1)}
    with Checkpointer(store, state, strategy="log") as checkpointer:
        for step in range(1, 5):
            weight.grad = torch.randn(40)
            state["optimizer"].step()
            checkpointer.step(step)
    assert materialize(Disk(store), CheckpointName(4, 1)).exact
    assert torch.equal(Store(store).read(4)["weight"], weight.detach())


class Own(torch.optim.SGD):
    pass


def test_only_torchs_optimizers_are_built(store):
    fill(store, Own, {"lr": 0.1})
    with pytest.raises(Unsupported, match="only torch's own"):
        materialize(Disk(store), CheckpointName(5, 1))


def test_the_second_reader_refuses_logs(store):
    fill(store)
    read_independently(store, 1)
    with pytest.raises((Damaged, KeyError)):
        read_independently(store, 5)


def test_a_state_of_another_step_is_refused(store):
    fill(store)
    materialize(Disk(store), CheckpointName(3, 1))
    there = store / "checkpoints" / "00000003-0001" / "state.json"
    (store / "checkpoints" / "00000006-0001" / "state.json").write_bytes(there.read_bytes())
    assert not Store(store).verify().ok
    with pytest.raises(Corrupt, match="not the whole state of 00000006-0001"):
        Store(store).read(6)
