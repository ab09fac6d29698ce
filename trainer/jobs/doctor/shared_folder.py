"""Does the folder of runs behave on all machines as a run needs it? Renaming, O_EXCL, flock, delay."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

from trainer.jobs.doctor.findings import ExaminedRanks, Finding, Level
from trainer.launch.polling import poll
from trainer.launch.safe_files import replace_file

_PATIENCE = 10.0  # seconds until a machine must see what another one has written
_DELAY = 1.0  # seconds; more is a file system that keeps old answers
_NAMES, _VERSIONS = 8, 30  # files that all try to make; times that a file is written anew while the others read it


@dataclass
class FolderReport:
    """What one rank has seen of the folder."""

    delay_s: float | None = None  # until it saw a file of rank 0; None: never, or it did not look
    problems: list[tuple[Level, str]] = field(default_factory=list)


class _Examination:
    """One rank's side of it: steps, which all ranks begin together. Rank 0 writes and the others look."""

    def __init__(self, folder: Path, is_main: bool) -> None:
        self.folder, self.is_main, self.report = folder, is_main, FolderReport()
        self.made = 0  # files of `make_once` that this rank has made
        self._lock: int | None = None

    def look_before(self) -> None:
        """Ask for a file that is not there yet: a network file system may remember that answer."""
        (self.folder / "seen").exists()

    def write(self) -> None:
        """Rank 0 writes that file, and the first version of another one."""
        if self.is_main:
            replace_file(self.folder / "seen", "here")
            replace_file(self.folder / "replaced", _version(0))

    def see(self) -> None:
        """How long until this rank sees it?"""
        began = monotonic()
        if poll(lambda: (self.folder / "seen").exists() or None, _PATIENCE):
            self.report.delay_s = monotonic() - began

    def replace(self) -> None:
        """Rank 0 puts one version in the place of another; what the others read is always there, and whole."""
        path = self.folder / "replaced"
        if self.is_main:
            for number in range(1, _VERSIONS):
                replace_file(path, _version(number), lasting=False)
        elif poll(lambda: self._is_last(path), _PATIENCE) is None:
            self._add("error", f"reads an old version of a file {_PATIENCE:g} s after it was replaced")

    def _is_last(self, path: Path) -> bool | None:
        """Is the newest version there, or one that must not be seen? None: wait for it."""
        try:
            text = path.read_text()
        except FileNotFoundError:
            self._add("error", "finds a file gone for a moment while it is replaced: os.replace is not atomic there")
            return True
        if text not in map(_version, range(_VERSIONS)):
            self._add("error", "reads a file half written while it is replaced: os.replace is not atomic there")
            return True
        return text == _version(_VERSIONS - 1) or None

    def make_once(self) -> None:
        """All try to make files of the same names; for each of them one rank may succeed."""
        for number in range(_NAMES):
            with suppress(FileExistsError):
                os.close(os.open(self.folder / f"once-{number}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
                self.made += 1

    def lock(self) -> None:
        """Rank 0 takes a lock."""
        if self.is_main:
            self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def try_lock(self) -> None:
        """The others must not get it."""
        if not self.is_main:
            descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT)
            with suppress(BlockingIOError):  # as it should be
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._add("error", "gets a lock that rank 0 holds: flock does not reach it")
            os.close(descriptor)

    def unlock(self) -> None:
        """Rank 0 lets go of it."""
        if self._lock is not None:
            os.close(self._lock)

    def _add(self, level: Level, sentence: str) -> None:
        self.report.problems.append((level, sentence))

    def do(self, step: Callable[[_Examination], None]) -> None:
        """One step; an error of the file system is what was looked for. Who does not see the folder does no more."""
        if not self.is_main and self.report.delay_s is None and step not in _STEPS[:3]:
            return
        try:
            step(self)
        except OSError as error:
            self._add("error", f"cannot use the folder of runs ({step.__name__.replace('_', ' ')}: {error.strerror})")


def _version(number: int) -> str:
    """A text of several blocks of a disk; half of it is no version."""
    return f"{number:04d}" * 2048


_STEPS: tuple[Callable[[_Examination], None], ...] = (
    *(_Examination.look_before, _Examination.write, _Examination.see, _Examination.replace),
    *(_Examination.make_once, _Examination.lock, _Examination.try_lock, _Examination.unlock),
)


def examine_folder(site: ExaminedRanks, folder: Path) -> tuple[list[FolderReport], list[Finding]]:
    """Collective: what each rank has seen of this folder, which rank 0 has made, and what is wrong with it."""
    first = site.first_ranks()
    # one rank of each machine is enough; of one machine alone also its second one, for there must be two
    examiners = first if len(first) > 1 else range(min(2, site.world.size))
    examination = _Examination(folder, site.world.is_main)
    for step in _STEPS:
        site.begin()
        if site.world.rank in examiners:
            examination.do(step)
    answers = site.world.all_gather_values((examination.report, examination.made))  # all ranks; plain values
    reports = [report for report, _ in answers]
    findings = [finding for rank in examiners for finding in _judge(site, rank, reports[rank])]
    if (total := sum(made for _, made in answers)) != _NAMES:
        sentence = f"O_EXCL does not hold in the folder of runs: {_NAMES} files were made {total} times"
        findings.append(Finding("error", sentence))
    return reports, findings


def _judge(site: ExaminedRanks, rank: int, report: FolderReport) -> list[Finding]:
    """What one rank has seen, as findings."""
    problems = list(report.problems)
    if report.delay_s is None and not problems:
        sentence = f"does not see what rank 0 wrote {_PATIENCE:g} s before: run.root must be one folder of all machines"
        problems.append(("error", sentence))
    elif report.delay_s is not None and report.delay_s > _DELAY:
        sentence = f"sees a file {report.delay_s:.1f} s after rank 0 has written it: restarts and resumes wait so long"
        problems.append(("warning", f"{sentence}; mount the folder with a shorter cache (NFS: lookupcache=positive)"))
    return [site.finding(level, sentence, rank) for level, sentence in problems]
