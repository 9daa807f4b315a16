"""A step that exists as base and records → a whole state beside its manifest, without the model.

On a CPU run's own kind of machine the result is exact, and nothing before it is needed any more;
else `exact` is false in it, and restores go on replaying the log, unless the user said otherwise.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from everstep.errors import Conflict, Corrupt, Missing, Unsupported
from everstep.format.global_tensors import optimizers_of
from everstep.format.manifest import CheckpointName, Manifest, Part
from everstep.format.packs import ALIGNED_FROM_BYTES, Layout, lay_out
from everstep.format.tables import encode_table, still_groups
from everstep.keeper.data import Data, Image, Segment, parse
from everstep.keeper.writer import Writer
from everstep.restore.chain import Chain
from everstep.restore.choose import Candidate
from everstep.restore.load import Loader
from everstep.restore.rebuild import Rebuilt
from everstep.sharding.leaves import Leaf, bytes_of
from everstep.store import catalog, commit
from everstep.tiers.tier import Tier


def materialize(disk: Tier, name: CheckpointName) -> Manifest:
    """Make the state of a log step whole, durably; blocks. Returns the state's manifest.

    Where it is not exact, the log, which is, stays what a restore takes.

    Takes memory for the state. Raises Missing, Corrupt, Unsupported (an optimizer that is
    not torch's own, or a step that is a state already).
    """
    try:
        return _find_whole(disk, name) or _materialize(disk, name)
    except (Conflict, Corrupt, Missing) as error:
        if not catalog.is_there(disk, name):
            raise Missing(
                f"materialising {name} of {disk.root}: it is not there, or not any more"
            ) from error
        if isinstance(error, Conflict) and (made := _find_whole(disk, name)):
            return made  # by somebody else, meanwhile
        raise


def _materialize(disk: Tier, name: CheckpointName) -> Manifest:
    candidate = Candidate(name, disk)
    chain = candidate.describe()
    if not chain.replayed:
        raise Unsupported(f"materialising {name} of {disk.root}: it is a whole state already")
    chain.check_unruled(f"materialising {name} of {disk.root}")
    with Loader() as loader:
        tensors = Rebuilt(candidate, chain, loader).tensors
    layout, table = described(chain, tensors)
    image = Image(parse(table), list(packs_of(layout, tensors)))
    return publish(disk, chain, image, chain.why_inexact)


def _find_whole(disk: Tier, name: CheckpointName) -> Manifest | None:
    """What was made of it before; a base that is spread takes a replay itself."""
    found = commit.find_state(disk, name)
    return None if found is None or found.is_spread else found


def described(chain: Chain, tensors: Mapping[str, torch.Tensor]) -> tuple[Layout, bytes]:
    """How these tensors of the state after the last record lie in packs, and the piece table that
    says so."""
    saved = chain.saved(chain.optimized).tensors.values()
    entries = {entry.spec.name: entry for entry in saved}
    still = {name: n for table in chain.base.tables for name, n in still_groups(table).items()}
    layout = lay_out([Leaf(key, tensor).spec for key, tensor in tensors.items()], still)
    on = {key: entries[key].device if key in entries else "cpu" for key in tensors}
    aliases = {
        key: entries[key].aliases for key in tensors if key in entries and entries[key].aliases
    }
    strides = {key: entry.strides for key, entry in entries.items() if entry.strides is not None}
    return layout, encode_table(layout, aliases, on, optimizers_of(chain.last.tables), strides)


def whole_manifest(chain: Chain, part: Part, differing: Sequence[str] = ()) -> Manifest:
    """Of the state after the last record, which is all in this part. `differing`: why it is not
    exact."""
    last = chain.last.manifest
    return replace(
        last,
        parts=(part,),
        records=(),
        previous=None,
        exact=not differing,
        topology=last.topology | ({"replayed": {"differs": [*differing]}} if differing else {}),
        created=commit.now(),
        tag=None,
    )


def publish(disk: Tier, chain: Chain, image: Image, differing: Sequence[str]) -> Manifest:
    """Make the state durable, and publish it beside its log step. Raises Missing where the step is
    gone, Unavailable where gc was quicker, Conflict where a state is there that is to stay."""
    name = chain.last.manifest.name
    log_digest = catalog.digest_of_manifest(disk, name)
    data = Data(Writer(disk, None, parent=chain.base.manifest.name), image, is_record=False)
    with data.durable(name):
        manifest = whole_manifest(chain, data.part(name.step), differing)
        commit.publish_state(disk, manifest, log_digest, data.document)
    return manifest


def packs_of(layout: Layout, tensors: Mapping[str, torch.Tensor]) -> Iterator[list[Segment]]:
    """The packs, in the memory of the tensors themselves where they are large and on the host;
    small ones are joined."""
    rows: list[list[tuple[int, torch.Tensor]]] = [[] for _ in layout.packs]
    for spec, piece in zip(layout.specs, layout.pieces, strict=True):
        rows[piece.pack].append((piece.offset, tensors[spec.entry]))
    for pack, header, members in zip(layout.packs, layout.headers, rows, strict=True):
        views = [memoryview(header)]
        members.sort(key=lambda row: (row[0], row[1].nbytes))
        large = [row for row in members if row[1].nbytes >= ALIGNED_FROM_BYTES]
        at = pack.header
        for offset, tensor in large:
            views += [memoryview(bytes(offset - at)), bytes_of(tensor).numpy().data]
            at = offset + tensor.nbytes
        rest = bytearray(pack.size - at)
        for offset, tensor in members[len(large) :]:
            rest[offset - at : offset - at + tensor.nbytes] = bytes_of(tensor).numpy().data
        yield [Segment(view) for view in (*views, memoryview(rest)) if len(view)]
