"""What is kept of gradients for recorders, which takes memory: only while there is one.

Everything but `Interest.set` runs in the training thread; that in any.
"""

import threading
import weakref
from typing import Any, Generic, TypeVar

from torch import Tensor

T = TypeVar("T")


class ByParameter(Generic[T]):
    """Something of each parameter, for as long as that lives. By identity, as in torch's
    WeakIdKeyDictionary, which takes three times as long: it is asked of each one in each step."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[weakref.ref[Tensor], T]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __setitem__(self, parameter: Tensor, value: T) -> None:
        key, rows = id(parameter), self._rows

        def forget(dead: weakref.ref[Tensor]) -> None:
            if key in rows and rows[key][0] is dead:  # else another one has its address now
                del rows[key]

        rows[key] = weakref.ref(parameter, forget), value

    def get(self, parameter: Tensor) -> T | None:
        """None where there is nothing."""
        row = self._rows.get(id(parameter))
        return row[1] if row and row[0]() is parameter else None

    def discard(self, parameter: Tensor) -> None:
        """Forget it; no error where there is nothing."""
        self._rows.pop(id(parameter), None)

    def clear(self) -> None:
        """Forget all."""
        self._rows.clear()


_interested = 0
_takes_parts = True
_lock = threading.Lock()
_kept: list[ByParameter[Any]] = []


class Interest:
    """One recorder's."""

    def __init__(self) -> None:
        self._is_on = False

    def set(self, is_on: bool) -> None:
        """Keep what comes from now on, or not; the same again does nothing. When the last one is
        off, nothing is kept, and what was kept is released."""
        global _interested, _takes_parts
        with _lock:
            _interested += is_on - self._is_on
            self._is_on = is_on
            if not _interested:
                _takes_parts = True
                for entries in _kept:
                    entries.clear()


def is_wanted() -> bool:
    """Whether anybody is interested."""
    return _interested > 0


def takes_parts() -> bool:
    """Whether copies are of use of what other ranks have parts of."""
    return _takes_parts


def give_up_parts() -> None:
    """A rank has no memory for them; without its copies those of others mean nothing."""
    global _takes_parts
    _takes_parts = False


def by_parameter() -> ByParameter[Any]:
    """For a module to keep something in, for as long as anybody is interested."""
    entries: ByParameter[Any] = ByParameter()
    _kept.append(entries)
    return entries
