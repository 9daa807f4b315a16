"""torch.distributed.checkpoint on stores of everstep: its storage layer, in the place of
FileSystemWriter and FileSystemReader.

    from everstep.integrations.dcp import StorageReader, StorageWriter

    dcp.save(state_dict, storage_writer=StorageWriter("runs/gpt", step=5000))  # async_save, too
    dcp.load(state_dict, storage_reader=StorageReader("runs/gpt", step=5000))

DCP plans, and its ranks talk, as they do with its own; only where bytes go is another matter:

    all ranks      local plan ──────────────▶ packs and a piece table, durable ──▶ their part
    coordinator    all plans ──▶ an epoch ──────────────────────────── all parts ──▶ the manifest

Invariants:
* What one rank could not write, or nobody wrote, is an error of the save, and there is no
  checkpoint. Each rank has a part of its own.
* Nothing is pickled into a store, nor unpickled from it. What DCP pickles (`load_bytes`) is made
  anew here, of tagged JSON.
* DCP is told that each tensor is one chunk: where its pieces lie is known to their tables alone.
"""

import dataclasses
import inspect
import io
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import LoadItemType, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from everstep.errors import Conflict, EverstepError, Mismatch, Missing, Unsupported
from everstep.format.boxes import Box
from everstep.format.global_tensors import index_of
from everstep.format.manifest import CheckpointName, Manifest, Part
from everstep.format.merge import unite_tables
from everstep.format.packs import lay_out
from everstep.format.tables import FileLink, TensorEntry, encode_table
from everstep.interchange.state_dicts import PLANNER, StateDicts
from everstep.interchange.torch_files import StandIn, write_archive
from everstep.keeper.data import Data, Image, parse
from everstep.keeper.home import check_no_writer
from everstep.keeper.persist import apply_retention
from everstep.keeper.writer import Writer
from everstep.restore.load import Loader, gathered
from everstep.restore.materialize import packs_of
from everstep.restore.store import Store
from everstep.restore.whole import Whole
from everstep.sharding.layout import LocalBox, is_dtensor
from everstep.sharding.leaves import Leaf, check_tensor, dtype_name
from everstep.sharding.topology import topology
from everstep.sharding.world import group_size
from everstep.state.objects import Json, device_of, encode, place_of
from everstep.store import catalog, commit
from everstep.store.names import parse_checkpoint
from everstep.store.presence import living
from everstep.store.retain import Keep
from everstep.tiers.tier import Tier, tier_at

Path = str | os.PathLike[str]
_OF_FILES = inspect.signature(dcp.FileSystemWriter).parameters.keys()
"""The options of FileSystemWriter; somebody may put StorageWriter in its place later."""


def split_id(checkpoint_id: Path) -> tuple[str, str | None]:
    """Store and step of a `checkpoint_id`: STORE, STORE@STEP, or STORE@STEP-EPOCH."""
    text = os.fspath(checkpoint_id)
    store, at, step = text.rpartition("@")
    is_step = step.isdecimal() or parse_checkpoint(step) is not None
    return (store, step) if at and store and is_step else (text, None)


class _Storage:
    """What a writer and a reader are set to: a store, and a step of it (None: the next, or the
    latest). The store may be named as STORE@STEP, too."""

    def __init__(self, path: Path | None = None, step: int | str | None = None) -> None:
        """`path`: the store. `step`: None: see above; a step; to load also a tag, or "120-3"."""
        self._store = None if path is None else os.fspath(path)
        self._step = self._default_step = step
        self.reset(path if step is None else None)

    def reset(self, checkpoint_id: Path | None = None) -> None:
        """DCP calls it with the `checkpoint_id` of a save or load, which counts from then on."""
        self.save_id = self.load_id = secrets.token_hex(8)
        if checkpoint_id is not None:
            self._store, step = split_id(checkpoint_id)
            self._step = self._default_step if step is None else step

    @property
    def store(self) -> str:
        """The store. Raises ValueError where there is none."""
        if self._store is None:
            raise ValueError("neither a store was given nor a checkpoint_id, STORE or STORE@STEP")
        return self._store

    @property
    def checkpoint_id(self) -> str:
        """As it may be given to DCP, unless the step is a tag."""
        return self.store if self._step is None else f"{self.store}@{self._step}"

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path) -> bool:
        """Whether it can be one of these: a directory, or a bucket of a known kind."""
        try:
            tier_at(split_id(checkpoint_id)[0])
        except Unsupported:
            return False
        return bool(os.fspath(checkpoint_id))


