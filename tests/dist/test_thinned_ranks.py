"""Thinned saves of several ranks: all save the same modules at one step."""

import pytest
import torch
from jobs import trains

from everstep import Full, Store
from examples import slow


@pytest.mark.parametrize("layout", ["fsdp2", *slow("ddp")])
def test_each_tensor_is_the_newest_that_was_saved(gang, layout, store):
    thin = Full(thin={"model.blocks.*": 2})
    run, *_ = gang.run(trains, layout, store, 5, size=2, strategy=thin, waits=True)
    assert not run.errors
    for step in range(2, 6):
        plan = Store(store).restore_plan(step)
        assert set(plan.values()) == {step - 1, step}
        own = ((n, t) for n, t in Store(store).read(step).items() if not n.startswith("rng."))
        for name, tensor in own:
            called = name.removeprefix("optimizer.").removeprefix("model.")
            if name.startswith("optimizer."):
                called = ":".join(called.rsplit(".", 1))
            assert torch.equal(tensor, run.states[plan[name]][called]), (step, name)
    assert Store(store).verify().ok
