"""Where a process writes: the main rank to the console, every rank to its log file, children through their parent.

A word that a full disk does not take is lost; it never ends a run.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from trainer.launch.safe_files import make_folder, open_descriptor, open_file
from trainer.messages import escape_text

_console: TextIO | None = None  # the console's stderr, where this process's own was led into a file


def redirect_output(rank: int, folder: Path) -> None:
    """Lead logging and warnings into logs/rank-N.log; of ranks other than the main one all output, of libraries too."""
    path = log_path(folder, rank)
    make_folder(path.parent)
    if rank != 0:
        _redirect_descriptors(path)
    # records of Python's logging, of this program and of libraries
    file = _LogFile(path, encoding="utf-8", delay=True)
    file.setFormatter(_EscapingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S"))
    logging.getLogger().addHandler(file)
    # of many ranks a user watches one: what it warns of stands on the console as well
    if rank == 0:
        screen = logging.StreamHandler()
        screen.setLevel(logging.WARNING)
        screen.setFormatter(_EscapingFormatter())
        logging.getLogger().addHandler(screen)
    logging.captureWarnings(True)


def say(text: str) -> None:
    """Print on the console's stderr, of whatever rank; a progress line that stands there gives way."""
    # what was printed before comes first, whichever stream it went to
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    screen = _console or sys.stderr
    clear = "\r\x1b[2K" if screen.isatty() else ""
    with suppress(OSError):  # what comes after it, such as status.json, matters more
        print(f"{clear}{escape_text(text)}", file=screen, flush=True)


def append_to_log(text: str, folder: Path | None, rank: int) -> bool:
    """Append to the rank's log file; False where it could not be written, which must not hide why a run ended."""
    if folder is not None:
        try:
            with open_file(log_path(folder, rank), "ab") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {escape_text(text)}\n".encode())
        except OSError:
            return False
    return True


def log_path(folder: Path, rank: int) -> Path:
    """The log file of a rank."""
    return folder / "logs" / f"rank-{rank}.log"


def _redirect_descriptors(path: Path) -> None:
    """From here on file descriptors 1 and 2 are the file, for C++ and child processes too."""
    global _console
    sys.stdout.flush()
    sys.stderr.flush()
    if _console is None:
        _console = os.fdopen(os.dup(2), "w", encoding="utf-8")
    file = open_descriptor(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    # Python's own streams onto the new descriptors; a full disk must not raise in somebody's print
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            io.BufferedWriter(_LossyFile(number, "w", closefd=False)), encoding="utf-8", line_buffering=True
        )
        for number in (1, 2)
    )


class _LossyFile(io.FileIO):
    """A file for what is printed: somebody's print must not end a run because the disk of the log is full."""

    def write(self, data: Any) -> int:
        """Write, or lose it."""
        try:
            return super().write(data) or 0
        except OSError:
            return len(data)


class _EscapingFormatter(logging.Formatter):
    """A record in which whatever names hold is to be seen: none moves the cursor of who reads it."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as text."""
        return escape_text(super().format(record))


class _LogFile(logging.FileHandler):
    """A log file whose disk may be full: what does not fit is lost, without a traceback for each line."""

    def _open(self) -> io.TextIOWrapper:
        return io.TextIOWrapper(open_file(Path(self.baseFilename), "ab"), encoding="utf-8")

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        with suppress(OSError):  # of opening it
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Pass over what the disk says; a mistake in the record is shown as ever."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)
