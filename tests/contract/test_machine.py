"""Strategies against chance: a program, what befalls it, and the same program that nothing befalls.

Hypothesis draws a `Plan` (plans.py), attachments, each of which goes back by some steps and then on
under a strategy of its own, and what happens at which step: one that is left out, saved twice,
deleted, a keeper that dies. Whatever the store offers then is what the run of the same steps
without everstep had, byte for byte. A failing example prints all of it.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plans import COUNTED, Momentum, Places, Plan, build, fast, possible, schedule, train
from runs import checkpointer, difference, end_keeper, kinds, snapshot

from alone import one_rank
from everstep import EverstepError, Keep, Store, Unavailable
from everstep.store import retain
from everstep.tiers.disk import Disk
from examples import examples

# Of a scheduler that goes on after a restore, before the optimizer does.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of")

LOG = {
    "strategy": st.just("log"),
    "base_every": st.integers(1, 6),
    "window": st.integers(1, 4),
    "verify": st.sampled_from(["rolling", "rolling", "full"]),
    "pre_clip": st.booleans(),
    "optimizers": st.just([Momentum]),
}
SPREAD = {"strategy": st.just("spread"), "window": st.integers(2, 5)}
STRATEGIES = [
    st.fixed_dictionaries(LOG),
    st.fixed_dictionaries(LOG),
    st.fixed_dictionaries(SPREAD),
    st.just({"strategy": "full"}),
    st.just({"strategy": "auto"}),
]
EVENTS = ["untold", "tag", "wait", "again", "the keeper dies", "deleted", "swept"]


@dataclass(frozen=True)
class Attachment:
    """So many steps under a strategy, after going back so many."""

    strategy: Mapping[str, object]
    count: int
    every: int = 1
    back: int = 0
    keep: Keep | None = None


attachments = st.builds(
    Attachment,
    strategy=st.one_of(STRATEGIES),
    count=st.integers(3, 9),
    every=st.sampled_from([1, 1, 1, 2, 3, 4, 5]),
    back=st.integers(0, 4),
    keep=st.sampled_from([None, None, None, Keep(last=1), Keep(last=2, every=3)]),
)


def sure_to_look(chosen):
    """The same, but that no write goes unseen: a sample may miss what no version counter counts."""
    strategy = {"strategy": "full"}
    if chosen.strategy["strategy"] == "log":
        strategy = {**chosen.strategy, "verify": "full"}
    return replace(chosen, strategy=strategy)


class Machine:
    """A program in a store, and `expected`: its losses and snapshots by step, where nothing befalls
    it; `events` by step."""

    def __init__(self, plan, store, events, total):
        self.plan, self.store, self.events = plan, store, events
        self.deleted = set()
        state, rules = build(plan, plan.seed)
        self.generator = torch.get_rng_state()
        self.expected = {}
        for step in range(1, total + 1):
            loss = self.train(state, step)
            for rule in rules.values() if events.get(step) != "untold" else ():
                rule(step)
            self.expected[step] = loss, snapshot(state)
            self.after(state)

    def train(self, state, step):
        loss = train(self.plan, state, step)
        if self.plan.schedule_first:
            schedule(state)
        return loss

    def after(self, state):
        if not self.plan.schedule_first:
            schedule(state)

    def check(self, state, step):
        found = difference(snapshot(state), self.expected[step][1], f"step {step}")
        assert found is None, f"{kinds(self.store)}: {found}"

    def attach(self, chosen):
        """Go back, and on to another step."""
        is_first = not self.store.exists() or not Store(self.store).steps()
        state, rules = build(self.plan, self.plan.seed if is_first else 999)
        torch.set_rng_state(self.generator)
        options = {**chosen.strategy, "every": chosen.every, "keep": chosen.keep, "derive": rules}
        handles = {}
        unsaved = contextlib.suppress(Unavailable)  # check_kept() looks at which
        with unsaved, checkpointer(self.store, state, **options) as saver:
            reached = self.go_back(saver, chosen.back)
            if reached:
                self.check(state, reached)
                self.after(state)
            for step in range(reached + 1, reached + chosen.count + 1):
                if step in self.plan.writes:
                    saver.wait("captured")  # or the copy would be torn, and not saved
                assert self.train(state, step) == self.expected[step][0], f"step {step}"
                event = self.events.get(step)
                if event != "untold":
                    handles[step] = saver.step(step)
                    self.check(state, step)
                if handles.get(step):
                    handles[step] = self.befall(event, saver, step, handles[step])
                self.after(state)
            for handle in filter(None, handles.values()):
                with contextlib.suppress(EverstepError):
                    handle.wait("local")
        self.check_kept(chosen, handles)

    def go_back(self, saver, back):
        reached = saver.restore()
        steps = [step for step in Store(self.store).steps() if step >= reached - back]
        return saver.restore(steps[0]) if steps else reached

    def befall(self, event, saver, step, handle):
        """Let something happen after a step; the handle that tells of its save."""
        if event == "the keeper dies":
            end_keeper(self.store)
        elif event == "swept":
            Store(self.store).gc()
        with contextlib.suppress(EverstepError):  # the step before was deleted, or another follows
            if event in ("again", "tag"):
                handle = saver.save(step, tag=f"at-{step}" if event == "tag" else None)
            elif event in ("wait", "deleted"):
                handle.wait("local")
            if event == "deleted":
                Store(self.store).delete(step)
                self.deleted.add(step)
        return handle

    def check_kept(self, chosen, handles):
        """What was told to be durable is there, unless retention or somebody has deleted it."""
        saved = [step for step, handle in handles.items() if handle and not handle.error]
        kept = newest = saved
        if chosen.keep:
            retain.apply(Disk(self.store), chosen.keep)  # the keeper does it after the commit
            newest = saved[-chosen.keep.last :]  # which may have been before one was deleted
            kept = [step for step in saved if chosen.keep.every and not step % chosen.keep.every]
        steps = Store(self.store).steps()
        assert {*kept} - self.deleted <= {*steps}
        assert max(steps, default=0) >= max({*newest} - self.deleted, default=0)
        if not {*self.events.values()} & {"the keeper dies", "deleted"}:
            due = [step for step in handles if step % chosen.every == 0]
            assert [step for step in due if step in saved] == due

    def check_all(self):
        """Each step that the store offers, and going on from one in the middle."""
        assert Store(self.store).verify().ok
        state, rules = build(self.plan, 998)
        steps = Store(self.store).steps()
        if not steps:  # none was due, or all were deleted
            return
        with checkpointer(self.store, state, derive=rules) as restorer:
            for step in [*reversed(steps), *steps[len(steps) // 2 :][:1]]:
                assert restorer.restore(step) == step
                self.check(state, step)
            self.after(state)
            for after in range(step + 1, max(self.expected) + 1) if self.plan.set_to_none else ():
                assert self.train(state, after) == self.expected[after][0], f"step {after}"
                for rule in rules.values() if self.events.get(after) != "untold" else ():
                    rule(after)
                self.after(state)


LATE_GRADIENTS = Plan(  # in memory that is used again
    optimizers=("AdamW fused",),
    dtype=torch.float16,
    micro=1,
    clip="torch",
    scaler=False,
    autocast=False,
    scheduler="steps",
    schedule_first=False,
    set_to_none=False,
    tensor_rate=False,
    closure=True,
    average="none",
    compression="none",
    thaws_at=0,
    freezes_at=40,
    updates=(1,),
    writes={},
    seed=224,
)


@pytest.fixture(scope="module", autouse=True)
def _group(tmp_path_factory):
    with one_rank(tmp_path_factory.mktemp("ranks")):
        yield


@settings(fast, max_examples=examples(36))
@example(
    plan=LATE_GRADIENTS,
    moves=[Attachment({"strategy": "spread", "window": 5}, count=15, every=5)],
    events={},
)
@given(
    plan=possible,
    moves=st.lists(attachments, min_size=1, max_size=3),
    events=st.dictionaries(st.integers(1, 15), st.sampled_from(EVENTS), max_size=4),
)
def test_whatever_befalls_it(plan, moves, events):
    if not plan.set_to_none:  # gradients of zero go on to be updates, and are no part of a state
        moves = moves[:1]
    if not {*plan.writes.values()} <= COUNTED:
        moves = [sure_to_look(chosen) for chosen in moves]
    with Places() as places:
        machine = Machine(plan, places.new(), events, sum(chosen.count for chosen in moves))
        for chosen in moves:
            machine.attach(chosen)
        machine.check_all()
