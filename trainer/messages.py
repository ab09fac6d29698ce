"""Exceptions that end a run with their message alone, and the format of messages: counts, numbers, names, paths."""

import re
from collections.abc import Iterable, Sequence
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from traceback import extract_tb
from types import ModuleType

_MAX_PROBLEMS = 10  # that one message shows


class Refusal(Exception):
    """The command or the configuration cannot work; the message says what is wrong, why, and what works instead."""


class FatalRunError(Exception):
    """A run cannot go on, and the message says all of it: exit code 1, without a traceback."""


class BadData(FatalRunError):
    """A run reads a sample that it cannot use; the message says which sample, what is wrong with it, and what to do."""


class NotFinite(BadData, FloatingPointError):
    """A loss, a gradient or a weight is NaN or infinite; all ranks raise it alike.

    The message names step, ranks and samples as far as known.
    """

    def __init__(self, what: str, read: str, then: str = "") -> None:
        """`what` is wrong; `read`: each rank's samples; `then`: why that ends the run."""
        super().__init__(
            f"{what}. {then}Nothing of it is saved: the same command goes on from the newest checkpoint, if there is"
            f" one.\nRead were:{read}\nLook for broken samples, a loss that divides by zero, a rate that is too high"
            " (optimizer.lr)"
        )
        self.what, self.read = what, read


def join_problems(problems: Sequence[str]) -> str:
    """Problems as one message, a line each: the first of them, and how many more there are."""
    left_out = len(problems) - _MAX_PROBLEMS
    return "\n".join([*problems[:_MAX_PROBLEMS], *([f"… and {left_out:,} more"] if left_out > 0 else [])])


def first_line(error: BaseException) -> str:
    """The first line of an error's message; the name of its class where it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def error_place(error: BaseException, *libraries: ModuleType) -> str:
    """Where an error was raised in code of nobody of these: `in FILE:LINE`; empty where it is all theirs."""
    inside = tuple(str(Path(str(module.__file__)).parent) for module in libraries)
    frames = [frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith(inside)]
    return f"in {frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """A question that names the options nearest to a mistyped word; empty where none is near."""
    known = list(options)
    # upper and lower case are mixed up more often than letters
    same = [option for option in known if option.lower() == word.lower()]
    close = same or get_close_matches(word, known, n=2, cutoff=0.5)
    return f"; did you mean {' or '.join(repr(name) for name in close)}?" if close else ""


def format_count(count: int, noun: str) -> str:
    """`1 process`, `2 processes`, `1,437 samples`."""
    ending = "" if count == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{count:,} {noun}{ending}"


def format_names(names: Iterable[str], most: int) -> str:
    """The first so many names, and how many more there are: `a, b and 3 more`."""
    escaped = [escape_line(name) for name in names]
    return ", ".join(escaped[:most]) + (f" and {len(escaped) - most:,} more" if len(escaped) > most else "")


def format_number(value: float) -> str:
    """Four digits after the point; four significant ones where that would be too few or too many."""
    # 0.1235, 12.3457, but 1.235e-05 and 1.235e+06
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 or value == 0 else f"{value:.4g}"


def format_duration(seconds: float) -> str:
    """Minutes and seconds, hours where there are some: `0:41`, `1:02:03`."""
    # Python writes 0:00:41 and 1:02:03
    text = str(timedelta(seconds=round(seconds)))
    return text.removeprefix("0:").removeprefix("0") if text.startswith("0:") else text


def format_seconds(seconds: float) -> str:
    """A time with as many digits as matter."""
    # 1:40 and more as a clock shows it; below, three digits
    if seconds >= 100:
        return format_duration(seconds)
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


# control characters, what reverses the direction of a line, ends of lines, and halves of characters
_INVISIBLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
# the same but for tabs and ends of lines
_INVISIBLE_IN_TEXT = re.compile(_INVISIBLE.pattern.replace("\x00-\x1f", "\x00-\x08\x0b-\x1f"))


def escape_line(name: object) -> str:
    """A name (a path, a key, a class) in one line; invisible characters are written as Python does: \\n, \\x1b."""
    return _INVISIBLE.sub(_escaped, str(name))


def escape_text(text: str) -> str:
    """The same of a text of several lines, whose ends stay."""
    return _INVISIBLE_IN_TEXT.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def expand_home(path: str | Path) -> Path:
    """The path, with ~ or ~user replaced by the home folder; Refusal where this machine has no such folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        user = Path(path).parts[0]
        raise Refusal(f"{path}: this machine knows no home folder {user}; write the whole path") from None
