"""Modules that everstep runs in processes of their own (keepers, and workers that have torch),
forked from a process that has imported them: most of what such a process costs is Python's start
and its imports, and the tests start some thousand.

`install()` gives `everstep.keeper.home` and `everstep.keeper.workers` a subprocess that asks that
process, in whatever process of the tests. What runs is the module, as by `python -m`, with the
arguments, environment, directory, files and session that it would have, after what a test wants
done in keepers (`begin_with`). Where a test has changed the interpreter or its path, and in
processes that did not call `install`, they start as their users' do.
"""

import ast
import contextlib
import gc
import importlib
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import traceback
from types import SimpleNamespace

from everstep.keeper import home, workers

KEEPER = "everstep.keeper"
ADDRESS = "EVERSTEP_TEST_MODULES"
"""Where the one for keepers listens, and which interpreter it runs, with which path. Before the one
for workers is a "torch-"."""

BEGINNING = "EVERSTEP_TEST_KEEPERS_BEGIN"
"""The module and the name of a function that keepers call first, and its arguments."""

QUIET = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def install() -> None:
    """From now on, what this process starts is forked where that makes no difference."""
    own = {"run": _end, "Popen": _start}
    home.subprocess = workers.subprocess = SimpleNamespace(**{**vars(subprocess), **own})


def begin_with(patch, function, *arguments):
    """Keepers that are started from now on, with this environment, call this function first."""
    patch.setenv(BEGINNING, repr((function.__module__, function.__name__, arguments)))


@contextlib.contextmanager
def servers():
    """The processes that are forked from; whoever has this environment uses them."""
    name = f"everstep-tests-{os.getpid()}"
    with contextlib.ExitStack() as stack:
        for each in (name, f"torch-{name}"):
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            listener.bind(f"\0{each}")
            listener.listen(100)
            process = subprocess.Popen(
                [sys.executable, "-P", __file__, each],
                stdin=listener.fileno(),
                env={**os.environ, **QUIET},
            )
            stack.callback(process.wait)
            stack.callback(process.terminate)
        os.environ[ADDRESS] = f"{name} {_interpreter()}"
        stack.callback(os.environ.pop, ADDRESS)
        yield


def _interpreter():
    return f"{sys.executable} {os.environ.get('PYTHONPATH')}"


def _start(words, **options):
    name, _, interpreter = os.environ.get(ADDRESS, "").partition(" ")
    if interpreter != _interpreter():
        return subprocess.Popen(words, **options)
    module, *arguments = words[words.index("-m") + 1 :]
    name = name if module == KEEPER else f"torch-{name}"
    with open(os.devnull, "r+b") as nothing:
        files = [options.get(each, 2) for each in ("stdin", "stdout", "stderr")]
        files = [nothing.fileno() if file == subprocess.DEVNULL else file for file in files]
        return _Popen(name, (module, arguments, options["cwd"], dict(options["env"])), files)


def _end(words, *, timeout, check, **options):
    """As much of subprocess.run as starting a keeper needs."""
    del timeout, check
    process = _start(words, **options)
    process.wait()
    return process


class _Popen:
    """As much of subprocess.Popen as starting one needs."""

    def __init__(self, name, request, files) -> None:
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.connect("\0" + name)
        socket.send_fds(self._connection, [repr(request).encode()], files)
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

    def send_signal(self, number):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def terminate(self):
        self.send_signal(signal.SIGTERM)


# ---- the process that is forked from -------------------------------------------------------------


def _serve(*, has_torch: bool) -> None:
    """Fork a process for each connection, up to the end of who has started this."""
    gc.disable()
    import numpy  # noqa: F401 - what a keeper imports when it needs it
    import xxhash  # noqa: F401
    import zstandard  # noqa: F401

    import everstep.keeper.process

    if has_torch:
        import torch._dynamo  # noqa: F401 - the first optimizer would import it

        import everstep.offload.inner
        import everstep.restore.materialize  # noqa: F401
    gc.collect()
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    listener, starter = socket.socket(fileno=0), os.pidfd_open(os.getppid())
    while listener in select.select([listener, starter], [], [])[0]:
        connection, _ = listener.accept()
        if not os.fork():
            listener.detach()
            os.close(starter)
            _run(connection)
        connection.close()


def _run(connection) -> None:
    """Become the process that a trainer starts, and say how it ended unless that is well."""
    os.register_at_fork(after_in_child=connection.close)  # the keeper, which detaches itself
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    request, files, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    if not request:  # who was to ask was killed before
        os._exit(0)
    module, arguments, folder, env = ast.literal_eval(request.decode())
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    if module != KEEPER:
        os.getppid = lambda: struct.unpack("3i", credentials)[0]
    connection.send(b"%d" % os.getpid())
    status = 1
    try:
        if module == KEEPER:
            _begin()
        sys.argv = [module, *arguments]
        sys.modules.pop(module, None)  # it may be imported as another's part
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code or 0
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
    install()
    _serve(has_torch=sys.argv[1].startswith("torch-"))
