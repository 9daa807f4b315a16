"""Run an action with a fault at each of its system calls, and check what is left every time."""

import contextlib
import copy
import hashlib
import itertools
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from faults import Fault, FaultySystem, Killed, Medium

from everstep import EverstepError, Missing, Store
from everstep.format.manifest import CheckpointName
from everstep.store import catalog, commit, retain
from everstep.tiers.disk import Disk
from examples import stride
from stores import packs_of


@dataclass
class Promises:
    """What was reported durable, and so must be there whatever happens."""

    checkpoints: set[CheckpointName] = field(default_factory=set)
    epochs: set[int] = field(default_factory=set)
    tags: dict[str, CheckpointName] = field(default_factory=dict)
    moving: dict[str, set[CheckpointName]] = field(default_factory=dict)  # a tag: any of these
    whole: set[CheckpointName] = field(default_factory=set)  # log steps, made whole

    def check(self, base: Path) -> None:
        """Everything that is committed verifies, and everything that was promised is there."""
        path = base / "store"
        try:
            store = Store(path)
        except Missing:
            assert self == Promises()
            return
        disk = Disk(path)
        verdict = store.verify()
        assert verdict.ok, verdict.problems
        committed = set(catalog.committed(disk))
        assert self.checkpoints <= committed
        assert self.epochs <= set(catalog.read_epochs(disk))
        tags = catalog.read_tags(disk)
        assert self.tags.items() <= tags.items()
        assert all(tags[tag] in allowed & committed for tag, allowed in self.moving.items())
        assert all(catalog.read_state(disk, name) for name in self.whole)
        if self.checkpoints:
            assert store.latest() >= max(name.step for name in catalog.lineage(disk))
            store.manifest()


Action = Callable[[Disk, Promises], None]


def leaves(packs: int, epoch: int = 1, checkpoints: int | None = None) -> Callable[[Disk], None]:
    """The end of a sweep: what attempts have left is nobody's in the next epoch, and goes; so many
    packs stay, and checkpoints, where that is said."""

    def finish(disk: Disk) -> None:
        commit.claim_epoch(disk, CheckpointName(catalog.lineage(disk)[-1].step, epoch))
        retain.sweep(disk)
        assert len(packs_of(disk.root)) == packs
        assert checkpoints in (None, len(catalog.committed(disk)))
        assert Store(disk.root).verify().ok

    return finish


_checked: set[bytes] = set()
"""Digests of trees, and of what was promised of each."""


def sweep(
    folder: Path,
    prepare: Callable[[Disk], Promises],
    action: Action,
    fault: Fault,
    finish: Callable[[Disk], None] = lambda disk: None,
) -> int:
    """Let `fault` happen at every call of `action` (`make test`: at each third). Returns how many
    there were, or up to two more.

    After each: what is seen, what a power cut leaves, and what a power cut may leave are checked;
    the action is done again by whoever comes after, and must succeed; then all is checked again.
    """
    template = folder / "template"
    template.mkdir()
    promised = prepare(Disk(template / "store", FaultySystem(Medium(template))))
    for at in itertools.count(1, stride()):
        case = folder / f"at-{at}"
        live = Path(shutil.copytree(template, case / "live"))
        medium = Medium(live)
        system = FaultySystem(medium, fault, at)
        disk = Disk(live / "store", system)
        promises = _copy(promised)
        try:
            with contextlib.suppress(EverstepError, Killed):
                action(disk, promises)
            _check_images(medium, promises, case / "first", at)
            _again_after_power_cut(case, medium, action, promises, finish)
            system.disarm()
            if fault is Fault.KILL:
                disk = Disk(live / "store", FaultySystem(medium))
            action(disk, promises)
            _check_images(medium, promises, case / "second", at)
            finish(disk)
            _check(promises, live)
        except BaseException:
            print(f"{fault} at call {at}: {system.calls[at - 1 :][:1]} of {system.calls}")
            raise
        finally:
            system.release()
        shutil.rmtree(case)
        if not system.fired:
            return at - 1  # and the action, done twice without a fault, was all right
    raise AssertionError


def _check_images(medium: Medium, promises: Promises, target: Path, seed: int) -> None:
    _check(promises, medium.base)
    target.mkdir()
    _check(promises, medium.after_power_cut(target / "least"))
    print(f"seed of the partial image: {seed}")
    _check(promises, medium.after_power_cut(target / "some", random.Random(seed)))


def _again_after_power_cut(
    case: Path, medium: Medium, action: Action, promises: Promises, finish: Callable[[Disk], None]
) -> None:
    base = medium.after_power_cut(case / "restarted")
    disk = Disk(base / "store", FaultySystem(Medium(base)))
    promises = _copy(promises)
    action(disk, promises)
    _check(promises, base)
    finish(disk)
    _check(promises, base)


def _check(promises: Promises, base: Path) -> None:
    """Each tree once: of two calls in a row many leave the same."""
    digest = hashlib.sha256(repr(promises).encode())
    for folder, _, files in sorted(os.walk(base)):
        digest.update(f"{os.path.relpath(folder, base)}/ ".encode())
        for name in sorted(files):
            content = Path(folder, name).read_bytes()
            digest.update(f"{name} {len(content)} ".encode() + content)
    if digest.digest() not in _checked:
        promises.check(base)
        _checked.add(digest.digest())


def _copy(promises: Promises) -> Promises:
    return copy.deepcopy(promises)
