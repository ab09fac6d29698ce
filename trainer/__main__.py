"""`python -m trainer`: from the arguments of a command line to a run, and from a run to an exit code."""

from __future__ import annotations

import gc
import os
import signal
import sys
from dataclasses import replace

from trainer.api import build_decided_run, processes_to_start, run_doctor_job, run_in_processes
from trainer.configuration.command_line import parse_command_line
from trainer.configuration.compose import compose
from trainer.configuration.job_kinds import is_doctor_job
from trainer.launch import failure
from trainer.launch.child_processes import refuse_overwritten
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
        if launch.waiting_parent is not None:
            if launch.world_size > 1:
                signal.signal(signal.SIGINT, signal.SIG_DFL)  # until it listens; who started it ends the others, too
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # run_ranks has blocked it until here
        if parse_command_line(arguments).multirun:
            from trainer.sweeps.sweep import run_sweep

            code = run_sweep(arguments, launch)
        # this process starts the ranks, and waits for them
        elif count := processes_to_start(cfg := compose(arguments), launch):
            code, _, _ = run_in_processes(arguments, cfg, count)
        elif is_doctor_job(cfg):
            code = run_doctor_job(cfg, launch)
        # this process is the run, or one rank of it
        else:
            with failure.sys_exit_as_error():  # of a lab, as it is imported or its data are read
                gc.disable()  # imports leave no garbage, and looking for it takes a sixth of a start
                parts = build_decided_run(arguments, launch, cfg)
                gc.freeze()  # what is imported stays
                gc.enable()
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


if __name__ == "__main__":
    main()
