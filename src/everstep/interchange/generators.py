"""The global random generators' states: as everstep has them ("rng"), and as their own functions
take them, without numpy's arrays, which torch.load refuses."""

from typing import Any

import numpy as np

from everstep.state.stateful import python_state_of

RNG = "rng"


def global_generators(python: Any, numpy: Any, cpu: Any, cuda: Any = None) -> dict[str, Any]:
    """As everstep has them (state/stateful.py). `cuda`: None, of one GPU, or a list."""
    version, words, gauss = python
    found = {"python": (version, np.array(words, np.uint32), gauss), "torch": cpu}
    if numpy is not None:
        kind, own, *rest = numpy
        found["numpy"] = (kind, np.array(own, np.uint32), *rest)
    if isinstance(cuda, list):
        found["cuda"] = cuda
    elif cuda is not None:
        found |= {"cuda": [cuda], "cuda_current": 0}
    return found


def taken(said: Any) -> Any:
    """What everstep has of what `plain` made."""
    if not isinstance(said, dict) or not {"python", "torch"} <= said.keys():
        return said
    found = global_generators(said["python"], said.get("numpy"), said["torch"], said.get("cuda"))
    return found | {key: each for key, each in said.items() if key not in found}


def plain(said: Any) -> Any:
    """What random.setstate() and numpy.random.set_state() take."""
    if not isinstance(said, dict) or "python" not in said:
        return said
    found = said | {"python": python_state_of(said)}
    if "numpy" in said:
        kind, own, *rest = said["numpy"]
        found["numpy"] = (kind, own.tolist(), *rest)
    return found
