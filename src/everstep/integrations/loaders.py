"""The position of a DataLoader that an integration iterates: torch's own, or a StatefulDataLoader.

A resumed epoch begins with the generators as they were when it began, so that it comes in the same
order; leaves out the batches that were trained on; and goes on with the generators of the step.
Nothing is loaded for that but where the data set is iterable and the loader torch's own.

Not exact: what a data set draws at random inside workers, up to the end of the epoch; a sampler
that draws from global generators while an epoch goes on.
"""

import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from everstep.errors import Unsupported


class LoaderPosition:
    """Watches the iterators of one loader from now on; for the state of a Checkpointer.

    ahead: by how many batches the loader is before the training loop, and generators with it.
    """

    is_by_rank = True

    def __init__(self, loader: Any, ahead: int = 0) -> None:
        self._loader, self._ahead = loader, ahead
        self._kind = getattr(type(loader), "_watched", type(loader))
        self.samplers = list(_samplers_of(loader))
        self._loads_itself = ahead > 0 and loader.num_workers == 0
        self._fetched: int | None = None
        """Batches of this epoch that came from the loader. None: nothing of it is iterated."""
        self._begun = 0
        """Iterators of the whole run."""
        self.is_at_end = False
        self._began: dict[str, Any] | None = None
        """Generators when this epoch began."""
        self._before: tuple[dict[str, Any] | None, Any] = (None, None)
        """Generators, and the loader's own state, before the newest batch was loaded."""
        self._resumed: dict[str, Any] | None = None
        if hasattr(loader, "load_state_dict"):
            loader.load_state_dict({})  # an iterator may be there, nobody knows from when
        watched = {"__iter__": lambda _: self.iterate(), "_watched": self._kind}
        loader.__class__ = type(self._kind.__name__, (self._kind,), watched)

    def state_dict(self) -> dict[str, Any]:
        """Position None: the next epoch begins."""
        state: dict[str, Any] = {
            "begun": self._begun,
            "own": _states(_own(self._loader, self.samplers)),
            "position": None,
        }
        if self._fetched is None or self.is_at_end or self._fetched < self._ahead:
            return state
        before, loader = self._before if self._ahead else (None, self._state())
        where = {"began": self._began, "before": before, "loader": loader}
        return state | {"position": self._fetched - self._ahead} | where

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iterator goes on from there. Raises Unsupported where one lives."""
        if self._fetched is not None and not self.is_at_end:
            raise Unsupported(
                "restoring a data loader: it is being iterated, and that iterator would go on "
                "where it is. Restore before the loop over it begins, or leave that loop"
            )
        for generator, own in zip(_own(self._loader, self.samplers), state["own"], strict=True):
            generator.set_state(own)
        self._begun, self._resumed = state["begun"], state
        self._fetched, self.is_at_end = None, False

    def iterate(self) -> Iterator[Any]:
        """In place of the loader's __iter__."""
        resumed, self._resumed = self._resumed, None
        now, position, then = generators_of(self._loader, self.samplers), 0, None
        self._began = now
        if resumed and resumed["position"] is not None:
            position, then = resumed["position"], now
            self._began = resumed["began"]
        self._begun += not position
        iterator = self._resume(position, resumed) if resumed else self._iterator()
        if then and resumed:
            set_generators(self._loader, resumed["before"] or now, self.samplers)
        return self._batches(iterator, position, then)

    def _batches(
        self, iterator: Iterator[Any], position: int, then: dict[str, Any] | None
    ) -> Iterator[Any]:
        """`then`: the generators after the first batch, where that was loaded before."""
        self._fetched, self.is_at_end = position, False
        then = then if self._ahead else None
        try:
            while True:
                if self._ahead:
                    self._before = (
                        generators_of(self._loader, self.samplers) if self._loads_itself else None,
                        self._state(),
                    )
                batch = next(iterator, self)
                if then:
                    set_generators(self._loader, then, self.samplers)
                    then = None
                if batch is self:
                    self.is_at_end = True
                    break
                self._fetched += 1
                yield batch
        finally:  # also where the training loop was left
            self._fetched = self._fetched if self.is_at_end else None

    def _iterator(self) -> Iterator[Any]:
        iterator: Iterator[Any] = self._kind.__iter__(self._loader)
        return iterator

    def _resume(self, position: int, resumed: dict[str, Any]) -> Iterator[Any]:
        """A new iterator, at that batch."""
        loader = self._loader
        name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
        whole = getattr(loader, name)
        rest = loader.__dict__[name] = _Rest(whole)
        try:
            if loader.persistent_workers and self._begun > 1:
                self._iterator()  # the run's first one drew a seed, the later ones did not
            assert self._began is not None
            set_generators(self._loader, self._began, self.samplers)
            is_iterable = isinstance(loader.dataset, IterableDataset)
            if is_iterable or position == 0 or resumed["loader"] is not None:
                loader.__dict__[name] = whole
                if position and resumed["loader"] is not None:
                    loader.load_state_dict(resumed["loader"])
                    position = 0
                iterator = self._iterator()
                for _ in range(position):
                    next(iterator)
            else:
                rest.count = position
                iterator = self._iterator()
                rest.skip()
        finally:
            loader.__dict__[name] = whole
        return iterator

    def _state(self) -> Any:
        """The loader's own, where only that tells the position: what the data set has read."""
        dataset = self._loader.dataset
        is_known = not isinstance(dataset, IterableDataset) and not hasattr(dataset, "state_dict")
        return (
            None
            if is_known or not hasattr(self._loader, "state_dict")
            else self._loader.state_dict()
        )


