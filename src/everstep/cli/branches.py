"""A store's epochs as a tree, and the tree as rows to draw. Pure: no files, no colours.

One line of epochs runs straight down: the one that leads to the newest. What it left behind, an
epoch's steps beyond the fork or an older resumption, hangs off to the right where it left:

    ┌ epoch 1
    ●  40
    ●  80
    ├─╮ left behind: epoch 1
    │ ○ 120-1
    ├ epoch 2
    ● 100
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from everstep.store.lineage import Epoch
from everstep.store.names import CheckpointName

_HEAD, _TAIL = 2, 6
"""How many checkpoints in a row are drawn at the beginning and at the end, when not all are."""


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the drawing: `depth` lines pass on its left, `mark` is its own part of the graph.

    It stands for an epoch (beyond its step `after`, if not -1), a checkpoint, or `hidden` ones.
    The trunk is the leftmost line; it is live where it leads to the newest epoch.
    """

    depth: int
    mark: str
    epoch: Epoch | None = None
    after: int = -1
    checkpoint: CheckpointName | None = None
    hidden: int = 0
    is_left: bool = False
    has_live_trunk: bool = True


@dataclass(frozen=True, slots=True)
class _Start:
    """An epoch begins here, or goes on beyond step `after`."""

    epoch: Epoch
    after: int


@dataclass(slots=True)
class _Branch:
    """A straight line: what lies on it, top to bottom."""

    items: "list[_Start | CheckpointName | _Branch]" = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not any(
            isinstance(item, CheckpointName) or (isinstance(item, _Branch) and not item.is_empty)
            for item in self.items
        )


def draw(
    epochs: Mapping[int, Epoch],
    checkpoints: Iterable[CheckpointName],
    current: Collection[CheckpointName],
    always: Collection[CheckpointName] | None,
) -> list[Row]:
    """The rows of the drawing; `current` are the checkpoints of the run as it is now.

    The middle of a long row of checkpoints is hidden but for those in `always`; None hides nothing.
    """
    forest = _Forest(epochs, checkpoints)
    rows: list[Row] = []
    roots = sorted(forest.children[None], key=lambda epoch: forest.newest[epoch.number])
    for root in roots:
        line = forest.branch(root)
        if root is roots[-1] or not line.is_empty:
            pen = _Pen(frozenset(current), always, root is roots[-1], rows)
            pen.draw(line, 0)
    return rows


class _Forest:
    """Epochs by parent. A parent that is unknown or not older (a damaged store) counts as none."""

    def __init__(self, epochs: Mapping[int, Epoch], checkpoints: Iterable[CheckpointName]) -> None:
        self.children: dict[int | None, list[Epoch]] = {None: []}
        self.newest: dict[int, int] = {}
        self._own: dict[int, list[CheckpointName]] = {}
        for name in sorted(checkpoints):
            self._own.setdefault(name.epoch, []).append(name)
        known = {number: Epoch(number, None, 0) for number in self._own} | dict(epochs)
        for number in sorted(known, reverse=True):
            epoch = known[number]
            parent = epoch.parent if epoch.parent in known and epoch.parent < number else None
            self.children.setdefault(parent, []).insert(0, epoch)
            self.newest.setdefault(number, number)
            if parent is not None:
                self.newest[parent] = max(self.newest[number], self.newest.get(parent, parent))

    def branch(self, epoch: Epoch, after: int = -1) -> _Branch:
        """The straight line from `epoch` on, beyond step `after`; forks go to the newest heir."""
        line = _Branch()
        here: Epoch | None = epoch
        while here is not None:
            forks = [c for c in self.children.get(here.number, []) if c.fork > after]
            heir = max(forks, key=lambda child: self.newest[child.number], default=None)
            self._follow(line, here, after, heir, [child for child in forks if child is not heir])
            here, after = heir, -1
        return line

    def _follow(
        self, line: _Branch, epoch: Epoch, after: int, heir: Epoch | None, others: list[Epoch]
    ) -> None:
        """Put one epoch on the line, from `after` to the heir's fork, with what leaves it there."""
        limit = heir.fork if heir else float("inf")
        own = [name for name in self._own.get(epoch.number, []) if name.step > after]
        leaving = sorted((c for c in others if c.fork <= limit), key=lambda c: c.fork)
        line.items.append(_Start(epoch, after))
        for name in own:
            if name.step > limit:
                break
            while leaving and leaving[0].fork < name.step:
                line.items.append(self.branch(leaving.pop(0)))
            line.items.append(name)
        line.items += [self.branch(child) for child in leaving]
        if heir and (any(n.step > limit for n in own) or any(c.fork > limit for c in others)):
            line.items.append(self.branch(epoch, heir.fork))


@dataclass(frozen=True, slots=True)
class _Pen:
    """Turns lines into rows."""

    current: frozenset[CheckpointName]
    always: Collection[CheckpointName] | None
    has_live_trunk: bool
    rows: list[Row]

    def draw(self, line: _Branch, depth: int) -> None:
        """Draw a line and what leaves it."""
        run: list[CheckpointName] = []
        begun = False
        for index, item in enumerate(line.items):
            if isinstance(item, CheckpointName):
                run.append(item)
                continue
            self._draw_run(run, depth)
            run = []
            if isinstance(item, _Branch):
                if not item.is_empty:
                    self.draw(item, depth + 1)
            elif _is_worth_a_row(line, index):
                mark = "├" if begun else ("├─╮" if depth else "┌")
                at = depth if begun or not depth else depth - 1
                is_left = depth > 0 or not self.has_live_trunk
                self._add(Row(at, mark, item.epoch, item.after, is_left=is_left))
                begun = True
        self._draw_run(run, depth)

    def _draw_run(self, run: list[CheckpointName], depth: int) -> None:
        hidden = 0
        middle = range(_HEAD, len(run) - _TAIL) if self.always is not None else range(0)
        for index, name in enumerate(run):
            if len(middle) > 1 and index in middle and name not in (self.always or ()):
                hidden += 1
                continue
            if hidden:
                self._add(Row(depth, "┊", hidden=hidden, is_left=run[0] not in self.current))
                hidden = 0
            is_left = name not in self.current
            mark = "○" if is_left else "●"
            self._add(Row(depth, mark, checkpoint=name, is_left=is_left))

    def _add(self, row: Row) -> None:
        self.rows.append(replace(row, has_live_trunk=self.has_live_trunk))


def _is_worth_a_row(line: _Branch, index: int) -> bool:
    """An epoch that wrote nothing is drawn only as the first or the last of its line."""
    rest = line.items[index + 1 :]
    return not rest or index == 0 or not isinstance(rest[0], _Start)
