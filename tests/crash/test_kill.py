"""SIGKILL of trainer and keeper at random moments of a real run: at most one step is lost, and the
run goes on bit for bit. A failing test prints its seed; EVERSTEP_SEED=… runs it again."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from typing import ClassVar

import pytest
import torch
import trainer
from trainer import build, train_one_step

import everstep
import forked
from examples import slow

STEPS = 60


class Run:
    """The trainer in a process, and what it has said so far."""

    begun: ClassVar[list["Run"]] = []

    def __init__(self, store, steps=STEPS, every=1, log=None):
        """`log`: steps from base to base; None: whole states."""
        strategy = "log" if log else "full"
        self.process = forked.Forked(trainer.main, str(store), steps, every, strategy, log)
        self.begun.append(self)
        self.losses: dict[int, str] = {}
        self.last = 0
        first = self.read()
        assert first is not None, "the trainer died before it had restored"
        self.restored: int = first["restored"]
        self.keeper: int = first["keeper"]

    def read(self):
        line = self.process.stdout.readline()
        if not line.endswith("\n"):
            return None
        event = json.loads(line)
        if "trained" in event:
            self.losses[event["trained"]] = event["loss"]
        self.last = event.get("step", self.last)
        return event

    def read_steps(self, count):
        while count:
            event = self.read()
            if event is None or "done" in event:
                return
            count -= "step" in event

    def kill(self):
        self.process.kill()
        while self.read():
            pass
        self.process.close()

    def finish(self):
        while self.read():
            pass
        assert self.process.wait() == 0
        self.process.close()


@pytest.fixture(autouse=True)
def _nobody_goes_on(store):
    """A test that fails leaves no trainer behind, nor the keeper that this would start again."""
    yield
    while Run.begun:
        run = Run.begun.pop()
        if not run.process.stdout.closed:
            run.kill()


def seed():
    chosen = int(os.environ.get("EVERSTEP_SEED", random.SystemRandom().randrange(1 << 30)))
    print(f"EVERSTEP_SEED={chosen}")
    return chosen


def check_against_uninterrupted(store, losses):
    """Losses and final state are those of a run that was never interrupted, bit for bit."""
    state = build()
    expected = {step: train_one_step(state).hex() for step in range(1, STEPS + 1)}
    assert losses == expected
    generator = torch.get_rng_state()
    final = build()
    with everstep.Checkpointer(store, final) as checkpointer:
        assert checkpointer.restore(STEPS) == STEPS
    assert torch.equal(torch.get_rng_state(), generator)
    check_equal(final["model"].state_dict(), state["model"].state_dict())
    for one, other in zip(*(s["optimizer"].state.values() for s in (final, state)), strict=True):
        check_equal(one, other)


def check_equal(tensors, expected):
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name


def die_and_go_on(store, rng, kills, keeper_too, log=None):
    losses: dict[int, str] = {}
    previous = 0
    for kill in range(kills):
        run = Run(store, log=log)
        assert previous - run.restored <= 1, (
            f"kill {kill}: {previous} was done, {run.restored} restored"
        )
        run.read_steps(rng.randrange(1, 12))
        # Anywhere in the next step or two, also inside a save.
        deadline = time.monotonic() + rng.uniform(0, 0.02)
        while time.monotonic() < deadline:
            pass
        if keeper_too and rng.random() < 0.7:
            os.kill(run.keeper, signal.SIGKILL)
            if rng.random() < 0.5:
                run.read_steps(rng.randrange(1, 4))
        run.kill()
        losses.update(run.losses)
        # The step whose line was not printed any more may still have been taken.
        previous = max(run.last, run.restored)
    run = Run(store, log=log)
    assert previous - run.restored <= 1
    run.finish()
    losses.update(run.losses)
    check_against_uninterrupted(store, losses)
    assert everstep.Store(store).verify().ok


def test_trainer_killed_at_random_moments(store):
    die_and_go_on(store, random.Random(seed()), kills=4, keeper_too=False)


@pytest.mark.parametrize("base_every", [3, *slow(50)])
def test_trainer_with_a_log_killed_at_random_moments(store, base_every):
    die_and_go_on(store, random.Random(seed()), kills=4, keeper_too=False, log=base_every)


@pytest.mark.slow
@pytest.mark.parametrize("log", [None, 4])
def test_trainer_killed_very_often(store, log):
    die_and_go_on(store, random.Random(seed()), kills=25, keeper_too=False, log=log)


@pytest.mark.parametrize("log", [*slow(None), 7])
def test_keeper_killed_while_training(store, log):
    """Training goes on, a new keeper takes over what was sealed, nothing is lost."""
    rng = random.Random(seed())
    run = Run(store, log=log)
    for _ in range(3):
        run.read_steps(rng.randrange(1, 8))
        keeper = subprocess.run(
            ["pgrep", "-f", f"everstep.keeper {os.path.realpath(store)}"],
            capture_output=True,
            text=True,
        )
        for pid in keeper.stdout.split():
            with contextlib.suppress(ProcessLookupError):  # one that was just starting another
                os.kill(int(pid), signal.SIGKILL)
    run.finish()
    check_against_uninterrupted(store, run.losses)
    verdict = everstep.Store(store).verify()
    assert verdict.ok, verdict.problems


@pytest.mark.parametrize("log", [*slow(None), 7])
def test_keeper_and_trainer_killed_one_after_the_other(store, log):
    """With the keeper's memory gone too, what is on the disk must do: the loss may be larger than a
    step, the state is still one of the run's own, and the run ends bit-equal."""
    rng = random.Random(seed())
    losses: dict[int, str] = {}
    for _ in range(3):
        run = Run(store, log=log)
        run.read_steps(rng.randrange(2, 12))
        os.kill(run.keeper, signal.SIGKILL)
        run.kill()
        losses.update(run.losses)
    run = Run(store, log=log)
    run.finish()
    losses.update(run.losses)
    check_against_uninterrupted(store, losses)


@pytest.mark.slow
def test_capture_output_does_not_hang(store):
    """subprocess.run(capture_output=True) waits for the pipes to close: the keeper must not hold
    them."""
    done = subprocess.run(
        [sys.executable, trainer.__file__, str(store), "3", "1"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert '"done": true' in done.stdout
