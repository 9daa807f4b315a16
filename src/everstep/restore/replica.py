"""The live replica: a log's newest state in shared memory, brought on by each record as it comes.

    record t (arena, else disk) ──▶ the optimizers, on tensors that lie in an arena of their own
    lend ──▶ that arena's slot is sealed: a whole state, as a dead trainer's arena holds one
    base ──▶ the same image, as state.json beside record t

Invariants:
* The slot is sealed only while nothing changes the tensors: a process that dies in the midst of an
  update leaves one that nobody takes for a state.
* It holds what the log says, or nothing: what another build, machine or flush mode would bring to
  other bits is Unsupported, and what does not compare with the run's digests is Corrupt.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from everstep.errors import Conflict, Missing, Unsupported
from everstep.format.global_tensors import Described
from everstep.format.manifest import CheckpointName, Manifest, encode_manifest
from everstep.keeper.arena import Arena, SlotState
from everstep.keeper.data import Data
from everstep.keeper.encoder import Encoder
from everstep.keeper.ranks.node_save import REPLICA
from everstep.keeper.writer import Writer
from everstep.offload.memory import Memory
from everstep.restore.chain import Chain
from everstep.restore.choose import Candidate, find_held
from everstep.restore.load import Loader
from everstep.restore.materialize import described, publish, whole_manifest
from everstep.restore.rebuild import Rebuilt
from everstep.store import catalog, commit
from everstep.tiers.tier import Tier

_DIGEST_BYTES = 64
"""Of a manifest, about, for each chunk."""


class Replica:
    """The state of one log. For one thread; its methods block."""

    def __init__(self, disk: Tier) -> None:
        self._disk = disk
        self._loader = Loader()
        self._candidate = Candidate(CheckpointName(0, 0), disk)
        self._state: Rebuilt | None = None
        self._memory: Memory | None = None
        self.at: CheckpointName | None = None
        """The step that it has come to; None where it holds nothing."""
        self._records = 0
        """Since the newest base."""

    def follow(self, name: CheckpointName, arenas: Sequence[Arena]) -> bool:
        """Bring it to this checkpoint, of an epoch or a base that it may not know; and make a base
        of that, where the run would by what it says of its log. Whether it has. `arenas`: where
        the last checkpoints may still lie. It holds nothing where retention was quicker. Raises
        what else keeps it from that, after which it is worth nothing."""
        self._candidate.name = name
        try:
            self._follow(name, arenas)
        except Missing:
            self._drop()
        self._candidate.near = {}
        every = self._state and self._state.chain.last.manifest.capture.get("base_every")
        if type(every) is not int or self._records < every:
            return False
        with suppress(Missing, Conflict):  # retention was quicker; or another writer goes on
            self._write_base(name)
            return True
        return False

    def lend(self) -> Arena | None:
        """The arena with the state in its one slot, to be restored from until the next `follow`;
        None where it holds nothing."""
        if self._state is None or self.at is None:
            return None
        memory, chain = self._settle(), self._state.chain
        writer = Writer(self._disk, None, encoder=Encoder("raw"))
        part = Data(writer, memory.image, is_record=False).part(self.at.step)
        writer.hasher.shutdown(wait=False)
        manifest = whole_manifest(chain, part)
        of = catalog.digest_of_manifest(self._disk, self.at)
        manifest = replace(manifest, capture={**manifest.capture, REPLICA: of})
        row = memory.seal(self.at.step, {"step": self.at.step})
        memory.arena.put_manifest(0, row, encode_manifest(manifest))
        memory.arena.set_state(0, SlotState.DONE)
        return memory.arena

    def _write_base(self, name: CheckpointName) -> None:
        assert self._state
        commit.check_epoch(self._disk, name.epoch, name.step)
        publish(self._disk, self._state.chain, self._settle().image, ())
        self._records = 0

    def _drop(self) -> None:
        self._state = self._memory = self.at = None

    def _follow(self, name: CheckpointName, arenas: Sequence[Arena]) -> None:
        if name == self.at:
            return
        missed: list[Manifest] = []
        for manifest in catalog.followed(self._disk, name):
            missed.insert(0, manifest)
            before = manifest.previous
            if before and self._state and before.name == self.at:
                break
        else:
            self._drop()
        held = find_held(arenas)
        for manifest in missed:
            known = held.get(manifest.name)
            if known and known.manifest == manifest:  # the trainer may fill these slots at any time
                links = (pack.path for part in manifest.all_parts for pack in part.packs)
                self._candidate.near = dict(zip(links, known.packs, strict=True))
            described = self._candidate.read(manifest)
            if self._state is None:
                self._begin(described)
            else:
                self._advance(self._state, described)
            self.at = manifest.name

    def _begin(self, base: Described) -> None:
        chain = Chain(base, [])
        self._check(chain)
        self._state = Rebuilt(self._candidate, chain, self._loader, goes_on=True)
        self._records = 0
        self._settle()

    def _advance(self, state: Rebuilt, log: Described) -> None:
        assert self._memory
        self._memory.arena.set_state(0, SlotState.FREE)
        self._check(Chain(state.chain.base, [log]))
        state.advance(log)
        self._records += 1

    def _check(self, chain: Chain) -> None:
        chain.check_unruled(f"a replica of {self._disk.root}")
        if differing := chain.why_inexact:
            raise Unsupported(
                f"a replica of {self._disk.root}: its bits would not be the run's "
                f"({'; '.join(differing)})"
            )

    def _settle(self) -> Memory:
        """All tensors lie in the arena."""
        assert self._state
        tensors = self._state.tensors
        layout, table = described(self._state.chain, tensors)
        if self._memory is None or table != self._memory.document:
            manifest = encode_manifest(self._state.chain.last.manifest)
            room = len(table) + 2 * len(manifest) + _DIGEST_BYTES * layout.digest_count
            self._memory = Memory.create(layout, table, documents_bytes=room)
        for name, tensor in tensors.items():
            self._memory.take(name, tensor)
        return self._memory
