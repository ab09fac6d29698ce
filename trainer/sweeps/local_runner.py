"""Runs of a sweep on this machine, one after the other or several at once, each in a process of its own.

What a run leaves in a process (memory of a device, a group that hangs, an aborted NCCL) goes with it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from tempfile import TemporaryDirectory
from typing import Literal

from trainer.configuration.multirun import Trial, run_arguments
from trainer.launch.child_processes import child_environment, forward_signals, start_program
from trainer.launch.failure import STOPPED
from trainer.launch.local_launcher import combine_exit_codes, read_failure
from trainer.launch.run_status import read_status
from trainer.launch.safe_files import make_folder, open_file
from trainer.messages import format_duration, format_number
from trainer.sweeps.results import Outcome, SweepResults

_POLL_INTERVAL = 0.1  # seconds


# ----------------------------------------------------------------------------------------- on which part of the machine

_VISIBLE = "CUDA_VISIBLE_DEVICES"  # CUDA's and ROCm's; no other kind of device is divided among runs


@dataclass(frozen=True)
class DeviceShare:
    """One of several equal parts of this machine: GPUs, and cores."""

    environment: dict[str, str]  # variables that keep a process inside its part
    label: str = ""  # its GPUs, for the screen; empty: it has none, or all of them


def visible_gpus(device: str) -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; none where runs compute elsewhere."""
    if device not in ("auto", "cuda"):
        return []
    import torch  # only now: it takes seconds

    from trainer.launch.devices import accelerator_type

    if accelerator_type() != "cuda":
        return []
    listed = os.environ.get(_VISIBLE)
    return listed.split(",") if listed else [str(index) for index in range(torch.accelerator.device_count())]


