"""What an update depends on beside its gradients and settings: torch.autocast, within which a
product of matrices comes to other bits, and torch's generators."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from everstep.sharding.leaves import dtype_name


def autocast_now() -> dict[str, str]:
    """The dtype to which operations are cast now, by the type of device; empty where they are
    not."""
    return {
        device: dtype_name(torch.get_autocast_dtype(device))
        for device in ("cpu", "cuda")
        if torch.is_autocast_enabled(device)
    }


def autocast_of(said: Mapping[str, Any]) -> dict[str, torch.dtype]:
    """What `autocast_now` said, as dtypes. Raises AttributeError, TypeError where it did not."""
    found = {device: getattr(torch, name) for device, name in said.items()}
    if not all(isinstance(dtype, torch.dtype) for dtype in found.values()):
        raise TypeError(f"{said} are no dtypes")
    return found


@contextlib.contextmanager
def autocast_as(then: Mapping[str, torch.dtype]) -> Iterator[None]:
    """Cast as then, whatever is cast now."""
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if device in then:
                stack.enter_context(torch.autocast(device, dtype=then[device]))
            elif torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def generators_now() -> dict[str, torch.Tensor]:
    """The states of torch's generators, by device."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        on_gpus = enumerate(torch.cuda.get_rng_state_all())
        states |= {f"cuda:{index}": state for index, state in on_gpus}
    return states


def drawn_since(before: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of the states of then those from which something was drawn."""
    now = generators_now()
    return {device: state for device, state in before.items() if not state.equal(now[device])}
