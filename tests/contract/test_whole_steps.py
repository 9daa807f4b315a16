"""Steps of a log that are made whole, by hand or by a command: they are the run's, what is before
them can go, and what goes meanwhile does no harm."""

import importlib
import json
from dataclasses import replace

import pytest
import torch
from keepers import ended
from runs import check_same, check_steps, checkpointer, difference, logged, restore, snapshot
from torch import nn
from wholes import advance, build, fill, same, tensors_of, train, whole_steps

import everstep
from everstep import Corrupt, Keep, Missing, Store, Unavailable, Unsupported
from everstep.cli.main import main
from everstep.format.manifest import CheckpointName, encode_manifest
from everstep.restore import materialize as materializing
from everstep.restore.materialize import materialize
from everstep.restore.rebuild import Rebuilt
from everstep.store import catalog, commit, names, retain
from everstep.tiers.disk import Disk
from examples import slow
from stores import files_of, packs_of

CLIPS = {
    "torch": nn.utils.clip_grad_norm_,
    "everstep": everstep.clip_grad_norm_,
    "by value": nn.utils.clip_grad_value_,
}


@pytest.mark.parametrize(
    ("kind", "options", "clip"),
    [
        (torch.optim.AdamW, {"foreach": True}, "everstep"),
        (torch.optim.AdamW, {"fused": True}, None),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, "everstep"),
        (torch.optim.Adafactor, {}, None),
        *slow(
            (torch.optim.AdamW, {"foreach": False}, "torch"),
            (torch.optim.AdamW, {"amsgrad": True, "maximize": True}, "by value"),
            (torch.optim.SGD, {"momentum": 0.9, "fused": True}, "everstep"),
            (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}, "everstep"),
            (torch.optim.RAdam, {}, None),
            (torch.optim.Adagrad, {}, None),
        ),
    ],
    ids=str,
)
def test_what_is_made_whole_is_the_run(store, kind, options, clip):
    """Groups, a schedule, buffers; from a base, and from what was made whole before."""
    state, frozen, live = build(1, kind, **options), {}, {}
    with logged(store, state, base_every=100) as saver:
        for step in range(1, 13):
            train(state, CLIPS.get(clip))
            saver.step(step)
            live[step], frozen[step] = tensors_of(state), snapshot(state)
    for step in (7, 12):
        same(Store(store).read(step), live[step])  # replayed, and nothing is written
        assert Store(store).manifest(step).records
        made = materialize(Disk(store), CheckpointName(step, 1))
        assert made.exact
        assert made.hyperparameters == Store(store).manifest(step).hyperparameters
        same(Store(store).read(step), live[step])
    assert [manifest.step for manifest in Store(store).chain(11)] == [7, 8, 9, 10, 11]
    assert check_steps(store, build(2, kind, **options), frozen) == list(range(1, 13))
    assert Store(store).verify().ok


def test_the_settings_of_then_are_adopted(store):
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    torch.set_default_dtype(torch.float64)
    try:
        with logged(store, state := build(1)) as saver:
            frozen = advance(saver, state, range(1, 5))
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(torch.float32)
    assert materialize(Disk(store), CheckpointName(4, 1)).exact
    assert torch.get_num_threads() == threads
    assert torch.get_default_dtype() == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert frozen.keys() == {*check_steps(store, build(2), frozen)}
    finally:
        torch.set_default_dtype(torch.float32)


def test_where_denormals_were_flushed_it_is_not_exact(store, caplog):
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot")
    try:
        with logged(store, state := build(1)) as saver:
            advance(saver, state, range(1, 4))
    finally:
        torch.set_flush_denormal(False)
    Store(store).read(3)
    assert "it may not be just what the run had: denormals" in caplog.text
    assert not materialize(Disk(store), CheckpointName(3, 1)).exact


def test_a_log_has_no_state_of_its_own(store):
    fill(store)
    with pytest.raises(Unsupported, match=f"Make it whole with: everstep materialize {store} 4$"):
        Store(store).state(4)
    assert Store(store).state(1).step == 1


# ---- the command ---------------------------------------------------------------------------------


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


