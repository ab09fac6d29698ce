"""Commands as a user types them: real processes, a terminal's worth of output, real signals, and what they leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.warm import ROOT, Forked

PATIENCE = 240.0  # seconds until a command is given up; nearly all take less than ten
MARK = "TRAINER_TEST_MARK"  # in the environment of everything a command starts, however it detaches itself

# A network and a length that make a whole run a matter of a second or two, on any strategy.
SMALL = ("model=mlp", "model.width=32", "model.depth=2", "loop.log_every=1")
TRANSFORMER = ("model=vit_tiny", "model.width=24", "model.heads=4", "model.depth=2")
SPLIT = (*TRANSFORMER, "loop.global_batch=120", "loop.log_every=1")


@dataclass
class Ended:
    """How a command ended: its exit code, and all that stood on the screen, stdout and stderr in their order."""

    code: int
    screen: str
    left: list[int]  # processes that outlived it
    litter: list[str]  # in its temporary folder: of torchrun, of multiprocessing


class Command:
    """One command under way, in a copy of the warm process where it can be. Its temporary files have their own folder.

    Started from nothing: what is no `python -m`, and what an interpreter reads from the environment as it starts.
    """

    def __init__(self, arguments: list[str], cwd: Path, environment: dict[str, str] | None = None) -> None:
        self.mark = uuid.uuid4().hex
        self.temporary = cwd / f"tmp-{self.mark[:8]}"
        self.temporary.mkdir(parents=True)
        self._file = self.temporary.with_suffix(".screen")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.temporary),
            MARK: self.mark,
            **(environment or {}),
        }
        with self._file.open("wb") as screen:
            if arguments[:2] == [sys.executable, "-m"] and "LC_ALL" not in environment:
                self.process: Any = Forked(arguments[2:], cwd, environment, screen.fileno())
            else:
                self.process = subprocess.Popen(
                    arguments, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=screen, stderr=screen
                )

    @property
    def screen(self) -> str:
        """What has been said so far."""
        return self._file.read_text(encoding="utf-8", errors="replace")

    @property
    def pid(self) -> int:
        """The process that the user's shell would know."""
        return self.process.pid

    def end(self) -> Ended:
        """Wait for it, then for what it started to be gone; what is not is killed and reported."""
        try:
            code = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still running after {PATIENCE:g} s:\n{self.screen[-4000:]}") from None
        until = time.monotonic() + 20
        while (left := self.members()) and time.monotonic() < until:
            time.sleep(0.05)
        self.kill()
        litter = [path.name for path in self.temporary.iterdir() if path.name.startswith(("torchelastic", "pymp"))]
        return Ended(code, self.screen, left, litter)

    def members(self) -> list[int]:
        """Every living process that this command started: its mark is in their environment, or they share its session.

        A copy of the warm process shows the environment of that one, but is the first of a session; see _become. So
        does a rank that was forked, in a session of its own: it is the command's child, and keeps its screen.
        """
        wanted = f"{MARK}={self.mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    state, parent, _, session = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:4]
                    ours = int(session) == self.pid or wanted in (entry / "environ").read_bytes()
                    ours = ours or int(parent) == self.pid or str(self._file) in map(os.readlink, entry.glob("fd/*"))
                except OSError:
                    continue
                if ours and state != "Z":
                    found.append(int(entry.name))
        return sorted(found)

    def rank(self, rank: int) -> int:
        """The process id of one rank."""
        children = [pid for pid in self.members() if _parent(pid) == self.pid]
        for pid in children:
            environment = (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in environment:
                return pid
        # those that were forked show the environment of who forked them, in the order of their ranks
        if rank < len(children):
            return sorted(children, key=_began)[rank]
        raise AssertionError(f"no rank {rank} of {self.pid}:\n{self.screen[-2000:]}")

    def wait_for_step(self, folder: Path, step: int) -> None:
        """Until metrics.jsonl has the line of this step or a later one."""
        until = time.monotonic() + PATIENCE
        while max((line["step"] for line in lines(folder)), default=0) < step:
            assert self.process.poll() is None, f"ended before step {step}:\n{self.screen[-4000:]}"
            assert time.monotonic() < until, f"no step {step}:\n{self.screen[-4000:]}"
            time.sleep(0.05)

    def kill(self) -> None:
        """End whatever is left of it."""
        for pid in self.members():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(10)


def single(*words: str) -> list[str]:
    """`python -m trainer …`."""
    return [sys.executable, "-m", "trainer", *words]


def torchrun(count: int, *words: str, flags: tuple[str, ...] = ()) -> list[str]:
    """`torchrun --standalone --nproc-per-node N -m trainer …`, with this Python's torchrun."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count), *flags]
    return [*launcher, "-m", "trainer", *words]


def finish(arguments: list[str], cwd: Path, code: int = 0, environment: dict[str, str] | None = None) -> str:
    """Run a command to its end, which must be this exit code with nothing left over; its screen."""
    ended = Command(arguments, cwd, environment).end()
    assert ended.code == code, f"exit code {ended.code}, not {code}:\n{ended.screen[-6000:]}"
    assert ended.left == []
    assert code or not ended.litter, ended.litter
    return ended.screen


def finish_all(commands: list[list[str]], cwd: Path, codes: int | list[int] = 0) -> list[str]:
    """Run commands, two at a time; their screens, in order."""
    wanted = [codes] * len(commands) if isinstance(codes, int) else codes
    screens: list[str] = []
    for at in range(0, len(commands), 2):
        under_way = [Command(arguments, cwd) for arguments in commands[at : at + 2]]
        for command, code in zip(under_way, wanted[at : at + 2], strict=True):
            ended = command.end()
            assert ended.code == code, f"exit code {ended.code}, not {code}:\n{ended.screen[-6000:]}"
            assert ended.left == []
            screens.append(ended.screen)
    return screens


def lines(folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl, all or of one kind."""
    try:
        data = (folder / "metrics.jsonl").read_bytes()
    except FileNotFoundError:
        return []
    read = [json.loads(line) for line in data.splitlines(keepends=True) if line.endswith(b"\n")]
    return [line for line in read if kind in (None, line["kind"])]


def curve(folder: Path, key: str = "loss") -> list[Any]:
    """One number a step, from step 1 on; every step stands once."""
    train = lines(folder, "train")
    assert [line["step"] for line in train] == list(range(1, len(train) + 1))
    return [line[key] for line in train]


def status(folder: Path) -> dict[str, Any]:
    """status.json."""
    return json.loads((folder / "status.json").read_text())


def far(one: list[float], other: list[float]) -> float:
    """The largest difference of two curves."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def files_below(folder: Path) -> set[Path]:
    """Everything in a folder, apart from what the commands of these tests say and keep for themselves."""
    return set(_below(folder))


def _below(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        relative = path.relative_to(folder)
        if not relative.parts[0].startswith("tmp-"):
            yield relative


def _began(pid: int) -> tuple[int, int]:
    """When, in ticks of the clock, and which one of a tick."""
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]), pid


def _parent(pid: int) -> int:
    text = (Path("/proc") / str(pid) / "stat").read_text()
    return int(text.rsplit(")", 1)[1].split()[1])
