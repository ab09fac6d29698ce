"""How tests run the product: one function, four ways, and what a user sees of a run afterwards.

    run(["model=mlp", …])                              in this process: every refusal, every run on one process
    run([…], ranks=2, how="group")                     on ranks that stay (fixture `processes`): no launch to pay
    run([…], ranks=2, how="process", place=tmp_path)   `python -m trainer … processes=2`: signals, kills, exit codes
    run([…], ranks=2, how="torchrun", place=tmp_path)  the same by torchrun
    start([…], …)                                      one of the last two, under way

A real process is a copy of one that has imported everything; but for the time a user could not tell the two apart.
"""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import pytest

from tests.ranks import fork_command, groups

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 240.0  # seconds until a command is given up; nearly all take less than ten
MARK = "TRAINER_TEST_MARK"  # in the environment of everything a command starts, however it detaches itself

# A network and a length that make a whole run a matter of a second or two, on any strategy.
SMALL = ("model=mlp", "model.width=32", "model.depth=2", "loop.log_every=1")
TRANSFORMER = ("model=vit_tiny", "model.width=24", "model.heads=4", "model.depth=2")
SPLIT = (*TRANSFORMER, "loop.global_batch=120", "loop.log_every=1")

How = Literal["here", "group", "process", "torchrun"]


