"""How far the weights of each layer have changed, as a picture."""

import math
import re
from collections.abc import Iterable
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from everstep.versions.diff import Change

_LAYER = re.compile(r"(.*?\.\d+)(\.|$)")
_INK, _BAR, _FAINT = "#1d2733", "#3b6fb6", "#c3cad3"


def layer_of(name: str) -> str:
    """What a weight belongs to: "model.blocks.3" of "model.blocks.3.mlp.weight"; without a number,
    what its module is called."""
    found = _LAYER.match(name)
    return found[1] if found else name.rpartition(".")[0] or name


def draw(changes: Iterable[Change], title: str, path: Path) -> None:
    """Write the picture: for each layer the root mean square of its elements' changes."""
    layers: dict[str, tuple[float, int]] = {}
    for change in sorted(changes, key=lambda change: _natural(layer_of(change.name))):
        squares, elements = layers.get(layer_of(change.name), (0.0, 0))
        total = squares + change.squares, elements + change.elements
        layers[layer_of(change.name)] = total
    values = [math.sqrt(squares / max(1, elements)) for squares, elements in layers.values()]
    with mpl.rc_context({"font.family": "DejaVu Sans", "font.size": 9, "text.color": _INK}):
        figure = Figure(figsize=(8, 1.2 + 0.24 * len(layers)), layout="constrained")
        axes = figure.subplots()
        bars = axes.barh(list(layers), values, color=_BAR, height=0.7)
        axes.bar_label(bars, [f"{value:.2g}" for value in values], padding=3, fontsize=8)
        axes.margins(x=0.1)
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", color=_FAINT, linewidth=0.5)
        axes.set_axisbelow(True)
        axes.set_xlabel("root mean square of an element's change")
        axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
        figure.savefig(path, dpi=150)


def _natural(name: str) -> list[tuple[int, str]]:
    """So that block 10 comes after block 9."""
    return [(int(each), "") if each.isdigit() else (0, each) for each in name.split(".")]
