"""Whole states made of log steps: the same bytes, readable without a model."""

import json

import pytest
import torch
from runs import logged
from torch import nn
from wholes import advance, build, fill

from everstep import Corrupt, Missing, Store, Unsupported
from everstep.cli.main import main
from everstep.restore.materialize import materialize
from everstep.store.names import CheckpointName
from everstep.tiers.disk import Disk


def test_the_command(store, capsys):
    fill(store)
    assert main(["materialize", str(store), "4", "7", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)["made"]
    assert [row["step"] for row in made] == [4, 7]
    assert all(row["exact"] for row in made)
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
    Store(store).delete(8)
    materialize(Disk(store), CheckpointName(7, 1))
    before = sum(path.stat().st_size for path in (store / "data").glob("*.safetensors"))
    freed = Store(store).delete(7)
    after = sum(path.stat().st_size for path in (store / "data").glob("*.safetensors"))
    assert before - after == freed
    assert not list((store / "data").glob("00000007-*"))
    assert not (store / "checkpoints" / "00000007-0001").exists()


def test_gradients_of_another_dtype(store):
    model = nn.Linear(20, 2, bias=False, dtype=torch.bfloat16)
    model.weight.grad_dtype = torch.float32
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with logged(store, state) as saver:
        for step in range(1, 5):
            model.weight.grad = torch.randn(2, 20)
            state["optimizer"].step()
            saver.step(step)
    assert materialize(Disk(store), CheckpointName(4, 1)).exact
    assert torch.equal(Store(store).read(4)["model.weight"], model.weight)


class Own(torch.optim.SGD):
    pass


def test_only_torchs_optimizers_are_built(store):
    with logged(store, state := build(1, Own)) as saver:
        advance(saver, state, range(1, 6))
    with pytest.raises(Unsupported, match="only torch's own"):
        materialize(Disk(store), CheckpointName(5, 1))


def test_a_state_of_another_step_is_refused(store):
    fill(store)
    materialize(Disk(store), CheckpointName(3, 1))
    there = store / "checkpoints" / "00000003-0001" / "state.json"
    (store / "checkpoints" / "00000006-0001" / "state.json").write_bytes(there.read_bytes())
    assert not Store(store).verify().ok
    with pytest.raises(Corrupt, match="not the whole state of 00000006-0001"):
        Store(store).read(6)
