"""A bar for what takes long."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """To be told (bytes done, bytes in all): on standard error where that is a terminal; rich is
    loaded for nothing else."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich import progress
    from rich.console import Console

    columns = (*progress.Progress.get_default_columns(), progress.TransferSpeedColumn())
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
