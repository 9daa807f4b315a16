"""The position of a DataLoader that an integration iterates: torch's own, or a StatefulDataLoader.

A resumed epoch begins with the generators as they were when it began, so that it comes in the same
order; leaves out the batches that were trained on; and goes on with the generators of the step.
Nothing is loaded for that but where the data set is iterable and the loader torch's own.

Not exact: what a data set draws at random inside workers, up to the end of the epoch; a sampler
that draws from global generators while an epoch goes on.
"""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset

from everstep.errors import Unsupported
from everstep.state.stateful import host_generators, set_host_generators


class LoaderPosition:
    """Watches the iterators of one loader from now on; for the state of a Checkpointer.

    ahead: by how many batches the loader is before the training loop, and generators with it.
    """

    is_by_rank = True

    def __init__(self, loader: Any, ahead: int = 0) -> None:
        self._loader, self._ahead = loader, ahead
        self._kind = getattr(type(loader), "_watched", type(loader))
        self._fetched: int | None = None
        """Batches of this epoch that came from the loader. None: nothing of it is iterated."""
        self._begun, self.is_at_end = 0, False
        """Epochs of the whole run; whether this one is over."""
        self._began: dict[str, Any] = {}
        """Generators when this epoch began."""
        self._before: tuple[dict[str, Any] | None, Any] = (None, None)
        """Generators, and the loader's own state, before the newest batch was loaded."""
        self._resumed: dict[str, Any] | None = None
        self._end_workers = weakref.finalize(self, lambda: None)
        if hasattr(loader, "load_state_dict"):
            loader.load_state_dict({})  # an iterator may be there, nobody knows from when
        watched = {"__iter__": lambda _: self.iterate(), "_watched": self._kind}
        loader.__class__ = type(self._kind.__name__, (self._kind,), watched)

    def state_dict(self) -> dict[str, Any]:
        """Position None: the next epoch begins."""
        own = [each.get_state() for each in _own(self._loader)]
        state = {"begun": self._begun, "own": own, "position": None}
        if self._fetched is None or self.is_at_end or self._fetched < self._ahead:
            return state
        before, loader = self._before if self._ahead else (None, self._state())
        state |= {"position": self._fetched - self._ahead, "began": self._began}
        return state | {"before": before, "loader": loader}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iterator goes on from there. Raises Unsupported where one lives."""
        if self._fetched is not None and not self.is_at_end:
            raise Unsupported(
                "restoring a data loader: it is being iterated, and that iterator would go on "
                "where it is. Restore before the loop over it begins, or leave that loop"
            )
        for generator, own in zip(_own(self._loader), state["own"], strict=True):
            generator.set_state(own)
        self._begun, self._resumed = state["begun"], state
        self._fetched, self.is_at_end = None, False

    def iterate(self) -> Iterator[Any]:
        """In place of the loader's __iter__."""
        now, resumed, self._resumed = generators_of(self._loader), self._resumed, None
        if resumed and resumed["position"] is not None:
            self._began = resumed["began"]
            iterator = self._resume(resumed["position"], resumed["loader"])
            set_generators(self._loader, resumed["before"] or now)
            return self._batches(iterator, resumed["position"], now if self._ahead else None)
        self._begun, self._began = self._begun + 1, now
        return self._batches(self._resume(0, None) if resumed else self._iterator(), 0, None)

    def _batches(
        self, iterator: Iterator[Any], position: int, then: dict[str, Any] | None
    ) -> Iterator[Any]:
        """`then`: the generators after the first batch, where that was loaded before."""
        self._fetched, self.is_at_end = position, False
        try:
            while True:
                if self._ahead:
                    self._before = generators_of(self._loader), self._state()
                batch = next(iterator, self)
                if then:
                    set_generators(self._loader, then)
                    then = None
                if batch is self:
                    self.is_at_end = True
                    break
                self._fetched += 1
                yield batch
        finally:  # also where the training loop was left
            self._fetched = None

    def _iterator(self) -> Iterator[Any]:
        iterator: Iterator[Any] = self._kind.__iter__(self._loader)
        if end := getattr(self._loader._iterator, "_shutdown_workers", None):
            # Of what is collected as garbage with a loader, torch waits 5 s for each worker.
            self._end_workers.detach()
            self._end_workers = weakref.finalize(self, end)
        return iterator

    def _resume(self, position: int, own: Any) -> Iterator[Any]:
        """A new iterator of this epoch, at that batch. `own`: the loader's own state then."""
        loader = self._loader
        is_known = own is None and not isinstance(loader.dataset, IterableDataset)
        name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
        whole = getattr(loader, name)
        rest = _Rest(whole)
        loader.__dict__[name] = rest if is_known else whole
        try:
            if loader.persistent_workers and self._begun > 1:
                self._iterator()  # the run's first one drew a seed, the later ones did not
            set_generators(loader, self._began)
            if own is not None:
                loader.load_state_dict(own)
            rest.count = position if is_known else 0
            iterator = self._iterator()
            rest.skip()
        finally:
            loader.__dict__[name] = whole
        for _ in range(0 if is_known or own is not None else position):
            next(iterator)
        return iterator

    def _state(self) -> Any:
        """The loader's own, where only that tells the position: what the data set has read."""
        loader, dataset = self._loader, self._loader.dataset
        is_needed = isinstance(dataset, IterableDataset) or hasattr(dataset, "state_dict")
        return loader.state_dict() if is_needed and hasattr(loader, "state_dict") else None


def generators_of(loader: Any) -> dict[str, Any]:
    """The states of those from which the order of data, and its workers' seeds, are drawn."""
    return host_generators() | {"own": [each.get_state() for each in _own(loader)]}


def set_generators(loader: Any, generators: dict[str, Any]) -> None:
    """Put them back to where they were."""
    set_host_generators(generators)
    for generator, state in zip(_own(loader), generators["own"], strict=True):
        generator.set_state(state)


def samplers_of(loader: Any) -> Iterator[Any]:
    """The loader's sampler, and those in it."""
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while sampler is not None:
        yield sampler
        sampler = getattr(sampler, "batch_sampler", getattr(sampler, "sampler", None))


def _own(loader: Any) -> list[torch.Generator]:
    """Generators that the loader was given. One with an `initial_seed` begins anew with that in
    each epoch."""
    samplers = [each for each in samplers_of(loader) if not hasattr(each, "initial_seed")]
    found = [getattr(each, "generator", None) for each in (loader, *samplers, loader.dataset)]
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


class _Rest:
    """A sampler, whose next iterator leaves out so many."""

    def __init__(self, sampler: Any) -> None:
        self.sampler, self.count = sampler, 0
        self._iterator: Iterator[Any] = iter(())

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> "_Rest":
        self._iterator = iter(self.sampler)
        return self

    def __next__(self) -> Any:
        self.skip()
        return next(self._iterator)

    def skip(self) -> None:
        while self.count:
            next(self._iterator)
            self.count -= 1
