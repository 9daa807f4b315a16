"""A process group of one process."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from torch import distributed as dist

_ended: list[object] = []


@contextlib.contextmanager
def one_rank(folder: Path) -> Iterator[None]:
    """torch's default process group, of this process alone; `folder` is new for each.

    The group's object is kept for good: where its last reference goes (with DDP's reducer) while a
    thread of it still lets go of its last work, torch 2.13 hangs, as both of them want the GIL.
    """
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=0, world_size=1)
    _ended.append(dist.group.WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()
