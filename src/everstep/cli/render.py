"""Text for people: sizes, ages, colours, tables. Standard library only: start-up time counts.

Whatever comes out of a store goes through `clean` or `brief` before it reaches a terminal.
"""

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TextIO

_CODES = {
    "bold": "1",
    "dim": "2",
    "red": "31",
    "green": "32",
    "yellow": "33",
    "blue": "34",
    "cyan": "36",
    "title": "1;36",
    "live": "1;32",
    "bad": "1;31",
}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SPANS = ((86_400, "day"), (3_600, "h"), (60, "min"), (1, "s"))
_GAP = "  "


@dataclass(frozen=True, slots=True)
class Cell:
    """A piece of text and its style, a key of this module's colours ("" for none)."""

    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: its title, and whether its texts end (not begin) at a common edge."""

    title: str
    right: bool = False


@dataclass(frozen=True, slots=True)
class Screen:
    """Where text goes: whether it shows colours; characters in a line (0: any number)."""

    colour: bool = False
    width: int = 0

    @classmethod
    def of(cls, stream: TextIO) -> "Screen":
        """A terminal has a width, and colours unless NO_COLOR or TERM=dumb say otherwise."""
        if not stream.isatty():
            return cls()
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        return cls(not plain, columns_of(stream))

    def paint(self, text: str, style: str) -> str:
        """`text` in that style, if this screen has colours."""
        if not self.colour or not style or not text:
            return text
        return f"\x1b[{_CODES[style]}m{text}\x1b[0m"

    def join(self, cells: Iterable[Cell]) -> str:
        """The cells in a row, cut with an ellipsis where they are wider than the screen."""
        parts: list[str] = []
        room = self.width or sys.maxsize
        for cell in cells:
            text = cell.text if len(cell.text) <= room else cell.text[: max(0, room - 1)] + "…"
            parts.append(self.paint(text, cell.style))
            room -= len(text)
            if room <= 0:
                break
        return "".join(parts).rstrip()


def columns_of(stream: TextIO) -> int:
    """How many characters wide a terminal is; 80 where it does not say."""
    said = os.environ.get("COLUMNS", "")
    if said.isdecimal() and int(said):
        return int(said)
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def align(columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> list[list[Cell]]:
    """The rows as a table, below a row of titles: cells padded to their column's width. Columns
    without any text are left out."""
    used = [i for i in range(len(columns)) if any(row[i].text for row in rows)]
    titles = [Cell(column.title, "dim") for column in columns]
    widths = {i: max(len(row[i].text) for row in (titles, *rows)) for i in used}
    lines = []
    for row in (titles, *rows):
        cells = []
        for i in used:
            space = " " * (widths[i] - len(row[i].text))
            before, after = (space, "") if columns[i].right else ("", space)
            cells += [Cell(before), row[i], Cell(after + _GAP)]
        lines.append(cells)
    return lines


def clean(text: object) -> str:
    """`text` without control characters: what a store holds cannot steer the terminal."""
    plain = str(text)
    if plain.isprintable():
        return plain
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in plain)


def size_text(size: int) -> str:
    """Bytes in the unit that leaves at most four digits: 286.1 MiB."""
    value, unit = float(size), 0
    while value >= 1023.95 and unit + 1 < len(_UNITS):
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{size} B"


def plural(count: int, noun: str) -> str:
    """1 checkpoint, 2 checkpoints, 1,204 checkpoints."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def time_text(created: str) -> str:
    """A time of the format as local time to the second; other text as it is."""
    try:
        return f"{datetime.fromisoformat(created).astimezone():%Y-%m-%d %H:%M:%S}"
    except ValueError:
        return clean(created)


def age_text(created: str, now: datetime | None = None) -> str:
    """How long ago a time of the format was, in its largest unit: "3 min ago"; "" for no time."""
    try:
        seconds = ((now or datetime.now(UTC)) - datetime.fromisoformat(created)).total_seconds()
    except (ValueError, TypeError):
        return ""
    for span, unit in _SPANS:
        if seconds >= span:
            count = int(seconds // span)
            return f"{plural(count, unit) if unit == 'day' else f'{count} {unit}'} ago"
    return "now"


def brief(value: Any, limit: int = 60) -> str:
    """Tagged JSON (docs/format.md) in few characters: containers by their first items."""
    text = clean(_brief(value, 0))
    return text if len(text) <= limit else text[: limit - 1] + "…"


def pairs_text(values: dict[str, Any], limit: int = 60) -> str:
    """ "loss 2.134 · accuracy 0.81"."""
    return " · ".join(f"{clean(key)} {brief(value, limit)}" for key, value in values.items())


def _brief(value: Any, depth: int) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return _items(value, "[", "]", depth)
    if not isinstance(value, dict):
        return str(value)
    if "$" not in value:
        if depth > 1:
            return f"dict of {len(value)}"
        shown = [f"{key} {_brief(item, depth + 1)}" for key, item in list(value.items())[:12]]
        return "{" + ", ".join(shown) + (", …" if len(value) > 12 else "") + "}"
    return _tagged(str(value["$"]), value.get("v"), depth)


def _tagged(kind: str, inner: Any, depth: int) -> str:
    match kind:
        case "tuple" | "torch.Size":
            return _items(inner, "(", ")", depth) if isinstance(inner, list) else kind
        case "torch.dtype" | "torch.device" | "tensor":
            return f"{kind.removeprefix('torch.')} {inner}"
        case "float" if isinstance(inner, str) and len(inner) == 16:
            return "nan" if int(inner[4:], 16) else ("-inf" if inner[0] == "f" else "inf")
        case _:
            return f"{kind} of {len(inner)}" if isinstance(inner, list) else kind


def _items(values: list[Any], left: str, right: str, depth: int) -> str:
    if depth > 1 or len(values) > 8:
        return f"{len(values)} items"
    return left + ", ".join(_brief(item, depth + 1) for item in values) + right