# ---- save ----------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class _Written:
    """What a rank has written of a checkpoint, durably: a part, with that piece table; and the
    objects that were its to write, as tagged JSON, of which `streams` are io.BytesIO."""

    name: CheckpointName
    part: Part | None = None
    table: bytes = b""
    objects: dict[str, Json] = dataclasses.field(default_factory=dict)
    streams: list[str] = dataclasses.field(default_factory=list)


class StorageWriter(_Storage, dcp.StorageWriter):
    """Saves to a store of everstep. It can be pickled, for async_save by a process.

    Each object of it is one writer, with one epoch: once another one has saved, it gets Conflict.
    """

    def __init__(
        self,
        path: Path | None = None,
        step: int | None = None,
        *,
        keep: Keep | None = None,
        **of_files: Any,
    ) -> None:
        """`path`: the store. `step`: None for the one after the latest. `keep`: what stays of the
        store after each save; all without it. `of_files`: options of FileSystemWriter, which change
        nothing here: a save is always durable, and overwrites nothing. Raises TypeError for others,
        and for those that would transform what is stored (`_extensions`)."""
        if of_files.pop("_extensions", None):
            raise TypeError("StorageWriter transforms nothing: leave _extensions out")
        if unknown := sorted(of_files.keys() - _OF_FILES):
            raise TypeError(f"StorageWriter has no option {unknown[0]!r}")
        super().__init__(path, step)
        self._keep = keep
        self._id = secrets.token_hex(16)
        self._token = ""
        """Of each save another one."""
        self._rank: int | None = None
        self._name: CheckpointName | None = None
        """What the coordinator has claimed; None on other ranks."""
        self._parent: CheckpointName | None = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """On all ranks. Raises Unsupported where they would not talk."""
        if not kwargs.get("use_collectives", True) and group_size() > 1:
            raise Unsupported(
                f"saving to {self.store} with use_collectives=False: a checkpoint is of all ranks "
                f"or does not exist, so that they have to talk. Leave that argument out"
            )
        self._token = secrets.token_hex(8)
        self._rank, self._name = kwargs.get("rank"), None

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        """On all ranks: mark the plan as one of this save."""
        return dataclasses.replace(plan, storage_data=self._token)

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        """On the coordinator: claim the checkpoint, and tell all. Raises Conflict, Unavailable."""
        name = self._claim(tier_at(self.store))
        return [dataclasses.replace(plan, storage_data=(plan.storage_data, name)) for plan in plans]

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        """On all ranks: write what the plan has, durably; blocks. Raises Mismatch, Unsupported,
        Unavailable."""
        disk, written = tier_at(self.store), _Written(self._name_of(plan))
        leaves = _collect(plan, planner, written)
        _discard_left(disk, self._rank)
        if leaves or self._name:  # a checkpoint has one part at least: the coordinator's
            part, written.table = _write(disk, written.name, leaves)
            written.part = part
            _last_packs[str(disk.root), self._rank] = written.name, part.packs
        size = written.part.size if written.part else 0
        return _done([WriteResult(MetadataIndex(""), size, written)])

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: publish what all have written. Raises Conflict, Mismatch,
        Unsupported, Unavailable; then there is no checkpoint."""
        name, disk = self._name, tier_at(self.store)
        assert name, "prepare_global_plan comes first"
        written = [each.storage_data for result in results for each in result]
        try:
            commit.publish(disk, self._manifest(disk, name, metadata, written))
        except BaseException:
            links = [link for each in written if each.part for link in each.part.packs]
            commit.discard_packs(disk, name, [link.path for link in links])
            raise
        metadata.storage_meta, metadata.version = self.storage_meta(), CURRENT_DCP_VERSION
        apply_retention(Writer(disk, self._keep))

    def storage_meta(self) -> StorageMeta:
        """What planners are told."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def _claim(self, disk: Tier) -> CheckpointName:
        """The checkpoint to be written. Raises Conflict where it is not the newest, or somebody
        else is writing."""
        what = f"saving to {disk.root} with torch.distributed.checkpoint"
        check_no_writer(self.store, what, living(disk))
        commit.open_store(disk)
        before = catalog.committed(disk)
        self._parent = next(catalog.newest_first(disk), None)
        step = self._step_after(disk, self._parent)
        epoch = commit.claim_epoch(disk, self._parent, self._id)
        if ended := set(catalog.committed(disk)).difference(before):
            # Another save has ended meanwhile, and would be left behind. From here on none can.
            self._parent, self._id = max(ended), secrets.token_hex(16)
            epoch = commit.claim_epoch(disk, self._parent, self._id)
            step = self._step_after(disk, self._parent)
        commit.check_epoch(disk, epoch, step)
        self._name = CheckpointName(step, epoch)
        return self._name

    def _step_after(self, disk: Tier, newest: CheckpointName | None) -> int:
        """The step to be saved, after the newest one. Raises Conflict, ValueError."""
        if self._step is None:
            return newest.step + 1 if newest else 1
        if not str(self._step).isdecimal():
            raise ValueError(f"a save needs a step, from 0 on, not {self._step!r}")
        if newest and int(self._step) <= newest.step:
            raise Conflict(
                f"saving to {disk.root} with torch.distributed.checkpoint: step {self._step} is "
                f"not above its newest one, {newest.step}. Save a later step, or to another store; "
                f"to go back for good, delete what is later first (everstep rm {disk.root} "
                f"{newest})"
            )
        return int(self._step)

    def _name_of(self, plan: dcp.SavePlan) -> CheckpointName:
        """What this rank writes for. A planner that caches plans gives one of an earlier save: then
        it is told from the store, in which the coordinator's claim is the newest."""
        if self._name:
            return self._name
        match plan.storage_data:
            case (self._token, CheckpointName() as name):
                return name
        disk = tier_at(self.store)
        step = self._step_after(disk, next(catalog.newest_first(disk), None))
        return CheckpointName(step, catalog.newest_epoch(disk))

    def _manifest(
        self, disk: Tier, name: CheckpointName, metadata: dcp.Metadata, written: Sequence[_Written]
    ) -> Manifest:
        """Of what all have written. Raises Conflict, Mismatch, Unsupported."""
        if others := {each.name for each in written} - {name}:
            raise Conflict(
                f"saving {name} to {disk.root}: some ranks took it for {sorted(others)[0]}, as "
                f"another save has begun, or as they see the store as it was before. Await a save "
                f"before the next one begins, and save without enable_plan_caching"
            )
        ranks = [(rank, each) for rank, each in enumerate(written) if each.part]
        parts = [dataclasses.replace(each.part, rank=rank) for rank, each in ranks if each.part]
        tables = [(f"rank {rank}", parse(each.table).table) for rank, each in ranks]
        found = unite_tables(tables, are_all=True)
        for key, each in metadata.state_dict_metadata.items():
            is_tensor = isinstance(each, dcp.TensorStorageMetadata) and each.size.numel() > 0
            if is_tensor and key not in found:
                raise Mismatch(f"saving {key!r}: nobody wrote it. A rank that has it must save it")
        objects = {key: value for each in written for key, value in each.objects.items()}
        said = {
            "data": metadata.planner_data,
            "streams": [key for each in written for key in each.streams],
            "version": CURRENT_DCP_VERSION,
            "save_id": self.save_id,
        }
        objects[PLANNER] = encode(said, PLANNER, _no_tensor)
        return Manifest(
            step=name.step,
            epoch=name.epoch,
            run=catalog.read_run(disk),
            created=commit.now(),
            parts=tuple(parts),
            objects=objects,
            hyperparameters={},
            parent=self._parent and self._parent._asdict(),
            topology=topology(len(written), "dcp"),
            capture={"library": "torch.distributed.checkpoint"},
            index=index_of([table for _, table in tables]),
        )


