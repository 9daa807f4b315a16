"""What does not change lies in files that many checkpoints share: written once, and kept as long as
one of them is there."""

import contextlib
import hashlib
import os
import random
import signal

import pytest
import torch

import everstep
from everstep import Conflict, Store, Unavailable
from everstep.format.manifest import CheckpointName
from everstep.format.packs import Spec
from everstep.store import catalog, commit, retain
from everstep.store.copy import Copier
from everstep.store.retain import Keep
from everstep.tiers.disk import Disk
from everstep.tiers.tier import tier_at
from forked import Forked, run
from stores import SMALL, Trainer, Unsynced, end_keeper, go_on, make_store, packs_of

FROZEN = ("frozen", "large")
SPECS = (*SMALL, Spec("frozen", "bfloat16", (70, 70)), Spec("large", "float32", (1300, 1024)))


def shared(path, *steps):
    """The file in which each of these checkpoints has what is still."""
    return [Store(path).manifest(step).parts[0].packs[-1].path for step in steps]


def check(path):
    """All that is offered is whole, and no file is there that nobody needs."""
    assert Store(path).verify().ok
    disk = Disk(path)
    manifests = [catalog.read_manifest(disk, name) for name in catalog.committed(disk)]
    needed = {link.path for manifest in manifests for link in manifest.files}
    assert packs_of(path) == {link for link in needed if link.endswith(".safetensors")}


def test_what_does_not_change_is_written_once(tmp_path):
    trainer = make_store(tmp_path, [1, 2, 3], SPECS, still=FROZEN)
    assert len(packs_of(tmp_path)) == 4
    assert len(set(shared(tmp_path, 1, 2, 3))) == 1
    go_on(trainer, 2, [3, 4])  # another attachment, on a branch
    assert len(packs_of(tmp_path)) == 6
    assert len(set(shared(tmp_path, 1, 2, 3, 4))) == 1
    check(tmp_path)


def test_only_what_is_new_counts_as_written(tmp_path):
    trainer = make_store(tmp_path, [1], SPECS, still=FROZEN)
    assert trainer.save(2).bytes < 16 << 10 < Store(tmp_path).manifest(2).size


def test_what_has_changed_is_written_anew(tmp_path):
    trainer = make_store(tmp_path, [1], SPECS, still=FROZEN)
    trainer.turn = 1
    trainer.save(2)
    trainer.save(3)
    one, two, three = shared(tmp_path, 1, 2, 3)
    assert one != two == three
    check(tmp_path)


def test_a_file_goes_with_the_last_checkpoint_that_names_it(tmp_path):
    make_store(tmp_path, [1, 2, 3], SPECS, still=FROZEN)
    [path] = set(shared(tmp_path, 1, 2, 3))
    disk = Disk(tmp_path)
    for step in (1, 3, 2):
        assert (tmp_path / path).exists()
        check(tmp_path)
        retain.delete(disk, [CheckpointName(step, 1)])
    assert not packs_of(tmp_path)


def test_retention_keeps_it(tmp_path):
    trainer = Trainer(Disk(tmp_path, Unsynced()), Keep(last=2), SPECS, still=FROZEN)
    trainer.claim()
    for step in range(1, 9):
        trainer.save(step)
        retain.apply(trainer.disk, trainer.keep, trainer.writer.cache)
        assert len(packs_of(tmp_path)) == min(step, 2) + 1
    assert shared(tmp_path, 8)[0].startswith("data/00000001-")
    check(tmp_path)


def test_a_file_that_is_gone_is_written_anew(tmp_path):
    trainer = make_store(tmp_path, [1], SPECS, still=FROZEN)
    retain.delete(trainer.disk, [CheckpointName(1, 1)])
    trainer.save(2)
    check(tmp_path)


def test_one_that_is_deleted_while_another_names_it(tmp_path):
    """Between the look for the file and the manifest: nothing is offered that is not there."""
    trainer = make_store(tmp_path, [1], SPECS, still=FROZEN)
    ended = trainer.commit_all(
        [trainer.seal(2)], lambda save: retain.delete(trainer.disk, [CheckpointName(1, 1)])
    )
    assert isinstance(ended[0], Unavailable)
    assert "deleted meanwhile" in str(ended[0])
    assert not packs_of(tmp_path)
    trainer.save(3)
    check(tmp_path)


