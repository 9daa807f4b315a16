"""DeepSpeed's own checkpoints of two ranks, imported, and trained on: as by DeepSpeed's own resume,
in other stages, and without DeepSpeed."""

import functools
import subprocess
import sys

import pytest
import zoo
from test_deepspeed import COMPILES_S, KINDS, RECIPE, STEPS, Job

from commands import run, run_json
from everstep import Checkpointer, Store
from stores import end_keeper

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
AFTER = range(STEPS + 1, STEPS + 4)


@pytest.fixture
def store(tmp_path, monkeypatch):
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    yield tmp_path / "store"
    end_keeper(tmp_path / "store")


def saves(folder, kind):
    job = Job(*kind)
    for step in range(1, STEPS + 1):
        job.train(step)
    job.engine.save_checkpoint(str(folder))
    whole = job.whole()
    return whole, [job.train(step) for step in AFTER]


def resumes(folder, kind):
    job = Job(*kind)
    job.train(7)
    job.engine.load_checkpoint(str(folder))
    return [job.train(step) for step in AFTER]


def goes_on(store, kind):
    job = Job(*kind)
    job.train(7)
    with job.checkpointer(store) as checkpointer:
        assert checkpointer.restore() == STEPS
        return job.engine.global_steps, [job.train(step) for step in AFTER]


def goes_on_plain(store):
    job = zoo.build("fsdp2", RECIPE)
    with Checkpointer(store, {"model": job.model, "optimizer": job.optimizer}) as checkpointer:
        assert checkpointer.restore(only=["model", "optimizer"]) == STEPS
        return [job.train(step) for step in AFTER]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}")
def test_a_folder_of_zero(gang, store, tmp_path, capsys, kind):
    in_two = functools.partial(gang.run, size=2, timeout=COMPILES_S)
    (whole, losses), *_ = in_two(saves, tmp_path / "zero", kind)
    gang.kill()
    theirs, *_ = in_two(resumes, tmp_path / "zero", kind)
    gang.kill()
    capsys.readouterr()
    said = run_json(capsys, "import", tmp_path / "zero", store)
    assert (said["step"], said["from"], said["left_out"]) == (STEPS, "deepspeed", {})
    found = Store(store).read()
    for name, tensor in whole.items():
        parameter, _, key = name.partition(":")
        if key == "fp32":
            assert found[f"model.{parameter}"].equal(tensor), name
    (steps, mine), *_ = in_two(goes_on, store, kind)
    assert (steps, mine) == (STEPS, theirs)
    assert mine == losses
    gang.kill()
    for stage in {1, 2, 3} - {kind[0]}:
        (steps, others), *_ = in_two(goes_on, store, (stage, kind[1]))
        assert (steps, others) == (
            STEPS,
            pytest.approx(theirs, abs=1e-2 if "b" in kind[1] else 1e-5),
        )
        gang.kill()
    if kind[1] == "float32":
        plain, *_ = in_two(goes_on_plain, store)
        assert plain == pytest.approx(theirs, abs=1e-5)
        gang.kill()


def saves_frozen(folder, store, stage):
    """Both ways: DeepSpeed's, and everstep's own."""
    job = Job(stage, frozen=0.5)
    for step in range(1, STEPS + 1):
        job.train(step)
    job.engine.save_checkpoint(str(folder))
    with job.checkpointer(store) as checkpointer:
        checkpointer.save(STEPS)
    return [job.train(step) for step in AFTER]


def goes_on_frozen(store, stage):
    return goes_on(store, (stage, "float32", 0.25))[1]


@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_weights(gang, store, tmp_path, stage):
    in_two = functools.partial(gang.run, size=2, timeout=COMPILES_S)
    losses, *_ = in_two(saves_frozen, tmp_path / "zero", tmp_path / "own", stage)
    gang.kill()
    assert run("import", tmp_path / "zero", store) == 0
    for each in (store, tmp_path / "own"):
        mine, *_ = in_two(goes_on_frozen, each, stage)
        assert mine == losses
        gang.kill()
        end_keeper(each)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_universal_folder(gang, store, tmp_path, capsys, stage):
    kind = (stage, "float32")
    (_, losses), *_ = gang.run(saves, tmp_path / "zero", kind, size=2, timeout=COMPILES_S)
    gang.kill()
    (tag,) = (each for each in (tmp_path / "zero").iterdir() if each.is_dir())
    words = ["--input_folder", tag, "--output_folder", tmp_path / "ucp"]
    options = ["--inject_missing_state", "--num_extract_workers", "1", "--num_merge_workers", "1"]
    program = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    subprocess.run([*program, *map(str, words), *options], check=True, capture_output=True)
    said = run_json(capsys, "import", tmp_path / "ucp", store)
    assert (said["step"], said["from"], said["left_out"]) == (STEPS, "deepspeed", {})
    (_, mine), *_ = gang.run(goes_on, store, kind, size=2, timeout=COMPILES_S)
    gang.kill()
    assert mine == losses


def loads_universal(folder, stage):
    """DeepSpeed's own resume: the weights and moments, as it tells of them itself."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    job = Job(stage, checkpoint={"load_universal": True})
    job.train(7)
    job.engine.load_checkpoint(str(folder))
    found = {}
    for name, parameter in job.engine.module.named_parameters():
        found[f"model.{name}"] = safe_get_full_fp32_param(parameter).clone()
        for key in ("exp_avg", "exp_avg_sq"):
            moment = safe_get_full_optimizer_state(parameter, key)
            found[f"optimizer.model.{name}.{key}"] = moment.clone()
    steps = [state["step"].item() for state in job.engine.optimizer.optimizer.state.values()]
    return job.engine.global_steps, steps, found


def trains_plain(store):
    job = zoo.build("ddp", RECIPE)
    state = {"model": job.model, "optimizer": job.optimizer}
    with Checkpointer(store, state, strategy="full") as checkpointer:
        for step in range(1, STEPS + 1):
            job.train(step)
            checkpointer.step(step)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_export_is_what_deepspeed_takes(gang, store, tmp_path, stage):
    gang.run(trains_plain, store, size=2)
    gang.kill()
    assert run("export", store, "--to", "ucp", tmp_path / "ucp") == 0
    in_two = functools.partial(gang.run, size=2, timeout=COMPILES_S)
    (counted, steps, found), *_ = in_two(loads_universal, tmp_path / "ucp", stage)
    gang.kill()
    assert counted == STEPS
    assert stage == 3 or set(steps) == {STEPS}
    stored = Store(store).read()
    assert all(stored[name].reshape(-1).equal(each.reshape(-1)) for name, each in found.items())
    assert len(found) > 20
