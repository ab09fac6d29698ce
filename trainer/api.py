"""`trainer.run`: a run from Python; and what it shares with the command line: from arguments to the parts of a run.

Typos are refused before torch is imported, which takes seconds.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from trainer.configuration import job_kinds, resource_paths
from trainer.configuration.command_line import parse_command_line
from trainer.configuration.compose import compose, quote_value
from trainer.configuration.interpolation import flatten_unresolved, format_value
from trainer.configuration.key_checks import suggest_overrides, unknown_key_message
from trainer.configuration.schema import parse_settings
from trainer.launch import failure
from trainer.launch.child_processes import refuse_namesake
from trainer.launch.launcher_environment import read_launch
from trainer.launch.local_launcher import refuse_too_many, run_with_restarts
from trainer.launch.preserve_process_state import preserve_process_state
from trainer.launch.rank_output import say
from trainer.launch.rendezvous import Launch
from trainer.launch.safe_files import resolve_links
from trainer.messages import Refusal, expand_home

if TYPE_CHECKING:
    from torch import nn

    from trainer.jobs.run_parts import RunParts


_compose_lock = threading.Lock()  # Hydra keeps what it composes in a place that all threads share


@dataclass(frozen=True)
class Result:
    """How a run ended, and its results."""

    state: str  # completed; preempted: stopped as requested, and saved
    metrics: dict[str, float]  # of the last evaluation; empty if there was none
    folder: Path
    parts: Callable[[], RunParts] = field(repr=False, compare=False)  # makes once more what the run was made of

    @cached_property
    def network(self) -> nn.Module:
        """The plain network on the CPU, in evaluation mode, with the weights of the last checkpoint."""
        with resource_paths.working_directory_importable(), preserve_process_state():
            parts = self.parts()
            from trainer.jobs.trained_run import load_network, select_checkpoint

            return load_network(parts, select_checkpoint(parts, "last").path, average=False)


# ---------------------------------------------------------------------------------------------------------- trainer.run


def run(
    words: Sequence[str] = (), config_dir: str | Path | None = None, processes: int | str = 1, **keys: Any
) -> Result:
    """Do what `python -m trainer WORDS` does, from a script, a test or a notebook.

    words: the arguments of the command line. config_dir: the same as --config-dir. processes: start this many on this
    machine, "auto": one for each GPU; 1: only this one. Raises Refusal if the command cannot work, and the error itself
    if the run fails; with several processes a RuntimeError with the message of the first failing rank. Ctrl-C stops and
    saves; a second one, or one before there is anything to save, raises KeyboardInterrupt. Never ends the process.
    """
    if isinstance(words, str):
        raise Refusal(f"trainer.run takes a list of arguments, not one text: trainer.run({words.split()})")
    # whatever is wrong with the arguments is reported as on the command line
    labs = [] if config_dir is None else ["--config-dir", str(config_dir)]
    if keys:
        raise Refusal(_suggest_arguments(keys, labs))
    arguments = [*labs, *map(str, words), *([] if processes == 1 else [f"processes={processes}"])]
    try:
        return _run_once(arguments)
    except (Refusal, KeyboardInterrupt) as error:
        # the frames of this module tell nobody anything: of the traceback only the call of run stays
        raise error.with_traceback(None) from None


def _suggest_arguments(keys: Mapping[str, Any], labs: list[str]) -> str:
    """What to write instead of Python's keyword arguments: overrides in the list, by the names that keys have here."""
    with resource_paths.working_directory_importable(), _compose_lock:
        known = flatten_unresolved(compose(labs))  # all keys that there are
    near = {key: suggest_overrides(key, format_value(value), known) for key, value in keys.items()}
    overrides = ", ".join(" or ".join(f'"{override}"' for override in some) for some in near.values() if some)
    problems = [unknown_key_message(key, known) for key, some in near.items() if not some]
    example = f": trainer.run([{overrides}, …])" if overrides else ""
    return "\n".join([f"trainer.run takes keys as words of its list, like the command line{example}", *problems])


