"""Steps a second on 1, 2 and 4 processes of this machine, and what a plan says of 8 to 1,024 GPUs: docs/scale.md.

python scripts/scaling.py              both tables
python scripts/scaling.py --measure    the first alone: real runs on CPUs, one after another
python scripts/scaling.py --paper      the second alone, by job=plan: bytes are counted, times are estimated
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.plan_times import run, train

STRATEGIES = ("ddp", "zero1", "fsdp")
SEQUENCES = 8  # of 1,024 tokens for each GPU, however many there are
PAPER = (
    "job=plan job.device=h100 job.strategies=[ddp,zero1,fsdp,hsdp] job.seconds=600 log=[] precision=bf16 model=gpt2"
    " data=synthetic_tokens data.vocab_size=50257 data.length=1024 data.evaluation_size=0"
)
GPUS = (8, 64, 256, 1024)


def measure(rounds: int) -> None:
    """Print steps a second of vit_tiny with 32 images in a step, on however many processes they are divided."""
    rows = [("single", 1), *((strategy, size) for size in (2, 4) for strategy in STRATEGIES)]
    seconds: dict[tuple[str, int], list[float]] = {row: [] for row in rows}
    with TemporaryDirectory() as folder:
        for _ in range(rounds):  # in turn, so that other programs disturb all of them alike
            for strategy, size in rows:
                seconds[strategy, size] += train("vit_tiny", f"strategy={strategy}", size, Path(folder))
    print("| processes | strategy | steps/s | of one process |\n|" + 4 * " --- |")
    # the lower quartile, as in plan_times.py: other programs take processors away for a moment
    rates = {row: 1 / quantiles(took, n=4)[0] for row, took in seconds.items()}
    for (strategy, size), rate in rates.items():
        print(f"| {size} | {strategy} | {rate:.2f} | {rate / rates['single', 1]:.2f} |")


def plan_on_paper(sizes: list[int]) -> None:
    """Print what job=plan has for so many H100s in machines of eight."""
    print("| GPUs | strategy | MB inside | MB between | step ms | steps/s | samples/s |\n|" + 7 * " --- |", flush=True)
    for size in sizes:
        with TemporaryDirectory() as folder:
            run(f"{PAPER} loop.global_batch={SEQUENCES * size} job.processes=[{size}] run.dir={folder}/run")
            rows = json.loads((Path(folder) / "run/plan/plan.json").read_text())["rows"]
        for row in rows:
            inside, between = (row["wire"][where] / 1e6 for where in ("inside", "between"))
            cells = f"{inside:,.0f} | {between:,.0f} | {row['step_s'] * 1e3:.1f} | {1 / row['step_s']:.1f}"
            samples = SEQUENCES * size / row["step_s"]
            print(f"| {size:,} | {row['words'].removeprefix('strategy=')} | {cells} | {samples:,.0f} |", flush=True)


def main() -> None:
    """Print the tables that are asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="real runs alone")
    parser.add_argument("--paper", action="store_true", help="plans alone")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each row")
    parser.add_argument("--gpus", type=int, nargs="*", default=GPUS, help="how many to plan for")
    words = parser.parse_args()
    if words.measure or not words.paper:
        measure(words.rounds)
    if words.paper or not words.measure:
        plan_on_paper(words.gpus)


if __name__ == "__main__":
    main()