_last_packs: dict[tuple[str, int | None], tuple[CheckpointName, Sequence[FileLink]]] = {}
"""By store and rank, what this process has written last: it is not told whether that was
published."""


def _discard_left(disk: Tier, rank: int | None) -> None:
    """Delete what a save has left here that failed on another rank: on a disk that is full, it
    would fail for ever. The next one has begun, so that nobody publishes it any more."""
    name, packs = _last_packs.pop((str(disk.root), rank), (CheckpointName(0, 0), ()))
    if packs and not catalog.is_there(disk, name):
        with disk.locked(exclusive=True):
            commit.discard_packs(disk, name, [pack.path for pack in packs])


def _collect(plan: dcp.SavePlan, planner: dcp.SavePlanner, written: _Written) -> dict[str, Leaf]:
    """The tensors of a rank's plan, or boxes of them, by their entries; its objects go to
    `written`. Raises Mismatch, Unsupported."""
    leaves: list[Leaf] = []

    def sink(name: str, tensor: torch.Tensor) -> str:
        if is_dtensor(tensor):
            raise Unsupported(
                f"saving {name!r}: it is a DTensor within an object. Let the planner flatten the "
                f"state dict (DefaultSavePlanner(flatten_state_dict=True))"
            )
        leaves.append(Leaf(name, tensor.detach()))
        return name

    for item in plan.items:
        if item.type != WriteItemType.BYTE_IO:
            leaves.append(_leaf_of(item, planner))
            continue
        key, value = item.index.fqn, _object_of(item, planner)
        if key == PLANNER:
            raise Unsupported(f"saving {key!r}: a checkpoint has its own object there. Rename it")
        if type(value) is io.BytesIO:
            written.streams.append(key)
            value = value.getvalue()
        written.objects[key] = encode(value, key, sink)
    found: dict[str, Leaf] = {}
    for leaf in leaves:
        check_tensor(leaf.name, leaf.tensor)
        if found.setdefault(leaf.entry, leaf) is not leaf:
            raise Unsupported(f"saving {leaf.entry!r}: two tensors have this name. Rename one")
    return found


