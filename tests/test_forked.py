"""Forked processes end as started ones do, and a spare one runs its words or ends with who forked it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.commands import SMALL
from trainer.launch.child_processes import can_fork

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")

# in a process that has nothing but what it needs: this one has threads
ENDS = """
import os, signal, sys, time
from trainer.launch.child_processes import ForkedProcess
def fails():
    raise ValueError("of the function")
def waits():
    time.sleep(600)
three, broken, waiting = ForkedProcess(lambda: os._exit(3)), ForkedProcess(fails), ForkedProcess(waits)
assert three.wait() == 3 and three.poll() == 3
assert broken.wait() == 1
assert waiting.poll() is None
waiting.terminate()
assert waiting.wait() == -signal.SIGTERM
waiting.kill()  # nothing
print("all")
"""

SPARE = """
import os, sys
from trainer.launch import child_processes
def main():
    print("ran", *sys.argv[1:], os.environ["ANSWER"], len(os.environ), os.getsid(0) == os.getpid(), flush=True)
    print("and failed", file=sys.stderr, flush=True)
    os._exit(7)
spare = child_processes.PreforkedProcess(main)
child_processes.run_program = lambda words, environment: (0, "a program of its own")
print(spare(["one", "two"], {"ANSWER": "42"}))
print(spare(["one"], {}))
"""

ALONE = """
import os
from trainer.launch.child_processes import PreforkedProcess
print(PreforkedProcess(print)._process.pid, flush=True)
os._exit(0)
"""

IMPORTS = """
import gc, sys
from trainer.__main__ import _import_for_ranks
from trainer.configuration.compose import compose
searches = []
gc.callbacks.append(lambda phase, info: searches.append(phase))
cfg = compose(["model=mlp"])
searches.clear()
_import_for_ranks(cfg)
assert not searches and gc.isenabled() and gc.get_freeze_count() > 100_000
assert {"torch._dynamo", "trainer.jobs.run_parts", "recipes.vision.digits"} < sys.modules.keys()
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_a_forked_process_ends_as_a_started_one_does() -> None:
    ended = python(ENDS)
    assert ended.stdout == "all\n", ended.stderr
    assert ended.stderr.count("ValueError: of the function") == 1


@pytest.mark.long
def test_what_is_imported_is_not_searched_for_garbage_then_or_later() -> None:
    ended = python(IMPORTS)
    assert ended.returncode == 0, ended.stderr


def test_a_spare_process_runs_its_words_in_their_environment_once() -> None:
    ended = python(SPARE)
    first, second = ended.stdout.splitlines()
    assert first == str((7, "ran one two 42 1 True\nand failed\n")), ended.stderr
    assert second == str((0, "a program of its own"))


def test_a_spare_process_that_nobody_needs_ends_with_who_forked_it() -> None:
    pid = int(python(ALONE).stdout)
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.long
@pytest.mark.slow
def test_ranks_and_the_reference_of_verify_are_forked(tmp_path: Path) -> None:
    nowhere = "import sys; sys.executable = '/nowhere'; from trainer.__main__ import main; main()"
    words = ["processes=2", "job=verify", "strategy=ddp", *SMALL, "device=cpu", f"run.dir={tmp_path / 'run'}"]
    command = [sys.executable, "-c", nowhere, *words]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.startswith("SAME: ddp on 2")


def test_where_an_accelerator_may_compute_nothing_is_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def exists(path: str) -> bool:
        seen.append(path)
        return True

    monkeypatch.setattr(os.path, "exists", exists)
    assert can_fork("cpu")
    assert not seen
    assert not can_fork("auto")
    assert "/dev/nvidiactl" in seen
