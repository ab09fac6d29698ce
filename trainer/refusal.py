"""What ends a run with its sentence alone: a command that cannot work (exit code 2), what a run cannot outlive (1)."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

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


def listed(problems: Sequence[str]) -> str:
    """Problems as one message, a line each: the first of them, and how many more there are."""
    more = [f"… and {len(problems) - _LINES:,} more"] if len(problems) > _LINES else []
    return "\n".join([*problems[:_LINES], *more])


def first_line(error: BaseException) -> str:
    """What an error says, as far as one line goes; of one that says nothing its kind."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def nearest(word: str, options: Iterable[str]) -> str:
    """Say which of the options a mistyped word probably meant; empty where none is near."""
    known = list(options)
    same = [option for option in known if option.lower() == word.lower()]
    close = same or get_close_matches(word, known, n=2, cutoff=0.5)
    return f"; did you mean {' or '.join(repr(name) for name in close)}?" if close else ""
