"""Little stores for tests: a trainer and its keeper without processes and without torch."""

import contextlib
import json
import os
import random
import secrets
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from everstep.format.document import seal
from everstep.format.manifest import CheckpointName
from everstep.format.packs import Layout, Spec, lay_out
from everstep.format.tables import FileLink, encode_table
from everstep.keeper import home, wire
from everstep.keeper.arena import Arena, Row
from everstep.keeper.job import ALL, Job
from everstep.keeper.persist import persist
from everstep.keeper.ranks.node_save import NodeSave
from everstep.keeper.writer import Outcome, Writer
from everstep.store import catalog, commit, names
from everstep.store.retain import Keep
from everstep.tiers.disk import Disk
from everstep.tiers.system import System

SMALL = (
    Spec("bias", "float32", (7,)),
    Spec("count", "int64", ()),
    Spec("empty", "float32", (0, 3)),
    Spec("mask", "bool", (5,)),
    Spec("wave", "complex128", (3,)),
)
MIXED = (
    *SMALL,
    Spec("half", "bfloat16", (3, 3)),
    Spec("large", "float32", (1300, 1024)),  # 5 MiB and a bit: two chunks
    Spec("weight", "float32", (512, 513)),  # 1 MiB and a bit: aligned, padded
)
CALL = {"optimizer": "optimizer", "class": "torch.optim.sgd.SGD", "sets": []}


class Unsynced(System):
    """A system that does not wait for the medium: for stores whose durability is not the test."""

    def fsync(self, fd: int) -> None:
        pass


@lru_cache(maxsize=32)
def content(spec: Spec, step: int) -> bytes:
    """The bytes that `spec` has at `step` in every test."""
    if spec.dtype == "bool":
        return bytes(random.Random(f"{spec.name} {step}").choices((0, 1), k=spec.size))
    return random.Random(f"{spec.name} {step}").randbytes(spec.size)


def write(tier, path: str, data: Sequence[memoryview], *await_bytes) -> None:
    """A new file, durably."""
    with tier.new_file(path, sum(map(len, data))) as file:
        file.fill(data, *await_bytes)
    file.finish()
    tier.sync_entries([path])


def write_packs(disk: Disk, name: CheckpointName, packs: Sequence[memoryview]) -> tuple:
    """Durably, each to a file of its own; the links to them."""
    token = secrets.token_hex(4)
    links = [FileLink(names.pack_path(name, token, n), len(pack)) for n, pack in enumerate(packs)]
    for link, pack in zip(links, packs, strict=True):
        write(disk, link.path, [pack])
    return tuple(links)


def image_of(layout: Layout, contents: Mapping[str, bytes]) -> bytearray:
    """The packs of a layout, one after another, filled."""
    image = bytearray(layout.size)
    at = 0
    for index, (pack, header) in enumerate(zip(layout.packs, layout.headers, strict=True)):
        image[at : at + pack.header] = header
        for spec, piece in zip(layout.specs, layout.pieces, strict=True):
            if piece.pack == index:
                start = at + piece.offset
                image[start : start + piece.size] = contents[spec.name]
        at += pack.size
    return image


