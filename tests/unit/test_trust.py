"""Ranks that come apart are together again, whenever each of them hears of it; and all count alike
how often that was."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from everstep.capture.trust import HEARD_WITHIN, JOIN_EVERY, SURPRISES_MAX, Trust
from everstep.errors import Mismatch, Unavailable, Unsupported


@dataclass
class Rank:
    """One that saves a whole state where it may not go on from the last one."""

    delays: list[int]
    """Calls until it hears of what fails, for one call after the other, over and over."""
    trust: Trust = field(default_factory=lambda: Trust(is_alone=False))
    base: int = 0
    _to_come: list = field(default_factory=list)

    def save(self, call, *, slips):
        """What it has for this call: the whole state that it goes on from, or its own."""
        for heard in [told for told in self._to_come if told[0] <= call]:
            self._to_come.remove(heard)
            self.trust.note_failure(*heard[1:])
        if slips or not self.trust.may_follow(self.base):
            self.base = call
        return "whole" if self.base == call else "record"

    def will_hear(self, call, error):
        """In its order: after what it hears of before."""
        due = call + 1 + self.delays[call % len(self.delays)]
        self._to_come.append((max([due, *(told[0] for told in self._to_come)]), call, error))


def run(ranks, slips, calls):
    """What becomes of each call."""
    outcomes = ["whole"]
    for call in range(1, calls):
        kinds = {
            rank.save(call, slips=(call, number) in slips) for number, rank in enumerate(ranks)
        }
        error = None
        if len(kinds) > 1:
            error = Mismatch("some a record, some a whole state")
        elif kinds == {"record"} and outcomes[-1] == "failed":
            error = Unavailable("what goes before it was not saved")
        if error:
            for rank in ranks:
                rank.will_hear(call, error)
        outcomes.append("failed" if error else kinds.pop())
    return outcomes


def delays(most):
    return st.lists(st.lists(st.integers(0, most), min_size=1, max_size=7), min_size=2, max_size=4)


@given(st.integers(2, 4), st.integers(1, 20))
def test_who_hears_before_the_next_call_loses_one_step(count, slip):
    outcomes = run([Rank([0]) for _ in range(count)], {(slip, 0), (slip + 6, 1)}, 60)
    lost = [call for call, outcome in enumerate(outcomes) if outcome == "failed"]
    assert lost == [slip, slip + 6]
    whole = [call for call, outcome in enumerate(outcomes) if outcome == "whole"]
    assert whole == [0, slip + 1, slip + 7]


@given(delays(HEARD_WITHIN - 2), st.integers(1, 20), st.data())
def test_who_hears_in_time_loses_few_steps(delays, slip, data):
    ranks = [Rank(each) for each in delays]
    by = data.draw(st.integers(0, len(ranks) - 1))
    outcomes = run(ranks, {(slip, by)}, 60)
    lost = [call for call, outcome in enumerate(outcomes) if outcome == "failed"]
    most = max(max(each) for each in delays)
    assert lost[0] == slip
    assert len(lost) <= 1 + 2 * most
    again = slip + 1 + HEARD_WITHIN + JOIN_EVERY
    assert set(outcomes[again:]) == {"record"}
    assert not any(rank.trust.lost for rank in ranks)


@given(delays(JOIN_EVERY - 2), st.sets(st.tuples(st.integers(1, 50), st.integers(0, 1))))
def test_who_hears_late_comes_together_all_the_same(delays, slips):
    ranks = [Rank(each) for each in delays]
    outcomes = run(ranks, slips, 300)
    assert set(outcomes[-100:]) == {"record"}
    assert len({rank.trust.lost is None for rank in ranks}) == 1


def surprised(trust, calls):
    for call in calls:
        trust.surprise(call, call, "somebody wrote to it")
    return bool(trust.lost)


def test_the_third_surprise_is_the_last():
    trust = Trust(is_alone=True)
    assert not surprised(trust, range(1, SURPRISES_MAX))
    assert surprised(trust, [50])
    assert "somebody wrote to it" in trust.lost


def test_an_interval_without_one_forgives():
    trust = Trust(is_alone=True)
    assert not surprised(trust, [1, 2])
    trust.note_interval(10)
    assert not surprised(trust, [11, 12])
    assert surprised(trust, [13])


def test_what_does_not_come_again_does_not_count():
    trust = Trust(is_alone=True)
    for call in range(10):
        trust.surprise(call, call, "it is copied from now on", counts=False)
    assert trust.lost is None


def test_what_is_torn_after_the_call_counts_alone():
    trust = Trust(is_alone=True)
    for call in (1, 5):
        trust.note_failure(call, Unsupported("a gradient was written to"))
        trust.note_failure(call, Unavailable("what goes before it was not saved"))
        assert not trust.may_follow(call)
    assert trust.lost is None
    trust.note_failure(9, Unsupported("a gradient was written to"))
    assert "a gradient was written to" in trust.lost


@given(st.permutations([(10, Mismatch("x")), (30, Mismatch("x")), (60, Mismatch("x"))]))
def test_ranks_count_what_keepers_report(failures):
    trust = Trust(is_alone=False)
    trust.surprise(10, 10, "only this rank sees it")
    assert trust.lost is None
    for call, error in sorted(failures, key=lambda each: each[0]):
        assert trust.lost is None
        trust.note_failure(call, error)
    assert trust.lost


def test_a_full_disk_is_no_surprise():
    trust = Trust(is_alone=False)
    for call in range(10, 500, 10):
        trust.note_failure(call, Unavailable("disk full"))
    assert trust.lost is None


@given(st.integers(1, 100), st.booleans())
def test_alone_what_comes_next_can_be_followed(call, is_late):
    trust = Trust(is_alone=True)
    trust.note_failure(call, Unavailable("disk full"))
    if is_late:  # of an earlier one, of which one hears later
        trust.note_failure(call - 1, Unavailable("disk full"))
    assert not trust.may_follow(call)
    assert trust.may_follow(call + 1)
    assert not trust.joins_at(call + 1)