# ---- what goes meanwhile, and afterwards ---------------------------------------------------------


pytestmark = pytest.mark.timeout(300)  # workers give way to whatever else this machine does


@pytest.mark.parametrize("module", ["rebuild.fill", "materialize.described"])
def test_a_step_that_is_deleted_meanwhile(store, monkeypatch, module):
    """Before anything of it is read, and when all of it was."""
    fill(store)
    disk = Disk(store)
    materialize(disk, CheckpointName(8, 1))  # retention can delete all that is before it
    place = importlib.import_module(f"everstep.restore.{module.partition('.')[0]}")
    before = getattr(place, module.partition(".")[2])

    def after(*args):
        assert retain.apply(disk, Keep(last=1)) > 0
        return before(*args)

    monkeypatch.setattr(f"everstep.restore.{module}", after)
    with pytest.raises(Missing, match=r"00000006-0001 .*it is not there, or not any more"):
        materialize(disk, CheckpointName(6, 1))
    assert Store(store).steps() == [8]
    assert len(packs_of(store)) == 2
    assert restore(store, build(2)) == 8


def test_packs_that_gc_takes_meanwhile(store, monkeypatch):
    """Of an older epoch: who makes a step whole sees that they are gone."""
    fill(store)
    disk, before = Disk(store), files_of(store)
    with monkeypatch.context() as patch:
        publish = commit.publish_state

        def after(*args):
            assert Store(store).gc()[0] > 0
            publish(*args)

        patch.setattr("everstep.store.commit.publish_state", after)
        (store / names.epoch_path(2)).write_bytes((store / names.epoch_path(1)).read_bytes())
        with pytest.raises(Unavailable, match="was deleted meanwhile"):
            materialize(disk, CheckpointName(6, 1))
    (store / names.epoch_path(2)).unlink()
    assert files_of(store) == before
    assert materialize(disk, CheckpointName(6, 1)).exact


def test_a_step_that_was_made_whole_outlives_what_was_before(store):
    """Also when it goes itself: its manifest first, since without its state it is nothing."""
    frozen = fill(store)
    disk = Disk(store)
    materialize(disk, CheckpointName(5, 1))
    assert retain.apply(disk, Keep(last=2)) > 0
    assert Store(store).steps() == [5, 6, 7, 8]
    assert Store(store).verify().ok
    check_steps(store, build(2), frozen)
    for step in (8, 7, 6, 5):
        assert Store(store).delete(step) > 0
    assert files_of(store) & {"data", "checkpoints"} == set()
    assert not packs_of(store)


def test_what_is_not_exact_frees_nothing(store, monkeypatch):
    """As of a CUDA run: such states stay as long as their steps, for those who read the store."""
    frozen = fill(store)
    disk = Disk(store)
    monkeypatch.setattr("everstep.restore.chain.Chain.why_inexact", ["torch 1"])
    for step in (3, 5, 6):
        assert not materialize(disk, CheckpointName(step, 1)).exact
    retain.apply(disk, Keep(last=1))
    assert Store(store).steps() == list(range(1, 9))
    assert whole_steps(store) == [3, 5, 6]
    assert Store(store).verify().ok
    check_steps(store, build(2), frozen)


@pytest.mark.slow
def test_retention_goes_up_to_a_base_that_is_spread_over_records(store):
    """Its bytes lie in the packs of records that are deleted."""
    state, keep = build(1), Keep(last=2)
    with logged(store, state, base_every=8, window=3, keep=keep) as saver:
        frozen = advance(saver, state, range(1, 31))
        keeper = saver._client.keeper_pid
    assert ended(keeper)
    spread = whole_steps(store)
    assert spread
    assert Store(store).steps() == list(range(spread[-1], 31))
    assert all(not state.parts for state in map(Store(store).manifest, Store(store).steps()))
    assert Store(store).verify().ok
    assert Store(store).gc()[0] == 0
    check_steps(store, build(2), frozen)
    assert Store(store).read(30)
    materialize(Disk(store), CheckpointName(spread[-1], 1))  # takes its place
    assert Store(store).read(spread[-1])
    retain.apply(Disk(store), Keep(last=2))
    assert Store(store).verify().ok
    check_steps(store, build(2), frozen)


