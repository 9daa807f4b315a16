"""Keepers that are forked from a process which has imported them: most of what a keeper costs is
Python's start and its imports, and the tests start some thousand.

`install()` gives `everstep.keeper.home` a Popen that asks that process, in whatever process of the
tests. What runs is the keeper's own `main`, with the arguments, environment, directory, files and
session that it would have, after what a test wants done there (`begin_with`). Where a test has
changed the interpreter or its path, and in processes that did not call `install`, a keeper starts
as its users' do.
"""

import ast
import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from types import SimpleNamespace

from everstep.keeper import home

ADDRESS = "EVERSTEP_TEST_KEEPERS"
"""Where it listens, and which interpreter it runs, with which path."""

BEGINNING = "EVERSTEP_TEST_KEEPERS_BEGIN"
"""The module and the name of a function that keepers call first, and its arguments."""


def install() -> None:
    """From now on, keepers that this process starts are forked where that makes no difference."""
    home.subprocess = SimpleNamespace(Popen=_start, DEVNULL=subprocess.DEVNULL)


def begin_with(patch, function, *arguments):
    """Keepers that are started from now on, with this environment, call this function first."""
    patch.setenv(BEGINNING, repr((function.__module__, function.__name__, arguments)))


@contextlib.contextmanager
def server():
    """The process that keepers are forked from; whoever has this environment uses it."""
    name = f"everstep-tests-{os.getpid()}"
    program = [sys.executable, "-P", __file__, name]
    process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    os.environ[ADDRESS] = f"{name} {_interpreter()}"
    yield
    del os.environ[ADDRESS]
    process.terminate()
    process.communicate()


def _interpreter():
    return f"{sys.executable} {os.environ.get('PYTHONPATH')}"


def _start(words, **options):
    if os.environ.get(ADDRESS, "").partition(" ")[2] != _interpreter():
        return subprocess.Popen(words, **options)
    arguments = words[words.index("everstep.keeper") + 1 :]
    return _Popen(arguments, options["stdout"], options["cwd"], options["env"])


class _Popen:
    """As much of subprocess.Popen as starting a keeper needs."""

    def __init__(self, arguments, output, cwd, env) -> None:
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.connect("\0" + os.environ[ADDRESS].split()[0])
        request = repr((arguments, cwd, dict(env))).encode()
        socket.send_fds(self._connection, [request], [output])
        self.pid = int(self._connection.recv(100))
        self.returncode = None

    def poll(self):
        """0 once it has ended with that, or by a signal; nobody needs to know which."""
        if self.returncode is None and select.select([self._connection], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self):
        if self.returncode is None:
            self.returncode = int(self._connection.recv(100) or 0)
            self._connection.close()
        return self.returncode

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


# ---- the process that keepers are forked from ----------------------------------------------------


def _serve(name: str) -> None:
    """Fork a keeper for each connection, for as long as stdin is open."""
    import numpy  # noqa: F401 - what a keeper imports when it needs it
    import xxhash  # noqa: F401
    import zstandard  # noqa: F401

    from everstep.keeper import __main__ as keeper

    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("\0" + name)
    listener.listen(100)
    print("ready", flush=True)
    while listener in select.select([listener, 0], [], [])[0]:
        connection, _ = listener.accept()
        if not os.fork():
            listener.close()
            _run(keeper.main, connection)
        connection.close()


def _run(main, connection) -> None:
    """Become the process that a trainer starts, and say how it ended unless that is well."""
    os.register_at_fork(after_in_child=connection.close)  # the keeper, which detaches itself
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    request, (output,), _, _ = socket.recv_fds(connection, 1 << 20, 1)
    arguments, folder, env = ast.literal_eval(request.decode())
    for number, source in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
        os.dup2(source, number)
    os.close(output)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    connection.send(b"%d" % os.getpid())
    status = 1
    try:
        _begin()
        status = main(arguments)
    except BaseException:  # noqa: BLE001  as an interpreter does
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            connection.send(b"%d" % status)
        os._exit(status)


def _begin() -> None:
    if BEGINNING in os.environ:
        module, name, arguments = ast.literal_eval(os.environ[BEGINNING])
        getattr(importlib.import_module(module), name)(*arguments)


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))
    _serve(sys.argv[1])
