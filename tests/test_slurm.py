"""The scripts for Slurm on a real one: a preempted job, or one out of time, goes on later; a cancelled one does not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.run import ROOT, SMALL, curve, lines, run, status
from tests.slurm import Cluster, missing, wait_for

pytestmark = [
    *(pytest.mark.service, pytest.mark.long),
    pytest.mark.skipif(bool(missing()), reason=missing() or "it is there"),
]

SCRIPTS = ROOT / "scripts" / "clusters" / "slurm"
EXCLUSIVE = ("--nodes=2", "--exclusive")
TORCHRUN = ("--gpus-per-node=1", "--cpus-per-task=1", "torchrun.sbatch")
SRUN = ("--gpus-per-node=1", "--cpus-per-task=1", "--ntasks-per-node=1", "srun.sbatch")
STEPS = 60
WORDS = (*SMALL, "device=cpu", f"loop.steps={STEPS}", "schedule=constant", "loop.save_every=2", "task=held")

# The first steps are quick. From the fifth on, each takes a second while there is no file `go`: time to be stopped in.
HELD = """
import time
from pathlib import Path

from recipes.vision.classification import Classification


class Held(Classification):
    def after_step(self, network, step):
        if step >= 5 and not Path("go").exists():
            time.sleep(1)
"""
LAB = ("--config-dir", "heldlab/conf")
YAML = "_target_: heldlab.held.Held\nnum_classes: ${data.num_classes}\n"


@pytest.fixture(scope="session")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One cluster for all tests."""
    group = Cluster(tmp_path_factory.mktemp("slurm"))
    yield group
    group.close()


