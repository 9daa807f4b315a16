"""State that speaks for itself: objects with state_dict and load_state_dict, plain values,
generators."""

import logging
import random
import sys
from array import array
from collections.abc import Sequence
from functools import cache, lru_cache, partial
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from everstep.sharding.layout import is_dtensor
from everstep.sharding.leaves import Guard, Leaf
from everstep.sharding.ranked import unowned
from everstep.state.objects import TensorSink, as_stored, encode, references, tensors_in
from everstep.state.overlaps import settle
from everstep.state.placement import Placement

log = logging.getLogger("everstep")


@runtime_checkable
class Stateful(Protocol):
    """torch's own protocol for objects with state (torch.distributed.checkpoint.stateful)."""

    def state_dict(self) -> Any:
        """What the object needs to go on."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Go on from that."""


class AtTheCall:
    """A part of which nobody knows when its tensors change: they are taken with the objects, at the
    call."""

    def __init__(self, name: str) -> None:
        self.name = name

    def leaves(self, guard: Guard) -> list[Leaf]:
        """None."""
        return []


class StatefulState(AtTheCall):
    """Anything with state_dict and load_state_dict: schedulers, data loaders, an EMA,
    the user's own."""

    def __init__(self, name: str, value: Stateful) -> None:
        super().__init__(name)
        self._value = value

    def says(self, word: str) -> bool:
        """Whether it says this of itself: that each of several ranks has its own (`is_by_rank`),
        that records may do without its tensors (`is_in_bases_alone`)."""
        return getattr(self._value, word, False) is True

    def objects(self, sink: TensorSink) -> Any:
        """Its state_dict at this moment."""
        return encode(self._value.state_dict(), self.name, sink)

    def prepare(self, placement: Placement) -> None:
        """Its load_state_dict gets an equal state_dict, with DTensors where its own has some now,
        as torch.distributed.checkpoint does it."""
        dtensors = cache(self._dtensors)

        def check(state: Any) -> None:
            if not isinstance(state, dict) and isinstance(self._value.state_dict(), dict):
                problem = f"other: {self.name!r} has no state_dict in the checkpoint"
                placement.problems.append(problem)

        if state := placement.object_of(
            self.name, like=lambda name: dtensors().get(name), check=check
        ):
            placement.then(lambda: self._value.load_state_dict(state()))

    def _dtensors(self) -> dict[str, torch.Tensor]:
        """Those in its state_dict, by the names that they would be saved under. Empty, and nothing
        of it is called, where no process group is up."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return {}
        return {name: each for name, each in tensors_in(self.objects).items() if is_dtensor(each)}


_SCALER_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


def _check_scaler(state: Any) -> None:
    if not isinstance(state, dict) or (state and state.keys() != set(_SCALER_KEYS)):
        raise TypeError(f"{state!r} is no state of a scaler")
    if not all(isinstance(each, (int, float)) or each.numel() == 1 for each in state.values()):
        raise TypeError(f"{state!r} are not all numbers")


class ScalerState(AtTheCall):
    """GradScaler, whose own state_dict() synchronises the device:
    its scale and tracker are taken as tensors."""

    def __init__(self, name: str, scaler: GradScaler) -> None:
        super().__init__(name)
        self._scaler = scaler

    def objects(self, sink: TensorSink) -> Any:
        """The keys of its state_dict."""
        scaler = self._scaler
        if not scaler.is_enabled():
            return {}
        scale = scaler._scale if scaler._scale is not None else scaler._init_scale
        tracker = scaler._growth_tracker
        state = {
            "scale": scale,
            "growth_factor": scaler.get_growth_factor(),
            "backoff_factor": scaler.get_backoff_factor(),
            "growth_interval": scaler.get_growth_interval(),
            "_growth_tracker": tracker if tracker is not None else scaler._init_growth_tracker,
        }
        return encode(state, self.name, sink)

    def prepare(self, placement: Placement) -> None:
        """Through its load_state_dict, which wants numbers."""
        if (made := placement.object_of(self.name, check=_check_scaler)) is None:
            return
        state = made()
        if bool(state) != self._scaler.is_enabled():
            was = "enabled" if state else "disabled"
            placement.problems.append(f"scaler: {self.name!r} was {was} in the checkpoint")
        placement.then(lambda: self._load(state))

    def _load(self, state: dict[str, Any]) -> None:
        numbers = {
            key: value.item() if isinstance(value, torch.Tensor) else value
            for key, value in state.items()
        }
        if self._scaler.is_enabled():
            self._scaler.load_state_dict(numbers)


class ValueState(AtTheCall):
    """A value of the user's own: tensors, numbers, strings, nested in dicts and lists,
    put back in place.

    `holder` and `key` say where the value itself stands, so that a plain number can be put back
    too.
    """

    def __init__(self, name: str, holder: Any, key: Any) -> None:
        super().__init__(name)
        self._holder = holder
        self._key = key

    def objects(self, sink: TensorSink) -> Any:
        """The value as it is now."""
        return encode(self._holder[self._key], self.name, sink)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors in it, by the names under which they are stored."""
        return tensors_in(self.objects)

    def prepare(self, placement: Placement) -> None:
        """Dicts, lists, tensors and arrays keep their identity; the rest is replaced, and tensors
        in memory of others that got other bytes."""
        with as_stored(f"restoring {self.name!r}"):
            self._prepare(placement)

    def _prepare(self, placement: Placement) -> None:
        live: dict[str, torch.Tensor] = {}
        if (stored := placement.stored(self.name)) is not None:
            # One that each rank has for itself is called after the rank that wrote it.
            names, here = {unowned(name): name for name in references(stored)}, self.tensors()
            for name in sorted(here.keys() - names.keys()):
                placement.problems.append(f"missing: the checkpoint has no tensor {name!r}")
            live = {names[name]: tensor for name, tensor in here.items() if name in names}
        for name, tensor in live.items():
            if (overlap := placement.overlaps.get(id(tensor))) is None:
                placement.into(name, tensor)
                continue
            placement.into(name, restored := torch.empty_like(tensor))
            placement.then(partial(settle, overlap, restored))
        if value := placement.object_of(self.name, live):
            placement.then(lambda: self._install(value()))

    def _install(self, value: Any) -> None:
        self._holder[self._key] = _merge(self._holder[self._key], value)