def test_records_and_a_base_that_is_spread(tmp_path):
    trainer = make_store(tmp_path, [1], SPECS, still=FROZEN)
    for step in (2, 3):
        trainer.record(step, step - 1, tuple(range(2, step + 1)), ends=step == 3)
    trainer.save(4)
    state = catalog.read_state(Disk(tmp_path), CheckpointName(3, 1))
    assert {part.packs[-1].path for part in state.parts} == set(shared(tmp_path, 1, 4))


class Opened(Disk):
    """Says what was read there."""

    def open(self, path, direct=False):
        self.opened = [*getattr(self, "opened", []), path]
        return super().open(path, direct)


def test_copies_do_not_read_again_what_the_one_before_has_brought(tmp_path):
    trainer = make_store(tmp_path / "store", [1, 2, 3], SPECS, still=FROZEN)
    target = Opened(tmp_path / "copy")
    copier = Copier(trainer.disk, target)
    for step in (1, 2, 3):
        copied = copier.copy(CheckpointName(step, 1))
        assert bool(copied.bytes_there) == (step > 1)
    assert shared(tmp_path / "copy", 3)[0] not in target.opened
    (tmp_path / "copy" / shared(tmp_path / "copy", 3)[0]).unlink()
    trainer.save(4)
    copier.copy(CheckpointName(4, 1))
    check(tmp_path / "copy")


def test_random_deletions(tmp_path):
    rng = random.Random(4)
    trainer = make_store(tmp_path, [1], SPECS, still=FROZEN)
    for step in range(2, 60):
        if rng.random() < 0.15:
            trainer = go_on(trainer, None, [])
        if rng.random() < 0.1:
            trainer.turn += 1
        trainer.save(step)
        names = catalog.committed(trainer.disk)
        doomed = [name for name in names[:-1] if rng.random() < 0.1]
        retain.delete(trainer.disk, doomed)
        if rng.random() < 0.1:
            retain.sweep(trainer.disk)
    check(tmp_path)


# ---- with real keepers ---------------------------------------------------------------------


class Lora(torch.nn.Module):
    """A frozen layer beside a small one that is trained, and a buffer that changes at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.Linear(256, 256)
        self.frozen.requires_grad_(False)
        self.norm = torch.nn.BatchNorm1d(256)
        self.down, self.up = torch.nn.Linear(256, 4), torch.nn.Linear(4, 256)

    def forward(self, batch):
        return self.norm(self.frozen(batch)) + self.up(self.down(batch))


def build(all_parameters=False):
    torch.manual_seed(0)
    model = Lora()
    owned = [p for p in model.parameters() if p.requires_grad or all_parameters]
    return {"model": model, "optimizer": torch.optim.AdamW(owned, lr=0.01)}


def train(state, step):
    batch = torch.randn(8, 256, generator=torch.Generator().manual_seed(step))
    state["optimizer"].zero_grad()
    state["model"](batch).square().mean().backward()
    state["optimizer"].step()


def tensors_of(state):
    return {name: each.clone() for name, each in state["model"].state_dict().items()}


@pytest.fixture
def local(stores):
    return stores("store")


def saves(store, state, steps, change=lambda step: None, **options):
    """Train and save these steps, each after a change; the bytes that each wrote, and the weights
    after each."""
    written, weights = [], {}
    with everstep.Checkpointer(store, state, keep=Keep(last=100), **options) as checkpointer:
        assert checkpointer.restore() == steps[0] - 1
        for step in steps:
            change(step)
            train(state, step)
            handle = checkpointer.step(step)
            handle.wait(timeout=60)
            written.append(handle.bytes)
            weights[step] = tensors_of(state)
    return written, weights


def check_restores(store, weights, build=build):
    for step, expected in weights.items():
        state = build()
        with everstep.Checkpointer(store, state) as checkpointer:
            assert checkpointer.restore(step) == step
        found = tensors_of(state)
        assert all(torch.equal(found[name], each) for name, each in expected.items())


@pytest.mark.parametrize("strategy", ["full", "spread", "log"])
def test_frozen_weights_cost_nothing_after_the_first_state(local, strategy):
    state = build()
    trained = sum(p.nbytes for p in state["model"].parameters() if p.requires_grad)
    written, weights = saves(local, state, range(1, 5), strategy=strategy)
    more, later = saves(local, build(), range(5, 8), strategy=strategy)
    assert written[0] > 256 * 256 * 4
    # One more file, without what was taken for still and is not (the statistics of the norm).
    assert min(written[1:]) < 3 * trained + (32 << 10)
    assert max(more) < 3 * trained + (32 << 10)
    check_restores(local, weights | later)


def test_layers_that_are_frozen_in_the_midst_of_training(local):
    state = build()
    frozen = state["model"].frozen.requires_grad_(True)
    state["optimizer"].add_param_group({"params": list(frozen.parameters())})

    def freeze(step):
        frozen.requires_grad_(step < 4)

    written, weights = saves(local, state, range(1, 11), freeze, strategy="full")
    assert written[-1] < written[0] / 8
    assert Store(local).verify().ok
    check_restores(local, weights, lambda: state)


def frozen_stack():
    """Sixteen frozen layers and a small trained one."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 256).requires_grad_(False) for _ in range(16)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(256, 4))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize("strategy", ["full", "log"])
