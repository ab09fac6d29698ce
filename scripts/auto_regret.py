#!/usr/bin/env python
"""How much slower is what `strategy=auto` chooses than the fastest strategy? By training with each of them.

For each network: `job=doctor` once, then `strategy=auto`, then every strategy that `job=plan` lists, all by
`python -m trainer`, in rounds, on a quiet machine. A time is `measured.step_s` of environment.json, the least of all
rounds. Prints a row for each network, with the regret: the time of the choice over that of the fastest, less one.

    python scripts/auto_regret.py --rounds 3
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NETWORKS = {
    "mlp": "model=mlp model.width=2048 model.depth=4 loop.global_batch=64",
    "vit": "model=vit_tiny model.width=384 model.heads=6 model.depth=6 loop.global_batch=64",
    "cnn": "model=cnn model.width=64 loop.global_batch=64",
    "resnet18": "model=resnet18 data=synthetic_images data.image_size=32 loop.global_batch=64",
    "gpt": "experiment=gpt_book model.width=256 model.depth=6 loop.global_batch=16",
    "vit_small_batch": "model=vit_tiny model.width=512 model.heads=8 model.depth=4 loop.global_batch=8",
}


def train(words: str, root: Path, name: str) -> dict[str, Any]:
    """Run a command to its end; the environment.json of its run. SystemExit where it fails."""
    command = [sys.executable, "-m", "trainer", *words.split(), f"run.root={root}", f"run.name={name}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    path = root / name / "environment.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def compare(words: str, processes: int, rounds: int, root: Path) -> tuple[str, str, float, int]:
    """What was chosen, what was fastest, the regret, and how many strategies were measured."""
    run = f"{words} processes={processes} device=cpu log=[] loop.steps=13 loop.eval_every=null loop.save_every=null"
    run += " run.resume=fresh sample.prompt=null"
    plan = words + f" device=cpu job=plan job.processes=[{processes}] log=[]"
    train(plan, root, "plan")
    rows = json.loads((root / "plan/plan/plan.json").read_text())["rows"]
    strategies = [row["words"] for row in rows if "global_batch" not in row["words"]]
    auto = train(f"{run} strategy=auto", root, "auto")["auto"]
    # what was chosen is measured as every other one is; nothing: ddp
    chosen = " ".join(auto["overrides"]) or "strategy=ddp"
    times: dict[str, float] = {}
    for _ in range(rounds):
        for strategy in dict.fromkeys([chosen, *strategies]):
            took = train(f"{run} {strategy}", root, "run")["measured"]["step_s"]
            times[strategy] = min(took, times.get(strategy, took))
    fastest = min(times, key=lambda strategy: times[strategy])
    return chosen, fastest, times[chosen] / times[fastest] - 1, len(times)


def main() -> None:
    """Print a row for each network."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("networks", nargs="*", help=f"only these of {', '.join(NETWORKS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    print("| network | chosen | fastest | regret | strategies |")
    print("|" + 5 * " --- |", flush=True)
    with TemporaryDirectory() as folder:
        root = Path(folder)
        examined = f"processes={options.processes} device=cpu job=doctor run.root={root}"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-m", "trainer", *examined.split()], env=environment, capture_output=True)
        for name in options.networks or NETWORKS:
            chosen, fastest, regret, count = compare(NETWORKS[name], options.processes, options.rounds, root)
            cells = [name, chosen, fastest, f"{100 * regret:.1f} %", str(count)]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
