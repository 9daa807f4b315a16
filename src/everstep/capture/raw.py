"""Whether gradients from before clipping are worth their memory, and the time to keep them.

They are where they came out of arithmetic of fewer bits (autocast to bf16): their low bytes are
zero, or of little entropy, and the keeper packs them. Gradients of plain float32 take the same
bytes before clipping and after it. Whether records could be packed tells which these are, but for
some (half of them zeros) that pack after clipping as well.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from everstep.handle import SaveHandle

LOOKS = 8
"""Records on the disk, after which it is known; ..."""
AGAIN_AFTER = 256
"""... and records without, after which it is looked at again."""
WORTH = 0.25
"""Of their bytes are not written, at least: squeezed exponents alone come to 0.16, also after
clipping."""


class Raw:
    """One log's. For the thread that trains."""

    def __init__(self) -> None:
        self.is_wanted = True
        self._seen: deque[SaveHandle] = deque(maxlen=4 * LOOKS)  # some are under way
        self._without = 0

    def note(self, calls: Sequence[Mapping[str, Any]], handle: SaveHandle) -> None:
        """A record is being captured, and with it what `calls` say. Without updates, or where a
        hook has compressed gradients, it tells nothing."""
        if not calls or any("compressed" in call for call in calls):
            return
        has_some = any("clips" in call for call in calls)
        if has_some and self.is_wanted:
            self._look(handle)
        elif not has_some and not self.is_wanted:
            self._without += 1
            self.is_wanted = self._without % AGAIN_AFTER == 0

    def _look(self, handle: SaveHandle) -> None:
        self._seen.append(handle)
        squeezed = [each.squeezed for each in self._seen if each.squeezed is not None]
        if len(squeezed) >= LOOKS and median(squeezed) < WORTH:
            self.is_wanted = False
            self._seen.clear()
