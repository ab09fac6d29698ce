"""Names that others gave, as they stand on a screen and in a log: none begins a line of its own or moves a cursor."""

import re

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
