"""Runs that an older commit stopped in the middle, kept as folders: how each was made, and how they are recorded anew.

Run by hand, in a checkout of the commit that is to be recorded: `python -m tests.baseline.old_runs`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

HERE = Path(__file__).resolve().parent
STEPS, STOPPED_AFTER = 16, 4  # a stop takes a step or two to be agreed upon

COMMON = ("device=cpu", "log=[]", "loop.log_every=1", f"loop.steps={STEPS}")
MLP = ("model=mlp", "model.width=16", "model.depth=2")
CNN = ("model=cnn", "model.width=8")
VIT = ("model=vit_tiny", "model.width=16", "model.heads=2", "model.depth=2", "loop.global_batch=64")
DECODER = ("model=gpt_nano", "model.width=16", "model.depth=2", "model.heads=2")
MIXTURE = ("model=moe_nano", "model.width=16", "model.heads=2", "model.groups=1", "model.depth=2", "model.inner=32")
TOKENS = ("data=synthetic_tokens", "data.length=32", "data.vocab_size=64", "data.size=512", "data.evaluation_size=64")
LANGUAGE = (*TOKENS, "loop.global_batch=16")
TWO = "loop.micro_batches=2"

# what a user typed, without the words above and the run's folder; a run that is begun with another's weights is later
RUNS: dict[str, tuple[str, ...]] = {
    "single": (*MLP, "strategy=single"),
    "ddp": (*CNN, "strategy=ddp", "processes=2", TWO),
    "zero1": (*MLP, "strategy=zero1", "processes=2"),
    "tp": (*DECODER, *LANGUAGE, "strategy=tp", "processes=2"),
    "fsdp": (*VIT, "strategy=fsdp", "processes=2"),
    "pp": (*DECODER, *LANGUAGE, "strategy=pp", "processes=2", TWO),
    "ema": (*MLP, "strategy=single", "ema.decay=0.9"),
    "muon": (*DECODER, *LANGUAGE, "strategy=single", "optimizer=muon"),
    "dropout": (*DECODER, *LANGUAGE, "strategy=single", "model.dropout=0.1"),
    "lora": (*DECODER, *LANGUAGE, "strategy=single", "model.lora=2", "init_from=dropout"),
    "fp16": (*MLP, "strategy=single", "precision=fp16"),
    "bf16": (*MLP, "strategy=single", "precision=bf16"),
    "sample_dropout": (*VIT, "strategy=ddp", "processes=2", "model.dropout=0.1", "loop.dropout=sample"),
    "mixture": (*MIXTURE, "model.expert_inner=16", *LANGUAGE, "strategy=fsdp", "processes=2"),
    "plateau": (*MLP, "strategy=single", "optimizer=sgd", "schedule=plateau", "loop.eval_every=2", "loop.save_every=2"),
}
BEGUN_WITH = {"lora": "dropout"}  # init_from names its folder


def words(name: str, folder: Path | str) -> list[str]:
    """The command's words; `folder` is the run's."""
    return [*COMMON, *RUNS[name], f"run.dir={folder}"]


def job_words(job: str, folder: Path | str, out: Path | str) -> list[str]:
    """The words of a job over what a run has learned, on one process, whatever the run had."""
    more = [] if job == "evaluate" else [f"job.out={out}"]
    return ["device=cpu", f"run.dir={folder}", "strategy=single", f"job={job}", "job.checkpoint=last", *more]


def unpack(name: str, place: Path) -> Path:
    """The run's folder, and that of the run which it was begun with, in `place`."""
    for one in filter(None, (BEGUN_WITH.get(name), name)):
        with tarfile.open(HERE / "runs" / f"{one}.tar.gz") as archive:
            archive.extractall(place, filter="data")
    return place / name


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def learned(folder: Path) -> dict[str, Any]:
    """What a run's metrics.jsonl says of each step and each evaluation, without times."""
    lines = read_lines(folder / "metrics.jsonl")
    train = [[line["step"], line["loss"], line["grad_norm"], line["lr"]] for line in lines if line["kind"] == "train"]
    return {"train": train, "eval": [figures(line) for line in lines if line["kind"] == "eval"]}


def figures(line: dict[str, Any]) -> dict[str, float]:
    """An evaluation's metrics, and its step."""
    return {name: value for name, value in line.items() if isinstance(value, int | float)}


def sums(path: Path) -> dict[str, list[float]]:
    """Of each tensor in a file of numbers: its sum and the sum of its squares."""
    read = {name: value.astype("float64") for name, value in load_file(path).items()}
    return {name: [float(value.sum()), float((value**2).sum())] for name, value in sorted(read.items())}


# ------------------------------------------------------------------------------------------------------------ recording


def run(place: Path, *told: str) -> None:
    """One command to its end."""
    done = subprocess.run([sys.executable, "-m", "trainer", *told], cwd=place, env=environment(), capture_output=True)
    assert done.returncode == 0, (told, done.stdout.decode() + done.stderr.decode())


def run_until_stopped(place: Path, name: str) -> None:
    """One run that is asked to stop as soon as it has done a few steps."""
    command = [sys.executable, "-m", "trainer", *words(name, name)]
    with subprocess.Popen(command, cwd=place, env=environment()) as process:
        metrics = place / name / "metrics.jsonl"
        while process.poll() is None and not (metrics.exists() and metrics.read_bytes().count(b"\n") >= STOPPED_AFTER):
            time.sleep(0.0005)
        process.send_signal(signal.SIGTERM)
    assert process.returncode == 75, f"{name} ended with {process.returncode}"


def environment() -> dict[str, str]:
    """One thread, as in the tests."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent.parent)}


def keep_the_last_checkpoint(folder: Path) -> None:
    """What a resume reads; nothing else, to stay small."""
    for older in sorted(path for path in (folder / "checkpoints").iterdir() if path.is_dir())[:-1]:
        shutil.rmtree(older)


def record(name: str, place: Path) -> dict[str, Any]:
    """Stop one run, keep its folder, and learn what becomes of it."""
    run_until_stopped(place, name)
    keep_the_last_checkpoint(place / name)
    with tarfile.open(HERE / "runs" / f"{name}.tar.gz", "w:gz") as archive:
        archive.add(place / name, name)
    with tempfile.TemporaryDirectory(dir=place) as other:
        folder = unpack(name, Path(other))
        for job in ("evaluate", "predict", "export"):
            run(Path(other), *job_words(job, name, f"{job}ed.safetensors"))
        evaluated = figures(read_lines(folder / "evaluate" / "metrics.jsonl")[-1])
        used = {job: sums(Path(other) / f"{job}ed.safetensors") for job in ("predict", "export")}
        run(Path(other), *words(name, name))
        stopped = evaluated["step"]
        said = {"command": " ".join(["python -m trainer", *words(name, name)]), "stopped": stopped}
        return {**said, "evaluate": evaluated, **used, **learned(folder)}


def main() -> None:
    """Record all of them, or those that are named."""
    (HERE / "runs").mkdir(exist_ok=True)
    file = HERE / "expected.json"
    expected = json.loads(file.read_text()) if file.exists() else {}
    with tempfile.TemporaryDirectory() as place:
        for name in sys.argv[1:] or RUNS:
            expected[name] = record(name, Path(place))
            rows = [f"{json.dumps(one)}: {json.dumps(expected[one])}" for one in RUNS if one in expected]
            file.write_text("{\n" + ",\n".join(rows) + "\n}\n")
            print(name, "stopped at step", expected[name]["stopped"], flush=True)


if __name__ == "__main__":
    main()
