"""Stores that old versions wrote stay readable: by this version, and by the second reader. What old
code saved is restored to the bits that its run had, and runs go on from it."""

import zipfile
from pathlib import Path

import pytest
import torch
from programs import ALONE, TOGETHER, fresh, restores_on, runs_on
from safetensors import safe_open

import everstep
from everstep import Store
from everstep.format.document import FORMAT_VERSION
from everstep.sharding.topology import vendor
from independent_reader import read as read_independently
from independent_reader import read_log
from stores import SMALL, content, end_keeper

HERE = Path(__file__).parent
STORES = sorted(HERE.glob("version-*"))


def test_this_version_has_one():
    assert f"version-{FORMAT_VERSION}" in [path.name for path in STORES]


@pytest.mark.parametrize("path", STORES, ids=lambda path: path.name)
def test_golden_store(path):
    store = Store(path)
    assert store.steps() == [1, 2, 3]
    assert store.manifest(3).epoch == 2
    assert store.manifest("3-1").epoch == 1
    assert store.manifest("best").step == 1
    verdict = store.verify()
    assert verdict.ok
    assert verdict.checkpoints == 4
    for step in (1, 2, 3):
        _, tensors = read_independently(path, step)
        assert tensors == {s.name: (s.dtype, s.shape, content(s, step)) for s in SMALL}
        for spec in SMALL:
            assert tuple(store.read(step)[spec.name].shape) == spec.shape


# ---- runs --------------------------------------------------------------------------------------


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


class Expected:
    """What the run had, by step (a number), or by the name of a branch's checkpoint."""

    def __init__(self, path):
        self.of = {}
        with safe_open(path, "pt") as file:
            here = {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}
            made_on = {"processor": "AuthenticAMD", **file.metadata()}
            self.is_same_build = made_on == {**here, "processor": vendor()}
            for name in file.keys():  # noqa: SIM118  it is no dict
                step, _, tensor = name.partition("/")
                step = int(step) if step.isdigit() else step
                self.of.setdefault(step, {})[tensor] = file.get_tensor(name)
        self.steps = sorted(step for step in self.of if isinstance(step, int))

    def check(self, step, found, is_replayed):
        """Bit for bit; replayed by another build of torch, or with other instructions, to the last
        bits."""
        for name, tensor in self.of[step].items():
            assert found[name].dtype == tensor.dtype, (step, name)
            if is_replayed and not self.is_same_build and tensor.is_floating_point():
                torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)
            else:
                assert torch.equal(raw(found[name]), raw(tensor)), (step, name)


def goes_on_as(name):
    """A log goes on as a log, where today's code records such a run."""
    if "log" not in name or name in ("log-unusual", "log-frozen"):
        return {}
    return {"strategy": everstep.Log() if hasattr(everstep, "Log") else "log"}


def only(name):
    """For one process: without what each of several ranks had for itself."""
    has_more = name in TOGETHER and TOGETHER[name].extra in ("own", "hook")
    return {"only": ["model", "optimizer"]} if has_more else {}


@pytest.fixture
def golden(request, store):
    """A copy of a store; and what is expected of it."""
    with zipfile.ZipFile(HERE / "archives" / f"{request.param}.zip") as archive:
        archive.extractall(store.parent)
    yield store, Expected(store.parent / "expected.safetensors"), request.param
    end_keeper(store, "b")
    end_keeper(store, "a")


def test_all_are_there():
    assert {path.stem for path in HERE.glob("archives/*.zip")} == ALONE.keys() | TOGETHER.keys()


def test_all_are_small():
    assert sum(path.stat().st_size for path in HERE.glob("archives/*.zip")) < 3 << 20


@pytest.mark.parametrize("golden", [*ALONE, *TOGETHER], indirect=True)
def test_it_is_read_restored_and_continued(golden):
    path, expected, name = golden
    store = Store(path)
    assert store.steps() == expected.steps
    assert store.verify().ok
    records = {step: bool(store.manifest(step).records) for step in expected.steps}
    check_read(path, expected, records)
    job, more = fresh(name), {}
    with job.attached(path, **goes_on_as(name)) as checkpointer:
        for step in [*expected.of][::-1]:
            restored = checkpointer.restore(step, **only(name))
            assert f"{restored}" == f"{step}".partition("-")[0]
            expected.check(step, job.contents(), bool(store.manifest(step).records))
        last = checkpointer.restore(**only(name))
        assert last == expected.steps[-1]
        for step in (last + 1, last + 2):
            job.train(step)
            checkpointer.save(step).wait("local")
            more[step] = job.contents()
    assert store.steps() == [*expected.steps, *more]
    assert store.verify().ok
    again = fresh(name)
    with again.attached(path) as checkpointer:
        for step in (last + 2, last + 1):
            assert checkpointer.restore(step) == step
            found = again.contents()
            assert all(torch.equal(raw(found[key]), raw(t)) for key, t in more[step].items())


def check_read(path, expected, records):
    """What can be read without a replay: by this version, and by the other reader."""
    store, is_spread = Store(path), False
    for step, is_record in records.items():
        manifest = store.manifest(step)
        is_spread |= bool(manifest.records and manifest.parts)
        if is_record:
            continue
        found = store.read(step)
        _, tensors = read_independently(path, step)
        names = [name for name in expected.of[step] if name in tensors]
        assert any(name.startswith("model") for name in names)
        for name in names:
            tensor = expected.of[step][name]
            assert tensors[name][2] == bytes(raw(tensor).numpy())
            tensor = torch.view_as_complex(tensor) if found[name].is_complex() else tensor
            assert torch.equal(raw(found[name]), raw(tensor))
    if not is_spread:
        assert read_log(path)[-1][0]["step"] == store.latest()


# ---- on as many ranks --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("golden", TOGETHER, indirect=True)
def test_ranks_restore_it_and_go_on(gang, golden):
    path, expected, name = golden
    program, size = TOGETHER[name], len(TOGETHER[name].nodes)
    is_record = {step: bool(Store(path).manifest(step).records) for step in expected.steps}
    found = gang.run(restores_on, program, path, expected.steps, size=size)[0]
    for step, contents in zip(expected.steps, found, strict=True):
        expected.check(step, contents, is_record[step])
    first, states, errors = gang.run(runs_on, program, path, 0, {}, 2, size=size)[0]
    assert (first, errors) == (expected.steps[-1], [])
    assert Store(path).verify().ok
    job = fresh(name)
    with job.attached(path) as checkpointer:
        for step in (first + 2, first + 1):
            assert checkpointer.restore(step, **only(name)) == step
            found = job.contents()
            assert all(torch.equal(raw(found[key]), raw(t)) for key, t in states[step].items())
