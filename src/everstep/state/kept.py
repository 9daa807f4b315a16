"""What is kept of gradients for recorders, which takes memory: only while there is one.

Everything but `Interest.set` runs in the training thread; that in any.
"""

import threading
from collections.abc import MutableMapping
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_interested = 0
_takes_parts = True
_lock = threading.Lock()
_kept: list[MutableMapping[Tensor, Any]] = []


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


def by_parameter() -> MutableMapping[Tensor, Any]:
    """For a module to keep something in, for as long as the parameter lives and anybody is
    interested."""
    entries: MutableMapping[Tensor, Any] = WeakIdKeyDictionary()
    _kept.append(entries)
    return entries
