"""Launch files for clusters: real scripts with a stand-in for the cluster, manifests, and every word they hand on."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainer.configuration.compose import compose
from trainer.configuration.multirun import multirun
from trainer.configuration.settings import settings

ROOT = Path(__file__).resolve().parent.parent
SLURM, KUBERNETES = ROOT / "scripts" / "slurm", ROOT / "scripts" / "kubernetes"
SCRIPTS = sorted(SLURM.glob("*.sbatch"))


def words_of(command: list[str]) -> list[str]:
    """What follows `-m trainer`."""
    at = next(at for at, word in enumerate(command) if command[at : at + 2] == ["-m", "trainer"])
    return command[at + 2 :]


# ---------------------------------------------------------------------------------------------------------------- slurm

STAND_IN = """#!/bin/sh
printf '%s\\0' "$(basename "$0")" "$@" >> "$CALLS"; printf '\\n' >> "$CALLS"
case $(basename "$0") in
    scontrol) [ "$1" != show ] || printf 'node7\\nnode8\\n';;
    squeue) echo "$ENDS";;
    srun)
        [ -z "${ENDING-}" ] || printf %s "$ENDING" > "${TRAINER_EXIT_FILE:-/dev/null}"
        [ -z "${STATUS-}" ] || { mkdir -p "$STATUS"; echo '{"state": "completed"}' > "$STATUS/status.json"; }
        exit "${CODE:-0}";;
