"""What a command has found out, and how it tells meanwhile how far it is."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from everstep.store.copy import Progress


class Answer(NamedTuple):
    """`facts`: one JSON object, for programs; `lines`: for people. Only one of them is asked for.
    `code`: the exit code."""

    facts: Mapping[str, Any]
    lines: Iterable[str]
    code: int = 0


@contextmanager
def progress_bar(what: str) -> Iterator[tuple[Progress, Callable[[], float]]]:
    """On standard error where that is a terminal; rich is loaded for nothing else. Yields what is
    told (bytes done, bytes in all), and what tells the seconds since it began."""
    began = time.monotonic()

    def seconds() -> float:
        return time.monotonic() - began

    if not sys.stderr.isatty():
        yield (lambda done, total: None), seconds
        return
    from rich import progress
    from rich.console import Console

    columns = (*progress.Progress.get_default_columns(), progress.TransferSpeedColumn())
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield (lambda done, total: bar.update(task, completed=done, total=total)), seconds
