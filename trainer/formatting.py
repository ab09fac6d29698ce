"""Numbers, names and paths as people read and write them."""

import re
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

from trainer.refusal import Refusal


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


# control characters, what reverses the direction of a line, ends of lines, and halves of characters
_UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_OF_TEXTS = re.compile(_UNSEEN.pattern.replace("\x00-\x1f", "\x00-\x08\x0b-\x1f"))


def shown(name: object) -> str:
    """A name (a path, a key, a class) in one line; what is not to be seen is written as Python does: \\n, \\x1b."""
    return _UNSEEN.sub(_escaped, str(name))


def shown_lines(text: str) -> str:
    """A text of several lines, which may stay: the same for all else in it."""
    return _OF_TEXTS.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def expand_home(written: str | Path) -> Path:
    """The path, with ~ as the home folder that it means; Refusal where this machine has no such folder."""
    try:
        return Path(written).expanduser()
    except RuntimeError:
        user = Path(written).parts[0]
        raise Refusal(f"{written}: this machine knows no home folder {user}; write the whole path") from None
