"""The Guard: what it takes for another tensor."""

import pytest
import torch

from everstep.sharding import leaves
from everstep.sharding.leaves import Guard

CHANGES = {
    "nothing": lambda found: found["weight"].add_(1),
    "another tensor": lambda found: found.update(weight=torch.ones(4, 6)),
    "other memory": lambda found: setattr(found["weight"], "data", torch.ones(4, 6)),
    "other strides": lambda found: setattr(found["square"], "data", found["square"].data.t()),
    "another shape": lambda found: setattr(
        found["weight"], "data", found["weight"].data.view(6, 4)
    ),
    "a part": lambda found: setattr(found["weight"], "data", found["weight"].data[:2]),
    "another dtype": lambda found: setattr(
        found["weight"], "data", found["weight"].data.view(torch.int32)
    ),
    "resized": lambda found: found["weight"].resize_(4, 5),
    "one more": lambda found: found.update(bias=torch.ones(6)),
}


@pytest.mark.parametrize("tried", [(99, 0), (2, 0)], ids=["torch's guards", "public"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_guard_tells(monkeypatch, change, tried):
    monkeypatch.setattr(leaves, "_GUARDS_TRIED", tried)
    found = {"weight": torch.zeros(4, 6), "square": torch.zeros(5, 5)}
    guard = Guard()
    guard.watch_size(found)
    for name, tensor in found.items():
        guard.watch_item(found, name, tensor)
    guard.begin()
    assert guard.holds()
    CHANGES[change](found)
    assert guard.holds() == (change == "nothing")
