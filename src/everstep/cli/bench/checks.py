"""What makes restores comparable: the same cold cache for all, and a digest of what came back."""

import os
from pathlib import Path

import torch
import xxhash
from torch.distributed.tensor import DTensor

from everstep.cli import workload


def digest(run: workload.Run, is_sharded: bool = False) -> str:
    """One digest of what must come back: model, optimizer, loader, torch's generator.

    Of a sharded run: of the whole tensors, on each rank, and without the generator, of which
    another number of ranks has others. All ranks have to call it.
    """
    hasher = xxhash.xxh3_128()
    tensors = {**run.model.state_dict(), **run.loader.state_dict()}
    if not is_sharded:
        tensors["rng"] = torch.get_rng_state()
    tensors.pop("batches_read")
    for index, held in run.optimizer.state_dict()["state"].items():
        tensors |= {f"{index}.{key}": value for key, value in sorted(held.items())}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        hasher.update(name.encode())
        hasher.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return hasher.hexdigest()


def chill(root: Path) -> str:
    """Take the files under `root` out of the page cache; says how."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1\n")
    except OSError:
        return forget(root)
    return "drop_caches"


def forget(root: Path) -> str:
    """Take the files under `root`, and nothing else, out of the page cache: what libraries need for
    their first call stays there, as it does when a process is started again. Says how."""
    os.sync()
    for path in root.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
    return "posix_fadvise"
