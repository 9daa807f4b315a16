"""derive=: parts that a rule brings forward, in the run and at the replay, byte for byte."""

import pytest
from derived import WAYS, anew, averaged, build, check_all, run, strided, two_in_a_row, with_buffers
from logs import train
from runs import check_steps, checkpointer, kinds

from everstep import Store, Unsupported
from everstep.cli.main import main
from everstep.format.manifest import CheckpointName
from everstep.restore.materialize import materialize
from everstep.tiers.disk import Disk
from examples import slow

QUICK = [averaged, with_buffers, two_in_a_row]


@pytest.mark.parametrize(
    ("make", "verify"),
    [
        *((make, "rolling") for make in QUICK),
        (anew, "full"),
        *slow(*((make, "rolling") for make in WAYS if make not in QUICK)),
    ],
)
def test_every_step_comes_back(store, make, verify):
    frozen = run(store, make, verify=verify)
    assert kinds(store) == "brrrrrrrr"
    for step in range(2, 10):
        (record,) = Store(store).manifest(step).records
        (table,) = Store(store).tables(Store(store).manifest(step))
        assert not [name for name in table.tensors if name.startswith(("ema", "more.slow"))]
        assert record.derived.keys() == build(3, make)[1].keys()
        assert all(said["rule"] for said in record.derived.values())
        digests = {f"@0!digest.{part}" for part in record.derived}
        assert digests <= table.tensors.keys()
    check_all(store, make, frozen)


@pytest.mark.parametrize("make", [with_buffers, *WAYS])
@pytest.mark.slow
def test_bases_that_are_spread(store, make):
    """The last record before a base has what is derived, too; it replays like the others."""
    frozen = run(store, make, 14, base_every=4, window=3)
    whole = sorted((store / "checkpoints").glob("*/state.json"))
    assert [int(path.parent.name[:8]) for path in whole] == [5, 9, 13]
    check_all(store, make, frozen)
    whole[1].unlink()  # so that some go back behind it
    check_all(store, make, frozen)
    materialize(Disk(store), CheckpointName(5, 1))
    check_all(store, make, frozen)
    assert Store(store).verify().ok


@pytest.mark.parametrize("make", [two_in_a_row, strided, *slow(*WAYS)])
def test_checkpoints_that_are_spread(store, make):
    options = {"strategy": "spread", "every": 4, "window": 3, "base_every": None}
    frozen = run(store, make, 14, verify="full", **options)
    assert Store(store).steps() == [4, 8, 12]
    assert Store(store).manifest(8).is_spread
    check_all(store, make, frozen)
    fresh, _ = build(2, make)
    check_steps(store, fresh, frozen, [8])  # no rule is needed: what it makes is there


@pytest.mark.parametrize("strategy", ["full", "log", "auto"])
def test_the_rule_runs_once_for_each_step(store, strategy):
    seen = []
    state, _ = build(1, averaged)
    with checkpointer(
        store, state, strategy=strategy, every=3, derive={"ema": seen.append}
    ) as saver:
        saver.save(0)
        for step in range(1, 8):
            train(state)
            saver.step(step)
            saver.save(step, tag="newest")
        assert seen == [1, 2, 3, 4, 5, 6, 7]
        assert saver.restore(3) == 3
        del seen[:]
        saver.step(3)
        train(state)
        saver.save(4)
        saver.step(4)
    assert seen == [4]


def test_it_cannot_be_made_whole_without_the_program(store, capsys):
    run(store, averaged)
    with pytest.raises(Unsupported, match="'ema' is derived by a rule"):
        materialize(Disk(store), CheckpointName(5, 1))
    assert main(["show", str(store), "5"]) == 0
    shown = capsys.readouterr().out
    assert "then ema" in shown
    assert "digest 2 (" in shown
    assert Store(store).verify().ok
