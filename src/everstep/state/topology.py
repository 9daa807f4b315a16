"""What a checkpoint was made by and on: informative, and needed to judge whether a replay or a
continuation can be exact."""

import platform
from collections.abc import Mapping
from typing import Any

import torch

from everstep import __version__

EXACT_KEYS = ("torch", "machine", "capability", "threads")
"""Where these differ, results may differ in last bits."""


def topology() -> dict[str, Any]:
    """Of this process, now."""
    return {
        "world_size": 1,
        "torch": torch.__version__,
        "everstep": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
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