class GeneratorState(AtTheCall):
    """torch.Generator, numpy's Generator or RandomState, random.Random."""

    def __init__(self, name: str, generator: Any, *, is_new: bool = False) -> None:
        """`is_new`: a checkpoint without it was written before it was saved."""
        super().__init__(name)
        self._generator = generator
        self._is_new = is_new

    def objects(self, sink: TensorSink) -> Any:
        """Its state."""
        generator = self._generator
        if isinstance(generator, (torch.Generator, np.random.RandomState)):
            return encode(generator.get_state(), self.name, sink)
        if isinstance(generator, random.Random):
            return encode(generator.getstate(), self.name, sink)
        return encode(generator.bit_generator.state, self.name, sink)

    def prepare(self, placement: Placement) -> None:
        """At the very end of the restore."""
        if self._is_new and not placement.saved.has(self.name):
            return
        if (seed := placement.seed(self.name)) is not None:
            placement.then(lambda: self._seed(seed), at_last=True)
        elif state := placement.object_of(self.name, check=self._check):
            placement.then(lambda: self._set(state()), at_last=True)

    def _check(self, state: Any) -> None:
        check_generator(self._generator, state)

    def _seed(self, seed: int) -> None:
        generator = self._generator
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        elif isinstance(generator, np.random.RandomState):
            generator.seed(seed % (1 << 32))
        elif isinstance(generator, random.Random):
            generator.seed(seed)
        else:
            generator.bit_generator.state = type(generator.bit_generator)(seed).state

    def _set(self, state: Any) -> None:
        generator = self._generator
        if isinstance(generator, torch.Generator):
            generator.set_state(state.cpu())
        elif isinstance(generator, np.random.RandomState):
            generator.set_state(state)
        elif isinstance(generator, random.Random):
            generator.setstate(state)
        else:
            generator.bit_generator.state = state


def check_generator(generator: Any, state: Any) -> None:
    """Raises what such a generator would for this state. Of torch's the bytes are still to come."""
    if isinstance(generator, torch.Generator):
        known = generator.get_state()
        if (state.dtype, state.shape) != (known.dtype, known.shape):
            raise ValueError(f"{state.dtype}{list(state.shape)} is no generator's state")
    elif isinstance(generator, np.random.Generator):
        type(generator.bit_generator)(0).state = state
    else:
        GeneratorState("", type(generator)(0))._set(state)


class GlobalGenerators(GeneratorState):
    """The random generators that training draws from: python's, numpy's,
    torch's on CPU and on each GPU."""

    def __init__(self) -> None:
        super().__init__("rng", None, is_new=True)

    def objects(self, sink: TensorSink) -> Any:
        """All their states; none of the calls synchronises a device."""
        kind, words, *rest = cast(tuple[Any, ...], np.random.get_state())
        state: dict[str, Any] = {"torch": torch.get_rng_state()}
        if torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state_all()
            state["cuda_current"] = torch.cuda.current_device()
        seldom = {
            "python": _encoded_python(random.getstate()),
            "numpy": _encoded_numpy(kind, words.tobytes(), *rest),
        }
        return encode(state, self.name, sink) | seldom

    def _check(self, state: Any) -> None:
        if not isinstance(state, dict):
            raise TypeError(f"{state!r} has no generators")
        check_generator(random.Random(0), python_state_of(state))
        check_generator(torch.default_generator, state["torch"])
        if "numpy" in state:
            check_generator(np.random.RandomState(0), state["numpy"])
        devices = [each.device for each in state.get("cuda", ())]
        if (current := state.get("cuda_current")) is not None:
            devices[current]

    def _seed(self, seed: int) -> None:
        random.seed(seed)
        torch.manual_seed(seed)  # of each GPU, too
        np.random.seed(seed % (1 << 32))

    def _set(self, state: dict[str, Any]) -> None:
        set_host_generators(state)
        if torch.cuda.is_available() and "cuda" in state:
            set_on_gpus(state["cuda"], state.get("cuda_current"))


