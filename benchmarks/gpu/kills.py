"""Trainers that are killed with SIGKILL in the midst of training, and what comes back.

A run that nothing interrupts tells the digest of its state after every step. Beside it each
strategy's run is killed five times, at moments that are drawn; after each restart, and in the end,
its digest must be the one of the same step.
"""

import contextlib
import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.gpu.part import Settings

STRATEGIES = ("full", "spread", "log", "auto")
ON_DISK = ("log", "auto")
"""Their records are many, and smaller: the others' states go to memory, where there is room."""
KILLS = 5
STEPS = 24
STEPS_OF_A_LIFE = (2, 5)
DELAY_S_MAX = 0.1
UNINTERRUPTED = "none"
Event = dict[str, Any]


def trainer(settings: Settings, strategy: str, store: str) -> None:
    """Train to the last step, and tell each one on standard output."""
    import everstep
    from benchmarks.contenders import checkpointer_of, digest
    from benchmarks.gpu import training

    def tell(**what: Any) -> None:
        print(json.dumps(what), flush=True)

    training.make_exact()
    run = training.build(settings.size_of("killed"), settings.device, settings.seed)
    run.clip = everstep.clip_grad_norm_
    if strategy == UNINTERRUPTED:
        for step in range(1, STEPS + 1):
            run.train_step()
            tell(step=step, digest=digest(run))
        return
    with checkpointer_of(run, Path(store), 1, strategy, base_every=6, keep=1) as checkpointer:
        start = checkpointer.restore()
        tell(restored=start, digest=start and digest(run))
        for step in range(start + 1, STEPS + 1):
            run.train_step()
            checkpointer.step(step)
            tell(step=step)
        tell(end=STEPS, digest=digest(run))


def kills(settings: Settings) -> None:
    """All strategies at once, beside the run that goes through."""
    with ThreadPoolExecutor(len(STRATEGIES)) as pool:
        lives = {name: pool.submit(_lives, settings, name) for name in STRATEGIES}
        with _events(settings, UNINTERRUPTED) as events:
            expected = {event["step"]: event["digest"] for event in events}
        for name, future in lives.items():
            settings.report(strategy=name, **judged(future.result(), expected))


def _lives(settings: Settings, strategy: str) -> list[Event]:
    """What each life told: the step that it began with, the last that it came to, and its end."""
    draw = random.Random(f"{settings.seed} {strategy}")
    lives: list[Event] = []
    for number in range(KILLS + 1):
        life: Event = {}
        lives.append(life)
        steps = draw.randint(*STEPS_OF_A_LIFE) if number < KILLS else STEPS + 1
        with _events(settings, strategy) as events:
            for event in events:
                if "digest" in event:
                    life["end" if "end" in event else "begin"] = event["digest"]
                life |= {key: event[key] for key in ("restored", "step") if key in event}
                steps -= "step" in event
                if not steps:
                    time.sleep(draw.uniform(0, DELAY_S_MAX))  # the moment is what is drawn
                    break
        if "restored" not in life:
            break  # it failed by itself: the log tells
    return lives


def judged(lives: list[Event], expected: dict[int, str]) -> Event:
    """Whether all digests are those of the uninterrupted run, and how many steps were lost."""
    steps = [life.get("restored") for life in lives]
    wrong = [step for step, life in zip(steps, lives, strict=True) if not _is_right(life, expected)]
    lost = [
        max(0, before.get("step", 0) - after["restored"])  # its last line may not have been read
        for before, after in pairwise(lives)
        if "restored" in after
    ]
    is_complete = len(lives) == KILLS + 1 and any(steps) and lives[-1].get("end")
    is_equal = not wrong and bool(is_complete) and lives[-1]["end"] == expected.get(STEPS)
    return {"restored": steps, "lost": lost, "wrong": wrong, "equal": is_equal}


def _is_right(life: Event, expected: dict[int, str]) -> bool:
    """What it began with; nothing, where there was no checkpoint yet."""
    step = life.get("restored")
    return step == 0 or (step is not None and life["begin"] == expected.get(step))


@contextlib.contextmanager
def _events(settings: Settings, strategy: str) -> Iterator[Iterator[Event]]:
    """What a trainer tells; it is killed in the end, where it has not ended by itself."""
    root = Path(settings.disk if strategy in ON_DISK else settings.fast)
    process = settings.child("trainer", strategy, str(root / strategy))
    assert process.stdout
    try:
        yield (json.loads(line) for line in process.stdout if line.startswith("{"))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