def _leaf_of(item: dcp.WriteItem, planner: dcp.SavePlanner) -> Leaf:
    """What the planner has for a tensor, or a box of one. Raises Mismatch."""
    data: Any = planner.resolve_data(item)
    data = data.wait() if hasattr(data, "trigger_wait") else data  # still on its way
    key, said = item.index.fqn, item.tensor_data
    assert said is not None, "a planner says what a tensor is"
    planned = said.properties.dtype, tuple(said.chunk.sizes)
    if (data.dtype, tuple(data.shape)) != planned:
        raise Mismatch(
            f"saving {key!r}: it is {data.dtype} of shape {tuple(data.shape)}, the planner had "
            f"announced {planned[0]} of shape {planned[1]}. Let create_local_plan say what "
            f"resolve_data gives"
        )
    box = Box(tuple(said.chunk.offsets), planned[1])
    return Leaf(key, data.detach(), None, box, tuple(said.size))


def _object_of(item: dcp.WriteItem, planner: dcp.SavePlanner) -> Any:
    """What is no tensor, as it is; of a planner that makes bytes of its own, as torch reads them
    without running anything. Raises Unsupported."""
    if isinstance(planner, dcp.DefaultSavePlanner):
        kind, usual = type(planner), dcp.DefaultSavePlanner
        own = (kind.resolve_data, kind.transform_object)
        if own == (usual.resolve_data, usual.transform_object):
            return planner.lookup_object(item.index)
    data: Any = planner.resolve_data(item)
    try:
        data.seek(0)
        return torch.load(data, weights_only=True)
    except Exception as error:
        raise Unsupported(
            f"saving {item.index.fqn!r}: the bytes that {type(planner).__qualname__} makes of it "
            f"are not what torch.load(weights_only=True) reads, and pickles are not stored: {error}"
        ) from error


def _no_tensor(name: str, tensor: object) -> str:
    raise Unsupported(f"saving {name!r}: what a planner says cannot have tensors in it")


def _write(disk: Tier, name: CheckpointName, leaves: Mapping[str, Leaf]) -> tuple[Part, bytes]:
    """Write a rank's packs and their table, durably, and return it; blocks. What was written in
    vain is deleted."""
    layout = lay_out([leaf.spec for leaf in leaves.values()])
    devices = {leaf.name: place_of(leaf.tensor.device) for leaf in leaves.values()}
    table = encode_table(layout, {}, devices, {})
    packs = list(packs_of(layout, {entry: leaf.tensor for entry, leaf in leaves.items()}))
    data = Data(Writer(disk, None), Image(parse(table), packs), is_record=False)
    with data.durable(name):
        commit.write_table(disk, table)
    return data.part(name.step), table


# ---- load ----------------------------------------------------------------------------------------


