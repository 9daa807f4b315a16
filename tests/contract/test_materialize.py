"""Whole states made of log steps: the same bytes, readable without a model."""

import json

import pytest
from wholes import fill

from everstep import Corrupt, Missing, Store
from everstep.cli.main import main
from everstep.format.manifest import CheckpointName
from everstep.restore.materialize import materialize
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


def test_a_state_of_another_step_is_refused(store):
    fill(store)
    materialize(Disk(store), CheckpointName(3, 1))
    there = store / "checkpoints" / "00000003-0001" / "state.json"
    (store / "checkpoints" / "00000006-0001" / "state.json").write_bytes(there.read_bytes())
    assert not Store(store).verify().ok
    with pytest.raises(Corrupt, match="not the whole state of 00000006-0001"):
        Store(store).read(6)
