"""Store: what a person or a tool does with checkpoints without a training run."""

import contextlib
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from everstep.errors import Corrupt, EverstepError, Missing, Unsupported
from everstep.format.global_tensors import Described
from everstep.format.manifest import CheckpointName, Manifest, Part, Stream
from everstep.format.tables import Table
from everstep.store import catalog, commit, names, read, retain
from everstep.store.copy import Copied, Progress, fork
from everstep.store.read import Verified
from everstep.tiers.tier import tier_at

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Verdict:
    """What `verify` found: how many checkpoints and bytes it read, and what is wrong.

    `problems` are by checkpoint ("00000120-0003"), or by folder ("epochs", "tags").
    """

    checkpoints: int
    bytes: int
    problems: dict[str, list[str]]
    unproven: dict[str, str] = field(default_factory=dict)
    """Checkpoints of which a replay came to other bytes than the run had, or may have, and what was
    wrong: each of their bytes may be as it was written."""

    @property
    def ok(self) -> bool:
        """Whether every byte is as it was written."""
        return not self.problems


class Store:
    """The checkpoints of one run, in a directory. Needs no model, starts no process; thread-safe.

    A step may be given as an int (of the run as it is now), as a tag, or as "step-epoch" (on any
    branch).
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises Missing where there is no store, Unsupported for one of an unknown format."""
        self._disk = tier_at(path)  # wherever the program goes from here
        self.path = self._disk.root
        try:
            self.run = catalog.read_run(self._disk)
        except Missing:
            raise Missing(
                f"opening the store {self.path}: there is none (no {names.STORE} in it). What "
                f"another library has saved is brought into one by: everstep import"
            ) from None

    def steps(self) -> list[int]:
        """The steps of the run as it is now, rising; branches left behind do not count."""
        return [name.step for name in catalog.lineage(self._disk)]

    def latest(self) -> int | None:
        """The newest step; None where there is no checkpoint yet."""
        steps = self.steps()
        return steps[-1] if steps else None

    def manifest(self, step: int | str | None = None) -> Manifest:
        """The manifest of a checkpoint, by default of the newest. Raises Missing, Corrupt."""
        return catalog.read_manifest(self._disk, catalog.find(self._disk, step))

    def chain(self, step: int | str | None = None) -> list[Manifest]:
        """What a checkpoint is rebuilt from, the checkpoint itself last: a state, and the logs that
        go on from it. Raises Missing, Corrupt."""
        return catalog.read_chain(self._disk, catalog.find(self._disk, step))

    def tables(self, manifest: Manifest) -> list[Table]:
        """The piece tables of a checkpoint, one per part: of the state, and of its records."""
        return [catalog.read_table(self._disk, part) for part in manifest.all_parts]

    def verify(self, step: int | str | None = None, progress: Progress | None = None) -> Verdict:
        """Read every byte of a checkpoint (and of what it goes on from), by default of all and of
        what names them, and compare; of a file that several have, once.

        `progress` is called with (bytes read, bytes in all). What is wrong is in the result, not
        raised; only a reference to a checkpoint that is not there is Missing.
        """
        problems: dict[str, list[str]] = {}
        if step is not None:
            chosen = self._with_what_it_follows(catalog.find(self._disk, step))
        else:
            chosen = catalog.committed(self._disk)
            problems = self._verify_documents()
        manifests: list[tuple[CheckpointName, Manifest]] = []
        for name in chosen:
            try:
                manifests.append((name, catalog.read_manifest(self._disk, name)))
            except EverstepError as error:
                if step is not None or catalog.is_there(self._disk, name):  # else deleted since
                    problems[str(name)] = [str(error)]
        packs = {
            link.path: link.size
            for _, manifest in manifests
            for link in manifest.files
            if link.digest is None
        }
        total, done = sum(packs.values()), 0
        seen: Verified = {}
        for name, manifest in manifests:
            for size, problem in self._verify(manifest, seen):
                done += size
                if problem and catalog.is_there(self._disk, name):  # else it was deleted meanwhile
                    problems.setdefault(str(name), []).append(problem)
                if progress:
                    progress(done, total)
        known = catalog.read_unproven(self._disk)
        unproven = {str(name): known[name] for name in chosen if name in known}
        return Verdict(len(chosen), done, problems, unproven)

    def read(
        self, step: int | str | None = None, names: Collection[str] | None = None
    ) -> dict[str, "torch.Tensor"]:
        """The tensors of a checkpoint (those in `names`, or all) by name, verified, on the CPU.

        An alias (tied weights) may be asked for like a name. The records of a log are replayed
        first, in memory for the whole state. Raises Missing with the names that are not there,
        Corrupt; Unsupported for a log that only its own program can replay.
        """
        from everstep.restore.load import Loader  # torch, which the rest does without
        from everstep.restore.whole import Whole

        name = catalog.find(self._disk, step)
        try:
            with Loader() as loader:
                state = catalog.read_whole(self._disk, name)
                return Whole(self._disk, name, loader, state).tensors(names)
        except Corrupt as error:
            if catalog.is_there(self._disk, name):
                raise
            raise Missing(f"reading {name} of {self._disk.root}: deleted meanwhile") from error

    def read_stream(
        self, part: str, step: int | str | None = None
    ) -> Iterator[tuple[str, Iterator["torch.Tensor | memoryview"]]]:
        """Yield what a streamed part of a checkpoint has, as its load_stream() would get it: names,
        each with its pieces, which are read and verified one by one. Raises Missing, Corrupt."""
        from everstep.restore.choose import Candidate  # torch, which the rest does without

        name = catalog.find(self._disk, step)
        streams = catalog.read_manifest(self._disk, name).streams
        if part not in streams:
            raise Missing(
                f"reading {part!r} of {name} of {self.path}: its streams are {[*streams]}"
            )
        return Candidate(name, self._disk).read_stream(streams[part])

    def state(self, step: int | str | None = None) -> Manifest:
        """The manifest of a checkpoint's whole state. Raises Missing, Corrupt; Unsupported for a
        step that is a log."""
        name = catalog.find(self._disk, step)
        if (state := catalog.read_whole(self._disk, name)) is None:
            raise Unsupported(
                f"looking for the state of step {name.step} of {self.path}: it is stored as redo "
                f"records. Make it whole with: everstep materialize {self.path} {name.step}"
            )
        return state

    def restore_plan(self, step: int | str | None = None) -> dict[str, int]:
        """The step that each tensor of a checkpoint is of, by all its names: its own, but for what
        was not due in a thinned save (everstep.Full(thin=...)). Raises what `state` does."""
        state = self.state(step)
        plan: dict[str, int] = {}
        for part, table in zip(state.parts, self.tables(state), strict=False):
            steps = names.pack_steps(table, part.packs, state.step)
            for name, entry in table.tensors.items():
                plan |= dict.fromkeys((name, *entry.aliases), steps[entry.pieces[0].pack])
        return plan

    def tag(self, step: int | str, tag: str) -> CheckpointName:
        """Let `tag` name a checkpoint, which is returned; a tag that exists moves. Raises Missing;
        ValueError for a tag that could be taken for a step."""
        names.tag_path(tag)
        name = catalog.find(self._disk, step)
        with self._disk.locked(exclusive=False):  # so that it is not deleted meanwhile
            catalog.read_manifest(self._disk, name)
            commit.set_tag(self._disk, tag, name)
        return name

    def delete_tag(self, tag: str) -> None:
        """Let `tag` name nothing any more. Raises Missing."""
        path = names.tag_path(tag)
        if self._disk.size(path) is None:
            found = catalog.tags(self._disk)
            raise Missing(f"deleting the tag {tag!r} of {self.path}: its tags are {found}")
        self._disk.delete(path)

    def fork(
        self, step: int | str, to: str | os.PathLike[str], progress: Progress | None = None
    ) -> Copied:
        """Begin a run of its own in the new place `to`, at a checkpoint of this one, whose files it
        shares on one file system. Raises Missing, Corrupt, Conflict where something is there."""
        name = catalog.find(self._disk, step)
        return fork(self._disk, tier_at(to), name, progress or (lambda done, total: None))

    def delete(self, step: int | str) -> int:
        """Delete a checkpoint and the data that only it needs. Returns the bytes freed."""
        if step is None:
            raise ValueError("delete needs a step, a tag or 'step-epoch': it takes none by itself")
        return retain.delete(self._disk, [catalog.find(self._disk, step)])

    def gc(self) -> tuple[int, int]:
        """Delete files that no checkpoint reaches: what failed left. Returns (files, bytes)."""
        return retain.sweep(self._disk)

    def _verify_documents(self) -> dict[str, list[str]]:
        problems: dict[str, list[str]] = {}
        for number in catalog.known_epochs(self._disk):
            try:
                catalog.read_epoch(self._disk, number)
            except EverstepError as error:
                problems.setdefault(names.EPOCHS, []).append(str(error))
        try:
            catalog.read_tags(self._disk)
        except EverstepError as error:
            problems[names.TAGS] = [str(error)]
        return problems

    def _with_what_it_follows(self, name: CheckpointName) -> list[CheckpointName]:
        """As far as it is there: the verification of what is before a gap says so."""
        found: list[CheckpointName] = []
        with contextlib.suppress(EverstepError):
            for manifest in catalog.followed(self._disk, name, with_bases=True):
                found.append(manifest.name)
        return found[::-1] or [name]

    def _verify(self, manifest: Manifest, seen: Verified) -> Iterator[tuple[int, str | None]]:
        """Bytes that were read, and what is wrong: also with the state beside a log step."""
        name = manifest.name
        state = None
        try:
            state = catalog.read_state(self._disk, name) if manifest.records else None
        except EverstepError as error:
            yield 0, str(error)
        try:
            if not state or not state.ends_chain:  # else nothing before it need be there
                catalog.check_previous(self._disk, manifest)
        except EverstepError as error:
            yield 0, str(error)
        for described in (manifest, state) if state else (manifest,):
            yield from self._verify_parts(described, seen)

    def _verify_parts(self, manifest: Manifest, seen: Verified) -> Iterator[tuple[int, str | None]]:
        tables: list[Table] = []
        both: list[Part | Stream] = [*manifest.all_parts, *manifest.streams.values()]
        for each in both:
            try:
                part = each if isinstance(each, Part) else catalog.read_stream(self._disk, each)
                table = catalog.read_table(self._disk, part)
                tables += [table] if part is each else []
                for size, problem in read.verify_part(self._disk, part, table, seen):
                    yield size, str(problem) if problem else None
            except EverstepError as error:
                yield 0, str(error)
        if len(tables) == len(manifest.all_parts):
            described = Described(manifest, tables)
            problems = chain(described.problems(), described.index_problems())
            yield from ((0, problem) for problem in problems)
