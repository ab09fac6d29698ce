"""A table of what was tried, the best first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.configuration.search_space import brief
from trainer.plain_numbers import counted, duration, number
from trainer.sweeps.results import NAME, Outcome

if TYPE_CHECKING:
    from rich.table import Table

_ROWS = 30  # that are shown
_WIDTH = 24  # characters of a value
_STATES = {"preempted": "stopped", "completed": ""}  # what is said of most would only fill the screen


def table(outcomes: Sequence[Outcome]) -> str:
    """The runs as lines for the terminal that is there, as wide as it is: values, best figure, time, folder."""
    from rich.console import Console

    # the best first; those without a figure last
    ranked = sorted(outcomes, key=lambda one: (one.figure or "~", *(-value for value in one.rank)))
    screen = Console(highlight=False, emoji=False, markup=False)
    with screen.capture() as captured:
        screen.print(_drawn(ranked[:_ROWS], {one.figure or "" for one in ranked} - {""}))
    lines = [line.rstrip() for line in captured.get().splitlines()]
    more = [f"  … and {counted(len(ranked) - _ROWS, 'run')} more, in {NAME}"] if len(ranked) > _ROWS else []
    return "\n".join([*lines, *more])


def _drawn(ranked: Sequence[Outcome], names: set[str]) -> Table:
    """One row a run. names: the figures by which they are compared, as a rule one."""
    from rich.table import Table
    from rich.text import Text

    # the values may be cut where the terminal ends, what was measured may not
    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    keys, one_name = list(dict.fromkeys(key for one in ranked for key in one.values)), len(names) == 1
    for heading in headings(keys):
        drawn.add_column(heading, overflow="ellipsis", max_width=_WIDTH)
    drawn.add_column(ranked[0].name if one_name else "best figure", justify="right", no_wrap=True)
    for heading in ("time", "folder", ""):
        drawn.add_column(heading, justify="right" if heading == "time" else "left", no_wrap=True)
    for place, one in enumerate(ranked):
        # where runs of several figures stand together none is the best of all
        first = place == 0 and one_name and one.best is not None
        figure = "–" if one.best is None else number(one.best) if one_name else f"{one.name} {number(one.best)}"
        state = "best" if first else _STATES.get(one.state, one.state)
        cells = [*(short(brief(one.values.get(key, ""))) for key in keys), figure, duration(one.seconds)]
        cells += [f"{one.folder.split('_')[0]}_*", state]
        drawn.add_row(*map(Text, cells), style="bold" if first else "")
    return drawn


def best_line(outcomes: Sequence[Outcome], folder: Path) -> list[str]:
    """Where the best run lies; nothing where none has a figure, or where they have several."""
    best = max(outcomes, key=lambda one: one.rank, default=None)
    if best is None or best.best is None or len({one.figure for one in outcomes if one.figure}) > 1:
        return []
    return [f"best        {best.name} {number(best.best)} at step {best.best_step}: {folder / best.folder}"]


def headings(keys: Sequence[str]) -> list[str]:
    """The last part of each key where no other ends so: `lr` for optimizer.lr."""
    last = [key.rpartition(".")[2] for key in keys]
    seen = Counter(last)
    return [name if seen[name] == 1 else key for name, key in zip(last, keys, strict=True)]


def short(value: str) -> str:
    """A value of at most 24 characters: of a longer one the beginning and the end, which says more of a path."""
    return value if len(value) <= _WIDTH else f"{value[:7]}…{value[-_WIDTH + 8 :]}"
