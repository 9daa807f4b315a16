"""Makes tests/ importable: stores.py and independent_reader.py are shared by all tests.

And gives stores whose keepers do not outlive the test.
"""

import gc
import tempfile
from pathlib import Path

import pytest

import forked_modules
from buckets import bucket, bucket_server, proxied, proxy  # noqa: F401 - fixtures
from ceph import ceph_bucket, ceph_server  # noqa: F401 - fixtures
from everstep.keeper import home
from partners import partner  # noqa: F401 - a fixture
from stores import end_keeper

forked_modules.install()


def pytest_collection_finish():
    """Spares the collections of all tests what was imported before them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _servers():
    with forked_modules.servers():
        yield


@pytest.fixture
def store(tmp_path):
    path = tmp_path / "store"
    yield path
    end_keeper(path)


@pytest.fixture
def other_store(tmp_path):
    path = tmp_path / "other"
    yield path
    end_keeper(path)


@pytest.fixture
def stores(tmp_path):
    """Stores by name, whose keepers end with the test."""
    made = set()

    def store(name):
        made.add(tmp_path / str(name))
        return tmp_path / str(name)

    yield store
    for path in made:
        end_keeper(path)


@pytest.fixture
def temporary_directory():
    """What stands for /tmp where keepers live, and nothing else is chosen; its path is short."""
    with tempfile.TemporaryDirectory(prefix="es-") as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(home, "_temporary_directory", lambda: Path(name))
        patch.delenv("XDG_RUNTIME_DIR", raising=False)
        patch.delenv("EVERSTEP_RUNTIME_DIR", raising=False)
        yield Path(name)
