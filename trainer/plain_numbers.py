"""How many there are of something, and which, in words; a number and a time as people read them."""

from collections.abc import Iterable
from datetime import timedelta

from trainer.safe_names import shown


def counted(number: int, noun: str) -> str:
    """`1 process`, `2 processes`, `1,437 samples`."""
    ending = "" if number == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number:,} {noun}{ending}"


def named(names: Iterable[str], most: int) -> str:
    """The first so many names, and how many more there are: `a, b and 3 more`."""
    every = [shown(name) for name in names]
    return ", ".join(every[:most]) + (f" and {len(every) - most:,} more" if len(every) > most else "")


def number(value: float) -> str:
    """Four digits after the point, or as many that matter where that would say too little or too much."""
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 or value == 0 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """Minutes and seconds, hours where there are some: `0:41`, `1:02:03`."""
    text = str(timedelta(seconds=round(seconds)))
    return text.removeprefix("0:").removeprefix("0") if text.startswith("0:") else text