@dataclass
class Trainer:
    """What a trainer and its keeper do for a save, in this thread."""

    disk: Disk
    keep: Keep | None = None
    specs: tuple[Spec, ...] = SMALL
    epoch: int = 0
    parent: CheckpointName | None = None
    aliases: dict[str, list[str]] = field(default_factory=dict)
    slots: int = 2
    still: tuple[str, ...] = ()
    """Names of tensors that have the same content at each step, that of `turn`."""
    turn: int = 0

    def __post_init__(self) -> None:
        self.layout = lay_out(self.specs, dict.fromkeys(self.still, 1))
        self.table = encode_table(self.layout, self.aliases, {}, {})
        self.arena = Arena.create(self.slots, 64 << 10, self.layout.size)
        self.writer = Writer(self.disk, self.keep, self.epoch, self.parent)
        self.sequence = 0

    def claim(self, parent: CheckpointName | None = None) -> int:
        """Attach as a new epoch that goes on from `parent`."""
        self.epoch = commit.claim_epoch(self.disk, parent)
        self.writer.epoch, self.writer.parent = self.epoch, parent
        return self.epoch

    def seal(
        self,
        step: int,
        tag: str | None = None,
        salt: int = 0,
        metrics: object = None,
        follows: int | None = None,
        window: tuple[int, ...] = (),
        ends: bool = False,
    ) -> Job:
        """Put the state of `step` into a slot; or a record, which `follows` a step. `window`: the
        steps so far over which a state is spread, which `ends` here."""
        self.sequence += 1
        slot = self.sequence % self.arena.slot_count
        turns = {s.name: self.turn if s.name in self.still else step + salt for s in self.specs}
        image = image_of(self.layout, {s.name: content(s, turns[s.name]) for s in self.specs})
        self.arena.image(slot)[: len(image)] = image
        said = {
            "objects": {"step": step},
            "hyperparameters": {},
            "topology": {},
            "capture": {"strategy": "full"},
            "metrics": metrics or {},
            "tag": tag,
        }
        if follows is not None:
            said["record"] = {"previous": follows, "calls": [CALL]}
        if window:
            calls = [CALL] if len(window) > 1 else None
            said["share"] = {"steps": list(window), "calls": calls, "ends": ends}
        descriptor = seal(said)
        record = Row(self.sequence, step, len(image), len(self.table), len(descriptor))
        self.arena.seal(slot, record, self.table, descriptor)
        job = Job(self.arena, slot, self.sequence)
        job.advance(ALL)
        job.answer(None)
        return job

    def save(self, step: int, tag: str | None = None, salt: int = 0) -> Outcome:
        """Commit the state of `step`; returns when it is durable."""
        return self.commit(self.seal(step, tag, salt))

    def record(
        self, step: int, follows: int, window: tuple[int, ...] = (), ends: bool = False
    ) -> Outcome:
        """Commit a record that leads from one step to another; returns when it is durable."""
        job = self.seal(step, follows=follows, window=window, ends=ends)
        return self.commit(job)

    def group(self, steps: Sequence[int]) -> list[Outcome | Exception]:
        """Commit records of these steps together, each of which follows the step before it; what
        became of each."""
        return self.commit_all([self.seal(step, follows=step - 1) for step in steps])

    def commit_all(
        self, jobs: list[Job], written: Callable[[NodeSave], object] = lambda save: None
    ) -> list[Outcome | Exception]:
        """Commit jobs together; what became of each that was taken. `written`: is called when one
        is written, and not yet committed."""
        saves = [NodeSave([job]) for job in jobs]
        return [ended for _, ended in persist(self.writer, saves, written)]

    def commit(self, job: Job) -> Outcome:
        """Commit one job; returns when it is durable."""
        (ended,) = self.commit_all([job])
        if isinstance(ended, Exception):
            raise ended
        return ended

    def spread(self, steps: tuple[int, ...]) -> Outcome:
        """Commit a state that is spread over these steps."""
        for index, step in enumerate(steps):
            job = self.seal(step, window=steps[: index + 1], ends=step == steps[-1])
            outcome = self.commit(job)
        return outcome


def make_store(
    path: Path,
    steps: Mapping[int, str | None] | range | list[int],
    specs: tuple[Spec, ...] = SMALL,
    system: System | None = None,
    still: tuple[str, ...] = (),
) -> Trainer:
    """A store of one epoch with checkpoints of these steps (a mapping gives their tags)."""
    trainer = Trainer(Disk(path, system or Unsynced()), specs=specs, still=still)
    trainer.claim()
    for step in steps:
        trainer.save(step, steps[step] if isinstance(steps, Mapping) else None)
    return trainer


def go_on(trainer: Trainer, reference: int | str | None, steps: range | list[int]) -> Trainer:
    """A new attachment that goes on from a checkpoint, as after a restore."""
    parent = catalog.find(trainer.disk, reference)
    successor = Trainer(trainer.disk, trainer.keep, trainer.specs, still=trainer.still)
    successor.turn = trainer.turn
    successor.claim(parent)
    for step in steps:
        successor.save(step)
    return successor


def end_keeper(path: Path, node: str = "") -> None:
    """Kill the keeper of a store, if one is running. Its files go: each new keeper looks at all."""
    if pid := keeper_pid(path, node):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for suffix in (".sock", ".log", ".lock"):
        _endpoint(path, node).with_suffix(suffix).unlink(missing_ok=True)


def keeper_pid(path: Path, node: str = "") -> int | None:
    """The keeper of a store (on a node that EVERSTEP_NODE calls so), if one is running."""
    try:
        with wire.connect(_endpoint(path, node).with_suffix(".sock")) as connection:
            return wire.check_peer(connection)
    except OSError:
        return None


def _endpoint(path: Path, node: str) -> Path:
    before = os.environ.get("EVERSTEP_NODE", "")
    os.environ["EVERSTEP_NODE"] = node
    try:
        return home.endpoint(path)
    finally:
        os.environ["EVERSTEP_NODE"] = before


def files_of(path: Path) -> set[str]:
    """Every file below a store, as relative paths; also while files are deleted."""
    return {
        os.path.relpath(os.path.join(folder, name), path)
        for folder, _, names in os.walk(path)
        for name in names
    }


def packs_of(path: Path) -> set[str]:
    """Every pack on the disk."""
    return {name for name in files_of(path) if name.endswith(".safetensors")}


def rewrite(path: Path, change: Callable[[dict], None]) -> None:
    """Change a sealed document and seal it again: damage that its own digest does not show."""
    value = json.loads(path.read_bytes())
    del value["digest"]
    change(value)
    path.write_bytes(seal(value))
