"""What a checkpoint was made by and on: informative, and needed to judge whether a replay or a
continuation can be exact."""

import contextlib
import functools
import platform
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from everstep import __version__

EXACT_KEYS = (
    "torch",
    "machine",
    "processor",
    "capability",
    "threads",
    "default_dtype",
    "matmul",
    "denormals",
)
"""Where these differ, results may differ in last bits."""

ALONE = "alone"
"""The layout of one process."""

PADDED = "+padding"
"""Ends a layout where parameters have elements that are of no tensor, and in no checkpoint."""

ELEMENTWISE = (
    "Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop",
    "Rprop", "SGD",
)  # fmt: skip
"""torch's optimizers that come to the same bits however tensors are cut."""

_THREADS_MAX = 1024
_PRECISIONS = ("highest", "high", "medium")
_SMALL, _HALF = 1e-310, 0.5


def topology(world_size: int = 1, layout: str = ALONE) -> dict[str, Any]:
    """Of this process, now, among so many. `layout`: how tensors are spread over them."""
    return {
        "world_size": world_size,
        "layout": layout,
        "torch": torch.__version__,
        "everstep": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": vendor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "matmul": _matmul(),
        "denormals": "flushed" if flushes_denormals() else "kept",
        # Asking would initialise CUDA, after which no process may be forked that uses it.
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_initialized() else None,
    }


def differences(then: Mapping[str, Any]) -> list[str]:
    """What differs here from `then`, of what exact results depend on: "torch 2.12, here 2.13"."""
    now = topology()
    keys = [*EXACT_KEYS, *(["cuda"] if now["cuda"] and then.get("cuda") else [])]
    return [
        f"{key} {then[key]}, here {now[key]}"
        for key in keys
        if key in then and then[key] != now[key]
    ]


def layout_differences(
    then: Mapping[str, Any], layout: str, calls: Iterable[Mapping[str, Any]]
) -> list[str]:
    """Where tensors are spread over ranks in another way than then: of a record's calls those that
    may come to other bits of it, since they do not go by single elements, or do in vectors."""
    is_same = then.get("layout", ALONE) == layout
    if is_same and not layout.endswith(PADDED):
        return []
    return sorted(
        {
            f"other ranks or boxes, which {call['class']} depends on"
            for call in calls
            # In vectors the last elements of a tensor may come to other bits than the rest.
            if not goes_by_elements(str(call["class"]))
            or (not is_same and any(values.get("fused") for values in call["sets"]))
        }
    )


def goes_by_elements(kind: str) -> bool:
    """Whether an optimizer of this class comes to the same bits however tensors are cut."""
    module, _, name = kind.rpartition(".")
    return module.startswith("torch.optim.") and name in ELEMENTWISE


@contextlib.contextmanager
def adopted(then: Mapping[str, Any]) -> Iterator[None]:
    """Let torch have, for a while, the settings of then that a process can choose: what an update
    comes to in its last bits depends on them."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    precision, wanted_precision = _precision(), str(then.get("matmul")).partition(",")[0]
    is_settable = {precision, wanted_precision} <= set(_PRECISIONS)
    try:
        if is_settable:
            torch.set_float32_matmul_precision(wanted_precision)
        if then.get("threads") in range(1, _THREADS_MAX):
            torch.set_num_threads(then["threads"])
        wanted = getattr(torch, str(then.get("default_dtype")), None)
        if isinstance(wanted, torch.dtype) and wanted.is_floating_point:
            torch.set_default_dtype(wanted)
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        if is_settable:
            torch.set_float32_matmul_precision(precision)


@functools.cache
def vendor() -> str:
    """Return the processor's vendor. torch lets MKL make square roots, and MKL's last bits go by
    the vendor, also where the instructions are the same."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    rows = (line.partition(":") for line in lines)
    known = (
        word.strip() for key, _, word in rows if key.strip() in ("vendor_id", "CPU implementer")
    )
    return next(known, None) or platform.processor()  # which starts a process


def _precision() -> str:
    """Of float32 matrix products: torch's name; where a program has chosen it by backend, both."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # torch refuses to tell in one word what was said in two
        backends: Any = torch.backends
        return f"{backends.cuda.matmul.fp32_precision}/{backends.mkldnn.matmul.fp32_precision}"


def _matmul() -> str:
    """How exact torch's matrix products are: Muon's updates depend on it, and PowerSGD's."""
    on_gpu = torch.backends.cuda.matmul
    flags = {
        "bf16": on_gpu.allow_bf16_reduced_precision_reduction,
        "fp16": on_gpu.allow_fp16_reduced_precision_reduction,
    }
    whole = [f", {name} sums in float32" for name, is_reduced in flags.items() if not is_reduced]
    return _precision() + "".join(whole)


def flushes_denormals() -> bool:
    """There is no other way to ask whether torch.set_flush_denormal was called, which sets a
    register of this thread's, for python's numbers too."""
    return _SMALL * _HALF == 0.0
