"""What of a restored state follows while training goes on: `restore(first=...)`."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Late:
    """One filling of tensors at a time, in a thread of its own. For the thread that trains."""

    def __init__(self) -> None:
        self._task: Future[None] | None = None

    def begin(self, fill: Callable[[], None]) -> None:
        """Do it, beside training."""
        executor = ThreadPoolExecutor(1, "everstep-late")
        self._task = executor.submit(fill)
        executor.shutdown(wait=False)

    def settle(self) -> None:
        """Before anybody reads or changes these tensors: block until they are there. Raises what
        went wrong, each time until something else is restored."""
        if self._task:
            self._task.result()
            self._task = None

    def forget(self) -> None:
        """Block until nothing is filled any more; something else is restored, or nothing."""
        if self._task:
            self._task.exception()
            self._task = None
