"""What appears at once: a folder under another name beside it, until all of it is durable."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from everstep.errors import Conflict, Unavailable


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to be filled, which becomes `target` when this ends, durably; nothing is left of it
    after an error. Raises Conflict where there is something, Unavailable."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise Conflict(f"exporting to {target}: there is something. Name another place")
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft.mkdir()
        yield draft
        for folder, _, files in os.walk(draft):
            for file in files:
                _sync(Path(folder, file))
            _sync(Path(folder))
        os.rename(draft, target)
        _sync(target.parent)
    except OSError as error:
        raise Unavailable(f"exporting to {target}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
