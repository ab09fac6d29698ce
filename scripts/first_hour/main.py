"""The first hour with a GPU: runs sections, writes the report line by line; see scripts/gpu_first_hour."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import traceback
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock

import torch

from scripts.first_hour.runs import Runs
from scripts.first_hour.sections import SECTIONS, Hour
from trainer.launch.devices import accelerator_type

PACKAGES = ("torchvision", "hydra", "omegaconf", "numpy", "safetensors")
SLOWER = 5  # times the limits of the sections on CPUs, which other programs may use as well


class Report:
    """A Markdown file that is complete after each line, also on the screen."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, Lock()
        self.wrong: list[str] = []
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text("", encoding="utf-8")

    def write(self, line: str) -> None:
        """Append one line."""
        with self._lock, self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            print(line, flush=True)

    def add_wrong(self, what: str) -> None:
        """Remember what is wrong; it is listed at the end of its section and of the report."""
        self.wrong.append(what)


def run_section(name: str, hour: Hour, report: Report) -> None:
    """One section, within its time; what it raises is wrong and stops no other."""
    section, limit = SECTIONS[name]
    limit *= SLOWER if hour.runs.device == "cpu" else 1
    before, started = len(report.wrong), time.monotonic()
    hour.runs.deadline = started + limit
    report.write(f"\n## {name}\n")
    report.write(f"{section.__doc__}\n")
    try:
        section(hour)
    except Exception as error:  # a mistake here must not cost the other sections
        report.add_wrong(f"the section {name} failed: {type(error).__name__}: {error}")
        traceback.print_exc()
    report.write("")
    for what in report.wrong[before:]:
        report.write(f"- **wrong**: {what}")
    report.write(f"- {name} took {time.monotonic() - started:.0f} s of at most {limit}")


def main() -> None:
    """Read the words, run the sections, end with what was found."""
    parser = argparse.ArgumentParser(prog="scripts/gpu_first_hour", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--device", help="cpu runs the same lines without a GPU; default: the accelerator")
    parser.add_argument("--report", type=Path, default=Path("runs/gpu_first_hour.md"), help="default: %(default)s")
    parser.add_argument("--folder", type=Path, help="of the runs, which then stay; default: a temporary one")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument("--jobs", type=int, default=max(1, cores // 4), help="small runs at once; default: cores / 4")
    parser.add_argument("--quick", action="store_true", help="tiny networks, few steps: do all lines work?")
    asked = parser.parse_args()
    if unknown := [name for name in asked.sections if name not in SECTIONS]:
        parser.error(f"no such section: {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    device = asked.device or accelerator_type()
    if device is None or device not in ("cpu", accelerator_type()):
        sys.stderr.write(
            f"scripts/gpu_first_hour: there is no {device or 'GPU'} here; --device cpu runs it on the CPU\n"
        )
        sys.exit(2)
    if absent := [name for name in PACKAGES if find_spec(name) is None]:
        sys.stderr.write(f"scripts/gpu_first_hour: not installed, and every run needs it: {', '.join(absent)}\n")
        sys.exit(2)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended, too
    gpus = 0 if device == "cpu" else torch.accelerator.device_count()
    report, started = Report(asked.report.resolve()), time.monotonic()
    report.write(f"# The first hour: {time.strftime('%Y-%m-%d %H:%M')}, device={device}, {' '.join(sys.argv[1:])}")
    with TemporaryDirectory() as temporary:
        folder = (asked.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        log = asked.report.resolve().with_name(asked.report.name + ".log")
        log.write_text("", encoding="utf-8")
        hour = Hour(Runs(folder, device, log), report.write, report.add_wrong, gpus, cores, asked.jobs, asked.quick)
        for name in SECTIONS:
            if name in (asked.sections or SECTIONS):
                run_section(name, hour, report)
    report.write(f"\n## all\n\n- took {time.monotonic() - started:.0f} s")
    report.write(f"- {len(report.wrong)} wrong" + "".join(f"\n  - {what[:160]}" for what in report.wrong))
    sys.exit(1 if report.wrong else 0)


if __name__ == "__main__":
    main()
