"""Checkpointer: the story of a save and of a restore.

save      collect the state → a strategy says what is captured → a slot → eager copies
          → (background) lazy copies → seal → keeper: encode what is a record, digest, write to the
          tier, commit → the handle rises: captured, held, local
restore   let a surviving keeper finish → choose a checkpoint → match it with the state → read from
          the nearest tier, verify, decode into the tensors → place objects, generators last
"""

import atexit
import contextlib
import logging
import operator
import os
import time
import weakref
from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, Never, SupportsIndex

from everstep.capture.captures import Captures, check_room
from everstep.capture.choice import Choice
from everstep.capture.saves import Saves, Skipped
from everstep.capture.strategy import Request
from everstep.errors import EverstepError, Unsupported
from everstep.format.manifest import CheckpointName
from everstep.handle import Levels, Metrics, SaveHandle
from everstep.keeper.client import Client
from everstep.keeper.spill import check_directory
from everstep.options import Full, Log, Options, Ranks, Spread, Tiers, check_names, refuse_unknown
from everstep.preemption import Preemption
from everstep.redo.derived import Derived, Rule
from everstep.restore.apply import Scope
from everstep.restore.restores import Restores
from everstep.sharding.partners import meet, new_address, open_stores
from everstep.sharding.world import World, form_team
from everstep.state.objects import plain_json
from everstep.state.view import State
from everstep.store import catalog
from everstep.store.commit import set_tag
from everstep.store.names import tag_path
from everstep.store.retain import Keep
from everstep.tiers.peer import Peer
from everstep.tiers.tier import Union, name_of, tier_at

log = logging.getLogger("everstep")

_CLOSE_S = 600.0


