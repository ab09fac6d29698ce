"""Several runs in one command (-m), each in processes of its own, so that one fails alone; what came of them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from trainer.configuration.multirun import Multirun, parse_multirun, run_arguments
from trainer.launch.failure import STOPPED, exit_code
from trainer.launch.launcher_environment import apply_init_method
from trainer.launch.namesake import refuse_namesake
from trainer.launch.rendezvous import Launch
from trainer.launch.safe_files import refuse_unsafe_files, resolve_links
from trainer.messages import Refusal, expand_home, format_count
from trainer.records.folder_lock import lock_folder
from trainer.records.run_folder import choose_path
from trainer.sweeps.device_shares import divide_machine, visible_gpus
from trainer.sweeps.parallel_runs import run_concurrently
from trainer.sweeps.results import Outcome, SweepResults, format_best, format_table
from trainer.sweeps.run_source import RunList, RunSource
from trainer.sweeps.sweep_screen import ParallelScreen, SequentialScreen

_MAX_FAILURES = 20  # that are named at the end
_STATE_WORDS = {"completed": "completed", "preempted": "stopped", "not started": "not started", "failed": "failed"}


def run_sweep(argv: Sequence[str], launch: Launch) -> int:
    """Run what the words of -m ask for; the exit code: 0, 75 if asked to stop, else the first failing run's.

    Refusal, before anything starts, where the words of one cannot work.
    """
    _refuse_launched(argv, launch)
    asked = parse_multirun(argv)
    _refuse_launched(argv, apply_init_method(launch, asked.init_method))
    refuse_namesake()
    if asked.plugin and asked.search is not None:
        raise Refusal(f"hydra/launcher={asked.plugin} starts all runs at once, and Optuna chooses one after the other")
    tried, more = _open_folder(asked, launch)
    source = _make_source(asked, tried)
    before = sum(outcome is not None and outcome.state == "completed" for outcome in source.outcomes())
    also = f", {before} completed before" if before else ""
    print(f"multirun    {format_count(source.left(), 'run')} below {tried.folder}{also}", flush=True)
    # who starts them: a plugin of Hydra, or this process
    stopped = _submit_to_plugin(asked, tried, more) if asked.plugin else _run_here(asked, source, tried, more)
    print("\n".join(_summary_lines(source.outcomes(), tried)), flush=True)
    codes = [outcome.exit_code if outcome else STOPPED for outcome in source.outcomes()]
    return _exit_code(codes, stopped, launch)


def _refuse_launched(argv: Sequence[str], launch: Launch) -> None:
    """Refuse to begin the same runs in each process of a launcher; with the words that begin them once."""
    if not launch.from_launcher and launch.world_size == 1:
        return
    words = [word for word in argv if word not in ("-m", "--multirun") and not word.startswith("distributed.init_m")]
    chosen = any(word.startswith(("processes=", "hydra/launcher=")) for word in words)
    if launch.world_size > launch.local_world_size and not chosen:
        nodes = -(-launch.world_size // launch.local_world_size)
        slurm = (f"hydra.launcher.nodes={nodes}", f"hydra.launcher.tasks_per_node={launch.local_world_size}")
        words = ["hydra/launcher=submitit_slurm", *slurm, *words]
    elif launch.world_size > 1 and not chosen:
        words = [f"processes={launch.world_size}", *words]
    each = f"each of the {launch.world_size} processes" if launch.world_size > 1 else "each process of it"
    raise Refusal(
        f"-m: a launcher has started this process, and {each} would begin the same runs. Start it once, without the"
        f" launcher: python -m trainer -m {shlex.join(words)}"
    )


def _open_folder(asked: Multirun, launch: Launch) -> tuple[SweepResults, list[str]]:
    """The folder, this command's until its process ends; and words that its runs get beside their own."""
    # a requeued job goes on in the same folder
    folder, restarted = choose_path(expand_home(asked.root), asked.name, asked.dir, "multirun", launch)
    folder = resolve_links(folder)
    refuse_unsafe_files(folder)
    try:
        lock_folder(folder)
    except OSError as error:
        raise Refusal(f"{folder} cannot be written to: {error.strerror}; give another run.dir") from None
    tried = SweepResults(folder)
    if asked.fresh and not restarted and not launch.requeued:
        tried.forget(asked.space.grid() if asked.search is None else ())
    return tried, ["run.resume=auto"] if launch.requeued and asked.fresh else []


def _make_source(asked: Multirun, tried: SweepResults) -> RunSource:
    """Every combination, or what Optuna chooses."""
    if asked.search is None:
        return RunList(asked.space.grid(), tried)
    from trainer.sweeps.optuna_study import OptunaStudy

    return OptunaStudy(asked.search, asked.space, tried)


def _run_here(asked: Multirun, source: RunSource, tried: SweepResults, more: Sequence[str]) -> int:
    """By this process, on this machine; how often was it asked to stop?"""
    parts = divide_machine(asked.at_once, asked.processes, visible_gpus(asked.device) if asked.at_once != 1 else [])
    if len(parts) == 1:
        return run_concurrently(source, parts, tried, more, SequentialScreen(source.left()))
    return run_concurrently(source, parts, tried, more, ParallelScreen(tried.folder, len(parts)))


def _submit_to_plugin(asked: Multirun, tried: SweepResults, more: Sequence[str]) -> int:
    """By a launcher that is a plugin of Hydra, all at once; never stopped here."""
    from trainer.configuration.hydra_launchers import submit_to_launcher

    left = tried.left(asked.space.grid())
    ended = submit_to_launcher(
        asked.composed, [[*run_arguments(one, tried.folder), *more] for one in left], tried.folder
    )
    for trial, (code, seconds) in zip(left, ended, strict=True):
        tried.add(trial, code, seconds, None if code in (0, STOPPED) else "see its own output")
    return 0


def _summary_lines(outcomes: Sequence[Outcome | None], tried: SweepResults) -> list[str]:
    """The table; the number of runs by outcome; the best; what went wrong with those that failed."""
    ended = [outcome for outcome in outcomes if outcome is not None]
    states = [outcome.state if outcome else "not started" for outcome in outcomes]
    counts = [f"{states.count(state)} {word}" for state, word in _STATE_WORDS.items() if state in states]
    lines = ["", *([format_table(ended), ""] if ended else []), *format_best(ended, tried.folder)]
    lines.append(f"multirun    {', '.join(counts)}, below {tried.folder}")
    failed = [one for one in ended if one.state == "failed"]
    lines += [f"  {one.folder}   exit code {one.exit_code}: {one.reason}" for one in failed[:_MAX_FAILURES]]
    if {"preempted", "not started"} & set(states):
        lines.append(f"to go on: the same command with run.dir={tried.folder}")
    return lines


def _exit_code(codes: Sequence[int], stopped: int, launch: Launch) -> int:
    """The exit code of the whole, from those of all runs; of one that was not started: 75."""
    if stopped > 1:  # nothing was saved the second time
        return 1
    failed, unfinished = [code for code in codes if code not in (0, STOPPED)], STOPPED in codes
    if failed and not (stopped and unfinished):
        return failed[0] or 1
    return exit_code(not unfinished, launch)
