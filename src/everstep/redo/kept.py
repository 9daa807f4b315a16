"""What is kept of gradients for recorders, which takes memory: only while there is one.

Everything but `Interest.set` runs in the training thread; that in any.
"""

import threading
import weakref
from functools import partial
from typing import Any, Generic, TypeVar

from torch import Tensor

T = TypeVar("T")


class ByParameter(Generic[T]):
    """Something of each parameter, for as long as that lives. By identity, as in torch's
    WeakIdKeyDictionary, which takes three times as long: it is asked of each one in each step."""

    def __init__(self) -> None:
        self._values: dict[int, T] = {}
        self._parameters: dict[int, weakref.ref[Tensor]] = {}
        """Of all that ever had something, and live: to make one anew in each step takes longer."""

    def __len__(self) -> int:
        return len(self._values)

    def __setitem__(self, parameter: Tensor, value: T) -> None:
        key = id(parameter)
        known = self._parameters.get(key)
        if known is None or known() is not parameter:
            self._parameters[key] = weakref.ref(parameter, partial(self._forget, key))
        self._values[key] = value

    def get(self, parameter: Tensor) -> T | None:
        """None where there is nothing."""
        key = id(parameter)
        value = self._values.get(key)
        return None if value is None or self._parameters[key]() is not parameter else value

    def discard(self, parameter: Tensor) -> None:
        """Forget it; no error where there is nothing."""
        self._values.pop(id(parameter), None)

    def clear(self) -> None:
        """Forget all."""
        self._values.clear()

    def _forget(self, key: int, dead: weakref.ref[Tensor]) -> None:
        if self._parameters.get(key) is dead:  # else another one has its address now
            del self._parameters[key]
            self._values.pop(key, None)


_interested = 0
_wants_raw = 0
_takes_parts = True
_lock = threading.Lock()
_kept: list[ByParameter[Any]] = []
_known_by_raw: list[ByParameter[Any]] = []


class Interest:
    """One recorder's."""

    def __init__(self) -> None:
        self._is_on = self._raw = False

    def set(self, is_on: bool, raw: bool = True) -> None:
        """Keep what comes from now on, or not; the same again does nothing. When the last one is
        off, nothing is kept, and what was kept is released. `raw`: gradients from before clipping,
        too."""
        global _interested, _wants_raw, _takes_parts
        with _lock:
            _interested += is_on - self._is_on
            _wants_raw += (is_on and raw) - self._raw
            self._is_on, self._raw = is_on, is_on and raw
            if not _interested:
                _takes_parts = True
                for entries in _kept:
                    entries.clear()


def is_wanted() -> bool:
    """Whether anybody is interested."""
    return _interested > 0


def wants_raw() -> bool:
    """Whether anybody wants gradients from before clipping, or needs them."""
    return _wants_raw > 0 or any(_known_by_raw)


def takes_parts() -> bool:
    """Whether copies are of use of what other ranks have parts of."""
    return _takes_parts


def give_up_parts() -> None:
    """A rank has no memory for them, or they are changed after clipping; without its copies those
    of others mean nothing."""
    global _takes_parts
    _takes_parts = False


def by_parameter(known_by_raw: bool = False) -> ByParameter[Any]:
    """For a module to keep something in, for as long as anybody is interested. `known_by_raw`: what
    it is of is known again after clipping only by the gradient from before."""
    entries: ByParameter[Any] = ByParameter()
    _kept.append(entries)
    if known_by_raw:
        _known_by_raw.append(entries)
    return entries
