"""Checkpoints as many ranks write them, out of those of one."""

import json
import random
from dataclasses import replace
from pathlib import Path

import torch
import xxhash

from everstep import Store
from everstep.format.boxes import Box, flat_boxes
from everstep.format.document import seal
from everstep.format.global_tensors import index_of
from everstep.format.manifest import CheckpointName, Manifest, Part
from everstep.format.packs import Spec, lay_out
from everstep.format.tables import decode_table, encode_table, extents
from everstep.restore.deliver import as_items
from everstep.store import commit
from everstep.tiers.disk import Disk
from stores import image_of, write_packs

PARTS = 3


def halves(box, dim, at):
    """A box in two, along a dim, the first of which has a length of `at`."""
    found = []
    for start, length in ((0, at), (at, box.lengths[dim] - at)):
        offsets, lengths = list(box.offsets), list(box.lengths)
        offsets[dim] += start
        lengths[dim] = length
        found.append(Box(tuple(offsets), tuple(lengths)))
    return found


def random_boxes(shape, seed):
    """A tensor in up to eight boxes: cut along its dims, or in ranges of its elements."""
    generator = random.Random(seed)
    whole = Box.whole(shape)
    if whole.count < 2 or generator.random() < 0.2:
        return [whole]
    if generator.random() < 0.3:
        cut = generator.randrange(1, whole.count)
        return flat_boxes(shape, 0, cut) + flat_boxes(shape, cut, whole.count)
    found = [whole]
    for _ in range(generator.randrange(1, 8)):
        box = found.pop(generator.randrange(len(found)))
        dims = [dim for dim, length in enumerate(box.lengths) if length > 1]
        if not dims:
            found.append(box)
            continue
        dim = generator.choice(dims)
        found += halves(box, dim, generator.randrange(1, box.lengths[dim]))
    return found


def divide(
    path: Path,
    step: int,
    into: int,
    seed: int = 0,
    lose: str | None = None,
    *,
    is_indexed: bool = False,
) -> Manifest:
    """Write a checkpoint again as step `into`: each tensor in boxes, in one of several parts each.

    `lose`: a tensor of which half is left out. `is_indexed`: the manifest tells what is where.
    """
    store, disk = Store(path), Disk(path)
    manifest = store.manifest(step)
    (table,), tensors = store.tables(manifest), store.read(step)
    boxes = {
        name: random_boxes(entry.spec.shape, f"{name} {seed}")
        for name, entry in table.tensors.items()
    }
    if lose:
        whole = Box.whole(table.tensors[lose].spec.shape)
        boxes[lose] = flat_boxes(whole.lengths, 0, whole.count // 2)
    generator = random.Random(seed)
    chosen = [{} for _ in range(PARTS)]
    for name, found in boxes.items():
        for box in found:
            generator.choice(chosen).setdefault(name, []).append(box)
    name = CheckpointName(into, manifest.epoch)
    parts, documents = [], []
    for rank, names in enumerate(chosen):
        document, packs, digests = _part(table, names, tensors)
        links = write_packs(disk, name, packs)
        parts.append(Part(rank, commit.table_link(document), links, digests, into))
        documents.append(document)
    tables = [decode_table(document, "a new table") for document in documents]
    index = index_of(tables) if is_indexed else None
    divided = replace(manifest, step=into, parts=tuple(parts), tag=None, index=index)
    commit.publish(disk, divided, None, documents)
    return divided


def entry_name(name: str, box: Box, shape: tuple[int, ...]) -> str:
    """What a piece is called in a pack's header."""
    pairs = zip(box.offsets, box.lengths, strict=True)
    inside = ",".join(f"{offset}:{offset + length}" for offset, length in pairs)
    return name if box == Box.whole(shape) else f"{name}[{inside}]"


def _part(table, names, tensors):
    rows, specs, contents = {}, [], {}
    for name, boxes in names.items():
        spec = table.tensors[name].spec
        for box in boxes:
            entry = entry_name(name, box, spec.shape)
            rows[entry] = (name, box)
            specs.append(Spec(entry, spec.dtype, box.lengths))
            items = as_items(tensors[name])[box.slices_in(Box.whole(spec.shape))]
            contents[entry] = items.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    layout = lay_out(specs)
    value = json.loads(encode_table(layout, {}, {}, table.optimizers))
    del value["digest"]
    merged = {}
    for row in value["tensors"]:
        name, box = rows[row["name"]]
        entry = table.tensors[name]
        here = merged.setdefault(
            name,
            {
                "name": name,
                "dtype": row["dtype"],
                "shape": entry.spec.shape,
                "device": entry.device,
                "pieces": [],
            },
        )
        if entry.aliases:
            here["aliases"] = list(entry.aliases)
        here["pieces"] += [{**row["pieces"][0], "offsets": box.offsets, "lengths": box.lengths}]
    value["tensors"] = [merged[name] for name in sorted(merged)]
    document = seal(value)
    image = image_of(layout, contents)
    packs = [memoryview(image)] if layout.packs else []
    digests = {
        extent.digest: xxhash.xxh3_128_hexdigest(image[extent.offset :][: extent.size])
        for extent in extents(decode_table(document, "a new table"))
    }
    return document, packs, tuple(digests[index] for index in range(len(digests)))