@dataclass(frozen=True)
class Finished:
    """How it ended: the exit code, all that stood on the screen, and the run's folder if there is one."""

    code: int
    out: str
    folder: Path
    left: list[int] = field(default_factory=list)  # processes that outlived it
    litter: list[str] = field(default_factory=list)  # in its temporary folder: of torchrun, of multiprocessing

    @property
    def record(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return lines(self.folder)

    @property
    def status(self) -> dict[str, Any]:
        """status.json."""
        return status(self.folder)

    def lines(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The same lines, of one kind."""
        return lines(self.folder, kind)

    def curve(self, key: str = "loss") -> list[Any]:
        """One number a step, from step 1 on."""
        return curve(self.folder, key)


def run(
    words: Sequence[str],
    ranks: int = 1,
    how: How = "here",
    *,
    place: Path | None = None,
    environment: Mapping[str, str] | None = None,
    code: int | None = 0,
) -> Finished:
    """Do what `python -m trainer WORDS` does in the folder `place`, the present one if none is named.

    code: the exit code that is expected, None: any; AssertionError with the screen where it is another.
    """
    place = Path.cwd() if place is None else place
    if how in ("process", "torchrun"):
        ended = start(words, ranks, how, place=place, environment=environment).end()
        assert ended.left == []
    elif how == "group":
        assert groups, "a test that runs on the group asks for the fixture `processes`"
        answers = groups[-1].run(ranks, type_words, place, [*words], environment or {})
        said = dict.fromkeys(each[1] for each in answers)  # what several say stands there once
        ended = Finished(max(each[0] for each in answers), "".join(said), place)
    else:
        assert ranks == 1, "in this process there is one rank"
        ended = Finished(*type_words(None, place, [*words], environment or {}), place)
    assert code in (None, ended.code), f"exit code {ended.code}, not {code}:\n{ended.out[-6000:]}"
    assert ended.code or not ended.litter, ended.litter
    return replace(ended, folder=_folder(words, place))


def start(
    words: Sequence[str],
    ranks: int = 1,
    how: Literal["process", "torchrun"] = "process",
    *,
    place: Path,
    environment: Mapping[str, str] | None = None,
    flags: Sequence[str] = (),
) -> Command:
    """A real process under way. flags: of torchrun."""
    program = [sys.executable, "-m"]
    if how == "torchrun":
        program += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *flags, "-m"]
    elif ranks > 1:
        words = [*words, f"processes={ranks}"]
    return Command([*program, "trainer", *words], place, environment)


# -------------------------------------------------------------------------------------- in this process, or on a rank


def type_words(launch: Any, place: Path, words: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """What `python -m trainer WORDS` does in this folder: exit code and screen. Leaves nothing switched on.

    launch: which rank this is; None: the only one.
    """
    from trainer.launch.preserve_process_state import preserve_process_state
    from trainer.records import folder_lock

    screen, before, imported, path = io.StringIO(), os.getcwd(), set(sys.modules), sys.path[:]
    with preserve_process_state(), redirect_stdout(screen), redirect_stderr(screen):
        os.environ.update(environment)
        os.chdir(place)
        sys.path.insert(0, str(place))
        try:
            return _do(launch, ["device=cpu", "log=[]", *words]), screen.getvalue()
        finally:
            folder_lock.unlock_all_folders()  # the run's folder: its process would let go of it
            os.chdir(before)
            sys.path[:] = path
            for name in imported & logging.root.manager.loggerDict.keys():
                logging.getLogger(name).disabled = False  # Hydra's help switches off all that there are
            _forget_lab(place, imported)


def _do(launch: Any, words: list[str]) -> int:
    """`trainer.__main__`, for a process that goes on afterwards."""
    from trainer.api import build_decided_run, run_doctor_job
    from trainer.configuration.command_line import parse_command_line
    from trainer.configuration.compose import compose
    from trainer.configuration.job_kinds import is_doctor_job
    from trainer.launch import failure
    from trainer.launch.rank_output import say
    from trainer.launch.rendezvous import Launch
    from trainer.messages import Refusal
    from trainer.sweeps.sweep import run_sweep

    launch = launch or Launch()
    try:
        if parse_command_line(words).multirun:
            return run_sweep(words, launch)
        if is_doctor_job(cfg := compose(words)):
            return run_doctor_job(cfg, launch)
        with failure.sys_exit_as_error():
            parts = build_decided_run(words, launch, cfg)
            with patch("trainer.jobs.fit.keep_freed_memory"):  # or tests would keep what the largest network has freed
                return parts.job(parts)
    except Refusal as refusal:
        say(str(refusal))
        return 2
    except SystemExit as end:  # of --help and its like
        return int(end.code or 0)
    except Exception as error:
        failed = error if isinstance(error, failure.RunFailed) else failure.RunFailed(Path(), None, "")
        cause = failed.__cause__ or error
        brief = isinstance(cause, failure.FatalRunError)
        text = str(cause) if brief else "".join(traceback.format_exception(cause)).rstrip()
        at = "" if failed.step is None else f" at step {failed.step}"
        first = failure.Failure(launch.rank, time.time(), failure.error_summary(cause), launch.rank)
        folder = failed.folder if error is failed else None
        failure.report_failure(first, f"the run failed{at}:\n{text}\n{failed.remedy}".rstrip(), launch, folder)
        return 1


def _forget_lab(place: Path, imported: set[str]) -> None:
    """What was imported from `place` is found anew: the lab of another test has the same name."""
    for name in sys.modules.keys() - imported:
        found = getattr(sys.modules[name], "__spec__", None)
        lies = [found.origin, *(found.submodule_search_locations or ())] if isinstance(found, ModuleSpec) else []
        if place != ROOT and any(path and Path(path).is_relative_to(place) for path in lies):
            del sys.modules[name]


# ---------------------------------------------------------------------------------------------------- a real process


class Command:
    """A program under way, in a copy of a process that has imported everything where it can be.

    Its temporary files have their own folder. Started from nothing: what is no `python -m trainer`, and what an
    interpreter reads from the environment as it starts.
    """

    def __init__(self, arguments: Sequence[str], place: Path, environment: Mapping[str, str] | None = None) -> None:
        self.mark = uuid.uuid4().hex
        self.temporary = place / f"tmp-{self.mark[:8]}"
        self.temporary.mkdir(parents=True)
        self._screen = self.temporary.with_suffix(".screen")
        its = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.temporary),
            MARK: self.mark,
            **(environment or {}),
        }
        if [*arguments[:3]] == [sys.executable, "-m", "trainer"] and "LC_ALL" not in its:
            self.process: Any = fork_command([*arguments[2:]], place, its, self._screen)
        else:
            with self._screen.open("wb") as screen:
                self.process = subprocess.Popen(
                    arguments, cwd=place, env=its, stdin=subprocess.DEVNULL, stdout=screen, stderr=screen
                )

    @property
    def screen(self) -> str:
        """What has been said so far."""
        return self._screen.read_text(encoding="utf-8", errors="replace") if self._screen.exists() else ""

    @property
    def pid(self) -> int:
        """The process that the user's shell would know."""
        return self.process.pid

    def end(self) -> Finished:
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
        return Finished(code, self.screen, self.temporary.parent, left, litter)

    def members(self) -> list[int]:
        """Every living process that this command started: its mark is in their environment, or they share its session.

        A copy shows the environment of what it is a copy of, but is the first of a session. So does a rank that was
        forked, in a session of its own: it is the command's child, and keeps its screen.
        """
        wanted = f"{MARK}={self.mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    state, parent, _, session = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:4]
                    ours = int(session) == self.pid or wanted in (entry / "environ").read_bytes()
                    ours = ours or int(parent) == self.pid or str(self._screen) in map(os.readlink, entry.glob("fd/*"))
                except OSError:
                    continue
                if ours and state != "Z":
                    found.append(int(entry.name))
        return sorted(found)

    def rank(self, rank: int) -> int:
        """The process id of one rank."""
        children = [pid for pid in self.members() if _stat(pid)[1] == self.pid]
        for pid in children:
            if f"RANK={rank}".encode() in (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0"):
                return pid
        # those that were forked show the environment of who forked them, in the order of their ranks
        assert rank < len(children), f"no rank {rank} of {self.pid}:\n{self.screen[-2000:]}"
        return sorted(children, key=lambda pid: (_stat(pid)[19], pid))[rank]

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


def _stat(pid: int) -> list[int]:
    """State, parent, … of a process as /proc has them from the third on; letters are 0."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return [int(each) if each.lstrip("-").isdigit() else 0 for each in fields]


# --------------------------------------------------------------------------------------------------- what a run leaves


def lines(folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl, all or of one kind."""
    path = folder / "metrics.jsonl"
    data = path.read_bytes() if path.is_file() else b""
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
    below = (path.relative_to(folder) for path in folder.rglob("*"))
    return {path for path in below if not path.parts[0].startswith("tmp-")}


def _folder(words: Sequence[str], place: Path) -> Path:
    """The run's folder: that of run.dir, else the newest below run.root; `place` where there is none."""
    given = dict(word.split("=", 1) for word in words if word.startswith(("run.dir=", "run.root=", "run.name=")))
    given = {key: value.strip("'\"") for key, value in given.items()}
    if "run.dir" in given:
        return place / given["run.dir"]
    root = place / given.get("run.root", "runs")
    if "run.name" in given:
        return root / given["run.name"]
    return max((path for path in root.glob("*/") if not path.is_symlink()), key=_age, default=place)


def _age(path: Path) -> int:
    return path.stat().st_mtime_ns


def quickly(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """The cases for `parametrize`, all but the quick ones marked as long: more of what the quick ones show."""
    every = list(cases)
    assert all(one in every for one in quick)  # a case that was renamed must not drop out in silence
    rest = [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long) for case in every]
    return [case if case in quick else marked for case, marked in zip(every, rest, strict=True)]
