"""One command under way, and every process that it has started, however they have detached themselves."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, Protocol

MARK = "CHAOS_MARK"  # in the environment of everything that a command starts
PARTING = 60.0  # seconds that what a command has started may outlive it
LOOK = 0.02  # seconds between two looks at files and processes, which nobody announces


class Started(Protocol):
    """What is used of `subprocess.Popen`."""

    pid: int

    def poll(self) -> int | None:
        """The exit code; None while it runs."""


Start = Callable[[list[str], Mapping[str, str], BinaryIO], Started]


def popen(arguments: list[str], environment: Mapping[str, str], screen: BinaryIO) -> Started:
    """Start a command as a shell would."""
    return subprocess.Popen(
        arguments, env=dict(environment), stdin=subprocess.DEVNULL, stdout=screen, stderr=screen, start_new_session=True
    )


class Command:
    """A command that was started just now; what it says goes to a file."""

    def __init__(self, start: Start, arguments: list[str], environment: Mapping[str, str], screen: Path) -> None:
        self._mark, self.screen = uuid.uuid4().hex, screen
        with screen.open("wb") as file:
            self._process = start(arguments, {**environment, MARK: self._mark}, file)

    @property
    def pid(self) -> int:
        """The launcher; or, of a command of one process, the only rank."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def said(self, last: int = 2000) -> str:
        """The end of what stands on its screen."""
        return self.screen.read_text(encoding="utf-8", errors="replace")[-last:]

    def members(self) -> list[int]:
        """Every living process of it: they have its mark, or are in its session."""
        wanted = f"{MARK}={self._mark}".encode()
        return [
            pid
            for pid, state, _, session in _processes()
            if state != "Z" and (session == self.pid or wanted in _environment(pid))
        ]

    def ranks(self) -> dict[int, int]:
        """rank → process; of a command of one process itself."""
        found: dict[int, int] = {}
        for pid, state, parent, _ in _processes():
            words = _environment(pid).split(b"\0") if parent == self.pid and state != "Z" else []
            found |= {int(word[5:]): pid for word in words if word.startswith(b"RANK=")}
        return found or {0: self.pid}

    def workers(self) -> list[int]:
        """The data workers of all ranks, by the name that torch gives them."""
        return [pid for pid in self.members() if _name(pid) == "pt_data_worker"]

    def kill(self) -> None:
        """End the launcher first, which would start others, then all that is left."""
        for pid in (self.pid, *self.members()):
            send(pid, signal.SIGKILL)

    def leave(self) -> list[int]:
        """Wait for its processes to be gone, and kill those that are not; which these were."""
        deadline = time.monotonic() + PARTING
        while (left := self.members()) and time.monotonic() < deadline:
            time.sleep(LOOK)
        self.kill() if left else None
        return left


def send(pid: int, number: int) -> None:
    """Send a signal to a process, unless it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def gone(pid: int) -> bool:
    """Has this process ended? One that nobody has asked about yet counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def _processes() -> Iterator[tuple[int, str, int, int]]:
    """Process, state, parent, session of all that run on this machine."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                words = Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            yield int(entry), words[0], int(words[1]), int(words[3])


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
