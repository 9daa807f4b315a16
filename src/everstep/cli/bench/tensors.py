"""What many small tensors cost everstep: the call, and the commit beyond the bytes themselves."""

import statistics
import time
from pathlib import Path
from typing import Any

import torch
import xxhash

from everstep import Checkpointer, Keep, Store
from everstep.cli.bench.floors import filled_buffer, page_multiple, plain_write

_FLOATS_EACH = 256
_TENSORS_PER_PARAMETER = 4  # itself, two moments, a step counter


def measure(root: Path, count: int, saves: int) -> dict[str, Any]:
    """Save a model of `count` tensors `saves` times, one after the other, and time the parts.

    `bookkeeping_s` is what is left of the time from captured to durable when a plain write of as
    many bytes or their digests, whichever takes longer (they go on at the same time), is taken
    off: table, manifest, their fsyncs, messages.
    """
    model, optimizer = _many_tensors(count)
    state = {"model": model, "optimizer": optimizer}
    rows = []
    with Checkpointer(root, state, keep=Keep(last=2), under_pressure="wait") as checkpointer:
        checkpointer.restore()
        for step in range(1, saves + 2):
            _update(model, optimizer)
            rows.append(_save(checkpointer, step))
    size = Store(root).manifest().size
    floor = _floor(root, size, count, saves)
    first, later = rows[0], rows[1:]
    parts = {name: statistics.median(row[name] for row in later) for name in later[0]}
    floor_s = max(floor["write_s"], floor["digest_s"])
    spent = [row["captured_to_local_s"] - floor_s for row in later]
    return {
        "tensors": count,
        "saves": saves,
        "bytes": size,
        "first_call_s": first["call_s"],
        **parts,
        **floor,
        "bookkeeping_s": statistics.median(spent),
        "bookkeeping_spread_s": [min(spent), max(spent)],
    }


def _many_tensors(count: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    parameters = [
        torch.nn.Parameter(torch.randn(_FLOATS_EACH))
        for _ in range(count // _TENSORS_PER_PARAMETER)
    ]
    model = torch.nn.ParameterList(parameters)
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def _update(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def _save(checkpointer: Checkpointer, step: int) -> dict[str, float]:
    began = time.perf_counter()
    handle = checkpointer.save(step)
    called = time.perf_counter()
    handle.wait("captured")
    captured = time.perf_counter()
    handle.wait("local")
    ended = time.perf_counter()
    return {
        "call_s": called - began,
        "call_to_captured_s": captured - called,
        "captured_to_local_s": ended - captured,
    }


def _floor(root: Path, size: int, count: int, repeats: int) -> dict[str, float]:
    """The median seconds of a plain write of `size` bytes, and of `count` digests over them."""
    buffer = filled_buffer(page_multiple(size))
    writes, digests = [], []
    for number in range(repeats):
        path = root / f"floor-{number}"
        writes.append(plain_write(path, buffer))
        path.unlink()
        began = time.perf_counter()
        with memoryview(buffer) as view:
            for index in range(count):
                xxhash.xxh3_128_hexdigest(view[index * size // count : (index + 1) * size // count])
        digests.append(time.perf_counter() - began)
    return {"write_s": statistics.median(writes), "digest_s": statistics.median(digests)}
