"""Draw docs/curves.svg: one configuration under four strategies, and how far their losses are apart.

    python scripts/curves.py                    trains single, ddp, tp and ddp_tp in a temporary folder, then draws
    python scripts/curves.py RUN_FOLDER ...     draws runs that are there; the others are compared with the first

The runs must have been logged at every step (loop.log_every=1).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from trainer.verify.loss_plot import largest_differences, plot_curves

CHECKOUT = Path(__file__).resolve().parent.parent
WORDS = ["model=vit_tiny", "model.dropout=0.1", "loop.epochs=4", "loop.log_every=1", "checkpoint.keep=1"]
RUNS = {"single": 1, "ddp": 2, "tp": 2, "ddp_tp": 4}  # strategy → processes


@dataclass(frozen=True)
class Run:
    """What one run folder says about its curve."""

    strategy: str
    processes: int
    losses: dict[int, float]  # step → the mean loss of that step's global batch
    digests: dict[int, str]  # step → which samples were in it
    words: list[str]  # of the command line


def main() -> None:
    """Train where no folder is given, draw, and say how far the curves are apart."""
    parser = argparse.ArgumentParser(description="Draw one configuration's curves under several strategies.")
    parser.add_argument("folders", nargs="*", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("--out", type=Path, default=CHECKOUT / "docs" / "curves.svg")
    asked = parser.parse_args()
    with TemporaryDirectory(prefix="curves-") as scratch:
        folders = asked.folders or [train(strategy, count, Path(scratch)) for strategy, count in RUNS.items()]
        runs = [read(folder) for folder in folders]
    steps = common_steps(runs)
    curves = {named(run): [run.losses[step] for step in steps] for run in runs}
    shared = " ".join(["trainer", *(word for word in runs[0].words if all(word in run.words for run in runs))])
    title = "Training loss at every step: one configuration, several strategies"
    asked.out.write_text(plot_curves(title, shared, curves, steps[0]), encoding="utf-8")
    apart = largest_differences([*curves.values()])
    print(f"{asked.out}: {len(runs)} runs, {len(steps)} steps, the same samples at every step")
    for count in (8, 24, len(steps)):
        if count <= len(steps):
            print(f"largest difference of the loss over the first {count} steps: {max(apart[:count]):.1e}")


def train(strategy: str, processes: int, root: Path) -> Path:
    """Run one strategy; the folder of the run. Its own words go to this program's stderr."""
    folder = root / strategy
    module = ["-m", "trainer"]
    if processes > 1:
        module = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), *module]
    words = [*WORDS, f"strategy={strategy}", f"run.dir={folder}"]
    threads = max(1, (os.cpu_count() or 1) // processes)
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    subprocess.run([sys.executable, *module, *words], cwd=CHECKOUT, env=environment, stdout=sys.stderr, check=True)
    return folder


def read(folder: Path) -> Run:
    """A run folder's curve."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    status = json.loads((folder / "status.json").read_text(encoding="utf-8"))
    steps = [line for line in lines if line["kind"] == "train"]
    words = (folder / "overrides.yaml").read_text(encoding="utf-8").splitlines()
    return Run(
        strategy=status["strategy"],
        processes=status["world_size"],
        losses={line["step"]: line["loss"] for line in steps},
        digests={line["step"]: line["sample_digest"] for line in steps},
        words=[json.loads(word[2:]) for word in words if word.startswith("- ")],
    )


def named(run: Run) -> str:
    """What a curve is called in the legend."""
    return f"{run.strategy}, {run.processes} process{'es' * (run.processes > 1)}"


def common_steps(runs: list[Run]) -> list[int]:
    """The steps that all runs have logged. Ends the program where they are none, or not about the same samples."""
    steps = sorted(set.intersection(*(set(run.losses) for run in runs)))
    if len(steps) < 2 or len(steps) <= steps[-1] - steps[0]:
        sys.exit("these runs do not share all steps; log every one of them: loop.log_every=1")
    for step in steps:
        if len({run.digests[step] for run in runs}) > 1:
            sys.exit(f"these runs saw different samples in step {step}: they are not of one configuration")
    return steps


if __name__ == "__main__":
    main()
