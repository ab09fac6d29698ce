"""Every way in which this program starts itself again: ranks of `processes=N`, runs of a sweep, a process of its own.

Nothing here needs torch.
"""

from __future__ import annotations

import os
import signal
import site
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from subprocess import Popen

import trainer
from trainer.launch.stop_signals import STOP_SIGNALS
from trainer.messages import Refusal

_PACKAGE_FOLDER = Path(__file__).resolve().parent.parent


def _command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "trainer", *arguments]


def start_program(
    arguments: Sequence[str], environment: Mapping[str, str], stdout: int | None, stderr: int | None
) -> Popen[bytes]:
    """Start a program with these arguments. stdout, stderr: descriptors; None: those of this process."""
    return Popen(
        _command(arguments),
        env=environment,
        # a process that prints into a file is not at the terminal, and must not read from it either
        stdin=None if stdout is None else subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,  # a terminal's Ctrl-C comes to this process alone, which forwards it once
    )


def import_path() -> str:
    """PYTHONPATH for a process of this Python: all that can be imported here, but for what it finds by itself.

    Another Python that a process calls (gsutil, a tool of the system) would find this one's standard library there.
    """
    library = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    library += [*site.getsitepackages(), site.getusersitepackages(), str(Path(library[0], "lib-dynload"))]
    library += [path for path in sys.path if path.endswith(f"python{sys.version_info[0]}{sys.version_info[1]}.zip")]
    known = {os.path.realpath(path) for path in library}
    return os.pathsep.join(path for path in sys.path if path and os.path.realpath(path) not in known)


def run_program(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """Run a program with these arguments and wait for it; the exit code, and all that it has printed."""
    ended = subprocess.run(
        _command(arguments),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    return ended.returncode, ended.stdout


def child_environment(scratch: Path, rank: int = 0) -> dict[str, str]:
    """This process's environment; it also names the parent, and the file where the child reports its failure."""
    file = scratch / str(rank) / "error.json"
    file.parent.mkdir(parents=True)
    # the child stops once its parent is gone, which may have been killed
    return {**os.environ, "TORCHELASTIC_ERROR_FILE": str(file), "TRAINER_PARENT": str(os.getpid())}


@contextmanager
def forward_signals(children: Sequence[Popen[bytes]]) -> Iterator[list[int]]:
    """Inside, requests to stop go to all children, and into the list; only the main thread can hear them."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def forward(number: int, _: object) -> None:
        received.append(number)
        for child in children:
            child.send_signal(number)

    handlers = {number: signal.signal(number, forward) for number in STOP_SIGNALS}
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


# ------------------------------------------------------------------------------------- is `trainer` there this program?


def refuse_overwritten() -> None:
    """Refuse where another distribution has written its files over this program's, or taken them away again."""
    if hasattr(trainer, "_HOMES"):
        return
    from importlib.metadata import packages_distributions, version  # looks at all that is installed

    names = ", ".join(f"{name} {version(name)}" for name in packages_distributions().get("trainer", []))
    raise Refusal(
        f"{_PACKAGE_FOLDER} holds another program's __init__.py, or none. Installed there: {names or 'not known'}. Do:"
        " pip uninstall trainer one-curve-trainer, then install one-curve-trainer into an environment of its own"
    )


def refuse_namesake() -> None:
    """Refuse to start `python -m trainer` in the present folder, where something else of that name is found first."""
    folder = os.getcwd()
    spec = PathFinder.find_spec("trainer", [folder])
    # a folder without Python is no package: it has no origin
    if spec and spec.origin and Path(spec.origin).resolve().parent != _PACKAGE_FOLDER:
        raise Refusal(
            f"{spec.origin} is not this program, and processes that start in {folder} find it first, because it is"
            " called trainer too; rename it, or start in another folder"
        )
