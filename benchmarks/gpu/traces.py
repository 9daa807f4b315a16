"""What torch's profiler saw of a save: who waited for the device, and on which stream copies ran.
The trace is read as data and thrown away."""

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.gpu.training import synchronize

WAITS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cudaFree",
    "cudaHostRegister",
)
"""Calls that wait for the device. cudaMemcpyAsync does, too, where host memory is pageable: that is
told by the copy's own name."""
STACK_MAX = 6
Event = dict[str, Any]


def traced(work: Callable[[], None], device: torch.device) -> dict[str, Any]:
    """Run `work` under the profiler, wait for the device, and sum up what was seen."""
    synchronize(device)
    kinds = [ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(ProfilerActivity.CUDA)
    with profile(activities=kinds, with_stack=True) as profiler:
        with record_function("work"):
            work()
        synchronize(device)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return summed_up(json.loads(path.read_text(errors="replace"))["traceEvents"])


def summed_up(events: list[Event]) -> dict[str, Any]:
    """Of a trace in Chrome's format (times in microseconds): the waits within "work", the training
    thread's with their stacks and the others counted; and what ran on which stream."""
    spans = [event for event in events if event.get("ph") == "X"]
    marks = [span for span in spans if span.get("cat") == "user_annotation"]  # the device's differ
    work = next(span for span in marks if span["name"] == "work")
    waits: dict[tuple[str, ...], list[float]] = defaultdict(list)
    streams: dict[tuple[str, Any], list[Event]] = defaultdict(list)
    elsewhere = 0
    for span in spans:
        kind = span.get("cat")
        if kind in ("cuda_runtime", "cuda_driver") and span["name"] in WAITS:
            if span["tid"] != work["tid"]:
                elsewhere += 1
            elif _holds(work, span):
                waits[span["name"], *_stack(spans, span)].append(span.get("dur", 0.0))
        elif kind in ("gpu_memcpy", "kernel"):
            name = span["name"] if kind == "gpu_memcpy" else "kernels"
            streams[name, span.get("args", {}).get("stream")].append(span)
    return {
        "waits": [
            {"call": call, "count": len(times), "ms": sum(times) / 1e3, "in": stack[:STACK_MAX]}
            for (call, *stack), times in waits.items()
        ],
        "waits_of_other_threads": elsewhere,
        "streams": [
            {"what": what, "stream": stream, "count": len(rows), **_amount(rows)}
            for (what, stream), rows in streams.items()
        ],
    }


def _stack(spans: list[Event], inner: Event) -> Iterator[str]:
    """What the call was made in, from the inside."""
    around = [span for span in spans if span["tid"] == inner["tid"] and _holds(span, inner)]
    around.sort(key=lambda span: -span["ts"])
    yield from (span["name"] for span in around if span is not inner and span["name"] != "work")


def _holds(outer: Event, inner: Event) -> bool:
    end = outer["ts"] + outer.get("dur", 0.0)
    return bool(outer["ts"] <= inner["ts"] and inner["ts"] + inner.get("dur", 0.0) <= end)


def _amount(rows: list[Event]) -> dict[str, float]:
    milliseconds = sum(row.get("dur", 0.0) for row in rows) / 1e3
    return {"ms": milliseconds, "bytes": sum(row.get("args", {}).get("bytes", 0) for row in rows)}