def generators_of(loader: Any, samplers: Iterable[Any] | None = None) -> dict[str, Any]:
    """The states of those from which the order of data, and its workers' seeds, are drawn.
    `samplers`: the loader's, where others stand in their place now."""
    version, words, gauss = random.getstate()
    return {
        "python": (version, np.array(words, np.uint32), gauss),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "own": _states(_own(loader, samplers)),
    }


def set_generators(
    loader: Any, generators: dict[str, Any], samplers: Iterable[Any] | None = None
) -> None:
    """Put them back to where they were."""
    version, words, gauss = generators["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    np.random.set_state(generators["numpy"])
    torch.set_rng_state(generators["torch"])
    for generator, state in zip(_own(loader, samplers), generators["own"], strict=True):
        generator.set_state(state)


def _own(loader: Any, samplers: Iterable[Any] | None) -> list[torch.Generator]:
    """Generators that the loader was given. One with an `initial_seed` begins anew with that in
    each epoch."""
    samplers = _samplers_of(loader) if samplers is None else samplers
    others = [each for each in samplers if not hasattr(each, "initial_seed")]
    found = [getattr(each, "generator", None) for each in (loader, *others, loader.dataset)]
    own = {id(each): each for each in found if isinstance(each, torch.Generator)}
    return list(own.values())


def _samplers_of(loader: Any) -> Iterator[Any]:
    """The loader's sampler, and those in it."""
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while sampler is not None:
        yield sampler
        sampler = getattr(sampler, "batch_sampler", getattr(sampler, "sampler", None))


def _states(generators: list[torch.Generator]) -> list[torch.Tensor]:
    return [generator.get_state() for generator in generators]


class _Rest:
    """A sampler, whose next iterator leaves out so many."""

    def __init__(self, sampler: Any) -> None:
        self._sampler, self.count = sampler, 0
        self._iterator: Iterator[Any] = iter(())

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> "_Rest":
        self._iterator = iter(self._sampler)
        return self

    def __next__(self) -> Any:
        self.skip()
        return next(self._iterator)

    def skip(self) -> None:
        """Draw them."""
        while self.count:
            next(self._iterator)
            self.count -= 1
