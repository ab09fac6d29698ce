"""Launch files for clusters: can they be read, and is every word known? test_slurm.py runs those of Slurm."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.run import ROOT
from trainer.configuration.compose import compose

SLURM, KUBERNETES = ROOT / "scripts" / "clusters" / "slurm", ROOT / "scripts" / "clusters" / "kubernetes"
SCRIPTS = sorted(SLURM.glob("*.sbatch"))


def words_of(command: list[str]) -> list[str]:
    """What follows `-m trainer`."""
    at = next(at for at, word in enumerate(command) if command[at : at + 2] == ["-m", "trainer"])
    return command[at + 2 :]


# ---------------------------------------------------------------------------------------------------------------- slurm


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_shell_can_read_it(script: Path) -> None:
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    # sbatch reads no further than the first command
    first = script.read_text().index("\nset -")
    assert "\n#SBATCH" not in script.read_text()[first:]


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("script", [*SCRIPTS, KUBERNETES / "entrypoint"], ids=lambda path: path.name)
def test_shellcheck_has_nothing_to_say(script: Path) -> None:
    ended = subprocess.run(["shellcheck", script], capture_output=True, text=True)
    assert ended.stdout == ""


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
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    # Trainer finds what it fills in by these names
    assert replicated["name"] == pods(runtime)["containers"][0]["name"] == "node"
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    trainer = job["spec"]["trainer"]
    # as many processes as a pod has GPUs: Trainer counts them itself
    assert "numProcPerNode" not in trainer
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    assert trainer["command"] == ["entrypoint"]
    selector = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": job["metadata"]["name"]}}
    assert network["spec"]["podSelector"] == network["spec"]["ingress"][0]["from"][0]["podSelector"] == selector
    compose(trainer["args"])  # every word is known


def test_a_task_of_skypilot() -> None:
    task = yaml.safe_load((ROOT / "scripts/clusters/skypilot.yaml").read_text())
    assert task["num_nodes"] > 1
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]  # stopped as requested, and saved
    before, _, words = task["run"].replace("\\\n", " ").strip().partition("scripts/clusters/kubernetes/entrypoint ")
    assert before.splitlines()[-1] == "sh "
    assert compose(shlex.split(words)).run.dir.startswith("/runs/")
    assert set(task["volumes"]) == {"/runs"}


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
    compose(container["args"])


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


@pytest.mark.long
def test_the_words_in_the_docs_are_taken() -> None:
    text = (ROOT / "docs" / "clusters.md").read_text()
    commands = re.findall(r"`([^`\n]*-m trainer [^`\n]*)`", text) + re.findall(r"^(.*-m trainer -m .*?)  ", text, re.M)
    assert len(commands) > 8
    for command in commands:
        words = [word for word in words_of(shlex.split(command)) if "=" in word and not word.startswith("hydra")]
        compose([re.sub(r"=([^\[{(]*?),.*", r"=\1", word) for word in words])  # of the values of a sweep the first
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert (ROOT / "docs" / link).exists(), link
