"""How each fault strikes a run. Files are damaged after a SIGKILL of all processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from signal import SIGKILL, SIGSTOP, SIGTERM

from tests.run import Command, status

LOOK = 0.02  # seconds between two looks at files and processes, which nobody announces


@dataclass(frozen=True)
class Scene:
    """What can be struck: the processes, their folder, and another folder that the task of the run looks into."""

    command: Command
    ranks: list[int]
    folder: Path
    inside: Path
    random: Random

    def send(self, pids: list[int], signal: int) -> None:
        """A signal to these processes."""
        for pid in pids:
            os.kill(pid, signal)

    def flip(self) -> None:
        """Damage any file of the newest checkpoint."""
        if self._ended():
            files = sorted(path for path in checkpoints(self.folder)[-1].iterdir() if path.stat().st_size)
            path = self.random.choice(files)
            data = bytearray(path.read_bytes())
            data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
            path.write_bytes(data)

    def tear(self) -> None:
        """Write half a line."""
        if self._ended():
            metrics = self.folder / "metrics.jsonl"
            line = metrics.read_bytes().splitlines()[-1]
            with metrics.open("ab") as file:
                file.write(line[: self.random.randrange(1, len(line))])

    def ask(self, what: str) -> None:
        """The task takes the file away when it strikes."""
        path = self.inside / what
        path.touch()
        while path.exists() and not all(map(gone, self.ranks)):
            time.sleep(LOOK)

    def _ended(self) -> bool:
        """End all processes: nobody else is to write to the files; was that before the run was complete?"""
        self.command.kill()
        while self.command.members():
            time.sleep(LOOK)
        return status(self.folder)["state"] != "completed"


# kind → what that is to users, how it strikes
STRIKES: dict[str, tuple[str, Callable[[Scene], None]]] = {
    "kill_rank": ("SIGKILL of one rank", lambda s: s.send([s.random.choice(s.ranks)], SIGKILL)),
    "kill_all": ("SIGKILL of all ranks", lambda s: s.send(s.ranks, SIGKILL)),
    "kill_launcher": ("SIGKILL of the launcher; the ranks are not told", lambda s: s.send([s.command.pid], SIGKILL)),
    "kill_worker": ("SIGKILL of a data worker", lambda s: s.send([s.random.choice(workers(s.command))], SIGKILL)),
    "flip": ("one flipped bit in the newest checkpoint", Scene.flip),
    "torn_line": ("half a line at the end of metrics.jsonl", Scene.tear),
    "term": ("SIGTERM to the launcher", lambda s: s.send([s.command.pid], SIGTERM)),
    "stop": ("SIGSTOP of one rank, which then neither ends nor answers", lambda s: s.send([s.ranks[-1]], SIGSTOP)),
    "nan": ("a loss that is NaN, once", lambda s: s.ask("nan")),
    "drift": ("another value in one weight of rank 1", lambda s: s.ask("drift")),
}
KILLS = [*STRIKES][:6]  # by SIGKILL


def workers(command: Command) -> list[int]:
    """The data workers of all ranks, by the name that torch gives them."""
    return [pid for pid in command.members() if _said(pid, "Name:") == "pt_data_worker"]


def gone(pid: int) -> bool:
    """Has this process ended? One that nobody has asked about yet counts as ended."""
    return _said(pid, "State:") in ("", "Z")


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints that are whole, oldest first."""
    return sorted(path.parent for path in folder.glob("checkpoints/step-*/manifest.json"))


def _said(pid: int, key: str) -> str:
    """A word of what Linux says of a process; empty where there is none any more."""
    try:
        words = Path(f"/proc/{pid}/status").read_text().split()
    except OSError:
        return ""
    return words[words.index(key) + 1]
