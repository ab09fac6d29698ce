"""The time of a step that `job=plan` says beside that of real runs, with a doctor's file of this machine: docs/plan.md.

    python scripts/plan_times.py                      five networks, six strategies, on one process and on two
    python scripts/plan_times.py gpt cnn              two networks
    python scripts/plan_times.py --repeat 3           each run three times, one after another, when others use the cores

Every row is a run of `python -m trainer` on CPUs, 12 steps without evaluation and saving. *Measured* is the lower quartile of
its steps: what a quarter of them were faster than, because other programs take processors away for a moment.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

COMMON = "log=[] device=cpu precision=fp32 schedule=constant loop.eval_every=null loop.save_every=null loop.log_every=1"
IMAGES = "data=synthetic_images data.size=512 data.evaluation_size=0"
NETWORKS = {
    "vit_tiny": f"model=vit_tiny {IMAGES} loop.global_batch=32",
    "cnn": f"model=cnn {IMAGES} loop.global_batch=256",
    "resnet18": f"model=resnet18 {IMAGES} loop.global_batch=16",
    "resnet50": f"model=resnet50 {IMAGES} data.image_size=64 loop.global_batch=16",
    "gpt_nano": "model=gpt_nano data=synthetic_tokens loop.global_batch=16",
}
TWO = ("ddp", "zero1", "fsdp", "tp", "pp")  # strategies on two processes
STEPS = 12


def train(network: str, words: str, processes: int, root: Path) -> list[float]:
    """Seconds of each step of a run but the first two, which make connections and state."""
    folder = root / f"{network} {words} {len(list(root.iterdir()))}"
    trainer(f"{NETWORKS[network]} {COMMON} loop.steps={STEPS} processes={processes} {words}", folder, root)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["step_s"] for line in lines if line["kind"] == "train"][2:]


def plan(network: str, processes: int, root: Path) -> list[dict[str, Any]]:
    """The rows that job=plan has for this network."""
    names = "single" if processes == 1 else ",".join(TWO)
    job = f"job=plan job.processes=[{processes}] job.strategies=[{names}]"
    folder = root / f"plan {network} {processes}"
    trainer(f"{NETWORKS[network]} {COMMON} {job}", folder, root)
    return json.loads((folder / "plan" / "plan.json").read_text())["rows"]


def trainer(words: str, folder: Path | None, root: Path) -> None:
    """Run the product."""
    command = [sys.executable, "-m", "trainer", *words.split(), f"run.root={root}"]
    command += [f"run.dir='{folder}'"] if folder else []
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
