"""One run at a time in a folder: who comes second is refused with who has it; a dead process has nothing."""

import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.run import ROOT, SMALL, run
from trainer import Refusal
from trainer.records.folder_lock import lock_folder, unlock_folder

HOLDING = """
import sys
from pathlib import Path
from trainer.records.folder_lock import lock_folder
lock_folder(Path(sys.argv[1]))
print("locked", "torch" in sys.modules, flush=True)
sys.stdin.read()
"""


def test_a_folder_in_use_is_refused_and_a_dead_runs_lock_is_gone(tmp_path: Path) -> None:
    words = [sys.executable, "-c", HOLDING, str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    other = subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "locked False\n"  # and torch was not imported for it
    for how in ("auto", "fresh"):  # which would move aside what is there
        refused = run([*SMALL, "loop.steps=1", "run.dir=run", f"run.resume={how}"], place=tmp_path, code=2)
        assert f"in use by another run (host {socket.gethostname()}, pid {other.pid})" in refused.out
    assert os.listdir(tmp_path) == ["run"]
    other.kill()
    other.communicate()
    run([*SMALL, "loop.steps=1", "run.dir=run"], place=tmp_path)


def test_the_lock_of_another_machine_is_waited_for_and_the_wait_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = lock_folder(tmp_path / "a")
    (tmp_path / "a" / ".lock").write_text("host elsewhere, pid 7\n")
    with pytest.raises(Refusal, match=r"in use by another run \(host elsewhere, pid 7\)"):
        lock_folder(tmp_path / "a", lease=0.1)
    assert caplog.text.count("in use on another machine (host elsewhere, pid 7); waiting up to 0.1 s") == 1
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lock_folder, tmp_path / "a", 0.0, 60.0)
        unlock_folder(kept)  # as the file server does, when the dead machine's time is over
        unlock_folder(waiting.result())


@pytest.mark.parametrize("what", ["stays", "is moved aside"])
def test_of_those_that_wait_for_a_folder_one_enters_whatever_becomes_of_it(tmp_path: Path, what: str) -> None:
    kept, path, entered = lock_folder(tmp_path / "a"), tmp_path / "a", threading.Barrier(4)

    def enter() -> object:
        entered.wait()
        try:
            return lock_folder(path, patience=1.0)
        except Refusal as refusal:
            return str(refusal)

    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(enter) for _ in range(3)]
        entered.wait()
        if what == "is moved aside":
            os.rename(path, tmp_path / "a.1")
        unlock_folder(kept)
        found = [one.result() for one in waiting]
    (inside,) = [one for one in found if isinstance(one, int)]
    assert all("a is in use by another run (host " in str(one) for one in found if one is not inside)
    assert (path / ".lock").read_text() == f"host {socket.gethostname()}, pid {os.getpid()}\n"
    unlock_folder(inside)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    held = lock_folder(tmp_path)
    reader, writer = os.pipe()
    if not (child := os.fork()):
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    os.close(reader)
    unlock_folder(held)
    unlock_folder(lock_folder(tmp_path))
    os.close(writer)
    os.waitpid(child, 0)
