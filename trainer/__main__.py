"""`python -m trainer`: from words to a run, and from a run to an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from trainer.configuration import bundle
from trainer.launch import failure
from trainer.launch.launch import Launch
from trainer.refusal import Refusal


def main() -> None:
    """Run the words of the command line; the process ends here, with an exit code that says how."""
    launch = Launch()
    try:
        launch = Launch.from_environment()
        code = run(sys.argv[1:], launch)
    except Refusal as refusal:
        failure.refuse(str(refusal), launch)
    except BrokenPipeError:  # of --help and its like: whoever read it has gone
        failure.leave(1)
    except Exception as error:
        failure.fail(error, launch)
    failure.leave(code)


def run(words: Sequence[str], launch: Launch) -> int:
    """Compose, check, build, train; the exit code. Typos are refused before torch is imported."""
    from trainer.configuration.compose import compose, folders
    from trainer.configuration.words import read

    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does; a lab is importable from its parent folder
    if read(words).multirun:
        from trainer.run.sweep import run_all

        return run_all(words, launch)
    cfg = compose(words)
    bundle.make_importable()

    from trainer.run.assembly import assemble  # from here on with torch
    from trainer.run.fit import fit

    return fit(assemble(cfg, words, folders(words), launch))


if __name__ == "__main__":
    main()