def divide_machine(
    at_once: int | Literal["auto"], processes: int | str | None, gpus: Sequence[str]
) -> list[DeviceShare]:
    """The machine in so many parts; a single part is all of it. Where there are more runs than GPUs, several share one.

    at_once: auto: as many as there are GPUs for. processes: of each run.
    """
    per_run = processes if isinstance(processes, int) else 1
    # processes=auto: each run takes all GPUs, so only one fits
    most = 1 if processes == "auto" else max(1, len(gpus) // per_run)
    count = most if at_once == "auto" else at_once
    if count == 1:
        return [DeviceShare({})]
    # the same number for each, even if some are left over: a batch that divides among the GPUs of one run divides
    # among those of all
    size = max(1, len(gpus) // count)
    parts = [gpus[at * size : (at + 1) * size] or gpus[at % max(1, len(gpus)) :][:1] for at in range(count)]
    # more threads than cores wait for each other
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // (count * per_run)))
    return [
        DeviceShare(
            {"OMP_NUM_THREADS": threads} | ({_VISIBLE: ",".join(part)} if part else {}),
            f"GPU {','.join(part)}" if part else "",
        )
        for part in parts
    ]


# ----------------------------------------------------------------------------------------------------------- the runner


@dataclass
class RunningChild:
    """A run under way."""

    trial: Trial
    process: Popen[bytes]
    share: DeviceShare
    began: float  # by the monotonic clock
    scratch: Path  # where it reports why it failed


def run_concurrently(
    trials: Sequence[Trial], shares: Sequence[DeviceShare], results: SweepResults, more: Sequence[str]
) -> int:
    """Keep one run going in each share of the machine until there are no more; how often was it asked to stop?

    more: overrides that each run gets beside its own. A request to stop is forwarded to all that are under way, and no
    other run is started; a second Ctrl-C as well, which ends them at once.
    """
    # one run at a time has the screen for itself; several print into files, and the screen tells of each in two lines
    output = results.folder / "output" if len(shares) > 1 else None
    if output is not None:
        make_folder(output)
        print(f"            {len(shares)} at the same time; their output is in {output}", flush=True)

    # each share of the machine is free, or has one run under way
    waiting, free, under_way = list(trials), list(shares), list[RunningChild]()
    processes: list[Popen[bytes]] = []  # all that were ever started
    with (
        TemporaryDirectory(prefix="trainer-") as scratch,
        forward_signals(processes) as signals,
        _terminate_at_end(processes),
    ):
        while True:
            # every share that is free gets a run, until somebody asks to stop
            while free and waiting and not signals:
                trial, share = waiting.pop(0), free.pop(0)
                if output is None:
                    print(f"\nrun {len(processes) + 1} of {len(trials)}   {trial.name}", flush=True)
                else:
                    print(f"started     {trial.name}{f'   on {share.label}' if share.label else ''}", flush=True)
                arguments = [*run_arguments(trial, results.folder), *more]
                child = _start_run(trial, arguments, share, Path(scratch) / str(trial.number), output)
                under_way.append(child)
                processes.append(child.process)
                if signals:  # one that came while this run was being started
                    child.process.send_signal(signals[0])
            if not under_way:
                return max(bool(signals), signals.count(signal.SIGINT))

            # an outcome that is written at once is not lost, whatever becomes of the others
            child = _wait_for_first(under_way)
            under_way.remove(child)
            free.append(child.share)
            outcome = _record_outcome(child, bool(signals), results)
            if output is not None:
                print(_format_ending(outcome), flush=True)


@contextmanager
def _terminate_at_end(processes: Sequence[Popen[bytes]]) -> Iterator[None]:
    """After an error inside, runs that are under way save and stop; otherwise all have ended."""
    try:
        yield
    finally:
        for process in processes:
            process.terminate()


def _start_run(
    trial: Trial, arguments: Sequence[str], share: DeviceShare, scratch: Path, output: Path | None
) -> RunningChild:
    """Start a run; output: the folder of the file that it prints into, None: the screen."""
    # its part of the machine; and TRAINER_EXIT_FILE is for the exit code of the whole sweep
    environment = child_environment(scratch) | share.environment | {"TRAINER_EXIT_FILE": ""}
    # the file goes on where an earlier start of this run stopped; the child keeps it open by itself
    with nullcontext() if output is None else open_file(output / f"{trial.name}.log", "ab") as file:
        descriptor = None if file is None else file.fileno()
        process = start_program(arguments, environment, descriptor, descriptor)
    return RunningChild(trial, process, share, time.monotonic(), scratch)


def _wait_for_first(under_way: Sequence[RunningChild]) -> RunningChild:
    """Wait until one has ended."""
    while True:
        for child in under_way:
            if child.process.poll() is not None:
                return child
        time.sleep(_POLL_INTERVAL)


def _record_outcome(child: RunningChild, stopping: bool, results: SweepResults) -> Outcome:
    """Write how a run ended into sweep.jsonl; stopping: somebody asked for it."""
    code, seconds = combine_exit_codes([child.process.wait()], stopping), time.monotonic() - child.began
    reason = None if code in (0, STOPPED) else _failure_reason(child, results.folder / child.trial.name)
    return results.add(child.trial, code, seconds, reason)


def _failure_reason(child: RunningChild, folder: Path) -> str:
    """Why a run failed, in one line: its own message, if it could leave one."""
    if message := read_failure(child.scratch).strip():
        return message.splitlines()[0][:500]
    # without a message it was killed, or printed its problem before it could report anything
    if (code := child.process.wait()) < 0:
        return f"killed by {signal.Signals(-code).name}"
    status = read_status(folder) or {}
    return str(status.get("reason") or "it ended without a word").splitlines()[0]


def _format_ending(outcome: Outcome) -> str:
    """How a run ended, with the metric that counts, in one line."""
    best = f"   {outcome.name} {format_number(outcome.best)}" if outcome.best is not None else ""
    why = f"   {outcome.reason}" if outcome.reason else ""
    return f"{outcome.state:<12}{outcome.folder}{best}   {format_duration(outcome.seconds)}{why}"
