"""The one exception for what cannot work: the command line ends with its sentence and exit code 2."""

from collections.abc import Iterable
from difflib import get_close_matches


class Refusal(Exception):
    """The command or the configuration cannot work; the message says what, why and the nearest thing that does."""


def nearest(word: str, options: Iterable[str]) -> str:
    """Say which of the options a mistyped word probably meant; empty where none is near."""
    close = get_close_matches(word, list(options), n=2, cutoff=0.5)
    return f"; did you mean {' or '.join(repr(name) for name in close)}?" if close else ""
