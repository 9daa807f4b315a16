"""Processes of their own for functions of the tests, forked from one that has imported torch: that
is most of the time that a new process takes.

    def trains(store, steps):  # of the test module; called in the process
        print(…, flush=True)

    process = Forked(trains, store, 60)  # used like a subprocess.Popen with pipes
    line = process.stdout.readline()
    process.kill()
    assert process.wait() == -signal.SIGKILL
    process.close()

    ended = run(trains, store, 60)  # like subprocess.run: its returncode, and what it printed
    assert ended.returncode == 0

A function is sent by reference, its arguments as pickles. It has the environment, the working
directory, the sys.path and the stderr of its caller, one thread for torch (the process that it is
forked from has OMP_NUM_THREADS=1), Python's own signal handlers, and no others; what ends it, ends
a process. What is imported or seeded in the caller is not there; the hash seed is the same in all.
"""

import atexit
import contextlib
import multiprocessing
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path

from forked_modules import QUIET

PATIENCE_S = 100.0
_preloaded = ["forked_preload"]


def preload(*modules: str) -> None:
    """Modules that the server imports, too, for which one that runs is started anew; those that are
    not installed it leaves out."""
    if new := set(modules) - set(_preloaded):
        _preloaded.extend(new)
        forkserver._forkserver._stop()


def start_server() -> None:
    """Start the process that others are forked from, once per test process: 3 s."""
    multiprocessing.set_forkserver_preload(_preloaded)
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    before = dict(os.environ)
    os.environ.update(QUIET, PYTHONPATH=path)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


class Forked:
    """`function(*args)` in a process, with pipes for its `stdin` and `stdout`."""

    daemon = True
    """Whether it has no processes of Python's multiprocessing of its own, and ends with its
    caller."""

    method = "forkserver"
    """How it is started: "spawn" is slower, and shares nothing."""

    def __init__(self, function: Callable, *args: object) -> None:
        if self.method == "forkserver":
            start_server()
        context = multiprocessing.get_context(self.method)
        stdin, mine = context.Pipe(duplex=False)
        printed, stdout = context.Pipe(duplex=False)
        stderr = Connection(os.dup(2))
        words = function, args, (stdin, stdout, stderr), {**os.environ, **QUIET}, os.getcwd()
        self._process = context.Process(
            target=_main, args=words, name=function.__name__, daemon=self.daemon
        )
        self._process.start()
        self.stdin = os.fdopen(os.dup(mine.fileno()), "w")
        self.stdout = os.fdopen(os.dup(printed.fileno()))
        for end in (stdin, mine, printed, stdout, stderr):
            end.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its status, or less than 0: the signal that ended it. None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float = PATIENCE_S) -> int:
        """Wait for its end, and give its returncode."""
        self._process.join(timeout)
        assert self.returncode is not None, f"{self._process.name} did not end in {timeout} s"
        return self.returncode

    def close(self) -> None:
        """Kill it, if it still runs."""
        self.kill()
        self.wait()
        self.stdout.close()
        with contextlib.suppress(BrokenPipeError):  # it did not read all
            self.stdin.close()

    def __enter__(self) -> "Forked":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of a process."""

    returncode: int
    stdout: str


def run(function: Callable, *args: object) -> Ended:
    """Call `function(*args)` in a process, and wait for its end."""
    with Forked(function, *args) as process:
        process.stdin.close()
        printed = process.stdout.read()
        return Ended(process.wait(), printed)


def _main(
    function: Callable,
    args: tuple,
    ends: tuple[Connection, ...],
    environ: dict[str, str],
    folder: str,
) -> None:
    for number, end in enumerate(ends):
        os.dup2(end.fileno(), number)
        end.close()
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)  # what was there takes it for a file still
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    try:
        function(*args)
    finally:
        atexit._run_exitfuncs()  # as where an interpreter ends