esac
"""


class Slurm:
    """A folder with stand-ins for srun, scontrol and squeue, which write down how they were called."""

    def __init__(self, folder: Path):
        self.folder, self.calls = folder, folder / "calls"
        for name in ("srun", "scontrol", "squeue"):
            (folder / name).write_text(STAND_IN)
            (folder / name).chmod(0o755)

    def batch(self, script: Path, *words: str, **env: str) -> tuple[int, list[list[str]]]:
        """Run a script as sbatch would; its exit code and the calls it made."""
        self.calls.write_text("")
        surroundings = {
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "CALLS": str(self.calls),
            "SLURM_SUBMIT_DIR": str(self.folder),
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NODELIST": "node[7-8]",
            "SLURM_NNODES": "2",
            "SLURM_GPUS_ON_NODE": "8",
            "SLURM_CPUS_PER_TASK": "64",
            **env,
        }
        ended = subprocess.run(["bash", script, *words], env=surroundings, capture_output=True, text=True, timeout=60)
        assert "unbound" not in ended.stderr, ended.stderr
        calls = [line.split("\0")[:-1] for line in self.calls.read_text().splitlines()]
        return ended.returncode, calls


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    return Slurm(tmp_path)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_shell_can_read_it(script: Path) -> None:
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    known = (
        "job-name nodes ntasks-per-node gpus-per-node cpus-per-task mem exclusive time requeue open-mode output signal"
    )
    given = re.findall(r"^#SBATCH --([a-z-]+)", script.read_text(), re.MULTILINE)
    assert set(given) <= set(known.split())
    assert len(given) == len(set(given))
    # sbatch reads no further than the first command
    first = script.read_text().index("\nset -")
    assert "\n#SBATCH" not in script.read_text()[first:]


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("script", [*SCRIPTS, KUBERNETES / "entrypoint"], ids=lambda path: path.name)
def test_shellcheck_has_nothing_to_say(script: Path) -> None:
    ended = subprocess.run(["shellcheck", script], capture_output=True, text=True)
    assert ended.stdout == ""


def test_one_torchrun_a_machine(slurm: Slurm) -> None:
    from torch.distributed.run import get_args_parser

    ends = int(time.time()) + 7200
    words = ["model=mlp", "--config-dir", str(ROOT / "conf"), "run.root=/shared runs"]
    code, calls = slurm.batch(SLURM / "torchrun.sbatch", *words, SLURM_JOB_END_TIME=str(ends))
    (command,) = [call for call in calls if call[0] == "srun"]
    assert code == 0
    asked = get_args_parser().parse_args(command[command.index("torchrun") + 1 :])
    assert (asked.nnodes, asked.nproc_per_node, asked.rdzv_backend) == ("2", "8", "c10d")
    assert (asked.rdzv_endpoint, asked.rdzv_id) == ("node7:24711", "4711-0")
    assert (asked.module, asked.training_script) == (True, "trainer")
    assert asked.training_script_args[-len(words) :] == words
    run = settings(compose([word.replace("/shared runs", "'/shared runs'") for word in words_of(command)])).run
    assert run.name == "slurm-4711"
    assert 6500 < run.stop_after <= 6600  # seconds: what is left less ten minutes


def test_one_process_a_gpu(slurm: Slurm) -> None:
    code, calls = slurm.batch(SLURM / "srun.sbatch", "model=mlp", "run.name=mine", SLURM_JOB_END_TIME="0")
    (command,) = [call for call in calls if call[0] == "srun"]
    assert code == 0
    assert command[command.index("python") :][:3] == ["python", "-m", "trainer"]
    assert settings(compose(words_of(command))).run.name == "mine"  # the user's word comes last


HOUR = 3600


@pytest.mark.parametrize("script", ["torchrun.sbatch", "srun.sbatch"])
@pytest.mark.parametrize(
    ("code", "left", "job", "requeued"),
    [
        (75, 60, 75, True),  # the clock
        (75, 5 * HOUR, 75, False),  # cancelled, or preempted: Slurm itself puts it back
        (0, 60, 0, False),
        (1, 60, 1, False),
        (2, 60, 2, False),
    ],
)
def test_what_the_clock_stopped_is_put_back(
    slurm: Slurm, script: str, code: int, left: int, job: int, requeued: bool
) -> None:
    ended = {"CODE": str(code)}
    if script == "torchrun.sbatch" and code in (0, 75):  # torchrun shows neither; the main rank's file does
        ended = {"CODE": "1" if code else "0", "ENDING": str(code)}
    end = str(int(time.time()) + left)
    answer, calls = slurm.batch(SLURM / script, "model=mlp", SLURM_JOB_END_TIME=end, **ended)
    assert answer == job
    assert (["scontrol", "requeue", "4711"] in calls) == requeued
    assert not list(slurm.folder.glob("*.exit"))


@pytest.mark.parametrize(("ends", "bound"), [("NONE", False), ("2100-01-01T00:00:00", True)])
def test_an_older_slurm_is_asked_for_the_end(slurm: Slurm, ends: str, bound: bool) -> None:
    code, calls = slurm.batch(SLURM / "torchrun.sbatch", "model=mlp", ENDS=ends)
    (command,) = [call for call in calls if call[0] == "srun"]
    assert code == 0
    assert any(word.startswith("run.stop_after=") for word in command) == bound


def test_the_smoke_test_goes_on_with_one_process(slurm: Slurm) -> None:
    folder = slurm.folder / "runs" / "smoke-4711"
    code, calls = slurm.batch(SLURM / "smoke.sbatch", "distributed.interface=lo", STATUS=str(folder))
    first, second = [settings(compose(words_of(call))) for call in calls if call[0] == "srun"]
    assert code == 0
    assert (first.run.dir, second.run.dir) == (str(folder), str(folder))
    assert (first.loop.epochs, second.loop.epochs, second.distributed.interface) == (2, 3, "lo")


# ----------------------------------------------------------------------------------------------------------- kubernetes


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((KUBERNETES / name).read_text()))


def pods(document: dict[str, Any]) -> dict[str, Any]:
    """The pod of a job, with the words that its container gets."""
    if document["kind"] == "TrainingRuntime":
        (job,) = document["spec"]["template"]["spec"]["replicatedJobs"]
        return job["template"]["spec"]["template"]["spec"]
    return document["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]


def test_a_train_job_fits_its_runtime() -> None:
    runtime, job, network = documents("trainjob.yaml")
    assert [runtime["kind"], job["kind"], network["kind"]] == ["TrainingRuntime", "TrainJob", "NetworkPolicy"]
    assert runtime["apiVersion"] == job["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    assert job["spec"]["runtimeRef"] == {"kind": "TrainingRuntime", "name": runtime["metadata"]["name"]}
    assert "torch" in runtime["spec"]["mlPolicy"]
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    # Trainer finds what it fills in by these names
    assert replicated["name"] == pods(runtime)["containers"][0]["name"] == "node"
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert replicated["template"]["spec"]["backoffLimit"] == 0  # one pod alone is never started again
    trainer = job["spec"]["trainer"]
    assert str(trainer["numProcPerNode"]) == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    assert trainer["command"] == ["entrypoint"]
    selector = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": job["metadata"]["name"]}}
    assert network["spec"]["podSelector"] == network["spec"]["ingress"][0]["from"][0]["podSelector"] == selector
    settings(compose(trainer["args"]))


def test_a_pytorch_job() -> None:
    job, network = documents("pytorchjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    elastic = job["spec"]["elasticPolicy"]
    assert elastic["minReplicas"] <= worker["replicas"] <= elastic["maxReplicas"]
    (container,) = pods(job)["containers"]
    assert (container["name"], container["command"]) == ("pytorch", ["entrypoint"])  # the operator's name for it
    assert job["spec"]["nprocPerNode"] == container["resources"]["limits"]["nvidia.com/gpu"]
    selector = {"matchLabels": {"training.kubeflow.org/job-name": job["metadata"]["name"]}}
    assert network["spec"]["podSelector"] == selector
    settings(compose(container["args"]))


@pytest.mark.parametrize("name", ["trainjob.yaml", "pytorchjob.yaml"])
def test_a_pod_can_save_before_it_goes_and_is_no_root(name: str) -> None:
    pod = pods(documents(name)[0])
    (container,) = pod["containers"]
    env = {each["name"]: each["value"] for each in container["env"]}
    assert all(isinstance(value, str) for value in env.values())
    assert int(env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert set(mounts) == {each["name"] for each in pod["volumes"]}
    assert env["TRAINER_EXIT_FILE"].startswith(mounts["runs"] + "/")
    claim = next(each for each in pod["volumes"] if each["name"] == "runs")["persistentVolumeClaim"]["claimName"]
    (volume,) = documents("volume.yaml")
    assert (volume["metadata"]["name"], volume["spec"]["accessModes"]) == (claim, ["ReadWriteMany"])
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_the_image_copies_what_there_is() -> None:
    text = (KUBERNETES / "Dockerfile").read_text()
    sources = [word for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE) for word in shlex.split(line)[:-1]]
    assert [name for name in sources if not name.startswith("--") and not (ROOT / name).exists()] == []
    assert os.access(KUBERNETES / "entrypoint", os.X_OK)


TORCHRUN = """#!/bin/sh
[ "$1 $2" = "-m trainer" ] || exit 9
case $3 in
    stopped) printf 75 > "$TRAINER_EXIT_FILE";;
    failed) exit 1;;
    waiting)
        trap 'printf 75 > "$TRAINER_EXIT_FILE"; exit 1' TERM
        printf 'up\\n'
        while :; do sleep 0.05; done;;
