"""What a command has found out, and how it tells meanwhile how far it is."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Answer(NamedTuple):
    """`facts`: one JSON object, for programs; `lines`: for people. Only one of them is asked for.
    `code`: the exit code."""

    facts: Mapping[str, Any]
    lines: Iterable[str]
    code: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """To be told (bytes done, bytes in all)."""

    show: Callable[[int, int], object]
    began: float = field(default_factory=time.monotonic)

    def __call__(self, done: int, total: int) -> None:
        """So far."""
        self.show(done, total)

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self.began


@contextmanager
def progress_bar(what: str) -> Iterator[Progress]:
    """On standard error where that is a terminal; rich is loaded for nothing else."""
    if not sys.stderr.isatty():
        yield Progress(lambda done, total: None)
        return
    from rich import progress
    from rich.console import Console

    columns = (*progress.Progress.get_default_columns(), progress.TransferSpeedColumn())
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield Progress(lambda done, total: bar.update(task, completed=done, total=total))
