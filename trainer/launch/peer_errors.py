"""Errors that are an echo: what a rank sees when the fault is another's, and what follows from what."""

from __future__ import annotations

import re
from collections.abc import Iterator

GONE = "Another process of the run ended without a message: it was killed, perhaps because memory ran out."
# What a rank sees when the fault is another's: gloo's, NCCL's and the store's words for a connection that broke, and
# what they say about that other one, in case it never says anything itself.
_ECHOES = {
    r"connection (was )?(closed|reset)|closed by peer|broken pipe|remote process exited": GONE,
    r"socket timeout|timed out( waiting|!)|timeout[\s\S]*NCCL|(NCCL|ProcessGroup)[\s\S]*(timed out|timeout)": (
        "Another process of the run stopped answering: it hangs, or does something else than this one."
    ),
    r"connection refused|socket closed|connectFullMesh|pair closure|NCCL|ProcessGroup|failed to (send|recv)": "",
}


def about_peer(error: BaseException) -> str | None:
    """What an error says about another rank, empty if nothing certain; None where it is this one's own."""
    texts = [str(one) for one in chain(error) if isinstance(one, RuntimeError | OSError)]
    found = (said for pattern, said in _ECHOES.items() if re.search(pattern, "\n".join(texts), re.IGNORECASE))
    return next(found, None)


def chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what it followed from."""
    one: BaseException | None = error
    while one is not None:
        yield one
        one = one.__cause__ or one.__context__