def host_generators() -> dict[str, Any]:
    """The states of python's, numpy's, and torch's global generators, but for those of GPUs."""
    python = _packed(random.getstate())
    return {"python": python, "torch": torch.get_rng_state(), "numpy": np.random.get_state()}


def _packed(state: tuple[Any, ...]) -> tuple[Any, ...]:
    """Its 625 numbers as one array: a list is the longest part of a small state's JSON."""
    version, words, gauss = state
    return version, np.frombuffer(array("I", words), dtype=np.uint32), gauss


def _no_sink(path: str, tensor: torch.Tensor) -> str:
    raise TypeError(f"{path} has no tensors")


# Few programs draw from these two at each step, and to encode 2,500 bytes takes as long as to look
# at 200 tensors.
@lru_cache(maxsize=1)
def _encoded_python(state: tuple[Any, ...]) -> Any:
    return encode(_packed(state), "rng.python", _no_sink)


@lru_cache(maxsize=1)
def _encoded_numpy(kind: str, words: bytes, *rest: Any) -> Any:
    return encode((kind, np.frombuffer(words, np.uint32), *rest), "rng.numpy", _no_sink)


def set_host_generators(state: dict[str, Any]) -> None:
    """Put them back to where they were; numpy's, where it is in that state."""
    random.setstate(python_state_of(state))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        np.random.set_state(state["numpy"])


def python_state_of(state: dict[str, Any]) -> Any:
    """As random.setstate() takes it."""
    version, words, gauss = state["python"]
    return version, tuple(words.tolist()), gauss


_CANNOT_RESUME = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""torch's own: they have no state, and draw another order when they are skipped forward."""


class LoaderState(StatefulState):
    """A StatefulDataLoader.

    When it resumes, at the next iter(), it draws what the run that was interrupted drew when its
    epoch began: a seed, and the order. The generators from which it does are restored already, to
    where that run had come with them, so that it would draw twice, and the next epoch, or whatever
    else draws from the global generators, would differ. So they are put back once more.
    """

    def __init__(self, name: str, loader: Any) -> None:
        super().__init__(name, loader)
        self._loader = loader
        if isinstance(loader.sampler, _CANNOT_RESUME):
            log.warning(
                "%s: torchdata cannot resume torch's %s, which draws another order then. Use "
                "shuffle=True, or a sampler that has state_dict() and load_state_dict()",
                name,
                type(loader.sampler).__name__,
            )

    def prepare(self, placement: Placement) -> None:
        """As for anything with a state_dict."""
        super().prepare(placement)
        if (iterator := self._loader._iterator) is not None and sys.getrefcount(iterator) > 3:
            log.warning(  # the loader, this function and the count refer to it, and a loop does
                "restoring %r: a loop over it has begun, and goes on where it is, with other data. "
                "Call restore() before iter(), or iter() again after it",
                self.name,
            )
        placement.then(lambda: self._loader.__dict__.update(_get_iterator=self._resume))

    def _resume(self) -> Any:
        """In place of the one call that resumes."""
        loader = self._loader
        loader.__dict__.pop("_get_iterator", None)
        if loader.next_iter_state is None:
            return loader._get_iterator()
        before = host_generators()
        own = loader.generator and loader.generator.get_state()
        try:
            return loader._get_iterator()
        finally:
            set_host_generators(before)
            if own is not None:
                loader.generator.set_state(own)


def is_loader(value: object) -> bool:
    """Whether LoaderState can take it."""
    module = sys.modules.get("torchdata.stateful_dataloader")  # else it is none
    kind = getattr(module, "StatefulDataLoader", None)
    return kind is not None and isinstance(value, kind) and hasattr(value, "_get_iterator")


def set_on_gpus(states: Sequence[torch.Tensor], current: int | None) -> None:
    """The generators' states of all GPUs that the process saw. `current`: which was its own (that
    of its tensors); its state is for the one that is so now, also where others are to be seen."""
    for index, state in enumerate(states[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, index)
    if current is not None:
        torch.cuda.set_rng_state(states[current])


def is_generator(value: object) -> bool:
    """Whether GeneratorState can take it."""
    kinds = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    return isinstance(value, kinds)


def _merge(live: Any, value: Any) -> Any:
    """`value`, in the live containers where their types agree."""
    if type(live) is dict and type(value) is dict:
        merged = {key: _merge(live.get(key), item) for key, item in value.items()}
        live.clear()
        live.update(merged)
        return live
    if type(live) is list and type(value) is list:
        padded = live[: len(value)] + [None] * (len(value) - len(live))
        live[:] = [_merge(old, new) for old, new in zip(padded, value, strict=True)]
        return live
    are_arrays = type(live) is np.ndarray and type(value) is np.ndarray and live.flags.writeable
    if are_arrays and (live.dtype, live.shape) == (value.dtype, value.shape):
        live[...] = value
        return live
    return value
