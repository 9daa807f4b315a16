"""torch.autocast: an update that multiplies matrices within it comes to other bits."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from everstep.state.leaves import dtype_name


def autocast_now() -> dict[str, str]:
    """The dtype to which operations are cast now, by the type of device; empty where they are
    not."""
    return {
        device: dtype_name(torch.get_autocast_dtype(device))
        for device in ("cpu", "cuda")
        if torch.is_autocast_enabled(device)
    }


@contextlib.contextmanager
def autocast_as(then: Mapping[str, Any]) -> Iterator[None]:
    """Cast as then, whatever is cast now. Raises AttributeError, TypeError where that is no
    dtype."""
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if device in then:
                dtype = getattr(torch, then[device])
                stack.enter_context(torch.autocast(device, dtype=dtype))
            elif torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