def _run_once(arguments: list[str]) -> Result:
    if (command_line := parse_command_line(arguments)).multirun or command_line.flags:
        raise Refusal("trainer.run does one run, and returns: -m, --help, --cfg and --info are for python -m trainer")
    with resource_paths.working_directory_importable():
        with _compose_lock:
            cfg = compose(arguments)
        launch = read_launch()
        count = processes_to_start(cfg, launch)
        # the folder is chosen here, because the results of the run are read from it afterwards
        folder = job_kinds.examined_folder(cfg) if job_kinds.is_doctor_job(cfg) else choose_run_folder(cfg, launch)
        arguments.append(f"run.dir={quote_value(str(folder))}")
        cfg.run.dir = str(folder)
        # Python calls signal handlers in the main thread alone
        if threading.current_thread() is not threading.main_thread():
            say("note        Ctrl-C does not reach a run in a thread; run.stop_after=… ends it")
        code = _run_in_children(arguments, cfg, count) if count else _run_in_this_process(arguments, launch, cfg)
        if code == 1:  # no run has failed, or its error would have been raised: a job has found something wrong
            raise RuntimeError(_read_verdict(cfg, folder))
        return Result(*_read_result(cfg, folder, code), folder, partial(build_run, arguments, Launch(), cfg))


def _run_in_this_process(arguments: Sequence[str], launch: Launch, cfg: DictConfig) -> int:
    """The exit code. The process keeps nothing of the run: no log file, no lock, no group of processes, no mode."""
    with preserve_process_state():
        if job_kinds.is_doctor_job(cfg):
            return run_doctor_job(cfg, launch)
        return _run_as_guest(arguments, launch, cfg)


def _run_as_guest(arguments: Sequence[str], launch: Launch, cfg: DictConfig) -> int:
    from torch import distributed

    from trainer.launch.run_status import mark_failed
    from trainer.records.folder_lock import unlock_all_folders

    joined = distributed.is_available() and distributed.is_initialized()  # the caller's own group stays
    # what the command line leaves to the end of its process is put back here, whatever happens
    try:
        with failure.sys_exit_as_error():
            parts = build_decided_run(arguments, launch, cfg)
            return parts.job(parts)
    except failure.RunFailed as failed:
        error = failed.__cause__
        assert error is not None
        mark_failed(failed.folder, failure.error_summary(error), launch.rank)
        raise error from None
    finally:
        # after an error or an interrupt no rank waits for the others before it leaves the group
        if distributed.is_available() and distributed.is_initialized() and not joined:
            distributed.destroy_process_group()
        unlock_all_folders()


def _run_in_children(arguments: Sequence[str], cfg: DictConfig, count: int) -> int:
    """The exit code of the run in processes of its own; their message stands on the screen, and in the error."""
    code, signals, message = run_in_processes(arguments, cfg, count)
    # what the command line says by its exit code is an error here
    if code == 2:
        raise Refusal(message)
    if code not in (0, failure.STOPPED):
        if signals.count(signal.SIGINT) > 1:
            raise KeyboardInterrupt("interrupted twice")
        has_verdict = job_kinds.is_verification(cfg) or job_kinds.is_doctor_job(cfg)
        verdict = _read_verdict(cfg, Path(str(cfg.run.dir))) if has_verdict else ""
        raise RuntimeError(
            message or verdict or "a process of the run ended without a message: killed, or out of memory"
        )
    return code


def _read_verdict(cfg: DictConfig, folder: Path) -> str:
    """What `verify` or `doctor` has found wrong, by its file in this folder; empty where that is nothing."""
    if job_kinds.is_doctor_job(cfg):
        path = folder / "doctor.json"
        findings = json.loads(path.read_text())["findings"] if path.is_file() else []
        errors = [finding["what"] for finding in findings if finding["level"] == "error"]
        return f"{'; '.join(errors)} ({path})" if errors else ""
    path = folder / "verify" / "verify.json"
    verify = json.loads(path.read_text()) if path.is_file() else {"same": True}
    return "" if verify["same"] else f"{verify['verdict']} ({path})"


def _read_result(cfg: DictConfig, folder: Path, code: int) -> tuple[str, dict[str, float]]:
    """What the files say: the state of the run, and its last metrics."""
    from trainer.launch.run_status import read_status
    from trainer.records.metrics_reader import metrics_of, read_last_lines

    # these jobs have a folder of their own, and leave the run's status as it was
    job_folder = "evaluate" if job_kinds.opens_trained_run(cfg) else "verify" if job_kinds.is_verification(cfg) else ""
    job_folder = "doctor" if job_kinds.is_doctor_job(cfg) else "lr" if job_kinds.is_range_test(cfg) else job_folder
    status = read_status(folder)
    if code == failure.STOPPED and status is None:
        raise KeyboardInterrupt("interrupted before the run began")
    state = "completed" if job_folder or not status else status["state"]
    last = read_last_lines(folder / job_folder / "metrics.jsonl", ["eval"])
    return "preempted" if code == failure.STOPPED else state, metrics_of(last.get("eval", {}))


