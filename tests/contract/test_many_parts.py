"""A checkpoint in which several parts have boxes of one tensor comes back as if it were one."""

from dataclasses import replace

import pytest
import torch
from runs import bits, check_same, checkpointer, freeze, restore, save, supervised
from test_round_trip import Holder, build_tied, odd_tensors

from divide import PARTS, divide
from everstep import Corrupt, Store
from everstep.format.global_tensors import index_of
from everstep.format.index import Run
from everstep.store import catalog, commit
from everstep.tiers.disk import Disk
from independent_reader import Damaged
from independent_reader import read as read_independently


def odd_state(seed):
    torch.manual_seed(seed)
    return {"buffers": Holder(**odd_tensors(seed)), "value": odd_tensors(seed)}


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("is_indexed", [False, True])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_tensors_of_all_kinds(store, seed, is_indexed):
    first, second = odd_state(1), odd_state(2)
    expected = freeze(first)
    save(store, first)
    divide(store, 1, 2, seed, is_indexed=is_indexed)
    strides = {name: tensor.stride() for name, tensor in second["value"].items()}
    assert restore(store, second, 2) == 2
    check_same(freeze(second), expected)
    assert {name: tensor.stride() for name, tensor in second["value"].items()} == strides


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_reader_says_the_same(store):
    save(store, odd_state(1))
    divide(store, 1, 2)
    opened = Store(store)
    assert opened.verify().ok
    before, after = opened.read(1), opened.read(2)
    assert before.keys() == after.keys()
    assert [bits(before[name]) for name in before] == [bits(after[name]) for name in before]
    assert read_independently(store, 1)[1] == read_independently(store, 2)[1]
    some = opened.read(2, ["value.large", "value.zero_dim"])
    assert bits(some["value.large"]) == bits(before["value.large"])


@pytest.mark.parametrize("is_indexed", [False, True])
def test_training_goes_on(store, is_indexed):
    state, other = build_tied(1), build_tied(2)
    with checkpointer(store, state, strategy="full") as saver:
        for step in (1, 2):
            supervised(state)
            saver.step(step)
    divide(store, 2, 3, is_indexed=is_indexed)
    assert restore(store, other, 3) == 3
    assert other["model"].head.weight is other["model"].embed.weight
    check_same(freeze(other), freeze(state))
    assert bits(Store(store).read(3)["model.head.weight"]) == bits(state["model"].embed.weight)


def test_what_no_part_has_is_missed(store):
    """By its name, before anything is changed."""
    state = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.zeros(2)}
    save(store, state)
    divide(store, 1, 2, lose="a")
    message = r"tensor 'a': elements \[.*\] are in no piece"
    fresh = {"a": torch.zeros(3, 4), "b": torch.ones(2)}
    with pytest.raises(Corrupt, match=message):
        restore(store, fresh, 2)
    assert not fresh["a"].any()
    with pytest.raises(Corrupt, match=message):
        Store(store).read(2)
    with pytest.raises(Damaged, match="a: covered"):
        read_independently(store, 2)
    problems = Store(store).verify().problems
    assert list(problems) == ["00000002-0001"]
    assert "elements" in problems["00000002-0001"][0]


def test_what_two_parts_have_is_refused(store):
    save(store, {"a": torch.arange(12.0)})
    manifest = divide(store, 1, 2)
    whole = Store(store).manifest(1)
    both = (*manifest.parts, replace(whole.parts[0], steps=3))
    parts = tuple(replace(part, steps=3) for part in both)
    commit.publish(Disk(store), replace(manifest, step=3, parts=parts))
    with pytest.raises(Corrupt, match="overlap"):
        restore(store, {"a": torch.zeros(12)}, 3)
    assert "overlap" in Store(store).verify(3).problems["00000003-0001"][0]


NAMES = [f"t{number}" for number in range(8)]


def rows(value):
    return {name: Holder(x=torch.full((6, 4), float(value))) for name in NAMES}


def tables_of(store, step, name):
    """The parts that have something of a tensor, and of how many; and where their tables are."""
    manifest = Store(store).manifest(step)
    tables = Store(store).tables(manifest)
    having = [at for at, table in enumerate(tables) if name in table.tensors]
    return having, [store / part.table.path for part in manifest.parts]


@pytest.fixture
def opened(monkeypatch):
    """The numbers of the parts whose tables are read."""
    read, original = [], catalog.read_table
    monkeypatch.setattr(catalog, "read_table", lambda *of: read.append(of[1].rank) or original(*of))
    return read


