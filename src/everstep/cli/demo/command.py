"""`everstep demo`: a training run that is killed again and again, and loses nothing by it.

The trainer is a child process (trainer.py) that checkpoints every step. This process kills it at
moments drawn from a seed (kills.py), has the same run trained without interruption, and reports
what was lost, and whether every bit is equal (report.py, picture.py).
"""

import argparse
import json
import random
import shutil
import sys
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.progress import Progress

from everstep.cli import text
from everstep.cli.answers import Answer
from everstep.cli.demo.events import SPREAD_EVERY, Event, Settings, Strategy
from everstep.cli.demo.kills import Trainer, draw_aims
from everstep.cli.demo.report import Kill, Report, make_report
from everstep.store.presence import is_empty
from everstep.tiers.objects import Url
from everstep.tiers.tier import place_of, tier_at

STEPS_MIN = 4
_DIRECTORY = "runs/demo"
_TITLES = ["kill", "at", "in step", "hit in", "saves in flight", "returned", "restored", "lost"]
_TITLES += ["again after"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `everstep demo`."""
    parser.add_argument("--steps", type=int, default=80, help="steps of the run (default 80)")
    parser.add_argument("--kills", type=int, default=6, help="how often it is killed (default 6)")
    parser.add_argument(
        "--store",
        default=_DIRECTORY,
        help="directory of store and logs; an earlier demo's is replaced (default %(default)s). Or "
        "the URL of an empty place in a bucket: then after each kill nothing is left on this "
        "machine, its keeper's memory neither",
    )
    parser.add_argument("--seed", type=int, help="of model, data and kills (default: a new one)")
    parser.add_argument("--picture", type=Path, help="PNG to write (default: in the directory)")
    parser.add_argument("--json", dest="report", type=Path, help="write the report to this file")
    parser.set_defaults(json=False)
    parser.add_argument(
        "--strategy",
        choices=get_args(Strategy),
        default="auto",
        help="how checkpoints are taken (default %(default)s), at every step; spread: at every "
        f"{SPREAD_EVERY}th",
    )
    parser.add_argument(
        "--size", choices=["25m", "tiny"], default="25m", help="parameters (default 25m)"
    )


def run(args: argparse.Namespace) -> Answer:
    """The demo; 1 where a comparison did not hold."""
    if args.steps < STEPS_MIN or args.kills < 0:
        raise ValueError(f"everstep demo: --steps must be at least {STEPS_MIN}, --kills 0 or more")
    url = args.store if isinstance(place_of(args.store), Url) else None
    if url and not is_empty(tier_at(url)):
        raise ValueError(f"everstep demo: {url} is not empty; give another one with --store")
    directory = _prepare(Path(_DIRECTORY if url else args.store))
    seed = random.SystemRandom().randrange(1_000_000) if args.seed is None else args.seed
    killed = Settings(str(directory), args.steps, seed, args.size, args.strategy, url)
    reference = replace(killed, role="reference")
    title = (
        f"Training with strategy {killed.strategy}, to be killed {args.kills} times "
        f"(seed {killed.seed}; store {killed.store})"
    )
    print(title)
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        logs = (
            train(killed, "training", args.kills, progress),
            train(reference, "the same run without interruption", 0, progress),
        )
    (directory / "events.json").write_text(json.dumps(logs))
    report = make_report(killed, *logs)
    lines = told(report)
    if len(report.kills) < args.kills:
        lines.append(f"Only {len(report.kills)} of {args.kills} kills came before the end.")
    lines.append(_draw(report, logs[0], args.picture or directory / "timeline.png"))
    lines.append(f"Checkpoints: everstep ls {killed.store}")
    facts = {"ok": report.ok, **asdict(report)}
    if args.report:
        args.report.parent.mkdir(parents=True, exist_ok=True)
        args.report.write_text(json.dumps(facts, indent=2) + "\n")
    return Answer(facts, lines, 0 if report.ok else 1)


def train(settings: Settings, what: str, kills: int, progress: Progress) -> list[Event]:
    """A run that is killed so often, and started again each time, up to its last step."""
    task = progress.add_task(what, total=settings.steps)

    def follow(event: Event) -> None:
        if event["event"] in ("restored", "trained"):
            progress.update(task, completed=event["step"])

    with closing(Trainer(settings, follow)) as trainer:
        for count, aim in enumerate(draw_aims(settings.steps, kills, settings.seed), 1):
            if not trainer.kill_at(*aim):
                break
            progress.update(task, description=f"{what}, killed {count} of {kills} times")
            trainer.start()
        trainer.finish()
        return trainer.events


def _draw(report: Report, killed: list[Event], path: Path) -> str:
    try:
        from everstep.cli.demo.picture import draw
    except ImportError:
        return "No picture: that needs matplotlib (pip install everstep[demo])."
    path.parent.mkdir(parents=True, exist_ok=True)
    draw(report, killed, path)
    return f"Timeline: {path}"


def _prepare(directory: Path) -> Path:
    """An empty directory, in the place of an earlier demo's. Other files are left alone."""
    directory = directory.resolve()
    if directory.exists() and any(directory.iterdir()):
        if not (directory / "killed.log").exists():
            raise ValueError(
                f"everstep demo: {directory} is not empty and not an earlier demo's; "
                f"give another one with --store"
            )
        shutil.rmtree(directory)
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def told(report: Report) -> list[str]:
    """The kills; a line for each comparison, and one for each problem."""
    rows = [_kill_cells(*row) for row in enumerate(report.kills, 1)]
    strategy, seed = report.settings.strategy, report.settings.seed
    lines = [f"Kills by SIGKILL (strategy {strategy}, seed {seed})"] if rows else []
    lines += text.table(_TITLES, rows, right=_TITLES)
    if not report.ok:
        said = [*(f"✗ {problem}" for problem in report.problems), "The comparison FAILED."]
        return [*lines, *(text.paint(line, "bad") for line in said)]
    lost_max = text.plural(report.settings.lost_max, "step")
    good = [
        f"{len(report.kills)} kills, at most {lost_max} lost at each: {report.lost} lost in all",
        f"{report.losses_compared} losses of {report.settings.steps} steps "
        f"({report.losses_again} computed again after kills) equal bit for bit",
        f"final state equal: {report.state['tensors']} tensors of "
        f"{text.size(report.state['bytes'])} and {report.state['values']} other values",
    ]
    return [*lines, *(text.paint(f"✓ {line}", "live") for line in good)]


def _kill_cells(number: int, kill: Kill) -> list[str]:
    is_log = kill.base not in (None, kill.restored)
    replay = f" ({kill.base} + {text.plural(kill.records or 0, 'record')})" if is_log else ""
    return [
        str(number),
        text.seconds(kill.at_s),
        "–" if kill.step is None else str(kill.step),
        kill.phase,
        ", ".join(map(str, kill.saving)) or "none",
        str(kill.returned),
        "–" if kill.restored is None else f"{kill.restored}{replay}",
        "–" if kill.lost is None else str(kill.lost),
        "killed before" if kill.again_s is None else text.seconds(kill.again_s),
    ]
