"""What started processes say, where this one speaks: its terminal, a notebook's cell, a test's capture."""

from __future__ import annotations

import codecs
import os
import sys
from contextlib import suppress
from selectors import EVENT_READ, DefaultSelector
from typing import Self, TextIO

_MOST = 65536  # bytes read at once


class Relay:
    """Where started processes are to print, for as long as the context lasts.

    A stream that is this process's own descriptor they simply share. One that is not (Jupyter's, pytest's,
    `redirect_stdout`) no other process can know: for it they get a pipe, and `pass_on` writes what comes out there.
    """

    def __enter__(self) -> Self:
        self._pipes = DefaultSelector()
        self._ends: list[int] = []
        self.stdout, self.stderr = self._end(sys.stdout, 1), self._end(sys.stderr, 2)
        return self

    def _end(self, stream: TextIO, number: int) -> int | None:
        """What a started process gets as this descriptor; None: the same."""
        if _is(stream, number):
            return None
        reading, writing = os.pipe()
        self._ends += [reading, writing]
        # a character may come in two pieces
        self._pipes.register(reading, EVENT_READ, (codecs.getincrementaldecoder("utf-8")("replace"), stream))
        return writing

    def pass_on(self, seconds: float) -> bool:
        """Wait so long for something that is said, and pass it on; was there something?

        In the thread that calls: a notebook knows by it to which cell the words belong.
        """
        ready = self._pipes.select(seconds)
        for key, _ in ready:
            decoder, stream = key.data
            # whoever listened may be gone: no reason to stop
            with suppress(OSError, ValueError):
                print(decoder.decode(os.read(key.fd, _MOST)), end="", file=stream, flush=True)
        return bool(ready)

    def __exit__(self, *_: object) -> None:
        """Pass on what is left. This process's own ends are open until now, so that none of the pipes ever ends."""
        while self.pass_on(0):
            pass
        self._pipes.close()
        for end in self._ends:
            os.close(end)


def _is(stream: TextIO, number: int) -> bool:
    """Does the stream write to the descriptor that started processes have under this number?"""
    try:
        return stream.fileno() == number
    except (AttributeError, OSError, ValueError):  # none at all; one without a descriptor; closed
        return False
