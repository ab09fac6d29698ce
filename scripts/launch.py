"""Run the words of scripts/train on `NPROC` processes, as torchrun would, and end with the run's own exit code.

torchrun turns every failure into exit code 1 and every preemption that it hears of into a traceback. This program
asks the same machinery (torch's `elastic_launch`) which process failed first and with what code. That a run was
stopped and saved shows in no exit code there, because its processes end with 0; the main rank writes it into the
file that `TRAINER_EXIT_FILE` names.
"""

import logging
import os
import sys
import uuid
from importlib.machinery import PathFinder
from pathlib import Path
from tempfile import TemporaryDirectory

# Words that show something and train nothing: one process is enough to answer.
SHOWING = {"--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i"}
MULTIRUN = {"-m", "--multirun"}
# Groups that say what is trained: whoever names one of them does not mean the experiment below.
CHOOSING = {"experiment", "data", "model", "task", "optimizer", "schedule"}


def main() -> int:
    """Train, and return what the run ended with: 0, 1, 2 or 75."""
    words = sys.argv[1:]
    refuse_namesake()
    nproc = processes(words)
    words = with_defaults(words)
    if MULTIRUN & {*words}:  # it starts each run's processes itself
        words += [] if nproc == 1 or any(word.startswith("processes=") for word in words) else [f"processes={nproc}"]
        nproc = 1
    if nproc == 1:
        os.execv(sys.executable, [sys.executable, "-m", "trainer", *words])
    threads = max(1, len(os.sched_getaffinity(0)) // nproc) if hasattr(os, "sched_getaffinity") else 1
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    with TemporaryDirectory(prefix="trainer-launch-") as scratch:
        return launch(nproc, words, Path(scratch))


def refuse_namesake() -> None:
    """End with 2 where `python -m trainer` would find something else of that name first."""
    spec = PathFinder.find_spec("trainer", [os.getcwd(), *sys.path])
    if spec and spec.origin and not Path(spec.origin).with_name("__main__.py").is_file():
        found = f"{spec.origin} is not this program, and Python finds it first"
        way = "start in another folder, or pip uninstall what has put it there"
        print(f"scripts/train: {found}; {way}.", file=sys.stderr)
        sys.exit(2)


def processes(words: list[str]) -> int:
    """How many processes: `NPROC`, else one for strategies that run on one, else two."""
    if SHOWING & {word.split("=")[0] for word in words}:
        return 1
    asked = os.environ.get("NPROC") or ("1" if {"strategy=single", "strategy=dp"} & {*words} else "2")
    if not asked.isdecimal() or int(asked) < 1:
        print(f"scripts/train: NPROC={asked} is no number of processes; NPROC=2 would be one.", file=sys.stderr)
        sys.exit(2)
    return int(asked)


def with_defaults(words: list[str]) -> list[str]:
    """The user's words, with `experiment=digits strategy=ddp` where they leave that open."""
    named = {word.lstrip("+").split("=")[0].split("@")[0] for word in words if "=" in word}
    added = [] if CHOOSING & named else ["experiment=digits"]
    added += [] if "strategy" in named else ["strategy=ddp"]
    # Beside the other overrides: flags may stand before or after them, not between.
    place = next((i for i, word in enumerate(words) if "=" in word and not word.startswith("-")), len(words))
    return [*words[:place], *added, *words[place:]]


def launch(nproc: int, words: list[str], scratch: Path) -> int:
    """Start the processes on this machine, wait for them, and say how the run ended."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.ERROR)  # the run's own last words stand last
    ending = scratch / "ending"
    os.environ["TRAINER_EXIT_FILE"] = str(ending)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        logs_specs=DefaultLogsSpecs(log_dir=str(scratch / "logs")),
    )
    try:
        elastic_launch(config, sys.executable)("-u", "-m", "trainer", *words)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            print(f"rank {rank} (pid {failure.pid}) was ended by {failure.signal_name()}.", file=sys.stderr)
        return failure.exitcode if failure.exitcode in (2, 75) else 1
    except SignalException:
        return meaning(ending, otherwise=1)  # the processes got the signal too and have ended by now
    return meaning(ending, otherwise=0)


def meaning(ending: Path, otherwise: int) -> int:
    """What the main rank wrote about how it ended."""
    return int(ending.read_text()) if ending.exists() else otherwise


if __name__ == "__main__":
    sys.exit(main())
