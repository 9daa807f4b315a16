"""FSDP1 (FullyShardedDataParallel): which ranges of its parameters lie in this rank's flat ones.

Its state_dict hooks gather, so they are not called. What is read here, torch 2.13 has no public way
to. Looked up where the user has imported it: the import takes a second.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from everstep.errors import Unsupported
from everstep.sharding.leaves import canonical
from everstep.sharding.mapped import Shard

Flat = tuple[str, torch.Tensor, list[Shard]]
"""The local name of a parameter, which has a range of one tensor or of several; and those."""


def units_of(module: nn.Module) -> list[tuple[str, Any]]:
    """The FSDP1 modules in a module, by their canonical names."""
    package = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    if package is None:
        return []
    kind = package.FullyShardedDataParallel
    named = module.named_modules()
    return [(canonical(name), each) for name, each in named if isinstance(each, kind)]


def flat_parameters(module: nn.Module, name: str) -> Iterator[Flat]:
    """The parameters of `module`, which is called `name`, that are parts of flat ones. What a
    forward without backward has left gathered is let go of first, as a backward does: after a
    restore the next forward would take it for the parameters."""
    for at, unit in units_of(module):
        if (handle := unit._handle) is None:
            continue
        if handle.uses_sharded_strategy and _is_gathered(handle):
            from torch.distributed.fsdp._runtime_utils import _reshard

            _reshard(unit, handle, True)
        yield from _of_handle(handle, ".".join(part for part in (name, at) if part))


def entries_of(module: nn.Module) -> dict[str, Any]:
    """What state_dict(keep_vars=True) would give without its hooks."""
    found: dict[str, Any] = {}
    for prefix, each in module.named_modules(remove_duplicate=False):
        each._save_to_state_dict(found, f"{prefix}." if prefix else "", True)
    return found


def _is_gathered(handle: Any) -> bool:
    flat = handle.flat_param
    if not hasattr(flat, "_full_param_padded"):  # no forward yet
        return False
    return not (handle.is_sharded(flat) and handle.needs_unshard())


def _of_handle(handle: Any, at: str) -> Iterator[Flat]:
    flat = handle.flat_param
    shards = []
    for fqn, shape, is_contiguous, here in zip(
        flat._fqns, flat._shapes, flat._contiguities, flat._shard_param_infos, strict=True
    ):
        name = f"{at}.{canonical(fqn)}"
        if not is_contiguous:
            raise Unsupported(
                f"capturing {name!r}: FSDP1 has flattened it in another order than that of its "
                f"elements, since it was not contiguous when it was wrapped. Make it contiguous"
            )
        first, count, start = 0, 0, 0
        if here.in_shard:
            first, count = here.offset_in_shard, here.numel_in_shard
            start = here.intra_param_start_idx
        memory = flat.detach()[first : first + count]
        shards.append((name, Shard.flat(name, shape, start, memory)))
    if flat._params is None:
        yield f"{at}._flat_param", flat, [shard for _, found in shards for shard in found]
    elif handle.uses_sharded_strategy:  # else they are as they were
        for (name, found), parameter in zip(shards, flat._params, strict=True):
            yield name, parameter, found
