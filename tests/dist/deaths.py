"""Trainings that are killed: what each rank does, and what has to be there afterwards.

A run is `trains` on each rank; what happened is in files, since nobody who is killed can tell:
`returned-<rank>` (the last step whose step() returned) and `local-<rank>` (the last one that this
rank was told is durable). `come_back` starts it again, and checks that nothing was lost.
"""

import os
import signal
import time
from pathlib import Path

import torch.distributed as dist
import zoo
from jobs import RECIPE, attached, trains_alone

from comparing import check_equal
from everstep import Store
from everstep.keeper.arena import SlotState
from processes import until

LAYOUT = "fsdp2"
AT = 4
"""The step at which picked deaths happen."""
LAST = 6


def die():
    """By SIGKILL, here and now."""
    os.kill(os.getpid(), signal.SIGKILL)


def states(last):
    """On each rank: the full state after each step of a run that nothing interrupts."""
    return trains_alone(LAYOUT, last)[1]


def opened(job, store, **options):
    """A Checkpointer of a job."""
    return attached(job, store, **{"strategy": "full", **options})


def trains(store, folder, last, how=None, victims=(), pause_s=0.0):
    """On each rank: go on to step `last`. `victims` die at step AT as `how` says. Returns the step
    that was restored, and the state there."""
    job, rank = zoo.build(LAYOUT, RECIPE), dist.get_rank()
    with opened(job, store) as saver:
        first = saver.restore()
        found = job.full_state()
        handles = {}
        for step in range(first + 1, last + 1):
            job.train(step)
            if step == AT and rank in victims:
                _prepare(saver, how, folder)
            if step == AT and how == "sealed":
                saver.wait()
                _note(folder, "ready", step)
                until((folder / "stopped").exists, "the keeper is not stopped")
            handles[step] = saver.step(step)
            _note(folder, "returned", step)
            if step == AT and how == "sealed":
                handles[step].wait("captured")
                _note(folder, "captured", step)
                until((folder / "go").exists, "nobody says go")
            _note_local(folder, handles)
            if pause_s:
                time.sleep(pause_s)  # a longer step: more moments to die in
        for handle in handles.values():
            handle.wait("local")
        _note_local(folder, handles)
    return first, found


def _prepare(saver, how, folder):
    """From here on the rank dies at the moment that `how` names."""
    saver.wait()
    client = saver._client
    if how == "before":
        die()
    elif how == "copying":
        submit = client.submit

        def submit_and_die(*told):
            submit(*told)
            arena = client._arenas[told[0]]
            assert SlotState.ANNOUNCED in map(arena.state, range(arena.slot_count))
            die()

        client.submit = submit_and_die
    elif how == "written":
        client.confirm = lambda sequence, problem: die()
    elif how == "untold":  # sealed, and nobody was told
        client.submit = lambda *_: die()
        saver._captures._copier._announce = lambda capture: None


def _note(folder, what, step):
    """By a rename: whoever is killed leaves the old or the new number."""
    path = folder / f"{what}-{dist.get_rank()}"
    path.with_suffix(".new").write_text(str(step))
    path.with_suffix(".new").rename(path)


def _note_local(folder, handles):
    done = [step for step, handle in handles.items() if handle.level == "local"]
    if done:
        _note(folder, "local", max(done))


def noted(folder, what, ranks=2):
    """What each rank has noted; 0 where nothing."""
    found = []
    for rank in range(ranks):
        path = folder / f"{what}-{rank}"
        found.append(int(path.read_text()) if path.exists() else 0)
    return found


def come_back(gang, store, folder, reference, last=LAST + 1, size=2, is_memory_lost=False):
    """Start again; the step that is restored. `is_memory_lost`: the keeper died as well, so only
    what was said to be durable counts."""
    returned, durable = noted(folder, "returned", size), noted(folder, "local", size)
    came = gang.run(trains, store, folder, last, size=size)
    steps = {step for step, _ in came}
    assert len(steps) == 1, f"the ranks went on from {steps}"
    (step,) = steps
    assert step >= max(durable), f"{durable} were said to be durable, {step} is there"
    if not is_memory_lost:
        assert step >= min(returned) - 1, f"step() had returned for {returned}, {step} is there"
    check_equal(came[0][1], reference[step])
    found = Store(store)
    assert found.verify().ok
    assert found.latest() == last
    found.gc()  # it leaves what the newest epoch wrote, which is that of this start
    check_no_rests(Path(store), found)
    return step


def check_no_rests(path, store):
    """Each file below data/ belongs to a checkpoint."""
    named = {file.path for step in store.steps() for file in store.manifest(step).files}
    lying = {str(f.relative_to(path)) for f in path.rglob("*.safetensors")}
    assert lying <= named, lying - named