# ----------------------------------------------------------------------------------------- for the command line as well


def build_run(arguments: Sequence[str], launch: Launch, cfg: DictConfig | None = None) -> RunParts:
    """What a run is made of. cfg: composed of the arguments already."""
    cfg = compose(arguments) if cfg is None else cfg
    resource_paths.make_recipes_importable()
    from trainer.jobs.run_parts import assemble  # from here on with torch

    return assemble(cfg, arguments, parse_command_line(arguments).folders, launch)


def build_decided_run(arguments: Sequence[str], launch: Launch, cfg: DictConfig) -> RunParts:
    """The same, after a plan has decided what stands for each auto, as if that had been typed."""
    parts = build_run(arguments, launch, cfg)
    if keys := job_kinds.open_keys(cfg, launch.world_size):
        from trainer.jobs.auto_choice import choose, with_choice

        choice = choose(parts, keys)
        if choice.overrides:
            parts = build_run(arguments, launch, compose(with_choice(arguments, choice)))
        parts.auto = choice
    return parts


def processes_to_start(cfg: DictConfig, launch: Launch) -> int:
    """How many processes this one is to start, by the key `processes`; 0: it does the run itself.

    Refusal where a launcher has started it, or where restarts are asked for and nothing is started.
    """
    # a child that was started for this very key must not start others
    if launch.is_local_child:
        return 0
    restarts = cfg.distributed.restarts
    if cfg.processes is None:
        if restarts and not job_kinds.opens_trained_run(cfg):  # of a trained run it is a key like all others
            raise Refusal(
                f"distributed.restarts={restarts} starts processes again that this command has started: add processes=N"
                " (1, 2, … or auto), or leave it out. torchrun has --max-restarts"
            )
        return 0
    if launch.from_launcher:
        raise Refusal(
            f"processes={cfg.processes}: a launcher started this process, as WORLD_SIZE={launch.world_size} in its"
            " environment says, and decides how many there are; leave out one of the two"
        )
    count = cfg.processes
    if count == "auto":
        from torch import accelerator  # only now: it takes seconds

        count = max(1, accelerator.device_count())
    refuse_too_many(count)
    # one process is a child too where it may have to be started again
    return int(count) if count > 1 or restarts else 0


def run_in_processes(arguments: Sequence[str], cfg: DictConfig, count: int) -> tuple[int, list[int], str]:
    """The run in so many processes: its exit code, the signals that asked it to stop, and its message if it failed."""
    refuse_namesake()
    # the restarts of a trained run are not those of the job that opens it
    restarts, folder = 0 if job_kinds.opens_trained_run(cfg) else cfg.distributed.restarts, Path()
    # they all look there again: a name that is generated must be the same for every attempt
    if restarts:
        folder = choose_run_folder(cfg, Launch())
        if cfg.run.dir is None and cfg.run.name is None:
            arguments = [*arguments, f"run.dir={quote_value(str(folder))}"]
    with TemporaryDirectory(prefix="trainer-") as scratch:
        return run_with_restarts(arguments, count, Path(scratch), folder, restarts)


def run_doctor_job(cfg: DictConfig, launch: Launch) -> int:
    """Do the job `doctor`, on every rank; the exit code. Refusal where it cannot be done."""
    from trainer.configuration.allowed_targets import AllowedTargets
    from trainer.configuration.instantiate import instantiate
    from trainer.jobs.doctor.job import Doctor
    from trainer.jobs.run_parts import make_machine

    # nothing of a run is built but this: none of it need be right
    doctor = instantiate(cfg.job, Doctor, "job", AllowedTargets())
    machine = make_machine(parse_settings(cfg), launch)
    machine.check()
    machine.refuse_shared_devices()
    return doctor(machine, job_kinds.examined_folder(cfg))


def choose_run_folder(cfg: DictConfig, launch: Launch) -> Path:
    """The folder that the configuration names, or one that is named now, on all ranks the same."""
    from trainer.launch.store_collectives import broadcast_from_main
    from trainer.records.run_folder import choose_path

    label, keys = str(cfg.model.get("_target_")).rsplit(".", 1)[-1].lower(), parse_settings(cfg).run

    def choose() -> str:
        return str(choose_path(expand_home(keys.root), keys.name, keys.dir, label, launch)[0])

    return resolve_links(broadcast_from_main(launch, "run-folder", choose))  # all ranks; a path
