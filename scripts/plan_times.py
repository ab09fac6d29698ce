"""The time of a step by `job=plan` beside that of real runs, after `job=doctor` on this machine: docs/plan.md.

    python scripts/plan_times.py                      five networks, six strategies, on one process and on two
    python scripts/plan_times.py gpt_nano cnn         two networks
    python scripts/plan_times.py --repeat 3           each run three times, one after another, when others use the cores

Every row is a run of `python -m trainer` on CPUs, 12 steps without evaluation and saving. *Measured* is the lower
quartile of its steps: a quarter of them were quicker, because other programs take processors away for a moment.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
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
    with TemporaryDirectory(dir=root) as folder:
        run(f"{NETWORKS[network]} {COMMON} loop.steps={STEPS} processes={processes} {words} run.dir={folder}/run")
        lines = [json.loads(line) for line in (Path(folder) / "run/metrics.jsonl").read_text().splitlines()]
    return [line["step_s"] for line in lines if line["kind"] == "train"][2:]


def plan(network: str, root: Path) -> list[dict[str, Any]]:
    """The rows that job=plan has for this network, on one process and on two."""
    names = ",".join(["single", *TWO])
    with TemporaryDirectory(dir=root) as folder:
        job = f"job=plan job.processes=[1,2] job.strategies=[{names}] run.root={root} run.dir={folder}/run"
        run(f"{NETWORKS[network]} {COMMON} {job}")
        rows = json.loads((Path(folder) / "run/plan/plan.json").read_text())["rows"]
    return [row for row in rows if "reshard_after_forward" not in row["words"]]


def run(words: str) -> None:
    """Run the product."""
    command = [sys.executable, "-m", "trainer", *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


def main() -> None:
    """Print the table, line by line, and how far the plan was off."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("networks", nargs="*", help=f"only these of {', '.join(NETWORKS)}")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each row")
    words = parser.parse_args()
    errors = []
    with TemporaryDirectory() as folder:
        root = Path(folder)
        run(f"job=doctor processes=2 device=cpu run.root={root}")
        print("| network | strategy | processes | planned ms | measured ms | error |")
        print("|" + 6 * " --- |", flush=True)
        for network in words.networks or NETWORKS:
            for row in plan(network, root):
                steps = [
                    seconds
                    for _ in range(words.repeat)
                    for seconds in train(network, row["words"], row["processes"], root)
                ]
                measured = quantiles(steps, n=4)[0]
                errors.append(row["step_s"] / measured - 1)
                name = row["words"].removeprefix("strategy=")
                times = f"{row['step_s'] * 1e3:.0f} | {measured * 1e3:.0f} | {100 * errors[-1]:+.0f} %"
                print(f"| {network} | {name} | {row['processes']} | {times} |", flush=True)
    sizes = [abs(error) for error in errors]
    print(f"\nmedian {100 * median(sizes):.0f} %, worst {100 * max(sizes):.0f} %")


if __name__ == "__main__":
    main()
