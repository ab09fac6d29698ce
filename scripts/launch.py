"""Run the arguments of scripts/train with `processes=N`: the number of `NPROC`, the digits where nothing else is named.

This program becomes `python -m trainer`, so that signals and the exit code are the run's own.
"""

import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

# Arguments that show something and train nothing: one process is enough to answer.
SHOWING = {"--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i"}
# Groups that say what is trained, or of which run: whoever names one of them does not mean the experiment below.
CHOOSING = {"experiment", "data", "model", "task", "optimizer", "schedule", "job"}


def main() -> None:
    """Become the program that trains."""
    arguments = sys.argv[1:]
    refuse_namesake()
    os.execv(sys.executable, [sys.executable, "-m", "trainer", *with_defaults(arguments, processes(arguments))])


def refuse_namesake() -> None:
    """End with 2 where `python -m trainer` would find something else of that name first."""
    spec = PathFinder.find_spec("trainer", [os.getcwd(), *sys.path])
    if spec and spec.origin and not Path(spec.origin).with_name("__main__.py").is_file():
        found = f"{spec.origin} is not this program, and Python finds it first"
        way = "start in another folder, or pip uninstall what has put it there"
        print(f"scripts/train: {found}; {way}.", file=sys.stderr)
        sys.exit(2)


def processes(arguments: list[str]) -> int:
    """How many processes: `NPROC`, else one for strategies that run on one, else two."""
    if SHOWING & {argument.split("=")[0] for argument in arguments}:
        return 1
    count = os.environ.get("NPROC") or ("1" if {"strategy=single", "strategy=dp"} & {*arguments} else "2")
    if not count.isdecimal() or int(count) < 1:
        print(f"scripts/train: NPROC={count} is no number of processes; NPROC=2 would be one.", file=sys.stderr)
        sys.exit(2)
    return int(count)


def with_defaults(arguments: list[str], count: int = 1) -> list[str]:
    """The user's arguments, and where they leave it open `experiment=digits strategy=ddp processes=N`."""
    named = {argument.lstrip("+").split("=")[0].split("@")[0] for argument in arguments if "=" in argument}
    added = [] if CHOOSING & named else ["experiment=digits"]
    added += [] if "strategy" in named else ["strategy=ddp"]
    added += [] if count == 1 or "processes" in named else [f"processes={count}"]
    # Beside the other overrides: flags may stand before or after them, not between.
    place = next(
        (i for i, argument in enumerate(arguments) if "=" in argument and not argument.startswith("-")), len(arguments)
    )
    return [*arguments[:place], *added, *arguments[place:]]


if __name__ == "__main__":
    main()
