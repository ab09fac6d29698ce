"""The commands of the first hour: each is a process of its own, ends in time, and leaves a run folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TAIL = 20_000  # characters of what a failing command said that are kept
LATE = 124  # the exit code of a command that was ended, as of timeout(1)
GRACE = 5.0  # seconds from SIGTERM to SIGKILL


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what stood on the screen."""

    code: int
    screen: str
    errors: str

    @property
    def why(self) -> str:
        """The sentence of a refusal, or the last line that was said; fit for a table."""
        lines = [line.strip() for line in (self.errors or self.screen).splitlines() if line.strip()]
        said = [line for line in lines if "Warning:" not in line] or ["it said nothing"]
        text = " ".join(said) if self.code == 2 else said[-1]
        return ("out of time; " * (self.code == LATE) + text[:300]).replace("|", "/")


class Runs:
    """Starts commands in a folder on one device. Several threads may ask at the same time."""

    def __init__(self, folder: Path, device: str, log: Path) -> None:
        self.folder, self.device = folder, device
        self.deadline = time.monotonic()  # of the section; nothing runs longer
        self._log, self._lock = log, Lock()
        self._live: set[subprocess.Popen[bytes]] = set()

    def stop(self) -> None:
        """End what runs, and let nothing start any more in this section."""
        self.deadline = 0.0
        for process in list(self._live):
            _end(process)

    def command(self, name: str, words: Sequence[str], **variables: str) -> Ended:
        """Run Python with these words to its end, or to the deadline. If it fails, what it said goes to the log."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            return Ended(LATE, "", "it was not started")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        screen, errors = self.folder / f"{name}.out", self.folder / f"{name}.err"
        command = [sys.executable, *words]
        with screen.open("wb") as out, errors.open("wb") as err:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,  # so that all its processes can be ended
            )
        self._live.add(process)
        try:
            code = process.wait(left)
        except subprocess.TimeoutExpired:
            code = LATE
        finally:  # also where this program is interrupted
            _end(process)
            self._live.discard(process)
        ended = Ended(code, *(path.read_text(encoding="utf-8", errors="replace") for path in (screen, errors)))
        if code:
            with self._lock, self._log.open("a", encoding="utf-8") as log:
                said = ended.screen[-TAIL:] + ended.errors[-TAIL:]
                log.write(f"===== {name} ended with {code}\n{' '.join(words)}\n{said}\n")
        return ended

    def trainer(self, name: str, words: str, **variables: str) -> Ended:
        """`python -m trainer` with these words, in a run folder of this name."""
        device = [] if "device=" in f" {words}".replace(" job.device=", "") else [f"device={self.device}"]
        run = [*words.split(), *device, f"run.root={self.folder}", f"run.name={name}"]
        return self.command(name, ["-m", "trainer", *run], **variables)

    def lines(self, name: str) -> list[dict[str, Any]]:
        """What a run wrote down after its steps."""
        path = self.folder / name / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
        return [line for line in lines if line["kind"] == "train"]

    def losses(self, name: str) -> dict[int, float]:
        """The loss after each step."""
        return {line["step"]: line["loss"] for line in self.lines(name)}

    def bits(self, name: str) -> dict[int, str]:
        """The loss after each step, to the bit."""
        return {line["step"]: line["loss_hex"] for line in self.lines(name)}

    def measured(self, name: str) -> dict[str, float]:
        """What the run's own summary says: `peak`, bytes, and `step_s`."""
        return json.loads((self.folder / name / "environment.json").read_text()).get("measured") or {}

    @cached_property
    def facts(self) -> Mapping[str, Any]:
        """What the machine is, asked in a process of its own: this one must not take memory of the device."""
        code = (
            "import json, sys, torch; from dataclasses import asdict;"
            "from trainer.jobs.doctor.host_facts import collect_host_facts;"
            "print(json.dumps(asdict(collect_host_facts(torch.device(sys.argv[1]), None))))"
        )
        ended = self.command("facts", ["-c", code, "cpu" if self.device == "cpu" else f"{self.device}:0"])
        if ended.code:
            raise RuntimeError(ended.why)
        return json.loads(ended.screen.splitlines()[-1])


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command that still runs, with all processes of its session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