def test_a_base_of_which_a_part_is_gone_is_not_published(store):
    """What holds the parts may have been deleted when a later step was made whole."""
    fill(store)
    for step in (8, 7):
        Store(store).delete(step)
    disk = Disk(store)
    lost = replace(Store(store).manifest(1), step=6)
    materialize(disk, CheckpointName(4, 1))
    retain.apply(disk, Keep(last=1))
    digest = catalog.digest_of_manifest(disk, CheckpointName(6, 1))
    with pytest.raises(Unavailable, match=r"data/00000001.* was deleted meanwhile"):
        commit.publish_state(disk, lost, digest)
    assert whole_steps(store) == [4]
    assert Store(store).verify().ok


# ---- of old stores (keep_exact=False): with other last bits, for the log -------------------------


WEIGHT = "model.0.weight"


@pytest.fixture
def elsewhere(monkeypatch):
    """What is made whole comes to other last bits, as on another machine."""

    class Replay(Rebuilt):
        @property
        def tensors(self):
            found = super().tensors
            bits = found[WEIGHT].detach().view(torch.int32)
            bits[0, 0] ^= 1
            return found

    monkeypatch.setattr(materializing, "Rebuilt", Replay)
    monkeypatch.setattr("everstep.restore.chain.Chain.why_inexact", ["torch 1"])


def make_whole(store, step):
    """As everstep did until it always kept the log of what is not exact."""
    disk, name = Disk(store), CheckpointName(step, 1)
    made = materialize(disk, name)
    assert not made.exact
    assert not made.ends_chain
    disk.replace(names.state_path(name), encode_manifest(replace(made, replaces_log=True)))


def weight_after(store, step):
    state = build(2)
    assert restore(store, state, step) == step
    return state, state["model"][0].weight.detach().clone()


def test_it_is_what_a_restore_takes_and_says_so(store, elsewhere, caplog):
    frozen = fill(store)
    make_whole(store, 5)
    assert [manifest.step for manifest in Store(store).chain(7)] == [5, 6, 7]
    state, weight = weight_after(store, 5)
    found = difference(snapshot(state), frozen[5])
    assert found
    assert "0.weight" in found
    assert torch.equal(weight, Store(store).read(5, [WEIGHT])[WEIGHT])
    assert "restoring step 5: " in caplog.text
    assert "(exact: false). It was made whole by a replay elsewhere" in caplog.text
    state, _ = weight_after(store, 8)
    assert difference(snapshot(state), frozen[8])
    assert "Step 5, from which it goes on, was made whole" in caplog.text
    caplog.clear()
    state, _ = weight_after(store, 4)  # from the base
    check_same(snapshot(state), frozen[4])
    assert "exact" not in caplog.text


def test_an_exact_restore_refuses_it(store, elsewhere):
    frozen = fill(store)
    make_whole(store, 5)
    state = build(2)
    before = snapshot(state)
    with checkpointer(store, state) as restorer:
        for step in (5, 8):
            with pytest.raises(Unsupported, match=r"exact: false.*or exact='allow'"):
                restorer.restore(step, exact="require")
        check_same(snapshot(state), before)
        assert restorer.restore(4, exact="require") == 4
    check_same(snapshot(state), frozen[4])


def test_retention_deletes_what_is_behind_it(store, elsewhere):
    fill(store)
    disk = Disk(store)
    make_whole(store, 5)
    assert retain.apply(disk, Keep(last=2)) > 0
    assert Store(store).steps() == [5, 6, 7, 8]
    verdict = Store(store).verify()
    assert verdict.ok, verdict.problems
    assert Store(store).gc() == (0, 0)
    assert Store(store).verify(7).ok
    assert len(packs_of(store)) == 5
    _, weight = weight_after(store, 8)
    assert torch.equal(weight_after(store, 8)[1], weight)
    for step in (8, 7, 6, 5):  # the log that it stood for goes with it
        assert Store(store).delete(step) > 0
    assert not packs_of(store)