class StorageReader(_Storage, dcp.StorageReader):
    """Loads from a store of everstep, whoever wrote it: a StorageWriter, or a Checkpointer. A log's
    step is replayed by each rank, in memory: `everstep materialize` what is loaded often."""

    def reset(self, checkpoint_id: Path | None = None) -> None:
        """See _Storage; what was read before is read anew."""
        super().reset(checkpoint_id)
        self._opened: _State | None = None
        self._failure: EverstepError | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """What the checkpoint has: of a log step, what a replay comes to. Raises Missing, Corrupt;
        Unsupported for a log that only its own program can replay.

        DCP lets these go, asks for those of a `rank` next, and fails without a reason: so it gets
        nothing then, and the reason when it goes on.
        """
        if "rank" in kwargs and self._failure:
            return dcp.Metadata({})
        try:
            self._opened = state = _State(Store(self.store), self._step)
        except EverstepError as error:
            self._failure = error
            raise
        self._failure = None
        found: dict[str, Any] = {name: _metadata_of(each) for name, each in state.flat.items()}
        meta = StorageMeta(self.checkpoint_id, state.said.get("save_id"), self.load_id)
        return dcp.Metadata(found, state.paths, {}, meta, state.said.get("version"))

    def set_up_storage_reader(
        self, metadata: dcp.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """On all ranks. Raises what `read_metadata` did."""
        if self._failure:
            raise self._failure

    def prepare_local_plan(self, plan: dcp.LoadPlan) -> dcp.LoadPlan:
        """On all ranks."""
        assert self._opened, "read_metadata comes first"
        return dataclasses.replace(plan, storage_data=str(self._opened.name))

    def prepare_global_plan(self, plans: list[dcp.LoadPlan]) -> list[dcp.LoadPlan]:
        """On the coordinator. Raises Conflict where ranks would load different steps."""
        found = sorted({str(plan.storage_data) for plan in plans} - {"None"})
        if len(found) > 1:
            raise Conflict(
                f"loading the latest step of {self.store}: for some ranks that is {found[0]}, for "
                f"others {found[-1]}, as one was saved meanwhile. Try again, or say which (step=)"
            )
        return plans

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Future[None]:
        """On all ranks: fill the planner's tensors, and give it its objects; each byte is verified
        on the way. Blocks; what was read of the checkpoint before is let go of. Raises Missing,
        Mismatch, Corrupt, Unavailable."""
        state, self._opened = self._opened, None
        assert state, "read_metadata comes first"
        items = [item for item in plan.items if item.type == LoadItemType.TENSOR]
        targets = [(item, planner.resolve_tensor(item).detach()) for item in items]
        with state.loader:
            state.whole.fill(gathered(state.place(*target) for target in targets))
            for target in targets:
                planner.commit_tensor(*target)
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, state.pickled(item.storage_index.fqn))
        return _done(None)


class _State:
    """A checkpoint's whole state, as DCP has it."""

    def __init__(self, store: Store, step: int | str | None) -> None:
        """Raises Missing, Corrupt, Unsupported."""
        disk = tier_at(store.path)
        self.name = catalog.find(disk, step)
        self.loader = Loader()
        self.whole = Whole(disk, self.name, self.loader, catalog.read_whole(disk, self.name))
        dicts = StateDicts(self.whole, self._stand_in)
        self.said, (self.flat, self.paths) = dicts.said, dicts.flat()

    def _stand_in(self, name: str, device: str) -> StandIn:
        spec = self.whole.entries[name].spec
        return StandIn.make(spec.dtype, spec.shape, name, str(device_of(device)))

    def place(self, item: dcp.ReadItem, target: torch.Tensor) -> tuple[TensorEntry, LocalBox]:
        """A box of a stored tensor, and where it goes. Raises Missing; Mismatch where it does not
        fit."""
        name = item.storage_index.fqn
        stand_in = self.flat.get(name)
        if type(stand_in) is not StandIn:
            root = self.whole.disk.root
            raise Missing(f"loading {name!r} from {self.name} of {root}: it has no such tensor")
        entry, box = (
            self.whole.entries[stand_in.of],
            Box(tuple(item.storage_offsets), tuple(item.lengths)),
        )
        found = dtype_name(target.dtype), tuple(target.shape)
        if found != (entry.spec.dtype, box.lengths):
            raise Mismatch(
                f"loading {entry.spec.name!r}: it is stored as {entry.spec.dtype}, {box} of shape "
                f"{entry.spec.shape}; what it is loaded into is {found[0]} of shape {found[1]}. "
                f"Load it into a tensor of that dtype, and convert it afterwards"
            )
        return entry, LocalBox(box, target)

    def pickled(self, name: str) -> io.BytesIO:
        """An object, with the tensors in it, for a planner's `load_bytes`, which unpickles it at
        once. Raises Corrupt."""
        data, read = io.BytesIO(), self.whole.read
        write_archive(data, self.flat[name], lambda names: (each for _, each in read(names)))
        data.seek(0)
        return data


def _metadata_of(value: Any) -> dcp.TensorStorageMetadata | dcp.BytesStorageMetadata:
    """Of a tensor as one chunk."""
    if type(value) is not StandIn:
        return dcp.BytesStorageMetadata()
    size = value.shape
    chunk = dcp.ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return dcp.TensorStorageMetadata(TensorProperties(dtype=value.dtype), size, [chunk])


def _done(value: Any) -> Future[Any]:
    found: Future[Any] = Future()
    found.set_result(value)
    return found
