"""Slices of tensors as rows of bytes: together they are all of it, and digests tell any byte."""

import pytest
import torch

from everstep.redo import rolling_digest
from everstep.redo.rolling_digest import RollingDigests, Row, _flat, count_for, differs
from everstep.sharding.leaves import Leaf
from everstep.state.fingerprint import Fingerprint

GROUP = [
    torch.randn(7, 5),
    torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last),
    torch.randn(33).to(torch.bfloat16),
    torch.tensor(3.0),
    torch.randn(6, 4).mT,
    torch.randn(3, dtype=torch.complex64).conj(),
    torch.arange(5) > 2,
]


def named(tensors):
    return [Leaf(str(index), tensor) for index, tensor in enumerate(tensors)]


def flat(tensor):
    return tensor.resolve_conj().contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 50, 1000])
def test_slices_are_all_of_it(count):
    row = Row(GROUP)
    pieces = [piece for number in range(count) for piece in row.cut(number, count)]
    found = torch.cat([piece.view(torch.uint8) for piece in pieces])
    assert found.equal(torch.cat(list(map(flat, GROUP))))
    largest = max(sum(piece.nbytes for piece in row.cut(number, count)) for number in range(count))
    assert largest <= len(found) / count + 16


def test_few_elements_of_a_transposed_tensor():
    tensor = torch.arange(24.0).view(6, 4).mT
    assert _flat(tensor, 7, 9).tolist() == tensor.contiguous().view(-1)[7:9].tolist()


def digests(monkeypatch, tensors, count, number):
    monkeypatch.setattr(rolling_digest, "count_for", lambda tensors, step_s: count)
    rolling = RollingDigests({"optimizer": 0})
    rolling.set({"optimizer": tensors}, 0.1)
    for _ in range(number + 1):
        [found] = rolling.next({"optimizer": Fingerprint([Leaf("w", tensors[0])])})
    found.digest()
    return [leaf.tensor for leaf in found.leaves]


@pytest.mark.parametrize("count", [1, 4])
def test_any_byte_is_told(monkeypatch, count):
    known = [digests(monkeypatch, GROUP, count, number) for number in range(count)]
    assert not any(differs(each, named(GROUP)) for each in known)
    for index, tensor in enumerate(GROUP):
        others = [each.clone() for each in GROUP]
        others[index].view(-1)[-1:].logical_not_() if tensor.dtype is torch.bool else (
            others[index].resolve_conj().reshape(-1)[-1:].add_(1.0)
        )
        if not flat(others[index]).equal(flat(tensor)):
            (found,) = filter(None, (differs(each, named(others)) for each in known))
            assert found[0] == count
            assert str(index) in found[1]


def test_a_sum_tells_bytes_and_their_places(monkeypatch):
    """As on a GPU."""
    monkeypatch.setattr(rolling_digest, "BLOCK_BYTES", 64)
    device = torch.device("cpu")
    tensor = torch.randint(0, 256, (333,), dtype=torch.uint8)
    known = rolling_digest._sum([tensor[:100], tensor[100:]], device)
    for place in range(len(tensor)):
        other = tensor.clone()
        other[place] += 1
        assert not rolling_digest._sum([other[:100], other[100:]], device).equal(known)
    swapped = tensor.clone()
    swapped[[8, 200]] = tensor[[200, 8]]
    if tensor[8] != tensor[200]:
        assert not rolling_digest._sum([swapped[:100], swapped[100:]], device).equal(known)
    assert rolling_digest._sum([], device).item() == 0


def test_how_much_is_digested_at_once():
    def count(size, step_s, number=1):
        return count_for([torch.empty(size, device="meta", dtype=torch.uint8)] * number, step_s)

    assert count(100, 0.1) == 1
    assert count(10**9, 0.1) == 401
    assert count(10**13, 0.1) == 1000
    assert count(5 * 10**6, 0.0) == 21  # nobody knows yet how long a step takes
    assert count(4, 0.03, 1000) == 44  # small tensors take their time, too


def test_nonsense_is_no_digest(monkeypatch):
    known = digests(monkeypatch, GROUP, 2, 0)
    for bad in (torch.zeros(31, dtype=torch.uint8), torch.full((32,), 255, dtype=torch.uint8)):
        with pytest.raises((ValueError, rolling_digest.struct.error)):
            differs([bad], named(GROUP))
    assert differs([torch.zeros(32, dtype=torch.uint8)], named(GROUP)) is None  # says nothing
    assert differs([*known, known[0]], named(GROUP)) is None  # of a GPU that is not here
