"""The live replica: a log's newest state in shared memory, brought on by each record as it comes.

    python -m everstep.restore.replica STORE     the worker (keeper/workers.py) that holds it, for a
                                                 keeper (keeper/live_replica.py)

    record t (arena, else disk) ──▶ the optimizers, on tensors that lie in an arena of their own
    lend ──▶ that arena's slot is sealed: a whole state, as a dead trainer's arena holds one
    base ──▶ the same image, as state.json beside record t

Invariants:
* The slot is sealed only while nothing changes the tensors: a process that dies in the midst of an
  update leaves one that nobody takes for a state.
* It holds what the log says, or nothing: what another build, machine or flush mode would bring to
  other bits is Unsupported, and what does not compare with the run's digests is Corrupt.
"""

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from everstep.errors import Conflict, Missing, Unsupported
from everstep.format.global_tensors import Described
from everstep.format.manifest import CheckpointName, Manifest, encode_manifest
from everstep.keeper import wire
from everstep.keeper.arena import Arena, SlotState
from everstep.keeper.data import Data
from everstep.keeper.encoder import Encoder
from everstep.keeper.ranks.node_save import REPLICA
from everstep.keeper.workers import Sent, serve
from everstep.keeper.writer import Writer
from everstep.offload.memory import Memory
from everstep.restore.chain import Chain
from everstep.restore.choose import Candidate, find_held
from everstep.restore.load import Loader
from everstep.restore.materialize import described, publish, whole_manifest
from everstep.restore.rebuild import Rebuilt
from everstep.store import catalog, commit
from everstep.tiers.tier import Tier, tier_at

_DIGEST_BYTES = 64
"""Of a manifest, about, for each chunk."""
LATE_S = 2.0
"""How long it gives way to all else that this machine does, with what it is asked for. Where there
is no time that nobody wants it takes its share then: a replica that never comes is of no use."""

_LOWEST, _FAIR = 19, 0


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
        # Retention was quicker, or another writer goes on.
        with contextlib.suppress(Missing, Conflict):
            assert self._state
            commit.check_epoch(self._disk, name.epoch, name.step)
            publish(self._disk, self._state.chain, self._settle().image, ())
            self._records = 0
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


# ---- its process ---------------------------------------------------------------------------------


def answer(replica: Replica, message: wire.Message, fds: list[int]) -> Sent:
    """Let it `follow` the checkpoint that was committed last, which may still lie in arenas, and
    lend the state, if who restores waits for it. Returns how far it has come, whether it has
    written a base, and the state's arena. Raises what keeps it from following."""
    arenas, name = list(map(Arena, fds)), message["name"]
    signal.setitimer(signal.ITIMER_REAL, LATE_S)
    has_base = bool(name) and replica.follow(CheckpointName(*name), arenas)
    lent = None
    if message["lends"]:  # somebody waits for it
        set_priority(_FAIR)
        lent = replica.lend()
    signal.setitimer(signal.ITIMER_REAL, 0)
    set_priority(_LOWEST)
    said = {"name": replica.at, "seconds": time.process_time(), "has_base": has_base}
    return {"type": "replica", **said}, [lent.fd] if lent else []


def set_priority(nice: int) -> None:
    """Of all threads. What the system does not allow is left out."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PGRP, 0, nice)
    with contextlib.suppress(OSError):  # else a session of its own would have a fair share
        Path("/proc/self/autogroup").write_text(str(nice))


def end_with_owner() -> None:
    """End at once when the keeper is gone, and delete what is half written."""
    end = select.poll()
    end.register(0, select.POLLRDHUP)

    def watch() -> None:
        end.poll()
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    threading.Thread(target=watch, daemon=True).start()


def main() -> int:
    """Serve until the keeper is gone."""
    end_with_owner()
    with contextlib.suppress(OSError):  # be the first that goes when memory runs out
        Path("/proc/self/oom_score_adj").write_text("1000")
    replica = Replica(tier_at(sys.argv[1]))
    signal.signal(signal.SIGALRM, lambda *_: set_priority(_FAIR))
    set_priority(_LOWEST)
    return serve(partial(answer, replica))


if __name__ == "__main__":
    sys.exit(main())