@pytest.fixture
def cluster(daemons: Cluster) -> Iterator[Cluster]:
    """The cluster with nothing to do, before and after a test."""
    yield daemons
    daemons.clear()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that a user submits from, with a lab in it."""
    (tmp_path / "heldlab" / "conf" / "task").mkdir(parents=True)
    (tmp_path / "heldlab" / "held.py").write_text(HELD)
    (tmp_path / "heldlab" / "conf" / "task" / "held.yaml").write_text(YAML)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def submitted(cluster: Cluster, place: Path, script: tuple[str, ...], *options: str, **env: str) -> tuple[str, Path]:
    """A run of two processes, one on each node; its job, and its folder."""
    *flags, name = script
    words = (*WORDS, "strategy=ddp", "run.name=held", *LAB)
    number = cluster.submit(place, *flags, *options, str(SCRIPTS / name), *words, **env)
    return number, place / "runs" / "held"


def reach(cluster: Cluster, place: Path, number: str, folder: Path, step: int) -> None:
    """Wait for a step of a job."""

    def there() -> bool:
        assert cluster.job(number)["JobState"] in ("PENDING", "RUNNING"), log(place)
        return max((line["step"] for line in lines(folder)), default=0) >= step

    wait_for(there)


def log(place: Path) -> str:
    return "\n".join(path.read_text(errors="replace")[-6000:] for path in sorted(place.glob("*.log")))


def undisturbed(folder: Path) -> None:
    """The run has every step once, with the losses of a run that nobody has disturbed."""
    run([*WORDS, "strategy=single", "run.name=alone", *LAB])
    assert len(curve(folder)) == STEPS
    assert curve(folder) == pytest.approx(curve(folder.parent / "alone"), rel=1e-5)


def test_the_smoke_test_works(cluster: Cluster, place: Path) -> None:
    number = cluster.submit(place, "--mem=1G", str(SCRIPTS / "smoke.sbatch"))
    assert cluster.ended(number)["JobState"] == "COMPLETED", log(place)
    assert "4 processes on 2 machines, then 1, one curve" in log(place)
    assert status(place / "runs" / f"smoke-{number}")["world_size"] == 1


@pytest.mark.parametrize("script", [TORCHRUN, SRUN], ids=["torchrun", "srun"])
def test_a_preempted_job_runs_again_and_goes_on(cluster: Cluster, place: Path, script: tuple[str, ...]) -> None:
    number, folder = submitted(cluster, place, script)
    reach(cluster, place, number, folder, 5)
    other = cluster.submit(place, "--partition=high", *EXCLUSIVE, "--output=high.log", "--wrap=true")
    cluster.again(number)
    saved = status(folder)
    assert (saved["state"], saved["step"] < STEPS) == ("preempted", True)
    (place / "go").touch()
    assert cluster.ended(other)["JobState"] == "COMPLETED"
    assert cluster.ended(number)["JobState"] == "COMPLETED", log(place)
    assert (status(folder)["attempt"], status(folder)["resume_step"]) == (2, saved["step"])
    undisturbed(folder)


@pytest.mark.parametrize("script", [SRUN, TORCHRUN], ids=["srun", "torchrun"])
def test_a_cancelled_job_saves_and_does_not_run_again(cluster: Cluster, place: Path, script: tuple[str, ...]) -> None:
    number, folder = submitted(cluster, place, script)
    reach(cluster, place, number, folder, 5)
    cluster.ask("scancel", number)
    job = cluster.ended(number)
    assert (job["JobState"], job["Restarts"]) == ("CANCELLED", "0"), log(place)
    assert status(folder)["state"] == "preempted"
    assert wait_for(cluster.rests)
    assert cluster.job(number)["Restarts"] == "0"


@pytest.mark.parametrize("script", [TORCHRUN, SRUN], ids=["torchrun", "srun"])
def test_a_job_whose_time_is_over_runs_again_and_goes_on(
    cluster: Cluster, place: Path, script: tuple[str, ...]
) -> None:
    # torchrun.sbatch stops the run 30 s after the start of the job; srun.sbatch as soon as Slurm looks, every 30 s
    time, signal = ("2", "TERM@1") if script is TORCHRUN else ("60", "USR1@90")
    number, folder = submitted(cluster, place, script, f"--time={time}", f"--signal={signal}", LEAD="90")
    if script is SRUN:
        reach(cluster, place, number, folder, 5)
        cluster.ask("scontrol", "update", f"job={number}", "timelimit=2")
    wait_for(lambda: cluster.again(number)["JobState"] == "PENDING")
    cluster.ask("scontrol", "update", f"job={number}", "timelimit=60")
    assert (status(folder)["state"], status(folder)["step"] < STEPS) == ("preempted", True), log(place)
    (place / "go").touch()
    assert cluster.ended(number)["JobState"] == "COMPLETED", log(place)
    undisturbed(folder)


def test_of_the_array_of_the_page_only_the_preempted_job_runs_again(cluster: Cluster, place: Path) -> None:
    (place / "scripts").symlink_to(ROOT / "scripts")
    page = (ROOT / "docs" / "clusters.md").read_text()
    (script,) = re.findall(r"^```bash\n(#!/bin/bash\n#SBATCH --array.+?)^```", page, re.MULTILINE | re.DOTALL)
    (place / "sweep.sbatch").write_text(script)
    small = ("--array=0-1", "--nodes=1", "--gpus-per-node=1", "--cpus-per-task=1")
    array = cluster.submit(place, *small, "sweep.sbatch", *WORDS, *LAB)
    folders = [place / "runs" / f"sweep-{rate}-0" for rate in ("0.001", "0.003")]
    for number, folder in enumerate(folders):
        reach(cluster, place, f"{array}_{number}", folder, 5)
    jobs = [cluster.job(f"{array}_{number}") for number in (0, 1)]
    # one of them has the number of the whole array: it is the one that is preempted
    (preempted,) = [number for number, job in enumerate(jobs) if job["JobId"] == array]
    node = f"--nodelist={jobs[preempted]['NodeList']}"
    cluster.submit(place, "--partition=high", node, "--exclusive", "--output=high.log", "--wrap=true")
    cluster.again(f"{array}_{preempted}")
    (place / "go").touch()
    for number, folder in enumerate(folders):
        assert cluster.ended(f"{array}_{number}")["JobState"] == "COMPLETED", log(place)
        assert len(curve(folder)) == STEPS
        assert status(folder)["attempt"] == (2 if number == preempted else 1)
