"""Under Ray Train, on a real cluster of this machine: a worker is killed, and the run ends as if it had not been."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.run import ROOT, SMALL, Command, curve, lines, run, status

RUN = [*SMALL, "strategy=ddp", "device=cpu", "loop.epochs=8", "loop.save_every=1ep", "log=[]"]


@pytest.mark.service
@pytest.mark.long
def test_a_killed_worker_costs_the_run_nothing(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    run([*RUN, "run.dir=undisturbed"], 2, "process", place=tmp_path)
    folder = tmp_path / "disturbed"
    script = [sys.executable, str(ROOT / "scripts/clusters/ray_train.py"), "--workers", "2"]
    script += ["--storage", str(tmp_path / "ray")]
    # Ray's sockets lie below its folder, and their paths may have 107 letters at most
    command = Command([*script, *RUN, f"run.dir={folder}"], tmp_path, {"RAY_TMPDIR": "/tmp", "TMPDIR": "/tmp"})
    command.wait_for_step(folder, 11)  # the first epoch is over
    os.kill(int(status(folder)["pid"]), signal.SIGKILL)
    ended = command.end()
    assert ended.code == 0, ended.out
    assert status(folder)["attempt"] == 2
    assert curve(folder) == curve(tmp_path / "undisturbed")
    # Ray has the last evaluation, and the last checkpoint
    last = lines(folder, "eval")[-1]
    assert f"ray         {last}" in ended.out
    (copy,) = (tmp_path / "ray").glob("*/checkpoint_*/manifest.json")
    assert json.loads(copy.read_text())["step"] == last["step"]
