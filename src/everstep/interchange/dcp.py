"""Directories of torch.distributed.checkpoint, and of what writes such ones (FSDP, Accelerate).

.metadata is a pickle of names, sizes, and where each piece lies; a piece is a small file of
torch.save inside of a larger one.
"""

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.storage import WriteResult

from everstep.errors import Corrupt, Missing, Unsupported
from everstep.format.boxes import Box
from everstep.interchange.pickles import Inert, dtype_of, read_pickle
from everstep.interchange.tensors import Found, Part, Stretch, lengths, named
from everstep.interchange.torch_files import Read, load, load_piece, pickled, write_archive

METADATA, _FILE = ".metadata", "__0_0.distcp"
_COMMON = "common.pt"
"""Of Megatron-core's `torch_dist`: what is no tensor of one rank or another."""
_PATH_MAX = 64
_GAPS_MAX = 64


def is_any(folder: Path) -> bool:
    """Whether it is such a directory."""
    return (folder / METADATA).is_file()


def read_tree(folder: Path) -> dict[str, Any]:
    """The state dict that was saved: nested as it was, tensors as Found. Raises Missing, Corrupt,
    Unsupported."""
    path = folder / METADATA
    if not is_any(folder):
        raise Missing(f"reading {folder}: it has no {METADATA}")
    said = read_pickle(Stretch(path, 0, path.stat().st_size), {})
    lies: dict[tuple[str, Any], Inert] = {}
    for index, info in said.get("storage_data").items():
        name, offset = index.get("fqn"), index.get("offset")
        if type(name) is not str:  # hashing what is nested deeply takes the process's stack
            raise TypeError("something whose name is no text")
        lies[name, offset if offset is None else lengths(offset)] = info
    flat: dict[str, Any] = {}
    for name, each in said.get("state_dict_metadata").items():
        if each.kind.endswith(".TensorStorageMetadata"):
            flat[name] = _tensor(folder, name, each, lies)
        else:
            flat[name] = load_piece(_place(folder, lies[name, None]))
    made = nested(flat, said.get("planner_data"))
    return {**load(folder / _COMMON), **made} if (folder / _COMMON).is_file() else made


def _tensor(folder: Path, name: str, said: Inert, lies: Mapping[tuple[str, Any], Inert]) -> Found:
    properties = said.get("properties")
    dtype = properties.state[0] if isinstance(properties.state, tuple) else properties.get("dtype")
    kind, shape, parts = dtype_of(dtype), lengths(said.get("size")), []
    for chunk in said.get("chunks"):
        box = Box(lengths(chunk.get("offsets")), lengths(chunk.get("sizes")))
        parts.append(_part(_place(folder, lies[name, box.offsets]), name, kind, box))
    return Found(kind, shape, tuple(parts))


def _part(place: Stretch, name: str, dtype: str, box: Box) -> Part:
    def blocks() -> Iterator[memoryview]:
        found = load_piece(place)
        if not isinstance(found, Found) or (found.dtype, found.shape) != (dtype, box.lengths):
            raise Corrupt(f"reading {place}: it is not the piece {box} of {name!r}")
        for part in found.parts:
            yield from part.blocks()

    return Part(box, blocks)


def _place(folder: Path, info: Inert) -> Stretch:
    """Where an item lies."""
    path = named(folder, info.get("relative_path"), folder)
    if info.get("transform_descriptors"):
        raise Unsupported(f"reading {path}: it was transformed when it was saved")
    return Stretch(path, *lengths((info.get("offset"), info.get("length"))))


def nested(flat: Mapping[str, Any], paths: Any) -> dict[str, Any]:
    """The state dict that a planner has made flat; `paths`: what it said of where each name was, in
    their order, if it did. Raises what nonsense comes to (tensors.reading)."""
    tree: dict[Any, Any] = {}
    paths = paths if isinstance(paths, dict) else {}
    for name in dict.fromkeys([name for name in (*paths, *flat) if name in flat]):
        way = paths.get(name, (name,))
        if not 0 < len(way) <= _PATH_MAX or not all(type(each) in (str, int) for each in way):
            raise ValueError(f"{way!r:.80} is no place in a state dict")
        at = tree
        for each in way[:-1]:
            at = at.setdefault(each, {})
        at[way[-1]] = flat[name]
    made = _with_lists(tree)
    if not isinstance(made, dict):
        raise TypeError("its top is no dict")
    return made


def _with_lists(tree: Any) -> Any:
    """What has numbers for keys as lists; None is where something empty was, as torch has it."""
    if type(tree) is not dict:
        return tree
    made = {key: _with_lists(each) for key, each in tree.items()}
    if made and all(type(key) is int for key in made):
        if not 0 <= min(made) <= max(made) < _GAPS_MAX * len(made):
            raise ValueError("a list with gaps")
        return [made.get(index) for index in range(max(made) + 1)]
    return made


def write_dcp(folder: Path, tree: dict[str, Any], read: Read) -> None:
    """A new directory of that state dict, for dcp.load. Raises OSError."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(tree, is_coordinator=True)
    (plan,), metadata = planner.create_global_plan([planner.create_local_plan()])
    values = [planner.lookup_object(item.index) for item in plan.items]
    tensors = read([name for each in values for name in pickled(each)[1]])
    found = []
    with (folder / _FILE).open("xb") as file:
        for item, each in zip(plan.items, values, strict=True):
            start = file.tell()
            write_archive(file, each, lambda names: islice(tensors, len(names)))
            size = file.tell() - start
            found.append(WriteResult(item.index, size, _StorageInfo(_FILE, start, size)))
    FileSystemWriter(folder, sync_files=False).finish(metadata, [found])
