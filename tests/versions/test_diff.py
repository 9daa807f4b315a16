"""everstep diff, beside what torch says of both states as a whole."""

import math

import pytest
import torch
from torch import nn

from commands import run, run_json
from everstep import Checkpointer, Log, Store
from everstep.format.packs import CHUNK_BYTES

torch.set_num_threads(1)


class Job:
    """A model, its optimizer and scheduler, which train."""

    def __init__(self, width=8):
        torch.manual_seed(1)
        self.model = nn.ModuleDict({f"layer{i}": nn.Linear(width, width) for i in range(3)})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.state = {"model": self.model, "optimizer": self.optimizer, "plan": self.scheduler}

    def train(self, place, steps, **options):
        with Checkpointer(place, self.state, **options) as checkpointer:
            for step in range(1, steps + 1):
                self.optimizer.zero_grad()
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
                for layer in self.model.values():
                    x = layer(x).tanh()
                x.square().mean().backward()
                self.optimizer.step()
                self.scheduler.step()
                checkpointer.save(step).wait("local", timeout=60)


def test_norms_are_those_of_the_whole_states(store, tmp_path, capsys):
    Job().train(store, 3, strategy="full")
    found = run_json(capsys, "diff", store, 1, 3, "--plot", tmp_path / "by layer.png")
    before, after = Store(store).read(1), Store(store).read(3)
    assert {each["name"] for each in found["changed"]} == {
        name for name in before if not torch.equal(before[name], after[name])
    }
    for each in found["changed"]:
        a, b = before[each["name"]].double(), after[each["name"]].double()
        assert each["norm"] == pytest.approx(float((b - a).norm()))
        assert each["norm_before"] == pytest.approx(float(a.norm()))
        assert each["largest"] == float((b - a).abs().max())
        assert each["changed"] == int((a != b).sum())
    assert [row["key"] for row in found["hyperparameters"]] == ["lr"]
    assert len(found["hyperparameters"][0]["parameters"]) == 6
    assert {row["path"]: row["second"] for row in found["objects"]}["plan.last_epoch"] == 3
    assert (tmp_path / "by layer.png").read_bytes().startswith(b"\x89PNG")
    assert run("diff", store, 1, 3) == 0
    out = capsys.readouterr().out
    assert "model.layer2.weight" in out
    assert "optimizer: 18 tensors changed" in out
    assert "optimizer, lr: 0.01 → 0.005 (of 6 parameters)" in out


def test_a_log_step_is_the_state_of_another_store(store, other_store, capsys):
    Job().train(store, 3, strategy="full")
    Job().train(other_store, 3, strategy=Log(base_every=100))
    assert run("diff", store, 3, other_store, 3) == 0
    assert "nothing differs" in capsys.readouterr().out
    found = run_json(capsys, "diff", other_store, 2, 3)
    expected = run_json(capsys, "diff", store, 2, 3)
    assert found["changed"] == expected["changed"]


def test_equal_chunks_are_not_read(store, capsys):
    weight = torch.arange(6 * CHUNK_BYTES // 4, dtype=torch.float32).view(-1, 512)
    changed = weight.clone()
    changed.view(-1)[CHUNK_BYTES // 4 + 5] += 0.5
    for step, tensor in ((1, weight), (2, changed)):
        with Checkpointer(store, {"value": {"weight": tensor, "same": torch.ones(3)}}) as each:
            each.save(step).wait("local", timeout=60)
    found = run_json(capsys, "diff", store, "1-1", "2-2")
    assert found["bytes_compared"] == CHUNK_BYTES
    (only,) = found["changed"]
    assert (only["changed"], only["norm"], only["norm_before"]) == (1, 0.5, None)
    assert found["equal"] == ["rng.torch", "value.same"]
    (pack,) = (store / "data").glob("00000002-*")
    data = bytearray(pack.read_bytes())
    data[4096 + 3 * CHUNK_BYTES + 7] ^= 1
    pack.write_bytes(data)
    assert run("diff", store, "1-1", "2-2") == 0  # that chunk is not looked at
    data[4096 + CHUNK_BYTES + 7] ^= 1
    pack.write_bytes(data)
    assert run("diff", store, "1-1", "2-2") == 1
    assert "digest" in capsys.readouterr().err


DTYPES = [torch.bool, torch.uint8, torch.int64, torch.uint16, torch.bfloat16, torch.float16]
DTYPES += [torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn]


def test_tensors_of_all_kinds_and_those_that_cannot_be_compared(store, other_store, capsys):
    first = {str(dtype): torch.zeros(4).to(dtype) for dtype in DTYPES}
    second = {str(dtype): torch.tensor([0, 1, 0, 0]).to(dtype) for dtype in DTYPES}
    first |= {
        "none": torch.tensor([math.nan, 1.0]),
        "void": torch.empty(0, 3),
        "one": torch.ones(2),
    }
    second |= {"none": torch.tensor([math.nan, math.inf]), "void": torch.empty(0, 3)}
    first["shape"], second["shape"] = torch.ones(2), torch.ones(3)
    first["kind"], second["kind"] = torch.ones(2), torch.ones(2).half()
    second["two"] = torch.ones(1)
    for place, value in ((store, first), (other_store, second)):
        with Checkpointer(place, {"value": value, "note": {"a": 1, "b": [1]}}) as each:
            each.save(1).wait("local", timeout=60)
    found = run_json(capsys, "diff", store, 1, other_store, 1)
    changes = {each["name"]: each for each in found["changed"]}
    for dtype in DTYPES:
        each = changes[f"value.{dtype}"]
        assert (each["changed"], each["largest"], each["norm"]) == (1, 1.0, 1.0)
    assert (changes["value.none"]["changed"], changes["value.none"]["largest"]) == (1, "inf")
    assert found["other"] == {
        "value.kind": ["float32 [2]", "float16 [2]"],
        "value.shape": ["float32 [2]", "float32 [3]"],
    }
    assert (found["only_first"], found["only_second"]) == (["value.one"], ["value.two"])
    assert "value.void" in found["equal"]
    assert run("diff", store, 1, other_store, 1) == 0
    assert run("diff", store, 1, other_store, 9) == 1
    with pytest.raises(SystemExit):
        run("diff", store, 1)
