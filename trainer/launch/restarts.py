"""The processes of `processes=N`, started once more after a failure: a budget of restarts that progress refills."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from trainer.launch import child_processes
from trainer.launch.failure import STOPPED
from trainer.launch.file_validation import MANIFEST, Damaged, read_json
from trainer.launch.rank_output import say
from trainer.launch.status import read_status
from trainer.plain_numbers import counted

_HEALTHY = (0, STOPPED, 2)  # a refusal would be the same the next time


class Fault(NamedTuple):
    """How a try ended. One that is the same twice is no accident."""

    step: int  # the last one that was reported
    saved: int  # the newest checkpoint; -1: none
    reason: str


def run_with_restarts(
    words: Sequence[str], count: int, scratch: Path, folder: Path, restarts: int, starter: child_processes.Starter
) -> tuple[int, list[int], str]:
    """Run the words in so many processes, again after a failure, up to `restarts` times without a new checkpoint.

    The exit code of the last try, which signals asked it to stop, and its account of what went wrong; scratch: an empty
    folder; folder: of the run.
    """
    left, faults = restarts, list[Fault]()
    while True:
        place = scratch / f"attempt_{len(faults)}"
        place.mkdir()
        code, asked = child_processes.start(words, count, place, len(faults), starter)
        said = child_processes.account(place)
        if not restarts or code in _HEALTHY or asked:
            return code, asked, said
        faults.append(fault(folder, said))
        *earlier, last = faults
        # what has been saved since is progress, however long it took
        if earlier and last.saved > earlier[-1].saved:
            left = restarts
        if earlier and last == earlier[-1]:
            say(f"no restart  the same failure twice at step {last.step:,}: {last.reason}")
            return code, asked, said
        if not left:
            say(f"no restart  {counted(restarts, 'restart')} without a new checkpoint (distributed.restarts)")
            return code, asked, said
        left -= 1
        where = f"from step {last.saved:,}" if last.saved >= 0 else "from the beginning"
        say(f"restart     {where}, after a failure at step {last.step:,}: {last.reason}; left without progress: {left}")


def fault(folder: Path, said: str) -> Fault:
    """How the last try ended, by the run's files and by what its processes have left."""
    status = read_status(folder) or {}
    return Fault(status.get("step", 0), _newest(folder), next(iter(said.splitlines()), "killed, without a last word"))


def _newest(folder: Path) -> int:
    """The step of the newest checkpoint; -1 where there is none."""
    steps = [-1]
    for path in (folder / "checkpoints").glob("[!.]*/manifest.json"):
        with suppress(OSError, Damaged):  # removed just now; of no use to the next try either
            steps.append(read_json(path, MANIFEST)[0]["step"])
    return max(steps)
