"""When the main thread is in no operation of torch: between two bytecodes of Python.

An operation counts what it has written (Tensor._version) when it ends, so that another thread which
looks at the counters does not see one that is still on. Whatever had begun before such a moment has
ended at it. The interpreter calls functions there that were handed to Py_AddPendingCall
(https://docs.python.org/3/c-api/init.html#c.Py_AddPendingCall).
"""

import ctypes
from collections import deque
from queue import SimpleQueue

_asked: deque[SimpleQueue[None]] = deque()


def ask(told: SimpleQueue[None]) -> None:
    """Put a None there at the next such moment: within microseconds to milliseconds, but for long
    calls without Python in them (a backward pass, waiting). Any thread; does not block."""
    _asked.append(told)
    # Where no more calls are taken, those that were will do.
    ctypes.pythonapi.Py_AddPendingCall(_tell_all, None)


def _answer(_: object) -> int:
    """Anything may be under way in Python: nothing is done here that takes a lock."""
    while _asked:
        _asked.popleft().put(None)
    return 0


_tell_all = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_answer)
