"""The global random generators' states: as everstep has them ("rng"), and as their own functions
take them, without numpy's arrays, which torch.load refuses."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from everstep.state.stateful import python_state_of

RNG = "rng"
_OWN = "python", "numpy", "torch", "cuda"


def global_generators(said: Mapping[str, Any], names: Sequence[str] = _OWN) -> dict[str, Any]:
    """As everstep has them (state/stateful.py). `names`: in `said` of python's, numpy's, torch's
    and CUDA's: a list, or of one GPU; None of what there is not."""
    of_python, of_numpy, of_torch, of_cuda = names
    version, words, gauss = said[of_python]
    found = {"python": (version, np.array(words, np.uint32), gauss), "torch": said[of_torch]}
    if (numpy := said.get(of_numpy)) is not None:
        kind, own, *rest = numpy
        found["numpy"] = (kind, np.array(own, np.uint32), *rest)
    if isinstance(cuda := said.get(of_cuda), list):
        found["cuda"] = cuda
    elif cuda is not None:
        found |= {"cuda": [cuda], "cuda_current": 0}
    return found


def taken(said: Any) -> Any:
    """What everstep has of what `plain` made."""
    if not isinstance(said, dict) or not {"python", "torch"} <= said.keys():
        return said
    return said | global_generators(said)


def plain(said: Any) -> Any:
    """What random.setstate() and numpy.random.set_state() take."""
    if not isinstance(said, dict) or "python" not in said:
        return said
    found = said | {"python": python_state_of(said)}
    if "numpy" in said:
        kind, own, *rest = said["numpy"]
        found["numpy"] = (kind, own.tolist(), *rest)
    return found
