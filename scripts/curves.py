"""Draw docs/curves.svg: one configuration under four strategies, and how far their losses are apart.

python scripts/curves.py        trains single, ddp, tp and ddp_tp in a temporary folder, then draws
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trainer.verify.loss_plot import largest_differences, plot_curves

CHECKOUT = Path(__file__).resolve().parent.parent
PICTURE = CHECKOUT / "docs" / "curves.svg"
WORDS = ["model=vit_tiny", "model.dropout=0.1", "loop.epochs=4", "loop.log_every=1", "checkpoint.keep=1"]
RUNS = {"single": 1, "ddp": 2, "tp": 2, "ddp_tp": 4}  # strategy → processes


def main() -> None:
    """Train, draw, and say how far the curves are apart."""
    with TemporaryDirectory(prefix="curves-") as scratch:
        runs = {strategy: train(strategy, count, Path(scratch) / strategy) for strategy, count in RUNS.items()}
    curves = {
        f"{strategy}, {count} process{'es' * (count > 1)}": [line["loss"] for line in runs[strategy]]
        for strategy, count in RUNS.items()
    }
    if len({tuple(line["sample_digest"] for line in steps) for steps in runs.values()}) > 1:
        sys.exit("these runs saw different samples: they are not of one configuration")
    title = "Training loss at every step: one configuration, several strategies"
    first = runs["single"][0]["step"]
    PICTURE.write_text(plot_curves(title, " ".join(["trainer", *WORDS]), curves, first), encoding="utf-8")
    apart = largest_differences([*curves.values()])
    for count in (8, 24, len(apart)):
        print(f"largest difference of the loss over the first {count} steps: {max(apart[:count]):.1e}")


def train(strategy: str, processes: int, folder: Path) -> list[dict[str, Any]]:
    """Run one strategy; its lines of training steps. Its own words go to this program's stderr."""
    words = [*WORDS, f"strategy={strategy}", f"processes={processes}", f"run.dir={folder}"]
    threads = max(1, (os.cpu_count() or 1) // processes)
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    command = [sys.executable, "-m", "trainer", *words]
    subprocess.run(command, cwd=CHECKOUT, env=environment, stdout=sys.stderr, check=True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["kind"] == "train"]


if __name__ == "__main__":
    main()
