"""How many there are of something, and which, in words."""

from collections.abc import Iterable


def counted(number: int, noun: str) -> str:
    """`1 process`, `2 processes`, `1,437 samples`."""
    ending = "" if number == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number:,} {noun}{ending}"


def named(names: Iterable[str], most: int) -> str:
    """The first so many names, and how many more there are: `a, b and 3 more`."""
    every = list(names)
    return ", ".join(every[:most]) + (f" and {len(every) - most:,} more" if len(every) > most else "")
