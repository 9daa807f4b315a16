"""One part, in the process that limits.run started: `python -m benchmarks.gpu.part NAME JSON`.

What is found is written down line by line: a part that is cut off leaves what it had.
"""

import importlib
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MODULES = {
    "machine": "measure",
    "figures": "measure",
    "kills": "kills",
    "trainer": "kills",
    "restores": "restores",
    "write": "restores",
    "read": "restores",
}
"""Where the function of that name is."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a part is told. `fast`, `disk`: directories for stores, the first in memory where there
    is room; `rows`: a file for what is found; `small`: all models are tiny."""

    device: str
    rows: str
    fast: str
    disk: str
    small: bool = False
    size: str = "300m"
    contender: str = ""
    seed: int = 1

    def size_of(self, wanted: str) -> str:
        """The size of a model."""
        return "small" if self.small else wanted

    def report(self, **row: Any) -> None:
        """Write a row down."""
        with Path(self.rows).open("a") as file:
            file.write(json.dumps(row) + "\n")

    def child(self, name: str, *rest: str) -> "subprocess.Popen[str]":
        """Another process of this part, whose standard output is read."""
        words = command(name, asdict(self), *rest)
        return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def command(name: str, settings: dict[str, Any], *rest: str) -> list[str]:
    """What runs a part."""
    return [sys.executable, "-m", "benchmarks.gpu.part", name, json.dumps(settings), *rest]


if __name__ == "__main__":
    name, told, *rest = sys.argv[1:]
    module = importlib.import_module(f"benchmarks.gpu.{MODULES[name]}")
    getattr(module, name)(Settings(**json.loads(told)), *rest)
