"""`python -m trainer`: from words to a run, and from a run to an exit code."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from trainer.configuration.compose import compose
from trainer.configuration.trained import reads_files
from trainer.configuration.words import read
from trainer.door import apart, reported, understood, wanted
from trainer.launch import failure
from trainer.launch.launch import Launch
from trainer.launch.launchers import launched
from trainer.launch.namesake import refuse_overwritten
from trainer.launch.screen import say
from trainer.refusal import Refusal


def main() -> None:
    """Run the words of the command line; the process ends here, with an exit code that says how."""
    launch, words = Launch(), sys.argv[1:]
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does; a lab is importable from its parent folder
    try:
        refuse_overwritten()
        launch = replace(launched(), ours=True)
        if read(words).multirun:
            from trainer.sweeps.sweep import run_all

            code = run_all(words, launch)
        elif count := wanted(cfg := compose(words), launch):
            code, _, _ = apart(words, cfg, count)
        elif reads_files(cfg):
            code = reported(cfg, launch)
        else:
            with failure.exits_are_errors():  # of a lab, as it is imported or its data are read
                parts = understood(words, launch, cfg)
                code = parts.job(parts)
    except Refusal as refusal:
        failure.refuse(str(refusal), launch)
    except KeyboardInterrupt:  # before there was a run that could hear it
        say("interrupted before the run began")
        failure.exit_process(failure.exit_code(False, launch))
    except BrokenPipeError:  # of --help and its like: whoever read it has gone
        failure.exit_process(1)
    except failure.Failed as failed:
        failure.fail(failed.__cause__ or failed, launch, failed.folder, failed.step, failed.remedy)
    except Exception as error:
        failure.fail(error, launch)
    failure.exit_process(code)


if __name__ == "__main__":
    main()
