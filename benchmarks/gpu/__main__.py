"""`make gpu`: all of it in one go of at most nine minutes, on a machine with a CUDA device.

Each part is a process of its own with a limit. The most valuable parts come first, and what does
not fit into the budget is dropped, and named. DIR/gpu.json and DIR/gpu.txt are written after each
part: a run that is cut off leaves what it had.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu import limits, page
from benchmarks.gpu.part import command

REPOSITORY = Path(__file__).parents[2]
BUDGET_S = 530.0
END_S = limits.DUMP_S + limits.KILL_S + 1.0
"""Kept for the end of a part that has passed its limit."""
FAST_BYTES = 40 << 30
"""Free in /dev/shm, for stores to lie there: what is measured then is not the disk."""
LOG_BYTES = 40_000
CONTENDERS = {
    "300m": "everstep-full everstep-log dcp-async everstep-full-skip everstep-spread torch.save "
    "torch_checkpointing",
    "2b": "everstep-log everstep-spread everstep-full dcp-async torch_checkpointing torch.save",
}
"""Of each size, the most telling first."""
WANTED = ("tests", "kills", "restores", *CONTENDERS)
TIMING = REPOSITORY / "tests/gpu/test_cuda_timing.py"
"""Has the machine for itself."""
TRAINERS = REPOSITORY / "tests/gpu/test_cuda_trainers.py"
"""Processes that are killed, and begin anew: most of it is their imports."""
EXACT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""The environment in which equal runs are equal bit for bit."""
_OUTCOME = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", re.MULTILINE)
_FAILURES = re.compile(r"^=+ (?:FAILURES|ERRORS) =+$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Part:
    """What runs in one process: pytest with these `tests`, or the function `kind` (part.MODULES).
    With less time than `least_s` it is dropped."""

    name: str
    kind: str
    limit_s: float
    least_s: float
    settings: dict[str, Any] = field(default_factory=dict)
    tests: tuple[str, ...] = ()


def stages(wanted: Sequence[str]) -> list[list[Part]]:
    """In this order; what stands in one stage runs at once."""
    workers = str(max(1, min(4, len(os.sched_getaffinity(0)) // 3)))
    others = (str(TIMING.parent), f"--ignore={TIMING}", f"--ignore={TRAINERS}", "-n", workers)
    figures = {
        size: [
            [
                Part(
                    f"{size} {name}",
                    "figures",
                    limit_s,
                    limit_s / 3,
                    {"size": size, "contender": name},
                )
            ]
            for name in CONTENDERS[size].split()
        ]
        for size, limit_s in (("300m", 90.0), ("2b", 110.0))
        if size in wanted
    }
    at_once = [
        Part("tests", "tests", 170, 30, tests=others),
        Part("trainers", "tests", 170, 60, tests=(str(TRAINERS), "-n", "3")),
        Part("kills", "kills", 170, 60),
    ]
    found = [
        [Part("machine", "machine", 40, 10)],
        [Part("timing tests", "tests", 60, 20, tests=(str(TIMING),))] if "tests" in wanted else [],
        [part for part in at_once if part.kind in wanted],
        *figures.get("300m", [])[:3],
        [Part("restores", "restores", 110, 50)] if "restores" in wanted else [],
        *figures.get("300m", [])[3:],
        *figures.get("2b", []),
    ]
    return [stage for stage in found if stage]


class Go:
    """One run of the parts, and what it has found so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._is_stopped = False
        self._marks: list[str] = []
        settings = {key: str(value) for key, value in vars(args).items()}
        self.results: dict[str, Any] = {"settings": settings, "parts": {}, "dropped": []}

    def run(self, parts: list[list[Part]]) -> None:
        """Run all; nothing that one does, or leaves undone, keeps the others from running."""
        for stage in parts:
            with ThreadPoolExecutor(len(stage)) as pool:
                list(pool.map(self._one, stage))

    def stop(self, *_: object) -> None:
        """Begin nothing more, and end what runs."""
        self._is_stopped = True
        for mark in self._marks:
            limits.end(mark, signal.SIGKILL, 0)

    def _one(self, part: Part) -> None:
        left_s = self._args.budget - END_S - (time.monotonic() - self._began)
        if self._is_stopped or left_s < part.least_s:
            why = "the run was stopped" if self._is_stopped else f"{max(0, left_s):.0f} s were left"
            self._note(lambda: self.results["dropped"].append(f"{part.name}: {why}"))
            return
        self._tell(f"{part.name} begins")
        began = time.monotonic()
        try:
            result = self._run(part, min(part.limit_s, left_s))
        except (OSError, ValueError) as error:  # no space, say: the others go on
            result = {"ended": f"{type(error).__name__}: {error}", "rows": [], "log": ""}
        result["seconds"] = time.monotonic() - began
        self._note(lambda: self.results["parts"].update({part.name: result}))
        self._tell(f"{part.name}: {result['ended']}")

    def _run(self, part: Part, limit_s: float) -> dict[str, Any]:
        with (
            _directory() as own,
            _directory(self._fast(part)) as fast,
            _directory(self._args.disk) as disk,
        ):
            rows, log = own / "rows", own / "log"
            paths = [str(REPOSITORY / "src"), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
            environment = {**EXACT, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
            environment["EVERSTEP_RUNTIME_DIR"] = str(own / "run")
            told = {"rows": str(rows), "fast": str(fast), "disk": str(disk), **part.settings}
            told |= {"device": self._args.device, "small": self._args.small}
            words = _pytest(part, disk) if part.tests else command(part.kind, told)
            mark = f"{os.getpid()}-{part.name}"
            self._marks.append(mark)
            how = limits.run(words, mark, log, limit_s, environment)
            text = log.read_text(errors="replace")
            found = [row_of_tests(text)] if part.tests else _rows_in(rows)
            keepers = [path.read_text(errors="replace") for path in own.rglob("*.log")]
            whole = "" if how == "ok" else "\n".join([*keepers, text])[-LOG_BYTES:]
            return {"ended": how, "rows": found, "log": whole}

    def _fast(self, part: Part) -> Path:
        """Memory, where there is room for stores beside what is captured in it."""
        shared = Path("/dev/shm")
        is_large = shared.is_dir() and shutil.disk_usage(shared).free >= FAST_BYTES
        is_small = self._args.small or part.settings.get("size") == "2b"
        return shared if is_large and not is_small else self._args.disk

    def _note(self, change: Callable[[], object]) -> None:
        """Change the results, and write them down, whole or not at all."""
        with self._lock:
            change()
            self.results["seconds"] = time.monotonic() - self._began
            texts = {"json": json.dumps(self.results, indent=1), "txt": page.text_of(self.results)}
            for kind, text in texts.items():
                draft = self._args.out / f"draft.{kind}"
                draft.write_text(text)
                draft.replace(self._args.out / f"gpu.{kind}")

    def _tell(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:4.0f} s] {text}", file=sys.stderr, flush=True)


def row_of_tests(log: str) -> dict[str, Any]:
    """What pytest counted, as far as it came, which tests failed, and their failures in full."""
    lines = [line for line in log.splitlines() if "::" in line and not _FAILED.match(line)]
    counts = Counter(found[1].lower() for line in lines if (found := _OUTCOME.search(line)))
    begin = _FAILURES.search(log)
    failures = log[begin.start() :] if begin else ""
    return {"counts": dict(counts), "failed": _FAILED.findall(log), "failures": failures}


def _rows_in(path: Path) -> list[dict[str, Any]]:
    """Those that were written to their end."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _pytest(part: Part, directory: Path) -> list[str]:
    options = ["-p", "no:cacheprovider", "-vv", "-m", "gpu", "--timeout=60"]
    return [sys.executable, "-m", "pytest", *options, f"--basetemp={directory}/t", *part.tests]


@contextlib.contextmanager
def _directory(place: Path | None = None) -> Iterator[Path]:
    """A new one with a short path, which goes afterwards."""
    path = Path(tempfile.mkdtemp(prefix="es-", dir=place))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def main(words: Sequence[str] | None = None) -> int:
    """Run it; 1 where something was not as it should be."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    add = parser.add_argument
    add("--parts", type=lambda text: text.split(","), default=WANTED, help=",".join(WANTED))
    add("--budget", type=float, default=BUDGET_S, help="seconds for all of it (%(default)s)")
    add("--out", type=Path, default=REPOSITORY / "build" / "gpu", help="where results go")
    add("--disk", type=Path, default=REPOSITORY / "runs", help="where stores lie on a disk")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--small", action="store_true", help="tiny models: to see that all of it works")
    args = parser.parse_args(words)
    if unknown := set(args.parts) - set(WANTED):
        parser.error(f"unknown parts {sorted(unknown)}; there are {', '.join(WANTED)}")
    for directory in (args.disk, args.out):
        directory.mkdir(parents=True, exist_ok=True)
    go = Go(args)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, go.stop)
    go.run(stages(args.parts))
    print((args.out / "gpu.txt").read_text())
    return 1 if page.problems(go.results) else 0


if __name__ == "__main__":
    sys.exit(main())
