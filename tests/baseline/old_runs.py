"""Runs that an older commit stopped in the middle, kept as folders: how each was made, and what is compared of them.

What has recorded them is this file as it was at b09460d1.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

HERE = Path(__file__).resolve().parent
STEPS = 16

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
