"""The command scripts/chaos: its options, what it prints, and its exit code."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from getpass import getuser
from pathlib import Path
from tempfile import TemporaryDirectory

from scripts.faults import shm
from scripts.faults.command import Start, popen
from scripts.faults.disk import disk
from scripts.faults.driven import Driven, Stuck
from scripts.faults.report import differences, report
from scripts.faults.strikes import KILLS, STRIKES
from scripts.faults.two import DISK, INSIDE, QUIET, RUN, TEMPORARY, both
from trainer.messages import Refusal, format_names

CACHE = f"torchinductor_{getuser()}"  # of torch, for all programs of this user; no run's own


def main(words: Sequence[str] | None = None, start: Start = popen) -> int:
    """Print what became of the run; 0: nothing was lost and nothing is left, 1: something, 2: the words cannot work."""
    asked, others = arguments().parse_known_args(words)
    before = shm.names()
    try:
        with place() as folder, disk(folder / DISK) as own, kept(folder, asked.keep):
            undisturbed, run, left_out = both(asked, others, folder, own, start)
            lines = report(run, undisturbed, left_out)
            wrong = differences(run.left, undisturbed.left)
            litter, excused = temporary(folder / TEMPORARY, run)
    except (Refusal, Stuck) as error:
        print(f"scripts/chaos: {error}", file=sys.stderr)
        return 2 if isinstance(error, Refusal) else 1
    outlived = undisturbed.outlived + run.outlived
    wrong += [f"{outlived} processes did not end with their command"] if outlived else []
    wrong += [f"left behind: {name}" for name in (*litter, *shm.left(before))]
    if excused:
        lines.append(f"note        left in TMPDIR by killed processes and torchrun: {format_names(excused, 3)}")
    same = ["the same    every loss to the bit, evaluations, weights, optimizer; nothing is left behind"]
    print(*lines, *([f"differs     {one}" for one in wrong] or same), sep="\n")
    return 1 if wrong else 0


def arguments() -> argparse.ArgumentParser:
    """The options; every other word is for the run."""
    kinds = "\n".join(f"  {kind:<14} {strike.__doc__}" for kind, strike in STRIKES.items())
    parser = argparse.ArgumentParser(
        prog="scripts/chaos",
        usage="%(prog)s [options] [words of the run]",
        description="Train while faults strike, and compare with a run that nothing happened to.",
        epilog=f"kinds of faults:\n{kinds}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--seed", type=int, default=0, help="of the list of faults; default: 0")
    parser.add_argument("--every", type=int, default=50, help="steps from one fault to the next; default: 50")
    parser.add_argument("--faults", type=int, help="or: how many")
    parser.add_argument("--kinds", help="separated by commas; default: all that can strike this run")
    parser.add_argument("--processes", type=int, default=1, help="default: 1")
    parser.add_argument("--max-restarts", type=int, help="under torchrun with this; default: processes=N, no restarts")
    parser.add_argument("--keep", type=Path, help="a new folder for both runs and all they said; default: removed")
    return parser


def temporary(folder: Path, run: Driven) -> tuple[list[str], list[str]]:
    """Temporary files that are left: those that nobody can excuse; those of killed processes, and torchrun's own."""
    quiet, struck = ([path.name for path in (folder / one).iterdir() if path.name != CACHE] for one in (QUIET, RUN))
    killed = any(blow.fault.kind in KILLS for blow in run.blows)
    excused = [name for name in struck if killed or name.startswith("torchelastic_")]
    return [*quiet, *(name for name in struck if name not in excused)], excused


@contextmanager
def place() -> Iterator[Path]:
    """A folder that is removed at the end, also when this program is asked to stop."""
    asks = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda number, _: sys.exit(128 + number)) for number in asks}
    try:
        with TemporaryDirectory(prefix="chaos-") as folder:
            for name in (DISK, INSIDE, f"{TEMPORARY}/{QUIET}", f"{TEMPORARY}/{RUN}"):
                (Path(folder) / name).mkdir(parents=True)
            yield Path(folder)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def kept(folder: Path, keep: Path | None) -> Iterator[None]:
    """Copy the folder at the end, whatever the end is, if that was asked for."""
    try:
        yield
    finally:
        if keep is not None:
            shutil.copytree(folder, keep, ignore=shutil.ignore_patterns(TEMPORARY))


if __name__ == "__main__":
    sys.exit(main())
