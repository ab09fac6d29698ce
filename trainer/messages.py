"""What a program says to people: the exceptions that end a run with a message, and how messages are written."""

import re
from collections.abc import Iterable, Sequence
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path

_LINES = 10  # of problems that are shown at once


class Refusal(Exception):
    """The command or the configuration cannot work; the message says what is wrong, why, and what works instead."""


class FatalRunError(Exception):
    """A run cannot go on, and the message says all of it: exit code 1, without a traceback, from whoever was first."""


class BadData(FatalRunError):
    """A run reads a sample that it cannot use; the message says which sample, what is wrong with it, and what to do."""


class NotFinite(BadData, FloatingPointError):
    """A loss, a gradient or a weight is NaN or infinite; the message names step, ranks and samples as far as known."""

    def __init__(self, step: int, what: str, read: str, then: str = "") -> None:
        """`what` is not finite, first in this step; `read`: each rank's samples; `then`: why that ends the run."""
        super().__init__(
            f"{what}. {then}Nothing of it is saved: the same command goes on from the newest checkpoint,"
            f" if there is one.\nRead were:{read}\nLook for broken samples, a loss that divides by zero, a rate that is"
            " too high (optimizer.lr)"
        )
        self.step, self.what, self.read = step, what, read


def join_problems(problems: Sequence[str]) -> str:
    """Problems as one message, a line each: the first of them, and how many more there are."""
    more = [f"… and {len(problems) - _LINES:,} more"] if len(problems) > _LINES else []
    return "\n".join([*problems[:_LINES], *more])


def first_line(error: BaseException) -> str:
    """What an error says, as far as one line goes; of one that says nothing its kind."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """Say which of the options a mistyped word probably meant; empty where none is near."""
    known = list(options)
    same = [option for option in known if option.lower() == word.lower()]
    close = same or get_close_matches(word, known, n=2, cutoff=0.5)
    return f"; did you mean {' or '.join(repr(name) for name in close)}?" if close else ""


def format_count(count: int, noun: str) -> str:
    """`1 process`, `2 processes`, `1,437 samples`."""
    ending = "" if count == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{count:,} {noun}{ending}"


def format_names(names: Iterable[str], most: int) -> str:
    """The first so many names, and how many more there are: `a, b and 3 more`."""
    every = [escape_line(name) for name in names]
    return ", ".join(every[:most]) + (f" and {len(every) - most:,} more" if len(every) > most else "")


def format_number(value: float) -> str:
    """Four digits after the point, or as many that matter where that would say too little or too much."""
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 or value == 0 else f"{value:.4g}"


def format_duration(seconds: float) -> str:
    """Minutes and seconds, hours where there are some: `0:41`, `1:02:03`."""
    text = str(timedelta(seconds=round(seconds)))
    return text.removeprefix("0:").removeprefix("0") if text.startswith("0:") else text


# control characters, what reverses the direction of a line, ends of lines, and halves of characters
_UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_OF_TEXTS = re.compile(_UNSEEN.pattern.replace("\x00-\x1f", "\x00-\x08\x0b-\x1f"))


def escape_line(name: object) -> str:
    """A name (a path, a key, a class) in one line; what is not to be seen is written as Python does: \\n, \\x1b."""
    return _UNSEEN.sub(_escaped, str(name))


def escape_text(text: str) -> str:
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
