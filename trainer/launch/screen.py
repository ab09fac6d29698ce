"""Where a process speaks: the main rank on the console, every rank in a log file of its own."""

import logging
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

_console: TextIO | None = None  # the console's stderr, where this process's own was led into a file


def redirect(rank: int, folder: Path) -> None:
    """Lead logging and warnings into logs/rank-N.log; of ranks other than the main one all output, of libraries too."""
    path = log_path(folder, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    if rank != 0:
        _lead_into(path)
    file = logging.FileHandler(path, encoding="utf-8", delay=True)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S"))
    logging.getLogger().addHandler(file)
    # of many ranks a user watches one: what it warns of stands on the console as well
    if rank == 0:
        screen = logging.StreamHandler()
        screen.setLevel(logging.WARNING)
        logging.getLogger().addHandler(screen)
    logging.captureWarnings(True)


def say(text: str) -> None:
    """Print on the console's stderr, of whatever rank; a progress line that stands there gives way."""
    # what was printed before comes first, whichever stream it went to
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    screen = _console or sys.stderr
    clear = "\r\x1b[2K" if screen.isatty() else ""
    print(f"{clear}{text}", file=screen, flush=True)


def note(text: str, folder: Path | None, rank: int) -> None:
    """Append to the rank's log file; a full disk must not hide why a run ended."""
    if folder is not None:
        with suppress(OSError), log_path(folder, rank).open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")


def log_path(folder: Path, rank: int) -> Path:
    """The log file of a rank."""
    return folder / "logs" / f"rank-{rank}.log"


def _lead_into(path: Path) -> None:
    """From here on file descriptors 1 and 2 are the file, for C++ and child processes too."""
    global _console
    sys.stdout.flush()
    sys.stderr.flush()
    if _console is None:
        _console = os.fdopen(os.dup(2), "w", encoding="utf-8")
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
