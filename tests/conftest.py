"""Makes tests/ importable: stores.py and independent_reader.py are shared by all tests.

And gives stores whose keepers do not outlive the test.
"""

import contextlib
import gc
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import forked_modules
from buckets import bucket, bucket_server, proxied, proxy  # noqa: F401 - fixtures
from ceph import ceph_bucket, ceph_server  # noqa: F401 - fixtures
from everstep.keeper import home
from partners import partner  # noqa: F401 - a fixture
from stores import end_keeper

forked_modules.install()
settings.register_profile("no clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no clock")


def pytest_configure(config):
    """Keepers are forked from processes that all workers of xdist share. Threads of torch that wait
    leave the processors to others."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if forked_modules.ADDRESS not in os.environ:
        running = contextlib.ExitStack()
        running.enter_context(forked_modules.servers())
        config.add_cleanup(running.close)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Spares Python's collector what is imported: to look through it meanwhile, and ever again."""
    gc.disable()
    result = yield
    gc.collect()
    gc.freeze()
    gc.enable()
    return result


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
def store(stores):
    return stores("store")


@pytest.fixture
def other_store(stores):
    return stores("other")


@pytest.fixture
def temporary_directory():
    """What stands for /tmp where keepers live, and nothing else is chosen; its path is short."""
    with tempfile.TemporaryDirectory(prefix="es-") as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(home, "_temporary_directory", lambda: Path(name))
        patch.delenv("XDG_RUNTIME_DIR", raising=False)
        patch.delenv("EVERSTEP_RUNTIME_DIR", raising=False)
        yield Path(name)
