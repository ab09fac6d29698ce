"""What a step, a start, a save and a proof cost: `python -m tests.baseline.costs [NAME...]` prints a row for each.

Medians of three; CPU seconds are those of all processes of a command, and count where the machine has other work.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
MLP = ("model=mlp", "model.width=64", "strategy=single", "device=cpu", "log=[]")
QUIET = ("loop.log_every=null", "loop.eval_every=null", "loop.save_every=null")
MANY = (
    *("processes=8", "device=cpu", "model=mlp", "model.depth=5000", "model.width=4", "loop.steps=6"),
    *("loop.global_batch=64", "loop.save_every=2", "loop.eval_every=null", "strategy=zero1"),
    "checkpoint.asynchronous=false",
)
COMMANDS: dict[str, tuple[tuple[str, ...], int]] = {
    "one step": ((*MLP, *QUIET, "loop.steps=1"), 3),
    "1,001 steps": ((*MLP, *QUIET, "loop.steps=1001"), 3),
    "1,001 steps, 50 saves": ((*MLP, *QUIET[:2], "loop.save_every=20", "loop.steps=1001"), 3),
    "refusal": (("loop.stepz=3",), 3),
    "proof": (("job=verify", "device=cpu"), 3),
    "proof, two processes": (("job=verify", "device=cpu", "strategy=ddp", "processes=2"), 3),
    "10,000 tensors, 8 ranks": (MANY, 1),
}


def measure(words: tuple[str, ...]) -> tuple[float, float, dict[str, float]]:
    """Wall and CPU seconds of one command, and where its status.json says that they went."""
    with tempfile.TemporaryDirectory() as place:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(CHECKOUT)}
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        command = [sys.executable, "-m", "trainer", *words, f"run.dir={place}/run"]
        subprocess.run(command, cwd=place, env=environment, capture_output=True)
        wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        status = Path(place, "run", "status.json")
        spent = json.loads(status.read_text()).get("seconds", {}) if status.exists() else {}
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, spent


def main() -> None:
    """Measure what is asked for."""
    for name in sys.argv[1:] or COMMANDS:
        words, times = COMMANDS[name]
        measured = [measure(words) for _ in range(times)]
        wall, cpu = (statistics.median(one[at] for one in measured) for at in (0, 1))  # type: ignore[type-var]
        spent = {key: round(value, 2) for key, value in measured[-1][2].items() if value}
        print(
            f"| {name} | `python -m trainer {' '.join(words)}` | {wall:.2f} | {cpu:.2f} | {spent or ''} |", flush=True
        )


if __name__ == "__main__":
    main()
