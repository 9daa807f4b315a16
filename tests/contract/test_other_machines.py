"""A replay on another machine than the run's: what it may differ in is told, or refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from runs import check_same, checkpointer, logged, snapshot, threads
from torch import nn

from everstep import Store, Unsupported
from everstep.cli.main import main
from everstep.format.manifest import CheckpointName
from everstep.restore.materialize import materialize
from everstep.sharding import topology
from everstep.tiers.disk import Disk
from examples import slow

ADAMW, SGD, RPROP = torch.optim.AdamW, torch.optim.SGD, torch.optim.Rprop


def build(seed, kind=ADAMW, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Linear(40, 6))
    return {"model": model, "optimizer": kind(model.parameters(), lr=0.01, **options)}


def train(state):
    state["optimizer"].zero_grad()
    state["model"](torch.randn(8, 6)).square().mean().backward()
    state["optimizer"].step()


def run(store, state, steps=5):
    with logged(store, state) as saver:
        for step in range(1, steps + 1):
            train(state)
            saver.step(step)


ELSEWHERE = """
import json, sys; sys.path[:0] = sys.argv[2:4]
import torch
from test_other_machines import build, run
from runs import snapshot
state = build(1, getattr(torch.optim, sys.argv[4]))
run(sys.argv[1], state)
weights = b"".join(p.detach().numpy().tobytes() for p in state["model"].parameters())
print(json.dumps({"set": torch.backends.cpu.get_cpu_capability(), "weights": weights.hex()}))
"""


def run_with_other_instructions(store, kind):
    """A run on this machine that keeps to the oldest instruction set: what it had in the end."""
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, store, here, here.parent, kind.__name__],
        env={**os.environ, "ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    if found["set"] == torch.backends.cpu.get_cpu_capability():
        pytest.skip("this processor has one instruction set only")
    return bytes.fromhex(found["weights"])


def test_another_number_of_threads(store, caplog):
    state, fresh = build(1), build(2)
    run(store, state)
    with threads(torch.get_num_threads() + 1), checkpointer(store, fresh) as restorer:
        with pytest.raises(Unsupported, match="recorded under threads"):
            restorer.restore(exact="require")
        assert restorer.restore(1, exact="require") == 1  # a whole state
        assert restorer.restore() == 5
    assert "may differ in last bits" in caplog.text
    check_same(snapshot(fresh), snapshot(state))
    caplog.clear()
    with checkpointer(store, fresh) as restorer:
        assert restorer.restore(exact="require") == 5
    assert "last bits" not in caplog.text


def test_a_processor_of_another_vendor(store, monkeypatch):
    """MKL comes to other square roots there, with the same instructions."""
    state, fresh = build(1), build(2)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(topology, "vendor", lambda: "Elsewhere")
        run(store, state)
    with checkpointer(store, fresh) as restorer:
        with pytest.raises(Unsupported, match=f"processor Elsewhere, here {topology.vendor()}"):
            restorer.restore(exact="require")
        assert restorer.restore() == 5


def test_a_number_of_threads_that_is_set_while_the_run_goes_on(store):
    here = torch.get_num_threads()
    state = build(1)
    with logged(store, state) as saver:
        for step in range(1, 4):
            train(state)
            saver.step(step)
        with threads(here + 1):
            train(state)
            saver.step(4)
    found = [Store(store).manifest(step).topology["threads"] for step in range(1, 5)]
    assert found == [here, here, here, here + 1]
    for there in (here, here + 1):
        said = f"recorded under threads {2 * here + 1 - there}"
        with (
            threads(there),
            checkpointer(store, build(2)) as restorer,
            pytest.raises(Unsupported, match=said),
        ):
            restorer.restore(4, exact="require")
    assert not materialize(Disk(store), CheckpointName(4, 1)).exact
    assert materialize(Disk(store), CheckpointName(3, 1)).exact


@pytest.mark.parametrize(
    ("kind", "result"),
    [(SGD, "different"), *slow((RPROP, "equal"), (ADAMW, "different"))],
)
def test_another_instruction_set(store, caplog, capsys, kind, result):
    """Real ones. Rprop adds what is rounded already; the others multiply and add in one rounding
    here, in two there."""
    weights = run_with_other_instructions(store, kind)
    fresh = build(2, kind)
    with checkpointer(store, fresh) as restorer:
        with pytest.raises(Unsupported, match="capability"):
            restorer.restore(exact="require")
        assert restorer.restore() == 5
    found = b"".join(p.detach().numpy().tobytes() for p in fresh["model"].parameters())
    assert (found == weights) == (result == "equal")
    assert "may differ in last bits" in caplog.text
    assert main(["materialize", str(store), "4", "--json"]) == 0
    (made,) = json.loads(capsys.readouterr().out)["made"]
    assert made["exact"] is False
    assert main(["show", str(store), "4"]) == 0
    shown = capsys.readouterr().out
    assert "not exact: capability" in shown
    assert main(["show", str(store), "4", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)["whole"]
    assert whole["exact"] is False
    assert Store(store).verify().ok