def lone(store):
    """A tensor that not all parts of step 2 have, and the parts that have it."""
    found = {name: tables_of(store, 2, f"{name}.kept_x")[0] for name in NAMES}
    return min(found.items(), key=lambda row: len(row[1]))


def test_a_part_of_a_state_takes_the_tables_that_it_needs(store, opened):
    save(store, rows(1))
    divide(store, 1, 2, is_indexed=True)
    name, having = lone(store)
    assert len(having) < PARTS
    opened.clear()
    state = rows(0)
    assert restore(store, state, 2, only=[name]) == 2
    assert sorted(opened) == having
    assert {each for each in NAMES if state[each].kept_x.all()} == {name}


def test_a_tensor_of_a_store_takes_the_tables_that_it_needs(store, opened):
    save(store, rows(1))
    divide(store, 1, 2, is_indexed=True)
    name, having = lone(store)
    opened.clear()
    (found,) = Store(store).read(2, [f"{name}.kept_x"]).values()
    assert sorted(opened) == having
    assert found.all()
    opened.clear()
    assert len(Store(store).read(2)) > len(NAMES)
    assert sorted(opened) == list(range(PARTS))  # each once


def test_tables_that_nobody_needs_may_be_damaged(store):
    """Others are found to be before anything is changed, and an older step is taken."""
    save(store, rows(1))
    divide(store, 1, 2, is_indexed=True)
    name, having = lone(store)
    _, paths = tables_of(store, 2, name)
    for number, path in enumerate(paths):
        if number not in having:
            path.write_bytes(b"damaged")
    state = rows(0)
    assert restore(store, state, only=[name]) == 2
    assert not Store(store).verify(2).ok
    paths[having[0]].write_bytes(b"damaged")
    with pytest.raises(Corrupt, match="restoring step 2"):
        restore(store, rows(0), 2, only=[name])
    assert restore(store, state) == 1
    assert all(state[each].kept_x.all() for each in NAMES)


def lying(store, change):
    """Step 2 again as step 3, with another index."""
    manifest = Store(store).manifest(2)
    parts = tuple(replace(part, steps=3) for part in manifest.parts)
    index = change(manifest.index)
    commit.publish(Disk(store), replace(manifest, step=3, parts=parts, index=index))


def moved(index):
    """All of each tensor is said to be in the first part that has some of it."""
    shapes = {name: entry.spec.shape for name, entry in index.tensors.items()}
    runs = {
        name: [Run(index.runs[name][0].part, 1, (0,) * len(shape), shape)]
        for name, shape in shapes.items()
    }
    return replace(index, runs=runs)


def longer(index):
    """Each tensor is said to be larger than all files are."""
    tensors = {
        name: replace(entry, spec=replace(entry.spec, shape=(1 << 40, *entry.spec.shape[1:])))
        for name, entry in index.tensors.items()
    }
    return replace(index, tensors=tensors)


@pytest.mark.parametrize(
    ("change", "problem"), [(moved, "not all in those parts"), (longer, "larger than its files")]
)
def test_an_index_that_lies_is_found_out(store, change, problem):
    save(store, rows(1))
    divide(store, 1, 2, is_indexed=True)
    lying(store, change)
    state = rows(0)
    several = max(NAMES, key=lambda name: len(tables_of(store, 2, f"{name}.kept_x")[0]))
    with pytest.raises(Corrupt, match=problem):
        restore(store, state, 3, only=[several])
    with pytest.raises(Corrupt, match=problem):
        Store(store).read(3, [f"{several}.kept_x"])
    assert not any(state[each].kept_x.any() for each in NAMES)
    assert "the index tells otherwise" in Store(store).verify(3).problems["00000003-0001"][0]
    assert Store(store).verify(2).ok


def test_what_two_parts_have_is_refused_beside_an_index(store):
    save(store, rows(1))
    manifest = divide(store, 1, 2, is_indexed=True)
    whole = Store(store).manifest(1)
    both = (*manifest.parts, *whole.parts)
    tables = Store(store).tables(replace(manifest, parts=both))
    parts = tuple(replace(part, steps=3) for part in both)
    index = index_of(tables)
    commit.publish(Disk(store), replace(manifest, step=3, parts=parts, index=index))
    state = rows(0)
    with pytest.raises(Corrupt, match="two pieces overlap"):
        restore(store, state, 3, only=["t0"])
    assert not state["t0"].kept_x.any()
