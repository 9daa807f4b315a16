"""Compressed forms: to a record's documents and back, bit for bit; nonsense is refused."""

import pytest
import torch

from everstep.redo import compression
from everstep.redo.compression import CompressedGradient

# What replay takes for a record that is not what the format says.
REFUSED = (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError)

LAID_OUT = {
    "row major": torch.zeros(6, 4, 3),
    "channels last": torch.zeros(6, 4, 3, 2).to(memory_format=torch.channels_last),
    "transposed": torch.zeros(4, 6).t(),
}


def form(kind, like):
    torch.manual_seed(0)
    layout = like.dtype, tuple(like.shape), like.stride()
    count, rows = like.numel(), like.shape[0]
    if kind == "cast":
        return CompressedGradient(
            kind, torch.empty_like(like, dtype=torch.float16).normal_(), None, *layout
        )
    if kind == "low rank":
        return CompressedGradient(kind, torch.randn(2 * (rows + count // rows)), None, *layout)
    indices = torch.stack([torch.randperm(count)[:5] for _ in range(3)]).int()
    return CompressedGradient(kind, torch.randn(3, 5), indices, *layout)


def expected(found):
    """Plainly, element by element."""
    if found.kind == "cast":
        return found.tensor.float()
    gradient = torch.empty_strided(found.shape, found.strides)
    flat = gradient.as_strided((gradient.numel(),), (1,))
    if found.kind == "low rank":
        rows = found.shape[0]
        p, q = found.tensor[: 2 * rows].view(rows, 2), found.tensor[2 * rows :].view(-1, 2)
        flat.copy_((p @ q.t()).flatten())
        return gradient
    flat.zero_()
    for places, values in zip(found.beside.tolist(), found.tensor, strict=True):
        for place, value in zip(places, values, strict=True):
            flat[place] += value
    flat /= 3
    return gradient


@pytest.mark.parametrize("kind", ["cast", "low rank", "sparse"])
@pytest.mark.parametrize("layout", LAID_OUT)
def test_by_way_of_a_record(kind, layout):
    found = form(kind, LAID_OUT[layout])
    said = {"compressed": compression.describe({"w": found, "v": found})}
    tensors = found.tensors("@0", "w") | found.tensors("@0", "v")
    like = LAID_OUT[layout]
    groups = compression.by_parameter(said)
    for name in ("w", "v"):
        gradient = compression.gradient_of(tensors, "@0", name, like, groups[name])
        assert gradient.stride() == LAID_OUT[layout].stride()
        torch.testing.assert_close(gradient, expected(found), rtol=1e-6, atol=1e-6)
        assert torch.equal(gradient, found.expand())
        assert found.makes(gradient, None, False)
        assert found.makes(gradient * 0.5, torch.tensor(0.5), True)
        assert not found.makes(gradient * 0.5, None, False)
        assert not found.makes(gradient.clone().fill_(1), torch.tensor(0.5), True)
        assert not found.makes(gradient.double(), None, False)
        assert not found.makes(gradient.t() if gradient.dim() == 2 else gradient[1:], None, False)
    assert compression.gradient_of(tensors, "@1", "w", like, groups["w"]) is None
    assert torch.equal(compression.gradient_of(tensors, "@0", "w", like, {}), found.tensor)


@pytest.mark.parametrize(
    "change",
    [
        {"form": "jpeg"},
        {"dtype": "load"},
        {"dtype": "float31"},
        {"strides": {"w": [1 << 50, 1]}},
        {"strides": {"w": [0, 0]}},
        {"strides": {"w": [1]}},
        {"form": "sparse"},
        {"form": "low rank"},
        {"names": None},
    ],
)
def test_nonsense_is_refused(change):
    like = torch.empty(6, 4)
    group = {"form": "sparse", "dtype": "float32", "names": ["w"]} | change
    tensors = {"@0.w": torch.randn(1, 3), "@0!indices.w": torch.tensor([[0, 1, 24]])}
    with pytest.raises(REFUSED):
        compression.gradient_of(
            tensors, "@0", "w", like, compression.by_parameter({"compressed": [group]})["w"]
        )