esac
"""


@pytest.fixture
def entrypoint(tmp_path: Path) -> tuple[list[str], dict[str, str]]:
    """The command of a pod, with a stand-in for torchrun, and its environment; an earlier start left its exit file."""
    (tmp_path / "torchrun").write_text(TORCHRUN)
    (tmp_path / "torchrun").chmod(0o755)
    (tmp_path / "exit").write_text("75")
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TRAINER_EXIT_FILE": str(tmp_path / "exit")}
    return [str(KUBERNETES / "entrypoint")], env


@pytest.mark.parametrize(("word", "code"), [("completed", 0), ("stopped", 75), ("failed", 1)])
def test_a_pod_ends_as_the_run_did(entrypoint: tuple[list[str], dict[str, str]], word: str, code: int) -> None:
    command, env = entrypoint
    assert subprocess.run([*command, word], env=env, timeout=60).returncode == code


def test_an_evicted_pod_waits_for_the_run_to_save(entrypoint: tuple[list[str], dict[str, str]]) -> None:
    command, env = entrypoint
    with subprocess.Popen([*command, "waiting"], env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 75


# ----------------------------------------------------------------------------------------------------------------- docs


def test_the_words_in_the_docs_are_taken() -> None:
    text = (ROOT / "docs" / "clusters.md").read_text()
    commands = re.findall(r"`([^`\n]*-m trainer [^`\n]*)`", text) + re.findall(r"^(.*-m trainer -m .*?)  ", text, re.M)
    assert len(commands) > 8
    for command in commands:
        words = [word for word in words_of(shlex.split(command)) if "=" in word or word == "-m"]
        if "-m" in words:
            assert len(multirun([word for word in words if not word.startswith("hydra")]).space.grid()) > 1
        else:
            settings(compose(words))
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert (ROOT / "docs" / link).exists(), link
