"""Which processes a team has: one that died before it attached to a keeper is heard of by nobody
else.

A process is told by its number, the time of its start and the namespace of both, so that neither a
number that was given again nor a container with numbers of its own is taken for it.
"""

import os
from pathlib import Path

_STATE, _STARTED = 0, 19  # fields of /proc/<pid>/stat after the name: proc(5) counts from 1


def this_process() -> list[int]:
    """How others can tell whether it lives: namespace, process id and start; [] where /proc does
    not say."""
    try:
        return [_namespace(), os.getpid(), int(_fields(os.getpid())[_STARTED])]
    except (OSError, ValueError, IndexError):
        return []


def has_died(mate: object) -> bool:
    """Whether that process is gone for certain. False for what cannot be told from here."""
    match mate:
        case [int(namespace), int(pid), int(started)]:
            try:
                if namespace != _namespace():
                    return False
                fields = _fields(pid)
            except FileNotFoundError:
                return True
            except (OSError, ValueError):
                return False
            return int(fields[_STARTED]) != started or fields[_STATE] in "ZX"
    return False


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _fields(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except ProcessLookupError as error:  # it went while we looked
        raise FileNotFoundError from error
