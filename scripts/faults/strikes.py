"""How each fault strikes a run: a function each. Files are damaged after a SIGKILL of all processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from scripts.faults.command import LOOK, Command, gone, send
from scripts.faults.disk import Disk
from scripts.faults.left import Left

FULL = 5.0  # seconds without space


@dataclass(frozen=True)
class Scene:
    """What can be struck: the processes, the files, the disk, and a folder that the task of the run looks into."""

    command: Command
    left: Left
    disk: Disk
    inside: Path
    random: Random


def kill_rank(scene: Scene) -> None:
    """SIGKILL of one rank."""
    send(_one(scene), signal.SIGKILL)


def kill_all(scene: Scene) -> None:
    """SIGKILL of all ranks."""
    for pid in scene.command.ranks().values():
        send(pid, signal.SIGKILL)


def kill_launcher(scene: Scene) -> None:
    """SIGKILL of the launcher; the ranks are not told."""
    send(scene.command.pid, signal.SIGKILL)


def kill_worker(scene: Scene) -> None:
    """SIGKILL of a data worker."""
    send(scene.random.choice(sorted(scene.command.workers())), signal.SIGKILL)


def term(scene: Scene) -> None:
    """SIGTERM to the launcher."""
    send(scene.command.pid, signal.SIGTERM)


def term_rank(scene: Scene) -> None:
    """SIGTERM to one rank."""
    send(_one(scene), signal.SIGTERM)


def stop(scene: Scene) -> None:
    """SIGSTOP of one rank, which then neither ends nor answers."""
    send(_one(scene), signal.SIGSTOP)


def flip(scene: Scene) -> None:
    """One flipped bit in the newest checkpoint."""
    for path in _damaged(scene):
        place = scene.random.randrange(path.stat().st_size)
        with path.open("r+b") as file:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 1 << scene.random.randrange(8)]))


def truncate(scene: Scene) -> None:
    """A file of the newest checkpoint is cut short."""
    for path in _damaged(scene):
        os.truncate(path, scene.random.randrange(path.stat().st_size))


def torn_line(scene: Scene) -> None:
    """Half a line at the end of metrics.jsonl."""
    if _ended(scene):
        line = scene.left.metrics.read_bytes().splitlines()[-1]
        with scene.left.metrics.open("ab") as file:
            file.write(line[: scene.random.randrange(1, len(line))])


def full_disk(scene: Scene) -> None:
    """No space on the disk for five seconds."""
    scene.disk.fill()
    time.sleep(FULL)  # the fault itself: it has a length
    scene.disk.free()


def nan(scene: Scene) -> None:
    """A loss that is NaN, once."""
    _ask_inside(scene, "nan")


def drift(scene: Scene) -> None:
    """Another value in one weight of rank 1."""
    _ask_inside(scene, "drift")


# kind → what strikes; its docstring says what that is to users
STRIKES: dict[str, Callable[[Scene], None]] = {
    strike.__name__: strike
    for strike in (
        *(kill_rank, kill_all, kill_launcher, kill_worker, term, term_rank, stop),
        *(flip, truncate, torn_line, full_disk, nan, drift),
    )
}

CHECKPOINTS = {"flip": 2, "truncate": 2}  # so many must be there: the newest is damaged, and the one before is used
KILLS = ("kill_rank", "kill_all", "kill_launcher", "kill_worker", "flip", "truncate", "torn_line")  # by SIGKILL
MAY_GO_ON = ("full_disk",)  # what a run may live through


def _one(scene: Scene) -> int:
    """A rank, drawn."""
    ranks = scene.command.ranks()
    return ranks[scene.random.choice(sorted(ranks))]


def _ended(scene: Scene) -> bool:
    """End all processes, because files are damaged while nobody writes them; was that before the run was complete?"""
    members = scene.command.members()
    scene.command.kill()
    while not all(gone(pid) for pid in members):
        time.sleep(LOOK)
    return scene.left.status()["state"] != "completed"


def _damaged(scene: Scene) -> list[Path]:
    """The file that is to be damaged, after the end of all processes: any of the newest checkpoint that holds bytes."""
    if not _ended(scene):
        return []
    files = sorted(path for path in scene.left.checkpoints()[-1].iterdir() if path.stat().st_size)
    return [scene.random.choice(files)]


def _ask_inside(scene: Scene, what: str) -> None:
    """The task takes the file away when it strikes."""
    path = scene.inside / what
    path.touch()
    while path.exists() and not all(map(gone, scene.command.ranks().values())):
        time.sleep(LOOK)
