"""The command line of -m: several runs in one command, each in processes of its own; the table of them at the end."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from trainer.configuration.multirun import Multirun, parse_multirun
from trainer.launch.child_processes import refuse_namesake
from trainer.launch.failure import STOPPED, exit_code
from trainer.launch.launcher_environment import apply_init_method
from trainer.launch.rendezvous import Launch
from trainer.launch.safe_files import refuse_unsafe_files, resolve_links
from trainer.messages import Refusal, expand_home, format_count
from trainer.records.folder_lock import lock_folder
from trainer.records.run_folder import choose_path
from trainer.sweeps.local_runner import divide_machine, run_concurrently, visible_gpus
from trainer.sweeps.results import Outcome, SweepResults, format_best, format_table

_MAX_FAILURES = 20  # that are named at the end
_STATE_WORDS = {"completed": "completed", "preempted": "stopped", "not started": "not started", "failed": "failed"}


def run_sweep(arguments: Sequence[str], launch: Launch) -> int:
    """Run what -m asks for; the exit code: 0, 75 if asked to stop, else the first failing run's.

    Refusal, before anything starts, where the overrides of one run cannot work.
    """
    # whatever is wrong with the launch, the overrides or the folder is refused before the first run
    _refuse_launched(arguments, launch)
    asked = parse_multirun(arguments)
    _refuse_launched(arguments, apply_init_method(launch, asked.init_method))
    refuse_namesake()
    # what an earlier command in this folder completed is not run again; one that failed is: its cause may be gone
    results, more = _open_folder(asked, launch)
    left = results.left(asked.trials)
    before = len(asked.trials) - len(left)
    also = f", {before} completed before" if before else ""
    print(f"multirun    {format_count(len(left), 'run')} below {results.folder}{also}", flush=True)
    gpus = visible_gpus(asked.device) if asked.concurrency != 1 else []
    shares = divide_machine(asked.concurrency, asked.processes, gpus)
    stop_requests = run_concurrently(left, shares, results, more)
    outcomes = [results.of(trial) for trial in asked.trials]
    print("\n".join(_summary_lines(outcomes, results)), flush=True)
    codes = [outcome.exit_code if outcome else STOPPED for outcome in outcomes]
    return _exit_code(codes, stop_requests, launch)


def _refuse_launched(arguments: Sequence[str], launch: Launch) -> None:
    """Refuse to begin the same runs in each process of a launcher; the message has the command that does it once."""
    if not launch.from_launcher and launch.world_size == 1:
        return
    skipped = ("distributed.init_m",)
    words = [word for word in arguments if word not in ("-m", "--multirun") and not word.startswith(skipped)]
    if launch.world_size > 1 and not any(word.startswith("processes=") for word in words):
        words = [f"processes={launch.local_world_size}", *words]
    each = f"each of the {launch.world_size} processes" if launch.world_size > 1 else "each process of it"
    machines = ""
    if launch.world_size > launch.local_world_size:
        machines = " Runs of several machines each are a job array, with one run a job (docs/clusters.md)."
    raise Refusal(
        f"-m: a launcher has started this process, and {each} would begin the same runs.{machines} Start it once,"
        f" without the launcher: python -m trainer -m {shlex.join(words)}"
    )


def _open_folder(asked: Multirun, launch: Launch) -> tuple[SweepResults, list[str]]:
    """The folder, locked until this process ends; and overrides that its runs get beside their own."""
    # a requeued job goes on in the same folder
    folder, restarted = choose_path(expand_home(asked.root), asked.name, asked.dir, "multirun", launch)
    folder = resolve_links(folder)
    refuse_unsafe_files(folder)
    try:
        lock_folder(folder)
    except OSError as error:
        raise Refusal(f"{folder} cannot be written to: {error.strerror}; give another run.dir") from None
    results = SweepResults(folder)
    if asked.fresh and not restarted and not launch.requeued:
        results.forget(asked.trials)
    return results, ["run.resume=auto"] if launch.requeued and asked.fresh else []


def _summary_lines(outcomes: Sequence[Outcome | None], results: SweepResults) -> list[str]:
    """The table; the number of runs by outcome; the best; what went wrong with those that failed."""
    ended = [outcome for outcome in outcomes if outcome is not None]
    states = [outcome.state if outcome else "not started" for outcome in outcomes]
    counts = [f"{states.count(state)} {word}" for state, word in _STATE_WORDS.items() if state in states]
    lines = ["", *([format_table(ended), ""] if ended else []), *format_best(ended, results.folder)]
    lines.append(f"multirun    {', '.join(counts)}, below {results.folder}")
    failed = [outcome for outcome in ended if outcome.state == "failed"]
    for outcome in failed[:_MAX_FAILURES]:
        lines.append(f"  {outcome.folder}   exit code {outcome.exit_code}: {outcome.reason}")
    if {"preempted", "not started"} & set(states):
        lines.append(f"to go on: the same command with run.dir={results.folder}")
    return lines


def _exit_code(codes: Sequence[int], stop_requests: int, launch: Launch) -> int:
    """The exit code of the sweep, from those of all runs; a run that was not started has 75."""
    if stop_requests > 1:  # the second one ended the runs at once, and nothing was saved
        return 1
    # a failure counts, unless it may come from the request to stop itself
    failed, unfinished = [code for code in codes if code not in (0, STOPPED)], STOPPED in codes
    if failed and not (stop_requests and unfinished):
        return failed[0] or 1
    return exit_code(not unfinished, launch)