class Checkpointer:
    """Saves the state of a training run, and restores it. For the thread that trains."""

    def __init__(
        self,
        store: str | os.PathLike[str],
        state: dict[str, Any],
        *,
        every: int = 1,
        strategy: str | Full | Spread | Log = "auto",
        keep: Keep | None = None,
        memory_bytes: int | None = None,
        when_full: Literal["wait", "skip"] = "wait",
        derive: Mapping[str, Rule] | None = None,
        ranks: Ranks | None = None,
        tiers: Tiers | None = None,
        **unknown: Never,
    ) -> None:
        """Open or make the store, and attach to its keeper, which is started where none runs.

        Where a torch.distributed process group is up, all its ranks make one, with the same
        arguments and the same names in `state`, and then the same calls, restore() among them.

        store: a directory, or the URL of a bucket (s3://, gs://, az://), which is the store then;
            credentials are those that every client of it takes (AWS_ACCESS_KEY_ID, a profile, ...).
        state: names to nn.Module, Optimizer, anything with state_dict and load_state_dict,
            generators, tensors, or nested dicts and lists of values and tensors.
        every: step() saves each step that is a multiple of it.
        strategy: how: an everstep.Full, Spread or Log; "full", "spread" and "log" are these as they
            come. "auto" takes what writes least, and `everstep show` tells why.
        keep: retention. None: all is kept.
        memory_bytes: of host memory for captures, at least two states. None: three states where
            they fit into half of the available memory, else two.
        when_full: what a save does when no memory is free: wait, or be skipped. It waits while
            anything is saved; after 120 s in which nothing is it fails, and no call waits until
            something is saved again. What goes on from the step before (a record of a log, a
            window's next share) waits in any case, and so does a log's next base: without it whole
            states are due.
        derive: names of parts of the state to functions of the step that bring them forward
            ({"ema": lambda step: ema.update_parameters(model)}): step() calls each once for its
            step, before it saves, in place of the training loop; a log calls them again at replay
            instead of holding what they make.
        ranks: what ranks have of their own.
        tiers: where else checkpoints are held.

        Raises ValueError, TypeError, Unavailable; Unsupported where a Log or Spread does not fit
        the optimizers.
        """
        for name in unknown:
            refuse_unknown(name)
        options = Options.of(every, strategy, keep, memory_bytes, when_full)
        if not os.fspath(store):
            raise ValueError("store must be a directory, not ''; for the current one say '.'")
        check_names("derive", derive)
        own = ranks or Ranks()
        self.state = state
        self.metrics = Metrics()
        self._every = every
        self._world = World(0, 1) if own.alone else World.current()
        self._state = State(
            state,
            world=self._world,
            by_rank=own.by_rank,
            check_replicas=own.check,
            layout=own.layout,
        )
        how = options.strategy if isinstance(options.strategy, Log) else Log()
        self._derived = Derived(derive or {}, self._state, is_full=how.verify == "full")
        self._disk = tier_at(store)
        tiers = tiers or Tiers()
        remote = tiers.remote_of(self._disk)
        if tiers.spill is not None:
            check_directory(name_of(tiers.spill))
        alike = {"state": self._state.parts, "every": every, "strategy": repr(options.strategy)}
        alike["derive"] = list(self._derived.parts)
        alike["peers"] = tiers.peers
        place = form_team(self._world, self._disk, alike)
        self._world.local = place.ranks
        choice = Choice(options, self._state, self._derived)
        if how.replica and place.own_store:
            raise Unsupported(
                f"everstep.Log(replica=True): each node has a store of its own ({store}), and a "
                f"replica needs one directory. Leave replica= out"
            )
        check_room(self._state)
        run = open_stores(self._world, place, self._disk, remote)
        remote_every = tiers.remote_every if tiers.remote else None
        replicates = tiers.peers > 0 and place.nodes > 1
        if tiers.peers and not replicates:
            log.warning("tiers: peers=%s, but there is no other node", tiers.peers)
        levels = Levels(self._disk.level, remote_every, replicates)
        self._saves = Saves(self.metrics, choice.run.trust, levels)
        has_partners = place.own_store or replicates
        self._client = Client(
            self._disk.root,
            keep,
            self._saves.on_event,
            replica=how.replica,
            place=place,
            tiers=tiers.to_json(),
            serve=new_address() if has_partners else None,
        )
        self._partners = self._meet(run, replicates) if has_partners else []
        others = [*self._partners, *([remote] if remote else [])]
        all_tiers = Union([self._disk, *others]) if others else self._disk
        self._captures = Captures(
            self._state, choice, options, self._disk, self._client, self._saves, self.metrics
        )
        self._restores = Restores(
            self._state, self._derived, all_tiers, self._client, self._captures
        )
        self._left_behind = next(catalog.newest_first(all_tiers), None)
        """The newest checkpoint that was there, until one is restored."""
        self._begun: SaveHandle | None = None
        self._last_step: int | None = None
        self._has_gone_back = False
        self._is_closed = False
        self._preemption = Preemption(
            self._world, self._is_saved, lambda: self.wait(timeout=_CLOSE_S)
        )
        _close_in_children(self)
        atexit.register(self._close_at_exit)

    def step(self, step: int) -> SaveHandle | None:
        """Tell that the optimizer has completed `step` updates. Saves where a save is due
        (`every`), and returns its handle; blocks only for what has to be copied at once. After a
        SIGTERM it saves, waits until all is durable and ends the process. Raises Unsupported, as
        save() does."""
        self._check_open()
        step = _checked(step)
        self._saves.calls += 1
        self._derive(step)
        self._note(step)
        is_last = self._preemption.comes_with(step)
        due = step % self._every == 0 or is_last
        strategy = self._captures.strategy
        if not due and not strategy.wants(step):
            self._captures.pass_by(step)
            return None
        handle = self._save(Request(step, is_asked=is_last))
        return handle if due else None

    def save(
        self, step: int, *, tag: str | None = None, metrics: dict[str, Any] | None = None
    ) -> SaveHandle:
        """Save the state as `step`, now; returns when all that must be copied at once is copied.
        In place of step(step), not after it: a step is written once.

        tag: a name for it, which moves if it exists. metrics: JSON (numbers may be numpy's or
        torch's), kept in the manifest. Of several ranks, rank 0's are taken. Raises ValueError and
        Unsupported for what cannot be saved; what fails later is on the handle.
        """
        if tag is not None:
            tag_path(tag)
        if metrics is not None and not isinstance(metrics, dict):
            raise ValueError(f"metrics must be a dict, not {metrics!r}")
        figures = plain_json(metrics or {}, "metrics")
        step = _checked(step)
        self._saves.calls += 1
        self._derive(step)
        self._preemption.comes_with(step)
        handle = self._save(Request(step, True, tag, figures))
        assert handle
        return handle

    def restore(
        self,
        step: int | str | None = None,
        *,
        only: str | list[str] | None = None,
        first: str | list[str] | None = None,
        from_store: str | os.PathLike[str] | None = None,
        exact: Literal["allow", "require"] = "allow",
    ) -> int:
        """Put a checkpoint back into the state, verified; returns its step. Blocks.

        step: None for the newest that verifies (0 is returned where there is none), a step of the
        run, a tag, or "step-epoch". only: names of parts of the state; the others are left alone
        (of a log, memory is taken for all of it, and torch's own optimizers are needed).
        first: names of parts that are needed first, such as "model": it returns when all is there
            but the tensors of other optimizers' state, which are filled in the background, and are
            there before their first update, which waits and raises what goes wrong with them (of a
            log all is there at once).
        from_store: another run's store to start from. exact: "require" refuses (Unsupported) to
        replay a log under another torch, processor or number of threads, where last bits may
        differ; "allow" does it, and says so in the log. Raises Missing, Mismatch (nothing was
        changed then), Corrupt (the tensors are half filled then: restore another step),
        Unavailable.
        """
        began = time.perf_counter()
        self._check_open()
        self._left_behind = None
        with contextlib.suppress(EverstepError):  # told before, and no reason not to restore
            self.wait()
        if not (step is None or type(step) in (int, str)):
            raise ValueError(f"step must be a step, a tag or 'step-epoch', not {step!r}")
        if exact not in ("allow", "require"):
            raise ValueError(f"exact must be 'allow' or 'require', not {exact!r}")
        scope = Scope(_names("only", only), _names("first", first), exact == "require")
        restored = self._restores.restore(step, from_store, scope)
        if restored is None:
            return 0
        self._last_step = restored.step
        self.metrics.restore_seconds = time.perf_counter() - began
        return restored.step

    def wait(self, level: str | None = None, timeout: float | None = None) -> None:
        """Block until every save that was begun has reached `level` (None: is durable) or failed.

        Raises the newest save's error where it was lost, TimeoutError after `timeout` seconds.
        """
        self._saves.wait(self._saves.levels.checked(level), timeout)

    def close(self) -> None:
        """Wait until all saves are durable, and detach. Raises the newest save's error if it was
        lost."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self.wait(timeout=_CLOSE_S)
        finally:
            atexit.unregister(self._close_at_exit)
            self._preemption.uninstall()
            self._state.forget_late()
            self._captures.close()
            self._saves.close()
            self._client.close()
            for partner in self._partners:
                partner.close()
            if not self._saves.pending:  # else something is still being copied
                self._captures.pool.close()
            if self._saves.newest and isinstance(self._saves.newest.error, Skipped):
                log.warning("closing: the newest is not saved: %s", self._saves.newest.error)
            elif self.metrics.skips:
                saves, skips = self.metrics.saves, self.metrics.skips
                log.warning("closing: %s of %s saves were skipped", skips, saves)
            if self._preemption.ends_process:  # it was asked to, and no step came any more
                self._preemption.end(wait=False)

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except (EverstepError, TimeoutError):
            if error is None:
                raise
            log.exception("closing the checkpointer after %r", error)

    # ---- save ------------------------------------------------------------------------------

    def _derive(self, step: int) -> None:
        if self._derived.parts:
            self._check_open()
            self._captures.hold_derived()
            self._derived.run(step)

    def _save(self, request: Request) -> SaveHandle | None:
        """None where there was nothing to be captured."""
        began = time.perf_counter()
        self._check_open()
        self._tell_left_behind(request.step)
        self._note(request.step)
        try:
            handle = self._saved_already(request)
            if handle is None:
                self._saves.await_partner()
                if self._preemption.is_last:
                    request = replace(request, must_wait=True)
                handle = self._captures.begin(request)
                self._begun = handle or self._begun
        finally:
            stall_s = time.perf_counter() - began
            self.metrics.stall_seconds += stall_s
            self.metrics.stall_seconds_max = max(self.metrics.stall_seconds_max, stall_s)
        if self._preemption.is_last and self._preemption.ends_process:
            self._preemption.end()
        return handle

    def _saved_already(self, request: Request) -> SaveHandle | None:
        """The save of just this state, where a log or a window has made one; it gets the tag."""
        step, tag = request.step, request.tag
        strategy, begun = self._captures.strategy, self._begun
        if request.metrics and begun and begun.step == step and begun.error is None:
            log.warning(
                "step %s is saved already, and what was saved stays as it is: these metrics are "
                "not kept. Give them to save(step, metrics=...) in place of step(step)",
                step,
            )
        last = strategy.current(step, self._captures.collect)
        if last and tag is not None:  # its name must not come before it
            self._saves.await_durable(last)
            assert self._captures.epoch is not None
            set_tag(self._disk, tag, CheckpointName(step, self._captures.epoch))
        return last

    def _meet(self, run: str, replicates: bool) -> list[Peer]:
        try:
            return meet(self._world, self._client, self._disk, run, replicates)
        except BaseException:
            self._client.close()
            raise

    # ---- small things ----------------------------------------------------------------------

    def _note(self, step: int) -> None:
        """The newest completed step."""
        if self._last_step is not None and step < self._last_step and not self._has_gone_back:
            self._has_gone_back = True
            log.warning(
                "step %s comes after step %s: restore() takes the highest number for the newest. "
                "Count all steps of a run, also over epochs of its data; to go back to an earlier "
                "one restore it",
                step,
                self._last_step,
            )
        self._last_step = step

    def _tell_left_behind(self, step: int) -> None:
        if self._left_behind and self._world.rank == 0:
            log.warning(
                "saving step %s: nothing was restored, and the checkpoints of %s, up to step %s, "
                "are left behind as a branch. To go on from them call restore() before the first "
                "save",
                step,
                self._disk.root,
                self._left_behind.step,
            )
        self._left_behind = None

    def _is_saved(self) -> bool:
        """Whether the newest completed step is durable, or on its way."""
        begun = self._begun  # not _newest: what is being collected still needs the main thread
        return self._last_step is None or (
            begun is not None and begun.step == self._last_step and begun.error is None
        )

    def _close_at_exit(self) -> None:
        """A program that ends without close() has its newest save finished all the same."""
        try:
            self.close()
        except (EverstepError, TimeoutError):
            log.exception("closing the checkpointer at exit")

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError("this Checkpointer is closed; make a new one")


def _checked(step: SupportsIndex) -> int:
    """As an int; numpy's numbers are none."""
    with contextlib.suppress(TypeError):
        if not isinstance(step, bool) and 0 <= (number := operator.index(step)) < 10**18:
            return number
    raise ValueError(f"step must be a number of completed updates, not {step!r}")


def _names(argument: str, parts: str | list[str] | None) -> list[str] | None:
    if parts is None:
        return None
    names = [parts] if isinstance(parts, str) else parts
    if not isinstance(names, (list, tuple)) or not names or {type(name) for name in names} != {str}:
        raise ValueError(f"{argument} must be names of parts of the state, not {parts!r}")
    return list(names)


def _close_in_children(checkpointer: Checkpointer) -> None:
    """A forked child (a data-loader worker) has no business with the keeper."""
    reference = weakref.ref(checkpointer)

    def forget() -> None:
        if (parent := reference()) is not None:
            parent._is_closed = True
            parent._client.abandon_in_child()
            parent._captures.abandon_in_child()

    os.register_at_fork(after_in_child=forget)
