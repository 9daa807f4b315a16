"""The self-test: kept in logs, tried again where a replay is on another machine, told with it."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from runs import check_same, checkpointer, kinds, logged, snapshot, threads
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from everstep import Store, Unsupported
from everstep.cli.main import main
from everstep.redo import selftest
from everstep.restore.materialize import materialize
from everstep.state.optimizers import OptimizerState
from everstep.store.names import CheckpointName
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
from test_selftest import build, run
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
        with pytest.raises(Unsupported, match=r"\(a self-test of 'optimizer' came to equal"):
            restorer.restore(exact="require")
        assert restorer.restore(1, exact="require") == 1  # a whole state
        assert restorer.metrics.selftest == {}
        assert restorer.restore() == 5
        assert restorer.metrics.selftest == {"optimizer": "equal"}
    assert "a self-test of 'optimizer' came to equal bytes here" in caplog.text
    check_same(snapshot(fresh), snapshot(state))
    caplog.clear()
    with checkpointer(store, fresh) as restorer:
        assert restorer.restore(exact="require") == 5
        assert restorer.metrics.selftest == {}
    assert "self-test" not in caplog.text


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
    here, in two there. What the self-test says is what the replay comes to."""
    weights = run_with_other_instructions(store, kind)
    fresh = build(2, kind)
    with checkpointer(store, fresh) as restorer:
        with pytest.raises(Unsupported, match=r"capability .* \(a self-test of 'optimizer'"):
            restorer.restore(exact="require")
        assert restorer.restore() == 5
        assert restorer.metrics.selftest == {"optimizer": result}
    found = b"".join(p.detach().numpy().tobytes() for p in fresh["model"].parameters())
    assert (found == weights) == (result == "equal")
    words = "equal" if result == "equal" else "DIFFERENT"
    assert f"a self-test of 'optimizer' came to {words} bytes here" in caplog.text
    assert main(["materialize", str(store), "4", "--json"]) == 0
    (made,) = json.loads(capsys.readouterr().out)["made"]
    assert made["exact"] is False
    assert made["selftest"] == {"optimizer": result}
    assert main(["show", str(store), "4"]) == 0
    shown = capsys.readouterr().out
    assert "not exact: capability" in shown
    assert f"a self-test of 'optimizer', there against here: {result}" in shown
    assert main(["show", str(store), "4", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)["whole"]
    assert whole["exact"] is False
    assert whole["selftest"] == {"optimizer": result}
    assert Store(store).verify().ok


def test_logs_keep_it(store, capsys):
    run(store, build(1))
    assert kinds(store) == "brrrr"
    recipes = [Store(store).manifest(step).topology.get("selftest") for step in range(1, 6)]
    assert recipes[0] is None
    assert recipes[1]["optimizer"]["class"] == "torch.optim.adamw.AdamW"
    assert recipes[1:] == [recipes[1]] * 4
    assert main(["show", str(store), "3"]) == 0
    shown = capsys.readouterr().out
    assert recipes[1]["optimizer"]["digest"] in shown
    assert "self-test" in shown
    assert main(["materialize", str(store), "3"]) == 0
    assert main(["show", str(store), "3"]) == 0
    assert "bit for bit" in capsys.readouterr().out.split("  whole")[-1]


def digest(kind, parameters, **options):
    state = OptimizerState("o", kind(parameters, **options), 0)
    found = selftest.record([state])
    assert "problem" not in found["o"], found
    assert json.loads(json.dumps(found)) == found
    assert selftest.compare({"selftest": found}, {"o": state}) == {"o": "equal"}
    assert selftest.compare({"selftest": found}) == {"o": "equal"}
    return found["o"]["digest"]


def parameters(*dtypes, dims=(1, 2)):
    return [nn.Parameter(torch.zeros((3,) * dim, dtype=dtype)) for dtype in dtypes for dim in dims]


@pytest.mark.parametrize("name", ["Adagrad", "Adafactor", "RAdam", "ASGD", "NAdam", "SGD"])
def test_torchs_own(name):
    kind = getattr(torch.optim, name)
    first = digest(kind, parameters(torch.float32))
    assert first == digest(kind, parameters(torch.float32, torch.float32), lr=0.5)
    assert first != digest(kind, parameters(torch.float32), weight_decay=0.5)
    assert first != digest(kind, parameters(torch.bfloat16))
    assert first != digest(kind, parameters(torch.float32, dims=(1, 3)))


def test_settings_that_matter():
    both = parameters(torch.float32)
    rate = torch.tensor(0.1)
    digest(ADAMW, both, lr=rate)
    digest(ADAMW, both, fused=True)
    digest(ADAMW, both, foreach=True)
    digest(torch.optim.Adam, parameters(torch.complex64, torch.float64, torch.float16))
    digest(torch.optim.Adam, parameters(torch.float32, dims=(0, 5, 7)))
    groups = [{"params": both[:1]}, {"params": both[1:], "weight_decay": 0.0}]
    assert digest(ADAMW, groups) != digest(ADAMW, both)
    if hasattr(torch.optim, "Muon"):
        digest(torch.optim.Muon, both[1:])


CALLS = []


class Own(torch.optim.AdamW):
    """Counts its updates where no copy of it has something of its own."""

    def step(self, closure=None):
        CALLS.append(1)
        return super().step(closure)


def test_a_users_own_is_not_run(store):
    """Whatever else its update does would happen in the midst of the run."""
    CALLS.clear()
    run(store, build(1, Own))
    assert len(CALLS) == 5
    kept = Store(store).manifest(5).topology["selftest"]
    assert kept["optimizer"]["problem"] == "only torch's own optimizers are tried"
    with threads(torch.get_num_threads() + 1), checkpointer(store, build(2, Own)) as restorer:
        assert restorer.restore() == 5
        assert restorer.metrics.selftest["optimizer"].startswith(
            "not run: in the run, only torch's"
        )
    assert len(CALLS) == 9
    other = {"optimizer": OptimizerState("o", ADAMW(parameters(torch.float32)), 0)}
    recipe = {"class": "torch.optim.sgd.SGD", "groups": [], "digest": ""}
    found = selftest.compare({"selftest": {"optimizer": recipe}}, other)
    assert found == {"optimizer": "not run: it was a torch.optim.sgd.SGD"}


def test_it_changes_nothing_of_the_run(store):
    """Schedulers wrap step(), hooks count: the test goes by all of them."""

    def make():
        state = build(1)
        state["scheduler"] = torch.optim.lr_scheduler.LinearLR(state["optimizer"], 0.1)
        return state

    def step(state):
        train(state)
        state["scheduler"].step()

    plain, seen = make(), []
    for _ in range(5):
        step(plain)
    expected = snapshot(plain)
    state = make()
    hook = register_optimizer_step_pre_hook(lambda *_: seen.append(1))
    with contextlib.closing(logged(store, state)) as saver:
        for number in range(1, 6):
            step(state)
            saver.step(number)
    hook.remove()
    check_same(snapshot(state), expected)
    assert len(seen) == 5
    assert "digest" in Store(store).manifest(3).topology["selftest"]["optimizer"]


@pytest.mark.parametrize(
    "recipes",
    [
        None,
        3,
        {"o": None},
        {"o": {}},
        {"o": {"class": "os.system", "groups": [], "digest": ""}},
        {"o": {"class": "torch.optim.AdamW", "groups": [{}], "digest": ""}},
        {"o": {"class": "torch.optim.adamw.AdamW", "groups": 3, "digest": ""}},
        {
            "o": {
                "class": "torch.optim.adamw.AdamW",
                "groups": [{"set": {}, "rate_is_tensor": False, "tensors": [["load", 10**12]]}],
            }
        },
        {
            "o": {
                "class": "torch.optim.adamw.AdamW",
                "groups": [
                    {"set": {}, "rate_is_tensor": False, "tensors": [["float32", 10**12]] * 10**5}
                ],
                "digest": "",
            }
        },
    ],
)
def test_recipes_that_are_none(recipes):
    found = selftest.compare({"selftest": recipes})
    assert all(text.startswith("not run") or text == "different" for text in found.values())
    selftest.describe(found)


def test_the_numbers_are_the_same_everywhere():
    """Pinned: logs of other versions hold digests of what came of them."""
    values = {
        dtype: selftest._values(dtype, (67, 33), 3)
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    }
    assert values[torch.float32][0, :3].tolist() == [
        0.5612562894821167,
        0.9692732095718384,
        -0.7230582237243652,
    ]
    for tensor in values.values():
        assert tensor.abs().max() <= 1
        assert tensor.double().mean().abs() < 0.05
    assert values[torch.float64].float().equal(values[torch.float32])
    for dtype, bits in ((torch.bfloat16, 7), (torch.float16, 10)):
        assert values[dtype].unique().numel() > 2**bits / 2
