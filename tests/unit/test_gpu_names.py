"""What is stored of GPUs has no number where it is the process's own: of each rank that is another,
and after a restart, too. By torch's word alone here, on real ones in tests/gpu."""

import pytest
import torch

from everstep.state.objects import place_of
from everstep.state.stateful import set_on_gpus

ON = [torch.device("cuda", number) for number in range(3)]


def test_the_process_own_gpu_has_no_number(monkeypatch):
    assert place_of(torch.device("cpu")) == "cpu"
    for own in range(3):
        monkeypatch.setattr(torch.cuda, "current_device", lambda own=own: own)
        assert [place_of(device) for device in ON] == [
            "cuda" if number == own else f"cuda:{number}" for number in range(3)
        ]


@pytest.mark.parametrize(
    ("saved_current", "current", "count", "expected"),
    [
        (1, 1, 3, {0: 0, 1: 1, 2: 2}),
        (1, 0, 1, {0: 1}),  # it sees its own GPU alone now
        (2, 1, 2, {0: 0, 1: 2}),
        (0, 2, 3, {0: 0, 1: 1, 2: 0}),
        (None, 0, 2, {0: 0, 1: 1}),  # as stored before: nobody knows which was its own
    ],
)
def test_a_generator_follows_the_process(monkeypatch, saved_current, current, count, expected):
    found: dict[int, int] = {}

    def put(state, device=current):
        found[device] = int(state)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_rng_state", put)
    set_on_gpus([torch.tensor(number) for number in range(3)], saved_current)
    assert found == expected
