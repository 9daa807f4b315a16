"""A step that exists as base and records → a whole state beside its manifest, without the model.

On a CPU run's own kind of machine the result is exact, and nothing before it is needed any more;
else `exact` is false in it, and restores go on replaying the log, unless the user said otherwise.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import xxhash

from everstep.errors import Conflict, Missing, Unsupported
from everstep.format.global_tensors import GlobalTensor, groups, optimizers_of, whole_tensors
from everstep.format.manifest import Manifest, Part
from everstep.format.packs import Layout, Spec, lay_out, pack_starts
from everstep.format.tables import decode_table, encode_table, extents
from everstep.restore.choose import Candidate, Described, moved
from everstep.restore.load import Loader
from everstep.restore.rebuild import rebuilt
from everstep.sharding.topology import ALONE, adopted
from everstep.store import catalog, claims, commit, retain
from everstep.store.names import CheckpointName, manifest_path
from everstep.tiers.disk import Disk

log = logging.getLogger("everstep")


def materialize(disk: Disk, name: CheckpointName) -> Manifest:
    """Make the state of a log step whole, durably; blocks. Returns the state's manifest.

    Where it is not exact, the log, which is, stays what a restore takes.

    Takes memory for the state, twice. Raises Missing, Corrupt, Unsupported (an optimizer that is
    not torch's own, or a step that is a state already).
    """
    with claims.hold(disk, name) as token:
        if made := _find_whole(disk, name):
            return made
        log_digest = catalog.digest_of_manifest(disk, name)
        candidate = Candidate(name, disk)
        base, *logs = candidate.describe()
        if base.manifest.is_spread:
            logs.insert(0, base)
        if not logs:
            raise Unsupported(f"materialising {name} of {disk.root}: it is a whole state already")
        then = logs[-1].manifest.topology
        with adopted(then), Loader() as loader:
            tensors = rebuilt(candidate, base, logs, loader)
            differing = differing_from(logs)
            differing |= set(moved(base))
            if not base.manifest.exact:
                differing.add(f"step {base.manifest.step}, where it begins, is not exact")
            replayed = {"differs": sorted(differing)}
        to = _Target(disk, name, log_digest, token)
        try:
            return _write(to, base, logs[-1], tensors, replayed)
        except Conflict:  # somebody else has made it meanwhile
            if made := _find_whole(disk, name):
                return made
            raise


def differing_from(logs: Sequence[Described]) -> set[str]:
    """What is other in this process than where they were recorded, which a replay may depend on."""
    return {text for each in logs for text in each.differences(ALONE)}


def _find_whole(disk: Disk, name: CheckpointName) -> Manifest | None:
    """What was made of it before; a base that is spread takes a replay itself."""
    found = commit.find_state(disk, name)
    return None if found is None or found.is_spread else found


@dataclass(frozen=True, slots=True)
class _Target:
    """The log step that is made whole; the digest of its manifest, the token of the claim on it."""

    disk: Disk
    name: CheckpointName
    log_digest: str
    token: str


def _write(
    to: _Target,
    base: Described,
    last: Described,
    tensors: Mapping[str, torch.Tensor],
    replayed: dict[str, Any],
) -> Manifest:
    """Make the state durable, and publish it beside its log. `replayed`: how it may differ."""
    disk, name = to.disk, to.name
    entries: dict[str, GlobalTensor] = {}
    for group in groups(base.manifest, base.tables):
        entries |= whole_tensors(group)
    _, of_last = last.records[-1]
    entries |= {key: whole for key, whole in whole_tensors(of_last).items() if key in tensors}
    layout = lay_out(
        [
            Spec(key, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for key, tensor in tensors.items()
        ]
    )
    on = {key: entries[key].device if key in entries else "cpu" for key in tensors}
    aliases = {
        key: entries[key].aliases for key in tensors if key in entries and entries[key].aliases
    }
    strides = {key: entry.strides for key, entry in entries.items() if entry.strides is not None}
    table = encode_table(layout, aliases, on, optimizers_of(of_last), strides)
    image = _image(layout, tensors)
    starts = pack_starts(pack.size for pack in layout.packs)
    packs = [
        image[start : start + pack.size] for start, pack in zip(starts, layout.packs, strict=True)
    ]
    if disk.size(manifest_path(name)) is None:  # a store that is gone is not made anew
        raise Missing(f"materialising {name} of {disk.root}: it was deleted meanwhile")
    links = commit.write_packs(disk, name, packs, token=to.token)
    part = Part(0, commit.table_link(table), links, _digests(table, packs), name.step)
    exact = not replayed["differs"]
    here = commit.find_state(disk, name)
    if here and here.exact and not exact:  # what the log goes on from may be gone
        commit.discard_packs(disk, name, links)
        raise Conflict(
            f"materialising {name} of {disk.root}: an exact base stands there, which a state that "
            f"would not be exact (other build or machine, or a GPU) must not replace. Materialise "
            f"a later step"
        )
    topology = last.manifest.topology
    manifest = replace(
        last.manifest,
        parts=(part,),
        records=(),
        previous=None,
        exact=exact,
        topology=topology if exact else {**topology, "replayed": replayed},
        created=commit.now(),
        tag=None,
    )
    try:
        replaced = commit.publish_state(disk, manifest, table, to.log_digest, to.token)
    except BaseException:
        commit.discard_packs(disk, name, links)
        raise
    if replaced:
        retain.drop_base(disk, replaced)
    return manifest


def _image(layout: Layout, tensors: Mapping[str, torch.Tensor]) -> memoryview:
    image = torch.zeros(layout.size, dtype=torch.uint8, device="cpu")
    starts = pack_starts(pack.size for pack in layout.packs)
    for start, pack in zip(starts, layout.packs, strict=True):
        header = torch.frombuffer(bytearray(pack.header), dtype=torch.uint8)
        image[start : start + len(pack.header)] = header
    for spec, piece in zip(layout.specs, layout.pieces, strict=True):
        at = starts[piece.pack] + piece.offset
        if piece.size:
            flat = tensors[spec.name].detach().contiguous().view(-1).view(torch.uint8)
            image[at : at + piece.size] = flat
    found: memoryview = image.numpy().data
    return found


def _digests(table: bytes, packs: list[memoryview]) -> tuple[str, ...]:
    found = {
        extent.digest: xxhash.xxh3_128_hexdigest(
            packs[extent.pack][extent.offset : extent.offset + extent.size]
        )
        for extent in extents(decode_table(table, "a new piece table"))
    }
    return tuple(found[index] for index in range(len(found)))
