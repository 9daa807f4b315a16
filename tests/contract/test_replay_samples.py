"""An update that is not the same twice is found out by the replay: each record has a few bytes of
what it came to."""

import itertools

import pytest
import torch
from logs import Plain, build, train
from runs import check_same, kinds, logged, snapshot, threads
from safetensors.torch import load_file

from everstep import Corrupt, Store

STEPS = 6


class Drifting(Plain):
    """Depends on something that no hook, attribute or generator tells of."""

    drift = itertools.count()

    def update(self):
        super().update(1 + next(type(self).drift) / 100)


def run(store, kind=Drifting):
    """A base and records; what the state was at each step."""
    state, frozen = build(1, kind), {}
    with logged(store, state, base_every=1000) as saver:
        for step in range(1, STEPS + 1):
            train(state)
            saver.step(step).wait("local")
            frozen[step] = snapshot(state)
    assert kinds(store) == "b" + "r" * (STEPS - 1)
    return frozen


def test_other_bytes_than_the_run_had(store, caplog):
    frozen = run(store)
    state = build(2, Drifting)
    with logged(store, state) as saver:
        with pytest.raises(Corrupt, match="step 2: 'optimizer' came to other bytes") as caught:
            saver.restore(2)
        assert type(caught.value) is Corrupt
        assert saver.restore() == 1
        check_same(frozen[1], snapshot(state))
    assert caplog.text.count("came to other bytes") == 1
    assert f"{STEPS - 2} other steps go on from the same damage" in caplog.text


def test_a_run_whose_updates_are_the_same_twice(store):
    frozen = run(store, Plain)
    state = build(2, Plain)
    with logged(store, state) as saver:
        for step in (STEPS, 3):
            assert saver.restore(step) == step
            check_same(frozen[step], snapshot(state))


def test_what_is_replayed_elsewhere_may_differ(store, caplog):
    """There is a warning in place of an error."""
    run(store)
    with threads(torch.get_num_threads() + 1), logged(store, build(2, Drifting)) as saver:
        assert saver.restore(2) == 2
    assert "may differ in last bits" in caplog.text


def test_a_few_bytes_in_each_record(store):
    run(store, Plain)
    found = {
        step: bytes(tensor.numpy())
        for step in range(2, STEPS + 1)
        for name, tensor in _own(store, step).items()
        if name.startswith("@0!updated.")
    }
    assert len(found) == STEPS - 1
    assert all(any(sample) and len(sample) == 16 * 64 for sample in found.values())
    tables = {part.table.path for step in found for part in Store(store).manifest(step).all_parts}
    assert len(tables) < len(found)  # not one for each step


def _own(store, step):
    """A record's own tensors, read without everstep's replay."""
    manifest = Store(store).manifest(step)
    found = {}
    for link in manifest.files:
        if link.path.endswith(".safetensors"):
            found |= load_file(store / link.path)
    return found
