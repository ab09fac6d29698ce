"""`python -m trainer`: from words to a run, and from a run to an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainer.configuration import bundle
from trainer.configuration.compose import compose
from trainer.configuration.words import read
from trainer.launch import failure
from trainer.launch.launch import Launch
from trainer.launch.launchers import launched
from trainer.refusal import Refusal

if TYPE_CHECKING:
    from trainer.run.preparation import RunParts


def main() -> None:
    """Run the words of the command line; the process ends here, with an exit code that says how."""
    launch, words = Launch(), sys.argv[1:]
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does; a lab is importable from its parent folder
    try:
        launch = launched()
        if read(words).multirun:
            from trainer.run.sweep import run_all

            code = run_all(words, launch)
        else:
            run = understood(words, launch)
            code = run.job(run)
    except Refusal as refusal:
        failure.refuse(str(refusal), launch)
    except BrokenPipeError:  # of --help and its like: whoever read it has gone
        failure.exit_process(1)
    except Exception as error:
        failure.fail(error, launch)
    failure.exit_process(code)


def understood(words: Sequence[str], launch: Launch) -> RunParts:
    """What a run is made of. Typos are refused before torch is imported, which takes seconds."""
    cfg = compose(words)
    bundle.make_importable()
    from trainer.run.assembly import assemble  # from here on with torch

    return assemble(cfg, words, read(words).folders, launch)


if __name__ == "__main__":
    main()
