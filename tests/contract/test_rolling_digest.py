"""The rolling digest: a replay that comes to other bytes than the run had is found out within K
steps, and what is not proven is not restored unasked."""

import json
import sys
import threading

import pytest
import torch
from logs import Plain, build, durable, train
from runs import check_same, kinds, logged, run_logged, snapshot, threads
from safetensors.torch import load_file

from everstep import Corrupt, Store
from everstep.capture import copier
from everstep.cli.main import main
from everstep.redo import replay, rolling_digest
from everstep.restore import apply
from everstep.store import catalog

STEPS = 12


@pytest.fixture
def slices(monkeypatch):
    """How many slices there are."""

    def set_count(count):
        monkeypatch.setattr(rolling_digest, "count_for", lambda tensors, step_s: count)

    return set_count


def run(store, kind=Plain, **options):
    """A base and records; what the state was at each step."""
    frozen = run_logged(store, build(1, kind), train, STEPS, durable, base_every=1000, **options)
    assert kinds(store) == "b" + "r" * (STEPS - 1)
    return frozen


def heads(store, steps=range(2, STEPS + 1)):
    """K and the number of the slice, by step, read without everstep's replay."""
    found = {}
    for step in steps:
        for link in Store(store).manifest(step).files:
            if link.path.endswith(".safetensors"):
                tensor = load_file(store / link.path).get("@0!digest.optimizer")
                if tensor is not None:
                    found[step] = rolling_digest._HEAD.unpack(bytes(tensor.tolist()))[:2]
    return found


@pytest.mark.parametrize("verify", ["rolling", "full"])
def test_each_record_has_the_digest_of_the_next_slice(store, slices, verify):
    slices(4)
    frozen = run(store, verify=verify)
    expected = [(4, step % 4) for step in range(STEPS - 1)] if verify == "rolling" else [(1, 0)]
    assert list(heads(store).values()) == (expected * STEPS)[: STEPS - 1]
    tables = {part.table.path for step in frozen for part in Store(store).manifest(step).all_parts}
    assert len(tables) < len(frozen)  # not one for each step
    state = build(2, Plain)
    with logged(store, state) as saver:
        for step in (STEPS, 3):
            assert saver.restore(step) == step
            check_same(frozen[step], snapshot(state))


@pytest.fixture
def other_from(monkeypatch):
    """A function of a step, from which on replays come to other bytes."""
    redo, update = replay.redo, replay._step
    now, first = 0, sys.maxsize

    def noting(record, optimizers):
        nonlocal now
        now = record.step
        redo(record, optimizers)

    def other(state, call):
        update(state, call)
        for leaf in state.here() if now >= first else ():
            leaf.tensor.view(-1).add_(1e-3)

    def set_first(step):
        nonlocal first
        first = step

    monkeypatch.setattr(apply, "redo", noting)
    monkeypatch.setattr(replay, "_step", other)
    return set_first


