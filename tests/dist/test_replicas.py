"""check: different bytes under one name on several ranks are found when they are saved."""

import os

import pytest
import torch
import zoo

import everstep
from everstep import Checkpointer, Store
from everstep.errors import EverstepError, Mismatch
from everstep.store import catalog
from everstep.tiers.disk import Disk
from examples import slow


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def trains(layout, store, changed_rank, what, nodes=""):
    """What became of three steps, at the second of which one rank has changed `what`."""
    rank = torch.distributed.get_rank()
    if nodes:
        os.environ["EVERSTEP_NODE"] = nodes[rank]
    job = zoo.build(layout, zoo.Recipe())
    state = {"model": job.model, "optimizer": job.optimizer}
    ended = []
    with Checkpointer(
        store, state, strategy="full", ranks=everstep.Ranks(check=True)
    ) as checkpointer:
        for step in range(1, 4):
            job.train(step)
            parameter = job.optimizer.param_groups[0]["params"][2]
            tensor = job.optimizer.state[parameter]["exp_avg"] if what == "moment" else parameter
            changes = step == 2 and rank == changed_rank
            before = local(tensor).detach().clone()
            if changes:
                local(tensor.detach()).view(-1)[-1] += 0.5
            try:
                checkpointer.step(step).wait("local")
                ended.append(None)
            except EverstepError as error:
                ended.append((type(error), str(error)))
            local(tensor.detach()).copy_(before)
        checkpointer.wait()
        return ended, job.full_state()


@pytest.mark.parametrize("layout", ["ddp", *slow("hsdp", "fsdp2", "fsdp_tp")])
def test_equal_replicas_pass_and_are_written_once(gang, store, layout):
    size = zoo.SIZES[layout]
    (ended, state), *others = gang.run(trains, layout, store, None, "", size=size)
    assert ended == [None] * 3
    assert all(ended == [None] * 3 for ended, _ in others)
    assert Store(store).verify().ok
    stored = Store(store).read()
    for name, tensor in state.items():
        parameter, _, key = name.partition(":")
        at = f"optimizer.model.{parameter}.{key}" if key else f"model.{parameter}"
        assert torch.equal(stored[at], tensor), name
    manifest = catalog.read_manifest(Disk(store), catalog.lineage(Disk(store))[-1])
    elements = sum(tensor.nbytes for tensor in stored.values())
    assert manifest.size < elements + (64 << 10) * size


@pytest.mark.parametrize("what", ["parameter", "moment"])
@pytest.mark.parametrize(("layout", "nodes"), [("ddp", ""), *slow(("hsdp", ""), ("hsdp", "aabb"))])
@pytest.mark.parametrize("changed", [0, 1])
def test_a_changed_replica_fails_the_save_on_all_ranks(gang, store, layout, nodes, what, changed):
    size = zoo.SIZES[layout]
    for ended, _ in gang.run(trains, layout, store, changed, what, nodes, size=size):
        assert ended[::2] == [None, None]
        kind, text = ended[1]
        assert kind is Mismatch
        for part in ("step 2", "blocks.0", f"rank {changed}"):
            assert part in text
        assert ("exp_avg" in text) == (what == "moment")
    assert [name.step for name in catalog.lineage(Disk(store))] == [1, 3]
    assert Store(store).verify().ok


def saves_values(store, row):
    """A matrix, large enough to be written by all ranks, and a tensor that is none of a model's,
    which rank 1 has otherwise: in a row; or (-1) the other one."""
    torch.manual_seed(7)
    model, loose = torch.nn.Linear(1024, 1024, bias=False), torch.randn(5)
    is_other = row is not None and torch.distributed.get_rank() == 1
    tensor = loose if row == -1 else model.weight.detach()[row or 0]
    said = None
    with Checkpointer(
        store, {"model": model, "loose": loose}, ranks=everstep.Ranks(check=True)
    ) as made:
        before = tensor.clone()
        tensor[3] += is_other
        try:
            made.save(1).wait("local")
        except Mismatch as error:
            said = str(error)
        tensor.copy_(before)
        made.save(2).wait("local")
    return said


@pytest.mark.parametrize("row", [3, 700, -1, None])
def test_rows_and_loose_tensors_are_compared(gang, store, row):
    found = {
        3: "model.weight[0:512,0:1024] has other bytes on rank 1 than on rank 0",
        700: "model.weight[512:1024,0:1024] has other bytes on rank 1 than on rank 0",
        -1: "'loose': it differs between the ranks",
        None: None,
    }[row]
    for text in gang.run(saves_values, store, row, size=2):
        assert text == found if found is None else found in text
