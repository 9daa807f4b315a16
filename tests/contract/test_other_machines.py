"""A replay on another machine than the run's: what it may differ in is told, or refused. And what
no replay does: take more memory than for two records."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from keepers import until
from logs import build, train
from runs import check_same, check_steps, checkpointer, logged, run_logged, snapshot, threads
from torch import nn

from everstep import Checkpointer, Corrupt, Store, Unsupported
from everstep.capture import plan
from everstep.cli.main import main
from everstep.format.manifest import CheckpointName
from everstep.redo import replay
from everstep.restore import records
from everstep.restore.materialize import materialize
from everstep.restore.records import Slabs
from everstep.sharding import topology
from everstep.tiers.disk import Disk

ADAMW, SGD, RPROP = torch.optim.AdamW, torch.optim.SGD, torch.optim.Rprop


ELSEWHERE = """
import json, sys; sys.path[:0] = sys.argv[2:4]
import torch
from logs import build, train
from runs import run_logged
state = build(1, getattr(torch.optim, sys.argv[4]))
run_logged(sys.argv[1], state, train, 5)
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
    run_logged(store, state, train, 5)
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
        run_logged(store, state, train, 5)
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
    ("kind", "result"), [(SGD, "different"), (RPROP, "equal"), (ADAMW, "different")]
)
@pytest.mark.slow
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


# ---- of a GPU, on the CPU (the tables alone say so; a real one is in tests/gpu) ------------------


LAST = 5


@pytest.fixture
def other_bits(monkeypatch):
    """The first weight comes to another last bit at each replayed update."""
    step = replay._step

    def again(state, call):
        step(state, call)
        with torch.no_grad():
            next(iter(state.parameters()))[2].view(torch.int32).view(-1)[0] += 1

    monkeypatch.setattr(replay, "_step", again)


@pytest.fixture(params=["cpu", "cuda:0"])
def device(request, monkeypatch):
    """What the tables say of where tensors were."""
    encode_table = plan.encode_table

    def encode(layout, aliases, devices, *rest):
        return encode_table(layout, aliases, dict.fromkeys(devices, request.param), *rest)

    monkeypatch.setattr(plan, "encode_table", encode)
    return request.param


def attempt(store, only=None, exact="allow"):
    state = build(2)
    with Checkpointer(store, state) as saver:
        assert saver.restore(LAST, only=only, exact=exact) == LAST
    return state["model"][0].weight.detach().clone()


@pytest.mark.parametrize("window", [1, 3])
def test_other_bits_are_damage_only_where_they_must_be_equal(
    store, device, other_bits, caplog, window
):
    run = build(1)
    run_logged(
        store, run, train, LAST, verify="full", base_every=3 if window > 1 else 20, window=window
    )
    trained = run["model"][0].weight
    if device == "cpu":
        for only in (None, "model"):
            with pytest.raises(Corrupt, match="other bytes"):
                attempt(store, only)
        with pytest.raises(Corrupt, match="other bytes"):
            materialize(Disk(store), CheckpointName(LAST, 1))
        return
    for only in (None, "model"):
        with pytest.raises(Unsupported, match="here on cpu"):
            attempt(store, only, exact="require")
        with caplog.at_level(logging.WARNING, "everstep"):
            weight = attempt(store, only)
        torch.testing.assert_close(weight, trained.detach())
        assert "here on cpu" in caplog.text
        caplog.clear()
    made = materialize(Disk(store), CheckpointName(LAST, 1))
    assert not made.exact
    assert "parameters on cuda, here on cpu" in made.topology["replayed"]["differs"]


# ---- memory --------------------------------------------------------------------------------------


@pytest.fixture
def slabs(monkeypatch):
    """Of each replay its slabs, with how many bytes there were at most."""
    found = []

    class Counted(Slabs):
        def __init__(self):
            super().__init__()
            self.most = 0
            found.append(self)

        def tensors(self, entries):
            tensors = super().tensors(entries)
            self.most = max(self.most, sum(map(len, self._slabs)))
            return tensors

    monkeypatch.setattr(records, "Slabs", Counted)
    return found


def test_memory_for_two_records_and_none_afterwards(store, slabs):
    frozen = run_logged(store, build(1), train, steps=9)
    check_steps(store, build(2), frozen, steps=[9, 2])
    two, one = [each.most for each in slabs]
    assert one > 0
    assert two == 2 * one
    until(lambda: not any(each._slabs for each in slabs), "memory that is given back")


class Summed(nn.Sequential):
    """Its extra state says what its weights are, and is looked at where that is restored."""

    def sums(self):
        return [parameter.detach().double().sum().item() for parameter in self.parameters()]

    def get_extra_state(self):
        return {"sums": self.sums()}

    def set_extra_state(self, state):
        self.seen = (state["sums"], self.sums())
        assert state["sums"] == self.sums()


def test_what_looks_at_the_weights_sees_all_of_the_base(store):
    def build_summed(seed):
        torch.manual_seed(seed)
        model = Summed(nn.Linear(6, 40), nn.Linear(40, 6))
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01)}

    frozen = run_logged(store, build_summed(1), train, steps=3)
    check_steps(store, build_summed(2), frozen, steps=[3])
