"""Values in words for people: sizes, ages, tagged JSON. Standard library only, for start-up time.

Whatever comes out of a store goes through `clean` or `brief` before it reaches a terminal.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SPANS = ((86_400, "day"), (3_600, "h"), (60, "min"), (1, "s"))


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


def time(created: str) -> str:
    """A time of the format as local time to the second; other text as it is."""
    try:
        return f"{datetime.fromisoformat(created).astimezone():%Y-%m-%d %H:%M:%S}"
    except ValueError:
        return clean(created)


def age(created: str, now: datetime | None = None) -> str:
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


def pairs(values: dict[str, Any], limit: int = 60) -> str:
    """ "loss 2.134 · accuracy 0.81"."""
    return " · ".join(f"{clean(key)} {brief(value, limit)}" for key, value in values.items())


def settings(values: dict[str, Any]) -> str:
    """As "slots 3 · budget 1.2 GiB · log no" of slots, budget_bytes and is_log."""
    return " · ".join(_setting(key, value) for key, value in values.items() if value is not None)


def _setting(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"{_spaced(key.removeprefix('is_'))} {'yes' if value else 'no'}"
    for ending, text in _UNITS_OF_KEYS.items():
        if key.endswith(ending) and isinstance(value, (int, float)):
            return f"{_spaced(key.removesuffix(ending))} {text(value)}"
    return f"{_spaced(key)} {brief(value, 200)}"


def _spaced(key: str) -> str:
    return clean(key).replace("_", " ")


def _rate(value: float) -> str:
    return f"{size(round(value))}/s" if value else "unknown"


_UNITS_OF_KEYS: dict[str, Callable[[Any], str]] = {
    "_bytes_per_s": _rate,
    "_bytes": lambda value: size(round(value)),
    "_s": seconds,
}
"""What the end of a key says of its value."""


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
