"""A checkpoint of a store in another library's format: streamed, and there at once or not."""

import json
import logging
import os
import shutil
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from everstep.errors import Conflict, Missing, Unavailable
from everstep.format.dtypes import ITEM_SIZES
from everstep.format.manifest import CheckpointName
from everstep.format.packs import in_groups
from everstep.interchange.dcp import write_dcp
from everstep.interchange.deepspeed import write_universal
from everstep.interchange.safetensors import header_of
from everstep.interchange.state_dicts import StateDicts
from everstep.interchange.torch_files import StandIn, write_torch
from everstep.restore.load import Loader
from everstep.restore.whole import Whole
from everstep.sharding.leaves import bytes_of
from everstep.store.copy import Progress
from everstep.tiers.disk import Disk
from everstep.tiers.tier import Tier

log = logging.getLogger("everstep")

_CONFIG, _FILE = "config.json", "checkpoint.pt"
_BESIDE = ["generation_config.json", "tokenizer*", "vocab*", "merges.txt", "*.model"]
_BESIDE += ["special_tokens_map.json", "added_tokens.json", "chat_template*"]
_BESIDE += ["preprocessor_config.json", "processor_config.json"]
_SAID = {"part": "part", "dtype": "dtype", "shard_bytes": "shard-size", "beside": "config"}
_DTYPES = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Options:
    """`part`: whose weights, without its name (None: see each format). `dtype`: of what are
    floating-point numbers (None: as it is). `beside`: a config.json, folders that have one and a
    tokenizer's files."""

    part: str | None = None
    dtype: str | None = None
    shard_bytes: int = 5_000_000_000  # as transformers has it
    beside: Sequence[Path] = ()

    def __post_init__(self) -> None:
        """Raises ValueError, Missing."""
        if self.dtype not in (None, *_DTYPES):
            raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, not {self.dtype!r}")
        for path in self.beside:
            if not path.exists():
                raise Missing(f"exporting with {path}: there is no such file or folder")


def export(
    disk: Tier,
    name: CheckpointName,
    target: Path,
    kind: str,
    options: Options,
    progress: Progress = lambda done, total: None,
) -> "Export":
    """Write a checkpoint to the new folder `target`; blocks. `kind`: one of FORMATS. The store is
    only read.

    Takes memory for two of the largest tensors; of a step that is a log for the whole state.
    Raises Missing, Corrupt, Conflict where there is something, Unavailable, Unsupported, ValueError
    for options that the format has no use for.
    """
    write, takes = FORMATS[kind]
    for each in fields(options):
        if each.name not in takes and getattr(options, each.name) != each.default:
            raise ValueError(f"exporting to {kind}: there is no use for --{_SAID[each.name]}")
    with Loader() as loader:
        whole = Whole(disk, name, loader)
        if streams := ", ".join(whole.manifest.streams):
            log.warning(
                "exporting %s of %s: streams stay where they are: %s", name, disk.root, streams
            )
        with _new_folder(target) as folder:
            export = Export(whole, folder, options, progress)
            write(export)
    return export


@contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """A folder to be filled, which becomes `target` when this ends, durably; nothing is left of it
    after an error. Raises Conflict where there is something, Unavailable."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise Conflict(f"exporting to {target}: there is something. Name another place")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(".tmp", f".{target.name}.", target.parent) as made:
            draft = Path(made, target.name)
            draft.mkdir()
            yield draft
            disk = Disk(draft)
            for each in (draft, *draft.rglob("*")):
                (disk.sync if each.is_dir() else disk.settle)(str(each.relative_to(draft)))
            os.rename(draft, target)
        Disk(target.parent).sync("")
    except OSError as error:
        raise Unavailable(f"exporting to {target}: {error.strerror or error}") from error


@dataclass(slots=True)
class Export:
    """One on its way, and what it came to."""

    whole: Whole
    folder: Path
    options: Options
    progress: Progress
    total: int = 0
    """Bytes of all that it is to have."""
    count: int = 0
    """Of tensors so far."""
    bytes: int = 0
    left_out: list[str] = field(default_factory=list)
    """What the format does without: other names of tensors (tied weights)."""

    def dtype(self, name: str) -> str:
        """That which the tensor gets."""
        dtype = self.whole.entries[name].spec.dtype
        return self.options.dtype if self.options.dtype and dtype in _DTYPES else dtype

    def size(self, name: str) -> int:
        """Bytes of the tensor there."""
        spec = self.whole.entries[name].spec
        return spec.size // ITEM_SIZES[spec.dtype] * ITEM_SIZES[self.dtype(name)]

    def tensors(self, names: Sequence[str]) -> Iterator[torch.Tensor]:
        """Read and converted, one after another."""
        for name, tensor in self.whole.read(names):
            self.count += 1
            self.bytes += self.size(name)
            self.progress(self.bytes, self.total)
            yield tensor.to(getattr(torch, self.dtype(name)))

    def tree(self, *, by_name: bool) -> dict[str, Any]:
        """See StateDicts; all tensors are in it."""
        self.total = sum(map(self.size, self.whole.entries))
        return StateDicts(self.whole, self._stand_in).tree(by_name=by_name)

    def _stand_in(self, name: str, device: str) -> StandIn:
        return StandIn.make(self.dtype(name), self.whole.entries[name].spec.shape, name)


def to_safetensors(export: Export) -> None:
    """All tensors under their names in the state, or without it those of `part`'s weights."""
    whole, part = export.whole, export.options.part
    _to_shards(export, {name: name for name in whole.entries} if part is None else whole.part(part))


def to_hf(export: Export) -> None:
    """A model's weights, as from_pretrained() takes them, and what is beside them."""
    _to_shards(export, export.whole.part(export.options.part))
    for path in export.options.beside:
        if path.is_file():
            shutil.copyfile(path, export.folder / _CONFIG)
        else:
            for pattern in (_CONFIG, *_BESIDE):
                for each in filter(Path.is_file, path.glob(pattern)):
                    shutil.copyfile(each, export.folder / each.name)
    config = export.folder / _CONFIG
    if export.options.dtype and config.exists():
        said = json.loads(config.read_bytes())
        said |= {key: export.options.dtype for key in ("dtype", "torch_dtype") if key in said}
        config.write_text(f"{json.dumps(said, indent=2)}\n")


def _to_shards(export: Export, chosen: Mapping[str, str]) -> None:
    """`chosen`: name there → in the state. Tied ones are left out: files hold no tensor twice."""
    entries, firsts = export.whole.entries, set(chosen.values())
    tied = ((alias, name) for name in firsts for alias in entries[name].aliases)
    export.left_out = [f"{alias!r}: tied to {name!r}" for alias, name in sorted(tied)]
    sizes = ((name, export.size(of)) for name, of in chosen.items())
    shards = in_groups(sizes, export.options.shard_bytes) or [[]]
    export.total = sum(map(export.size, chosen.values()))
    index: dict[str, str] = {}
    for number, shard in enumerate(shards):
        of_shards = f"-{number + 1:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        name = f"model{of_shards}.safetensors"
        # By falling size of items: so each lies on a multiple of it.
        shard.sort(key=lambda name: (-ITEM_SIZES[export.dtype(chosen[name])], name))
        shapes = {n: (export.dtype(chosen[n]), entries[chosen[n]].spec.shape) for n in shard}
        with (export.folder / name).open("xb") as file:
            file.write(header_of(shapes))
            for tensor in export.tensors([chosen[name] for name in shard]):
                file.write(bytes_of(tensor).numpy().data)
        index |= dict.fromkeys(shard, name)
    if len(shards) > 1:
        said: dict[str, Any] = {"metadata": {"total_size": export.total}, "weight_map": index}
        path = export.folder / "model.safetensors.index.json"
        path.write_text(f"{json.dumps(said, indent=2)}\n")


FORMATS: dict[str, tuple[Callable[[Export], None], Container[str]]] = {
    "dcp": (lambda e: write_dcp(e.folder, e.tree(by_name=True), e.tensors), {"dtype"}),
    "hf": (to_hf, _SAID),
    "safetensors": (to_safetensors, {"part", "dtype", "shard_bytes"}),
    "torch": (lambda e: write_torch(e.folder / _FILE, e.tree(by_name=False), e.tensors), {"dtype"}),
    "ucp": (lambda e: write_universal(e.folder, e.whole, e.tree(by_name=True), e.tensors), ()),
}
"""What each writes, and the options that it has a use for."""
