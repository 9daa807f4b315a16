"""What top-k did not send yet: in whole states alone, or in every record. Weights and optimizer are
exact with both, and the run as a whole with the latter."""

import json
import os
import signal

import pytest
import torch
from hooked import gradient_bytes, one_rank
from runs import check_same, checkpointer, freeze, kinds
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import everstep
import forked
from everstep import Store, Unsupported
from everstep.cli.main import main
from everstep.format.manifest import CheckpointName
from everstep.store import catalog
from everstep.tiers.disk import Disk

STEPS = 9
WHERE = pytest.mark.parametrize("residual", ["bases", "records"])


@pytest.fixture(autouse=True)
def _group(tmp_path):
    with one_rank(tmp_path):
        yield


def build(residual, seed=1):
    torch.manual_seed(seed)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(40, 300), nn.Tanh(), nn.Linear(300, 10))
    )
    hook = everstep.compress(model, "topk", ratio=0.01, residual=residual)
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01),
        "compression": hook,
        "data": torch.Generator().manual_seed(seed),
    }


def train(state):
    state["optimizer"].zero_grad()
    inputs = torch.randn(16, 40, generator=state["data"])
    (state["model"](inputs) - inputs[:, :10]).square().mean().backward()
    state["optimizer"].step()


def parts(state):
    return {name: freeze(state[name]) for name in ("model", "optimizer", "data")}


def residual_of(state):
    return freeze(state["compression"].state_dict()["tensors"])


def run(store, residual, steps=STEPS):
    """The frozen parts, and the residual, of each step; a base at the first and the sixth."""
    state, seen = build(residual), {}
    with checkpointer(store, state, strategy="log", base_every=5) as saver:
        for step in range(1, steps + 1):
            train(state)
            saver.save(step).wait("local")
            seen[step] = parts(state), residual_of(state)
    assert kinds(store) == "brrrrbrrr"[:steps]
    return seen


@WHERE
def test_every_step_comes_back(store, residual):
    seen = run(store, residual)
    for step, (frozen, owed) in seen.items():
        is_whole = residual == "records" or step in (1, 6)
        restored = build(residual, 2)
        with checkpointer(store, restored) as restorer:
            assert restorer.restore(step) == step
        check_same(parts(restored), frozen)
        check_same(residual_of(restored), owed if is_whole else freeze({"residual": {}}))


@WHERE
def test_what_is_said_of_it(store, residual, capsys):
    run(store, residual)
    is_exact = residual == "records"
    main(["ls", str(store), "--json"])
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    expected = [is_exact or row["kind"] == "state" for row in rows]
    assert [row["exact"] for row in rows] == expected
    main(["show", str(store), "8"])
    said = capsys.readouterr().out
    assert ("not exact" in said) is not is_exact
    assert "· indices 4 (" in said
    restored = build(residual, 2)
    with checkpointer(store, restored) as restorer:
        assert restorer.restore(6, exact="require") == 6
        assert restorer.restore(8, only=["model", "optimizer"], exact="require") == 8
        if is_exact:
            assert restorer.restore(8, exact="require") == 8
        else:
            with pytest.raises(Unsupported, match=r"'compression'.*residual='records'"):
                restorer.restore(8, exact="require")
    main(["materialize", str(store), "8"])
    said = capsys.readouterr().out
    assert ("bit for bit" if is_exact else "compression has no tensors in records") in said
    assert catalog.read_whole(Disk(store), CheckpointName(8, 1)).exact is is_exact


@WHERE
def test_a_record_is_small(store, residual):
    run(store, residual)
    dense = sum(p.nbytes for p in build(residual)["model"].parameters())
    assert gradient_bytes(store, 4) <= 0.05 * dense
    whole = sum(
        piece.size
        for entry in catalog.read_table(
            Disk(store), Store(store).manifest(4).records[0].part
        ).tensors.values()
        for piece in entry.pieces
        if entry.spec.name.startswith(("@0", "compression"))
        and not entry.spec.name.startswith("@0!digest")
    )
    assert (whole <= 0.05 * dense) is (residual == "bases")


def dies(store, folder, residual, steps):
    with one_rank(folder):
        state = build(residual, 3)
        saver = checkpointer(store, state, strategy="log", base_every=5)
        start = saver.restore()
        if start == 0:
            state = build(residual)
            saver = checkpointer(store, state, strategy="log", base_every=5)
        for step in range(start + 1, start + steps + 1):
            train(state)
            handle = saver.save(step)
        handle.wait("captured")
        os.kill(os.getpid(), signal.SIGKILL)


@WHERE
def test_a_run_that_is_killed_goes_on(store, residual, tmp_path):
    """With the residual in records as if nothing had been; else from just these weights."""
    seen = run(tmp_path / "whole", residual)
    for number, steps in enumerate((3, 4, 2)):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert forked.run(dies, store, folder, residual, steps).returncode == -signal.SIGKILL
        restored = build(residual, 4)
        with checkpointer(store, restored) as restorer:
            step = restorer.restore()
        if residual == "records" or number == 0:
            check_same(parts(restored), seen[step][0])
    assert step == STEPS
    fresh = build(residual, 5)
    with checkpointer(store, fresh) as restorer:
        assert restorer.restore(exact="allow") == STEPS
        train(fresh)
