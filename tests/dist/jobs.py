"""What ranks do in most of these tests: they train a job of the zoo, and save its steps.

run, *_ = gang.run(trains, "fsdp2", store, 7, size=4, strategy="log", base_every=5)
run = gang.run(trains, "ddp", store, 9, size=2, strategy="log")[0]  # goes on from there
assert run.first == 7
"""

import contextlib
import logging
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import zoo

from choices import chosen
from comparing import check_equal
from everstep import Checkpointer, clip_grad_norm_, compress
from everstep.redo.clipping import Recording

RECIPE = zoo.Recipe()


@dataclass(frozen=True, slots=True)
class Run:
    """What one rank had."""

    first: int
    """The step that was restored."""

    begun: zoo.FullState
    losses: list[float]
    states: dict[int, zoo.FullState]
    """By step; `begun` is among them."""

    errors: dict[int, str]
    """By step, of saves that failed."""

    drawn: tuple[torch.Tensor, torch.Tensor]
    """The state of torch's generator at the begin, and after the last save."""


def step_of(job, step):
    """Train a step; its loss."""
    return job.train(step)


def parts_of(job):
    """What is saved of a job."""
    return {"model": job.model, "optimizer": job.optimizer}


def compressed(job, kind, **options):
    """Gradients are sent compressed; the hook is saved, too."""
    return {**parts_of(job), "hook": compress(job.model, kind, **options)}


def sends_compressed(job, kind):
    """The same, but for the hook: other layouts have none."""
    compress(job.model, kind)
    return parts_of(job)


def raw(job):
    """Gradients are recorded from before clipping."""
    job.recording = Recording()  # for as long as the job is alive
    job.recording.set(True, pre_clip=True)
    return parts_of(job)


def clipped(job):
    """Gradients are clipped, and recorded from before that."""
    weights = list(job.model.parameters())
    job.optimizer.register_step_pre_hook(lambda *_: clip_grad_norm_(weights, 0.1) and None)
    return raw(job)


def attached(job, store, state_of=parts_of, nodes="", **options):
    """A Checkpointer of a job. `nodes`: a letter for each rank, the node on which it is."""
    if nodes:
        os.environ["EVERSTEP_NODE"] = nodes[dist.get_rank()]
    state = state_of(job)
    if hasattr(job, "canonical"):
        options["layout"] = lambda name, _: f"model.{job.canonical(name.removeprefix('model.'))}"
    return Checkpointer(store, state, **chosen(**options))


def trains(
    layout,
    store,
    last=0,
    recipe=RECIPE,
    train=step_of,
    after=0,
    restore=None,
    waits=False,
    kept=range(10**9),
    **options,
):
    """From what is restored up to step `last`, each step saved, and `after` more that are not.
    `waits`: for each save. `kept`: the steps of which the state is gathered."""
    job = zoo.build(layout, recipe)
    with attached(job, store, **options) as saver:
        first = saver.restore(**(restore or {}))
        begun, drawn = job.full_state(), torch.get_rng_state()
        losses, states, handles = [], {first: begun}, {}
        for step in range(first + 1, last + 1):
            torch.rand(dist.get_rank() + 1)
            losses.append(train(job, step))
            handles[step] = saver.step(step)
            if waits:
                saver.wait()
            if step in kept:
                states[step] = job.full_state()
        saver.wait()
        drawn = drawn, torch.get_rng_state()
    last = max(first, last)
    losses += [train(job, step) for step in range(last + 1, last + 1 + after)]
    errors = {step: str(each.error) for step, each in handles.items() if each and each.error}
    return Run(first, begun, losses, states, errors, drawn)


def trains_alone(layout, last, recipe=RECIPE, train=step_of, kept=range(10**9)):
    """The same training, of which nothing is saved: its losses, and its states by step (0: at the
    begin)."""
    job = zoo.build(layout, recipe)
    losses, states = [], {0: job.full_state()}
    for step in range(1, last + 1):
        losses.append(train(job, step))
        if step in kept:
            states[step] = job.full_state()
    return losses, states


def restores(layout, store, steps, recipe=RECIPE, restore=None, **options):
    """The states of these steps."""
    job, found = zoo.build(layout, recipe), {}
    with attached(job, store, **options) as saver:
        for step in steps:
            assert saver.restore(step, **(restore or {})) == step
            found[step] = job.full_state()
    return found


def check_restored(gang, layout, store, states, size=None, **options):
    """Each of these steps is restored to its bytes; `states`: by step."""
    size = size or zoo.SIZES[layout]
    found = gang.run(restores, layout, store, sorted(states), size=size, **options)[0]
    for step, state in states.items():
        check_equal(found[step], state)


@contextlib.contextmanager
def unheard():
    """What is said of each step that is lost is of no interest within."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
