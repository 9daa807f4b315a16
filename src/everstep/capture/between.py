"""When the main thread is in no operation of torch: between two bytecodes of Python.

An operation counts what it has written (Tensor._version) when it ends, so that another thread which
looks at the counters does not see one that is still on. Whatever had begun before such a moment has
ended at it, but for what runs Python in its midst (a TorchDispatchMode, the user's own
autograd.Function). The interpreter calls functions there that were handed to Py_AddPendingCall
(https://docs.python.org/3/c-api/init.html#c.Py_AddPendingCall): here sem_post, which runs no
Python, in whose midst a signal's handler could be called, and what it raises be lost.
"""

import ctypes
import time
from collections import deque

_libc = ctypes.CDLL(None)
_post = ctypes.cast(_libc.sem_post, ctypes.c_void_p)
_SEMAPHORE_BYTES = 64  # sizeof(sem_t) is 16 to 32
_asked: "deque[ctypes.Array[ctypes.c_char]]" = deque(maxlen=1024)
"""Semaphores that are perhaps still to be posted: the interpreter keeps at most 300 calls."""


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Moment:
    """Something that is waited for until it has come; then it stays. Thread-safe."""

    def __init__(self) -> None:
        self._semaphore = ctypes.create_string_buffer(_SEMAPHORE_BYTES)
        _libc.sem_init(self._semaphore, 0, 0)

    def ask_main_thread(self) -> None:
        """It comes when the main thread is next between two bytecodes: within micro- to
        milliseconds, but for long calls without Python in them (a backward pass, waiting). Perhaps
        never, where too much is asked of the interpreter. Any thread; does not block."""
        _asked.append(self._semaphore)
        ctypes.pythonapi.Py_AddPendingCall(_post, self._semaphore)

    def come(self) -> None:
        """It comes now."""
        _libc.sem_post(self._semaphore)

    def wait(self, deadline: float) -> None:
        """Block until it has come, or time.monotonic() is so late."""
        while _wait(self._semaphore, deadline) != 0:
            if time.monotonic() >= deadline:  # else a signal
                return
        self.come()  # for others that wait


def _wait(semaphore: "ctypes.Array[ctypes.c_char]", deadline: float) -> int:
    """Not 0 where it was not posted."""
    if hasattr(_libc, "sem_clockwait"):
        return int(_libc.sem_clockwait(semaphore, time.CLOCK_MONOTONIC, _at(deadline)))
    left = deadline - time.monotonic()  # glibc before 2.30 knows no clock but that on the wall
    return int(_libc.sem_timedwait(semaphore, _at(time.time() + left)))


def _at(moment: float) -> object:
    """A pointer to a timespec."""
    return ctypes.byref(_Time(int(moment), int(moment % 1 * 1e9)))
