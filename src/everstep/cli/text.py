"""Text for people: sizes, tagged JSON in words; tables, colours, the terminal's width.

Standard library only, for start-up time. Whatever comes out of a store goes through `clean` or
`brief` before it reaches a terminal.
"""

import os
import shutil
import struct
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

_CODES = {"dim": "2", "title": "1;36", "live": "1;32", "bad": "1;31"}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_ITEMS_MAX, _TOLD_MAX = 8, 100


def clean(text: object) -> str:
    """`text` without control characters: what a store holds cannot steer the terminal."""
    plain = str(text)
    if plain.isprintable():
        return plain
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in plain)


def size(size: int) -> str:
    """Bytes in the unit that leaves at most four digits: 286.1 MiB."""
    value, unit = float(size), 0
    while value >= 1023.95 and unit + 1 < len(_UNITS):
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{size} B"


def seconds(seconds: float) -> str:
    """In the unit that leaves a number before the point: "12 s", "61.7 ms", "340 µs"."""
    for unit, scale in (("s", 1), ("ms", 1e3), ("µs", 1e6)):
        if abs(seconds) * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds:.3g} s"


def plural(count: int, noun: str) -> str:
    """1 checkpoint, 2 checkpoints, 1,204 checkpoints."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def moved(count: int, noun: str, size_bytes: int, seconds: float) -> str:
    """As "12 tensors, 1.2 GiB, in 3.4 s (353.0 MiB/s)"."""
    rate = speed(size_bytes, seconds)
    return f"{plural(count, noun)}, {size(size_bytes)}, in {seconds:.1f} s ({rate})"


def speed(size_bytes: float, seconds: float = 1.0) -> str:
    """ "353.0 MiB/s"."""
    return f"{size(int(size_bytes / max(seconds, 1e-9)))}/s"


def time(created: str) -> str:
    """A time of the format as local time to the second; other text as it is."""
    try:
        return f"{datetime.fromisoformat(created).astimezone():%Y-%m-%d %H:%M:%S}"
    except ValueError:
        return clean(created)


def brief(value: Any, limit: int = 60) -> str:
    """Tagged JSON (docs/format.md) in few characters; long lists by how many items they have."""
    text = clean(_brief(value))
    return text if len(text) <= limit else text[: limit - 1] + "…"


def pairs(values: Mapping[str, Any], limit: int = 60) -> str:
    """ "loss 2.134 · accuracy 0.81"."""
    return " · ".join(f"{clean(key)} {brief(value, limit)}" for key, value in values.items())


def settings(values: Mapping[str, Any]) -> str:
    """As "slots 3 · budget 1.2 GiB" of slots and budget_bytes."""
    return pairs(dict(_setting(*item) for item in values.items() if item[1] is not None), 200)


def paint(text: str, style: str) -> str:
    """`text` in that style where standard output is a terminal with colours."""
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    if not text or not style or is_plain or not sys.stdout.isatty():
        return text
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m"


def line(text: str, style: str = "") -> str:
    """`text` in that style, cut with an ellipsis where it is wider than the terminal."""
    room = width()
    return paint(text if len(text) <= room else text[: room - 1] + "…", style)


def width() -> int:
    """How many characters a line of standard output has room for."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize


def table(
    titles: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = ()
) -> list[str]:
    """A line of titles, and a line for each row. Columns without any text are left out; texts below
    a title in `right` end, and do not begin, at a common edge."""
    used = [i for i in range(len(titles)) if any(row[i] for row in rows)]
    widths = {i: max(len(row[i]) for row in (titles, *rows)) for i in used}
    return [
        "  ".join(
            row[i].rjust(widths[i]) if titles[i] in right else row[i].ljust(widths[i]) for i in used
        ).rstrip()
        for row in (titles, *rows)
    ]


_UNITS_OF_KEYS: dict[str, Callable[[Any], str]] = {
    "_bytes_per_s": lambda value: speed(value) if value else "unknown",
    "_bytes": lambda value: size(round(value)),
    "_s": seconds,
}
"""What the end of a setting's key says of its value."""

_NUMBERS_END = 1e18
"""Of those that a setting can be: a document may say anything."""


def _setting(key: str, value: Any) -> tuple[str, Any]:
    for ending, text in _UNITS_OF_KEYS.items():
        is_number = isinstance(value, int | float) and abs(value) < _NUMBERS_END
        if key.endswith(ending) and is_number:
            return key.removesuffix(ending), text(value)
    return key.removeprefix("is_"), value


def _brief(value: Any) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.6g}"
        case list() if len(value) > _ITEMS_MAX:
            return f"{len(value)} items"
        case list():
            return f"[{', '.join(map(_brief, value))}]"
        case {"$": "float", "v": str(bits)} if len(bits) == 16:
            return str(struct.unpack(">d", bytes.fromhex(bits))[0])
        case {"$": "tuple", "v": items}:
            return _brief(items)
        case {"$": kind, **inner}:
            told = _brief(inner.get("v", ""))
            return f"{kind} {told}".rstrip() if len(told) <= _TOLD_MAX else str(kind)
        case dict():
            return f"{{{', '.join(f'{key} {_brief(item)}' for key, item in value.items())}}}"
        case _:
            return str(value)
