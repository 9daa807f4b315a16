"""Where text goes: colours, widths, tables. Standard library only: start-up time counts."""

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TextIO

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
