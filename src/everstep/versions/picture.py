"""How far the weights of each layer have changed, as a picture; and the look of all pictures."""

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from everstep.sharding.leaves import layer_of
from everstep.versions.diff import Change

FAINT, BLUE = "#c3cad3", "#3b6fb6"
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.edgecolor": "#b8bfc9",
    "legend.fontsize": 8,
    "legend.frameon": False,
    "figure.dpi": 150,
}


def draw(changes: Iterable[Change], title: str, path: Path) -> None:
    """Write the picture: for each layer the root mean square of its elements' changes."""
    layers: dict[str, tuple[float, int]] = {}
    for change in sorted(changes, key=lambda change: _natural(change.name)):
        squares, elements = layers.get(layer_of(change.name), (0.0, 0))
        layers[layer_of(change.name)] = squares + change.norm**2, elements + change.elements
    values = [math.sqrt(squares / max(1, elements)) for squares, elements in layers.values()]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8, 1.2 + 0.24 * len(layers)), layout="constrained")
        axes = figure.subplots()
        bars = axes.barh(list(layers), values, color=BLUE, height=0.7)
        axes.bar_label(bars, [f"{value:.2g}" for value in values], padding=3, fontsize=8)
        axes.margins(x=0.1)
        axes.invert_yaxis()
        axes.set_xlabel("root mean square of an element's change")
        axes.set_title(title)
        figure.savefig(path)


def _natural(name: str) -> str:
    """So that block 10 comes after block 9."""
    return re.sub(r"\d+", lambda number: number[0].zfill(9), name)
