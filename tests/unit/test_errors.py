"""What a process tells another of an error is one of the kinds that both know."""

import pytest

from everstep.errors import KINDS, Corrupt, EverstepError, kind_of
from everstep.redo.allowed import Overwritten
from everstep.redo.replay import OtherBytes


@pytest.mark.parametrize("kind", KINDS.values())
def test_each_is_itself(kind):
    assert KINDS[kind_of(kind("x"))] is kind


def test_others_are_what_they_are_a_kind_of():
    assert kind_of(Overwritten("x")) == "Unsupported"
    assert kind_of(OtherBytes(3, "optimizer", "a sample")) == Corrupt.__name__
    for error in (EverstepError("x"), ValueError("x")):
        assert kind_of(error) == "Unavailable"
