"""A number and what it counts, singular or plural."""


def counted(number: int, noun: str) -> str:
    """`1 process`, `2 processes`, `1,437 samples`."""
    ending = "" if number == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number:,} {noun}{ending}"
