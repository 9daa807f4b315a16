"""What a training run wrote, read by the second reader."""

import pytest

from everstep import Checkpointer, Store
from independent_reader import read as read_independently

torch = pytest.importorskip("torch")


def test_the_independent_reader_reads_a_run(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 7), torch.nn.BatchNorm1d(7))
    model.add_module("tied", model[0])
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    with Checkpointer(tmp_path / "s", state, strategy="full") as checkpointer:
        for step in (1, 2, 3):
            model(torch.randn(4, 7)).sum().backward()
            optimizer.step()
            checkpointer.step(step)
            checkpointer.wait("local")
    store = Store(tmp_path / "s")
    assert store.verify().ok
    for step in store.steps():
        _, found = read_independently(tmp_path / "s", step)
        expected = store.read(step)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            dtype, shape, data = found[name]
            assert (f"torch.{dtype}", shape) == (str(tensor.dtype), tuple(tensor.shape))
            assert data == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert store.latest() == 3
    for name, tensor in model.state_dict().items():
        assert torch.equal(store.read(3)[f"model.{name}"], tensor)