def test_the_newest_that_is_proven(store, slices, other_from, caplog, capsys):
    slices(3)
    frozen = run(store)
    other_from(8)
    state = build(2, Plain)
    with logged(store, state) as saver:
        with pytest.raises(Corrupt, match="came to other bytes than the run had") as caught:
            saver.restore(8)
        assert type(caught.value) is Corrupt
        assert saver.restore(7) == 7  # who asks for one gets it, if the replay comes to it
        check_same(frozen[7], snapshot(state))
        assert not catalog.read_unproven(Store(store)._disk)
        assert saver.restore() == 5
        check_same(frozen[5], snapshot(state))
        assert "step 8" in caplog.text
        assert "Nothing proves the 3 records up to this one" in caplog.text
    verdict = Store(store).verify()
    assert [int(name.partition("-")[0]) for name in verdict.unproven] == list(range(6, STEPS + 1))
    assert verdict.ok
    assert main(["verify", str(store)]) == 0
    assert main(["show", str(store), "7"]) == 0
    assert capsys.readouterr().out.count("came to other bytes than the run") == 2
    assert main(["verify", str(store), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["unproven"]) == STEPS - 5
    caplog.clear()
    other_from(sys.maxsize)
    with logged(store, state) as saver:
        assert saver.restore() == 5  # the next one does not try again
        assert "steps 6 to 12 are tried last" in caplog.text
        assert saver.restore(STEPS) == STEPS
        check_same(frozen[STEPS], snapshot(state))


def test_where_nothing_but_the_base_is_proven(store, slices, other_from):
    slices(3)
    frozen = run(store)
    other_from(3)
    for _ in range(2):
        with logged(store, state := build(2, Plain)) as saver:
            assert saver.restore() == 1
            check_same(frozen[1], snapshot(state))


def test_steps_may_be_numbered_in_twos(store, slices, other_from):
    slices(3)
    frozen = {}
    with logged(store, state := build(1, Plain)) as saver:
        for step in range(2, 2 * STEPS + 1, 2):
            train(state)
            durable(saver.step(step))
            frozen[step] = snapshot(state)
    other_from(16)
    with logged(store, state := build(2, Plain)) as saver:
        assert saver.restore() == 10  # the digests of 12, 14 and 16 prove all together
        check_same(frozen[10], snapshot(state))


def test_what_is_replayed_elsewhere_may_differ(store, slices, other_from, caplog):
    """There is a warning in place of an error, which names the first step that did."""
    slices(1)
    run(store)
    other_from(4)
    with threads(torch.get_num_threads() + 1), logged(store, build(2, Plain)) as saver:
        assert saver.restore(6) == 6
    assert "other bytes than the run's since step 4" in caplog.text
    assert "may differ in last bits" in caplog.text
    assert not catalog.read_unproven(Store(store)._disk)


def test_who_writes_while_it_is_digested_voids_it(store, monkeypatch):
    """The record is what its update came to, and its digest says nothing."""
    goes_on, digest = threading.Event(), rolling_digest.digest_of

    def digest_later(pieces):
        assert threading.current_thread().name != "everstep-copy" or goes_on.wait(30)
        return digest(pieces)

    state, frozen = build(1, Plain), {}
    with logged(store, state, base_every=1000) as saver:
        for step in range(1, STEPS + 1):
            train(state)
            monkeypatch.setattr(rolling_digest, "digest_of", digest_later if step == 4 else digest)
            handle = saver.step(step)
            frozen[step] = snapshot(state)
            if step == 4:
                with torch.no_grad():
                    state["model"][0].weight.mul_(0.5)
                goes_on.set()
            handle.wait("local")
    assert kinds(store) == "brrrb" + "r" * (STEPS - 5)
    assert [step for step, (count, _) in heads(store, [2, 3, 4]).items() if count == 0] == [4]
    with logged(store, fresh := build(2, Plain)) as saver:
        for step, expected in frozen.items():
            assert saver.restore(step) == step
            check_same(expected, snapshot(fresh))


def test_the_update_waits_for_its_digest(store, monkeypatch):
    goes_on, digest, waited = threading.Event(), rolling_digest.digest_of, []

    def digest_later(pieces):
        if threading.current_thread().name == "everstep-copy":
            waited.append(goes_on.wait(30))
        return digest(pieces)

    state = build(1, Plain)
    with logged(store, state, base_every=1000) as saver:
        for step in (1, 2, 3):
            train(state)
            if step == 2:
                monkeypatch.setattr(rolling_digest, "digest_of", digest_later)
                monkeypatch.setattr(copier, "_SEAL_S", 0.0)
            saver.step(step)
            if step == 2:
                threading.Timer(0.3, goes_on.set).start()
        expected = snapshot(state)
    assert waited[0]
    with logged(store, fresh := build(2, Plain)) as saver:
        assert saver.restore() == 3
        check_same(expected, snapshot(fresh))
