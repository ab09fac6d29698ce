"""`python -m trainer`: from the arguments of a command line to a run, and from a run to an exit code."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

from omegaconf import DictConfig

from trainer.api import (
    build_decided_run,
    processes_to_start,
    run_doctor_job,
    run_in_processes,
)
from trainer.configuration import resource_paths
from trainer.configuration.command_line import parse_command_line
from trainer.configuration.compose import compose
from trainer.configuration.job_kinds import is_doctor_job, needs_reference, open_keys
from trainer.launch import failure
from trainer.launch.child_processes import (
    ForkedProcess,
    PreforkedProcess,
    ProgramRunner,
    can_fork,
    refuse_overwritten,
    run_program,
    set_up_forked_child,
    start_program,
)
from trainer.launch.launcher_environment import read_launch
from trainer.launch.rank_output import say
from trainer.launch.rendezvous import Launch
from trainer.messages import Refusal


def main() -> None:
    """Do what the command line says; the process ends here, with an exit code that says how."""
    launch, arguments = Launch(), sys.argv[1:]
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does; a lab is importable from its parent folder
    try:
        # which of the processes of a launch this is
        refuse_overwritten()
        launch = replace(read_launch(), owns_process=True)
        if launch.waiting_parent is not None and launch.world_size > 1:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # until it listens; who started it ends the others, too
        if parse_command_line(arguments).multirun:
            from trainer.sweeps.sweep import run_sweep

            code = run_sweep(arguments, launch)
        # this process starts the ranks, and waits for them
        elif count := processes_to_start(cfg := compose(arguments), launch):
            code, _, _ = run_in_processes(
                arguments, cfg, count, partial(_fork_rank, cfg) if can_fork(cfg.device) else start_program
            )
        elif is_doctor_job(cfg):
            code = run_doctor_job(cfg, launch)
        # this process is the run, or one rank of it
        else:
            with failure.sys_exit_as_error():  # of a lab, as it is imported or its data are read
                runner = _program_runner(cfg, launch)
                _import_for_ranks(cfg) if launch.world_size > 1 else _import_run_modules(cfg)
                parts = build_decided_run(arguments, launch, cfg, runner)
                if isinstance(runner, PreforkedProcess) and not needs_reference(cfg):
                    runner.dismiss()  # all that was to be planned has been
                code = parts.job(parts)
    except Refusal as refusal:
        failure.exit_refused(str(refusal), launch)
    except KeyboardInterrupt:  # before there was a run that listens to it
        say("interrupted before the run began")
        failure.exit_process(failure.exit_code(False, launch))
    except BrokenPipeError:  # of --help and its like: the program that read it has gone
        failure.exit_process(1)
    except failure.RunFailed as failed:
        failure.exit_failed(failed.__cause__ or failed, launch, failed.folder, failed.step, failed.remedy)
    except Exception as error:
        failure.exit_failed(error, launch)
    failure.exit_process(code)


def _fork_rank(
    cfg: DictConfig, arguments: Sequence[str], environment: Mapping[str, str], stdout: int | None, stderr: int | None
) -> ForkedProcess:
    """A ProcessStarter that forks this process: it imports once what all ranks need."""
    if "torch" not in sys.modules:
        os.environ["OMP_NUM_THREADS"] = environment["OMP_NUM_THREADS"]  # OpenMP reads it once, as torch is imported
    _import_for_ranks(cfg)

    def target() -> None:
        set_up_forked_child(arguments, environment, stdout, stderr)
        main()

    return ForkedProcess(target)


def _program_runner(cfg: DictConfig, launch: Launch) -> ProgramRunner:
    """What runs arguments in another process; where a reference or a plan may be needed, it forks that process now."""
    is_needed = needs_reference(cfg) or open_keys(cfg, launch.world_size)
    if not (launch.is_main and is_needed and can_fork(cfg.device)):
        return run_program
    # later this process computes, and may not be forked any more
    _import_run_modules(cfg)
    return PreforkedProcess(main)


@contextmanager
def _only_imports() -> Iterator[None]:
    """Inside, Python does not look for garbage: imports leave none, and the search takes a tenth of a start."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # what is imported stays; later searches leave it out, and forked processes share its memory
        gc.enable()


@_only_imports()
def _import_for_ranks(cfg: DictConfig) -> None:
    """Import what one of several ranks needs: also torch's compiler, which DDP and FSDP import."""
    import torch.distributed.fsdp

    torch.compiler.disable(len)  # which imports it
    _import_run_modules(cfg)


@_only_imports()
def _import_run_modules(cfg: DictConfig) -> None:
    """Import what this run needs and takes seconds: torch, and the parts of this program that it uses."""
    importlib.import_module("trainer.jobs.run_parts")
    resource_paths.make_recipes_importable()
    for node in cfg.values():
        target = str(node.get("_target_")) if isinstance(node, DictConfig) else ""
        if target.startswith(("trainer.", "recipes.")):  # a lab may compute as it is imported, or start threads
            with suppress(ImportError):  # each process reports it by itself
                importlib.import_module(target.rpartition(".")[0])


if __name__ == "__main__":
    main()
