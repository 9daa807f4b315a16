"""Stores that old versions wrote stay readable: by this version, and by the second reader."""

from pathlib import Path

import pytest

from everstep import Store
from everstep.format.document import FORMAT_VERSION
from independent_reader import read as read_independently
from stores import SMALL, content

STORES = sorted(Path(__file__).parent.glob("version-*"))


def test_this_version_has_one():
    assert f"version-{FORMAT_VERSION}" in [path.name for path in STORES]


@pytest.mark.parametrize("path", STORES, ids=lambda path: path.name)
def test_golden_store(path):
    store = Store(path)
    assert store.steps() == [1, 2, 3]
    assert store.manifest(3).epoch == 2
    assert store.manifest("3-1").epoch == 1
    assert store.manifest("best").step == 1
    verdict = store.verify()
    assert verdict.ok
    assert verdict.checkpoints == 4
    for step in (1, 2, 3):
        _, tensors = read_independently(path, step)
        assert tensors == {s.name: (s.dtype, s.shape, content(s, step)) for s in SMALL}
        for spec in SMALL:
            assert tuple(store.read(step)[spec.name].shape) == spec.shape
