"""Make `.venv` in the checkout, once, and go on in it: `setup.py train WORDS` or `setup.py test WORDS`.

Runs on a bare Python, so it imports nothing but the standard library. `.venv/ready.json` is written last and says
what was installed; where it fits, nothing is done. `.venv/unfinished` stands while packages are being installed;
where it is found, an earlier set-up was interrupted, and what that left behind is thrown away.
"""

import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

CHECKOUT = Path(__file__).resolve().parent.parent
VENV = CHECKOUT / ".venv"
PYTHON = VENV / "bin" / "python"
READY = VENV / "ready.json"
UNFINISHED = VENV / "unfinished"
STDERR = 2  # where pip may talk; stdout is for the run
EXTRAS = {"train": [], "test": ["test"]}
# Many tests use one core: several files run at once. tests/conftest.py says how many; `-n 0` switches it off.
SEVERAL = ["-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder"]


def main() -> NoReturn:
    """Set up what is missing, then become the program that was asked for."""
    goal, words = sys.argv[1], sys.argv[2:]
    if not is_ready(goal):
        with one_at_a_time():
            if not is_ready(goal):
                set_up(goal)
    sys.stdout.flush()
    if goal == "test":
        os.chdir(CHECKOUT)
        run = [str(PYTHON), "-m", "pytest", *SEVERAL, *words]
    else:
        run = [str(PYTHON), "-P", str(CHECKOUT / "scripts" / "launch.py"), *words]
    os.execv(PYTHON, run)  # the same process: signals and the exit code need nobody to pass them on


def is_ready(goal: str) -> bool:
    """Does the environment hold what this goal needs?"""
    ready = read_ready()
    return (
        ready["fingerprint"] == fingerprint()
        and set(EXTRAS[goal]) <= set(ready["extras"])
        and ready["home"] == home()
        and not UNFINISHED.exists()
        and PYTHON.exists()
    )


def read_ready() -> dict[str, Any]:
    """What the last finished set-up wrote down; empty facts where there was none."""
    try:
        return json.loads(READY.read_text())
    except (OSError, ValueError):
        return {"fingerprint": None, "extras": [], "home": None}


def fingerprint() -> str:
    """Changes whenever the files change that say what to install."""
    digest = hashlib.sha256()
    for name in ("pyproject.toml", "constraints.txt"):
        digest.update((CHECKOUT / name).read_bytes())
    return digest.hexdigest()


def home() -> list[str]:
    """What an environment cannot survive the loss of: its place, and the Python that it was made from."""
    return [str(VENV), os.path.realpath(PYTHON)]


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Wait until no other process sets up; the lock goes with the last process that holds it, however that ends."""
    with open(__file__, "r+") as lock:  # this very file, so that no lock file lies about
        os.set_inheritable(lock.fileno(), True)  # a pip that outlives a killed set-up still holds it
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is setting up .venv, waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def set_up(goal: str) -> None:
    """Make or renew the environment; ready.json is written last."""
    check_venv_module()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))  # leaves through run(), which ends pip
    start = time.monotonic()
    say(f"setting up {VENV} (once; torch is large, this can take minutes)")
    ready = read_ready()
    python = os.path.realpath(sys.executable)  # sys.executable may lie in the .venv that is thrown away
    if UNFINISHED.exists() or (ready["home"] not in (None, home())):
        clear()
        ready["extras"] = []
    VENV.mkdir(exist_ok=True)
    UNFINISHED.touch()
    READY.unlink(missing_ok=True)
    if not (VENV / "pyvenv.cfg").exists():
        run(python, "-I", "-m", "venv", str(VENV))
    extras = sorted({*ready["extras"], *EXTRAS[goal]})
    install(extras)
    READY.write_text(json.dumps({"fingerprint": fingerprint(), "extras": extras, "home": home()}))
    UNFINISHED.unlink()
    say(f"set up in {time.monotonic() - start:.0f} s")


def check_venv_module() -> None:
    """Debian splits the venv module off; say so before anything is written."""
    if not all((spec := find_spec(name)) and spec.origin for name in ("venv", "ensurepip")):
        package = "python{}.{}-venv".format(*sys.version_info)
        say(
            f"this Python ({sys.executable}) comes without its venv module; "
            f"on Debian or Ubuntu install the package python3-venv ({package}) and run this again."
        )
        sys.exit(2)


def clear() -> None:
    """Empty the environment; the mark that it is unfinished goes last, with the set-up that follows."""
    VENV.mkdir(exist_ok=True)
    UNFINISHED.touch()
    for path in VENV.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path != UNFINISHED:
            path.unlink()


def install(extras: list[str]) -> None:
    """Install the checkout itself, editable, with the exact versions of constraints.txt."""
    product = f".[{','.join(extras)}]" if extras else "."
    quiet = [] if sys.stderr.isatty() else ["--quiet"]  # pip's progress is for eyes
    pip = [str(PYTHON), "-I", "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--use-pep517"]
    run(*pip, *quiet, "--constraint", "constraints.txt", "--editable", product)


def run(*command: str) -> None:
    """Run one step of the set-up; its own words have said why where it fails."""
    status = subprocess.run(command, cwd=CHECKOUT, stdout=STDERR, close_fds=False).returncode
    if status:
        say(f"set-up failed: {' '.join(command)} ended with {status}; run this again when that is mended")
        sys.exit(1)


def say(sentence: str) -> None:
    """One line on stderr, so that stdout holds nothing but the run's own words."""
    print(f"scripts/{sys.argv[1]}: {sentence}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