def test_a_layer_that_is_unfrozen_costs_itself_and_its_neighbours_in_a_file(local, strategy):
    state = frozen_stack()

    def unfreeze(step):
        if step == 4:
            layer = state["model"][15].requires_grad_(True)
            state["optimizer"].add_param_group({"params": list(layer.parameters())})

    written, weights = saves(local, state, range(1, 8), unfreeze, strategy=strategy)
    [part] = Store(local).manifest(1).parts
    largest = max(pack.size for pack in part.packs)
    layer = 256 * 257 * 4
    assert len(part.packs) > 5
    assert largest < 4.5 * layer
    assert written[3] < largest + 4 * layer  # the layer itself, with its moments
    assert max(written[1:3] + written[4:]) < 4 * layer
    end_keeper(local)
    check_restores(local, {step: weights[step] for step in (1, 3)}, frozen_stack)
    state["model"].load_state_dict(weights[1])
    check_restores(local, {step: weights[step] for step in (4, 7)}, lambda: state)


def digest(state):
    found = hashlib.sha256()
    for tensor in state["model"].state_dict().values():
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()


def undisturbed():
    """In a process like those that are killed: as many threads add in the same order."""
    state = build()
    for step in range(1, 201):
        train(state, step)
        print(digest(state))


def goes_on(store, die):
    """Train from the newest checkpoint, until it dies in the midst of a step."""
    state = build()
    with everstep.Checkpointer(store, state, strategy="full", keep=Keep(last=200)) as checkpointer:
        start = checkpointer.restore()
        print(start, flush=True)
        for step in range(start + 1, 201):
            train(state, step)
            checkpointer.step(step)
            if step == die:
                os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_two_hundred_checkpoints_with_kills_and_deletions(local):
    """All that is offered is exact, and the disk holds what manifests reach."""
    rng, die = random.Random(3), 0
    expected = run(undisturbed).stdout.split()
    while die < 200:
        die = min(200, die + rng.randrange(5, 40))
        with Forked(goes_on, local, die) as process:
            assert die - 80 < int(process.stdout.readline()) < die
            assert process.wait() == -signal.SIGKILL
        if rng.random() < 0.5:
            end_keeper(local)
        disk = tier_at(local)
        for name in [name for name in catalog.lineage(disk)[:-1] if rng.random() < 0.2]:
            with contextlib.suppress(Conflict):  # the keeper has just begun with a step
                retain.delete(disk, [name])
        retain.sweep(disk)
    run(goes_on, local, 0)
    end_keeper(local)
    disk = tier_at(local)
    commit.claim_epoch(disk, catalog.lineage(disk)[-1])  # what its writer left is nobody's
    retain.sweep(disk)
    check(local)
    left = Store(local).steps()
    assert left[-1] == 200
    assert len(left) > 40
    assert len(set(shared(local, *left))) <= 2
    for step in rng.sample(left, 20):
        state = build()
        with everstep.Checkpointer(local, state) as checkpointer:
            assert checkpointer.restore(step) == step
        assert digest(state) == expected[step - 1]


def test_writes_that_torch_does_not_count_are_saved(local):
    state = build()
    weights = {}
    with everstep.Checkpointer(local, state, strategy="full", keep=Keep(100)) as checkpointer:
        for step in range(1, 7):
            train(state, step)
            if step % 2:
                state["model"].frozen.weight.data.view(-1)[step] += 1.0
                state["model"].frozen.weight.detach().numpy()[0, 0] = step
            checkpointer.step(step).wait(timeout=60)
            weights[step] = tensors_of(state)
    check_restores(local, weights)
