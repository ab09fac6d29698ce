"""What ends a run with its sentence alone: a command that cannot work (exit code 2), a sample nobody can use (1)."""

from collections.abc import Iterable
from difflib import get_close_matches


class Refusal(Exception):
    """The command or the configuration cannot work; the message says what, why and the nearest thing that does."""


class BadData(Exception):
    """A run meets a sample that it cannot train on; the message says which, what it is not, and what to do.

    No traceback would say more: exit code 1 and this sentence, of whichever rank or decoding process met it first.
    """


def first_line(error: BaseException) -> str:
    """What an error says, as far as one line goes; of one that says nothing its kind."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def nearest(word: str, options: Iterable[str]) -> str:
    """Say which of the options a mistyped word probably meant; empty where none is near."""
    known = list(options)
    same = [option for option in known if option.lower() == word.lower()]
    close = same or get_close_matches(word, known, n=2, cutoff=0.5)
    return f"; did you mean {' or '.join(repr(name) for name in close)}?" if close else ""
