"""The scripts for Slurm on a real one: a preempted job, or one out of time, goes on later; a cancelled one does not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import SMALL, curve, finish, lines, single, status
from tests.inside import here
from tests.slurm import Cluster, missing, wait_for
from tests.warm import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "it is there")]

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
    assert here(*WORDS, "strategy=single", "run.name=alone", *LAB) == 0
    assert len(curve(folder)) == STEPS
    assert curve(folder) == pytest.approx(curve(folder.parent / "alone"), rel=1e-5)


@pytest.mark.long
def test_the_smoke_test_works(cluster: Cluster, place: Path) -> None:
    number = cluster.submit(place, "--mem=1G", str(SCRIPTS / "smoke.sbatch"))
    assert cluster.ended(number)["JobState"] == "COMPLETED", log(place)
    assert "4 processes on 2 machines, then 1, one curve" in log(place)
    assert status(place / "runs" / f"smoke-{number}")["world_size"] == 1


@pytest.mark.long
@pytest.mark.parametrize("script", [TORCHRUN, SRUN], ids=["torchrun", "srun"])
def test_a_preempted_job_runs_again_and_goes_on(cluster: Cluster, place: Path, script: tuple[str, ...]) -> None:
    number, folder = submitted(cluster, place, script)
    preempt(cluster, place, number, folder)
    undisturbed(folder)


def preempt(cluster: Cluster, place: Path, number: str, folder: Path) -> None:
    """Take a job's machines away in the middle, and let it run to its end later."""
    reach(cluster, place, number, folder, 5)
    other = cluster.submit(place, "--partition=high", *EXCLUSIVE, "--output=high.log", "--wrap=true")
    cluster.again(number)
    saved = status(folder)
    assert (saved["state"], saved["step"] < STEPS) == ("preempted", True)
    (place / "go").touch()
    assert cluster.ended(other)["JobState"] == "COMPLETED"
    assert cluster.ended(number)["JobState"] == "COMPLETED", log(place)
    assert (status(folder)["attempt"], status(folder)["resume_step"]) == (2, saved["step"])


@pytest.mark.long
def test_eight_tasks_that_were_preempted_have_the_bits_of_eight_processes(cluster: Cluster, place: Path) -> None:
    tasks = ("--gpus-per-node=1", "--cpus-per-task=1", "--ntasks-per-node=4", "srun.sbatch")
    number, folder = submitted(cluster, place, tasks)
    evaluate = f"--wrap=python -m trainer run.dir={folder} device=cpu job=evaluate {' '.join(LAB)}"
    options = (f"--dependency=afterok:{number}", "--nodes=1", "--ntasks=1", "--output=evaluated.log")
    after = cluster.submit(place, *options, evaluate)
    preempt(cluster, place, number, folder)
    assert status(folder)["world_size"] == 8
    finish(single(*WORDS, "strategy=ddp", "processes=8", "run.name=alone", *LAB), place)
    assert curve(folder, "loss_hex") == curve(folder.parent / "alone", "loss_hex")
    assert len(curve(folder)) == STEPS
    # what waits for a job does not begin as that one is preempted
    assert cluster.ended(after)["JobState"] == "COMPLETED", log(place)
    assert lines(folder / "evaluate", "eval")[-1]["step"] == STEPS


@pytest.mark.long
def test_machines_may_have_different_numbers_of_tasks(cluster: Cluster, place: Path) -> None:
    (place / "go").touch()
    train = " ".join(["srun --gpu-bind=none python -m trainer", *WORDS, "strategy=ddp loop.global_batch=120", *LAB])
    # two GPUs on each machine, so the tasks are two and one
    tasks = ("--nodes=2", "--ntasks=3", "--gpus-per-task=1", "--output=three.log")
    number = cluster.submit(place, *tasks, f"--wrap={train} run.name=held")
    assert cluster.ended(number)["JobState"] == "COMPLETED", log(place)
    (facts,) = (place / "runs" / "held").glob("environment.json")
    assert json.loads(facts.read_text())["world_size"] == 3
    assert here(*WORDS, "loop.global_batch=120", "strategy=single", "run.name=alone", *LAB) == 0
    assert curve(place / "runs" / "held") == pytest.approx(curve(place / "runs" / "alone"), rel=1e-5)


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
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


# ------------------------------------------------------------------------------------- what is asked of Slurm, and when

# A job without a network, which ends as the scripts do. Its processes save when they are asked to.
JOB = """#!/bin/bash
trap : TERM
srun bash -c 'trap "exit 75" TERM; touch up-$SLURM_PROCID; while :; do sleep 0.1; done' &
wait -n $! && code=0 || code=$?
touch stopped
until [ -e ask ]; do sleep 0.1; done
"""


def job(cluster: Cluster, place: Path, *options: str) -> str:
    """Its number, once both processes are there."""
    endings = {(SCRIPTS / name).read_text().partition("\njob=")[2] for name in ("torchrun.sbatch", "srun.sbatch")}
    (ending,) = endings
    (place / "job").write_text(f"{JOB}job={ending}")
    words = (*EXCLUSIVE, "--ntasks-per-node=1", "--requeue", "--open-mode=append", "--output=job.log", *options)
    number = cluster.submit(place, *words, "job")
    wait_for(lambda: all((place / f"up-{rank}").exists() for rank in (0, 1)))
    return number


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "cancelled", "state"),
    [((), True, "CANCELLED"), (("--no-requeue",), False, "FAILED")],
    ids=["cancelled", "no-requeue"],
)
def test_a_preempted_job_does_not_run_again_where_that_is_not_meant(
    cluster: Cluster, place: Path, options: tuple[str, ...], cancelled: bool, state: str
) -> None:
    number = job(cluster, place, *options)
    cluster.submit(place, "--partition=high", *EXCLUSIVE, "--output=high.log", "--wrap=true")
    wait_for((place / "stopped").exists)
    assert cluster.job(number)["PreemptTime"] != "None"
    if cancelled:
        cluster.ask("scancel", number)
        wait_for(lambda: cluster.job(number)["JobState"] != "RUNNING")
    (place / "ask").touch()
    ended = cluster.ended(number)
    assert (ended["JobState"], ended["Restarts"]) == (state, "0"), log(place)
    assert ("operation is presently disabled" in log(place)) == (not cancelled)


@pytest.mark.long
def test_a_job_that_is_asked_to_save_runs_again_unless_that_is_switched_off(cluster: Cluster, place: Path) -> None:
    (place / "ask").touch()
    number = job(cluster, place)
    cluster.ask("scancel", "--signal=TERM", number)
    cluster.again(number)
    for rank in (0, 1):
        (place / f"up-{rank}").unlink()
    wait_for(lambda: all((place / f"up-{rank}").exists() for rank in (0, 1)))
    cluster.ask("scontrol", "update", f"job={number}", "requeue=0")
    cluster.ask("scancel", "--signal=TERM", number)
    assert cluster.ended(number)["ExitCode"] == "75:0", log(place)
    assert cluster.job(number)["Restarts"] == "1"
