#!/usr/bin/env python
"""Let `strategy=auto` choose for many networks under many limits of memory, and train with what it chose.

Each run is `python -m trainer processes=N strategy=auto` in a control group (cgroup) of its own with a limit of memory,
for a few steps with a save. Prints a row for each: what was chosen, how long that took, planned and measured peak, and
whether the run ended well, was refused, or ran out of memory. Needs Linux, and the right to make control groups.

    python scripts/auto_choices.py --count 50
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
MIB = 2**20
GROUPS = Path("/sys/fs/cgroup")
STARTED = 700  # MiB that a run of several processes takes before it has a network, all together
# What is drawn from: words of a network, and the least and most that ddp needs of it, about, in MiB a process.
NETWORKS = (
    ("model=mlp model.width={width} model.depth=4", (2048, 3072, 4096, 5120), 64),
    ("model=vit_tiny model.width={width} model.heads=8 model.depth=8", (256, 384, 512), 64),
    ("model=cnn model.width={width}", (128, 256), 32),
    ("model=resnet18 model.num_classes=10 data=synthetic_images data.image_size={width}", (64, 96), 32),
    ("experiment=gpt_book model.width={width}", (256, 512), 16),
)


class Case(NamedTuple):
    """One run: its words, and how many MiB all of its processes may use."""

    words: list[str]
    processes: int
    limit: int


def draw_case(generator: random.Random) -> Case:
    """A network, an optimizer, a batch, a number of processes and a limit of memory, at random."""
    text, widths, batch = generator.choice(NETWORKS)
    processes = generator.choice((2, 3, 4))
    optimizer = generator.choice(("adamw", "sgd"))
    batch = processes * batch * generator.choice((1, 2, 4)) // 2
    words = text.format(width=generator.choice(widths)).split()
    words += [] if text.startswith("experiment=") else [f"optimizer={optimizer}"]  # which has keys of its own
    words += [f"loop.global_batch={batch}"]
    # beside 512 MiB that auto keeps for all else
    return Case(words, processes, STARTED + processes * (512 + generator.choice((200, 400, 600, 900, 1400, 2400))))


def run(case: Case, group: Path, limit_file: str, folder: Path) -> tuple[int, str, dict]:
    """The exit code of a run, its screen, and its environment.json."""
    (group / limit_file).write_text(str(case.limit * MIB))
    words = [*case.words, f"processes={case.processes}", "strategy=auto", "device=cpu", "loop.steps=3", "log=[]"]
    words += ["loop.eval_every=null", "sample.prompt=null", f"run.dir={folder}"]
    script = f'echo $$ > {group}/cgroup.procs; exec "$0" "$@"'
    done = subprocess.run(
        ["sh", "-c", script, sys.executable, "-m", "trainer", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    path = folder / "environment.json"
    return done.returncode, done.stdout, json.loads(path.read_text()) if path.is_file() else {}


def outcome(code: int, screen: str) -> str:
    """How a run ended, in a word or two."""
    if code == 0:
        return "trained"
    if code == 2 and "nothing fits" in screen:
        return "refused"
    lost = any(word in screen for word in ("out of memory", "can't allocate", "bad_alloc", "SIGKILL", "killed"))
    return "out of memory" if lost else f"failed ({code})"


def main() -> None:
    """Print a row for each run, then how many ended how."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    generator, ends = random.Random(options.seed), Counter[str]()
    version_1 = (GROUPS / "memory").is_dir()
    group = (GROUPS / "memory" if version_1 else GROUPS) / f"auto-{os.getpid()}"
    group.mkdir()
    print("| network | processes | limit MiB | chosen | s | planned MiB | measured MiB | end |")
    print("|" + 8 * " --- |", flush=True)
    try:
        while sum(ends.values()) - ends["refused"] < options.count:
            case = draw_case(generator)
            with TemporaryDirectory() as folder:
                limit_file = "memory.limit_in_bytes" if version_1 else "memory.max"
                code, screen, facts = run(case, group, limit_file, Path(folder) / "run")
            end = outcome(code, screen)
            ends[end] += 1
            if end not in ("trained", "refused"):
                print(screen, file=sys.stderr)
            chosen, auto = facts.get("strategy", ""), facts.get("auto") or {}
            peaks = [f"{(facts.get(key) or {}).get('peak', 0) / MIB:.0f}" for key in ("planned", "measured")]
            words = " ".join(auto.get("overrides", [])).removeprefix("strategy=") or chosen
            cells = [" ".join(case.words), case.processes, case.limit, words, auto.get("seconds", ""), *peaks, end]
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
    finally:
        group.rmdir()
    print(", ".join(f"{count} {end}" for end, count in ends.most_common()))


if __name__ == "__main__":
    main()
