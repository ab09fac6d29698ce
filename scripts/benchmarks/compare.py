"""Run this program, a loop by hand and Lightning Fabric on the same work, interleaved; see scripts/bench.

Each program is a process of its own on one thread a rank. In each round another one goes first, and ratios are taken
within a round, so that what else the machine does meets all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from scripts.benchmarks.work import Work

CHECKOUT = Path(__file__).resolve().parents[2]
PAGE = CHECKOUT / "docs" / "benchmarks.md"
MARK = "<!-- What follows is written by scripts/bench --write. -->\n"
PATIENCE = 600.0  # seconds until a program is given up

PROGRAMS = {"raw": "torch", "ours": "trainer", "fabric": "lightning"}  # program → the package that it needs
WORKS = {
    "overhead": Work("overhead", 2000, 32),
    "overhead-dl": Work("overhead-dl", 2000, 32),
    "resnet18": Work("resnet18", 20, 64),
    "gpt": Work("gpt", 60, 8),
    "overhead-ddp": Work("overhead", 1000, 32, ranks=2),
    "gpt-ddp": Work("gpt", 40, 8, ranks=2),
}
QUICK = [Work("overhead", 40, 32), Work("overhead", 40, 32, ranks=2)]
COLUMNS = {  # figure → its heading
    "step": "step, µs",
    "cpu": "step, µs of CPU",
    "evaluation": "evaluation, µs a batch",
    "first": "start to first step, s",
    "first_cpu": "start to first step, s of CPU",
    "memory": "peak memory, MiB",
}
Figures = dict[str, list[dict[str, float]]]  # of one workload: program → what each round has left


def main() -> None:
    """Measure what was asked for; print tables, or write them into the docs."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Measure this program beside others.")
    parser.add_argument("works", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(WORKS)}; default: all")
    parser.add_argument("--programs", default=",".join(PROGRAMS), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--write", action="store_true", help=f"put the tables into {PAGE.relative_to(CHECKOUT)}")
    parser.add_argument("--quick", action="store_true", help="a few steps of raw and ours: do figures come out?")
    asked = parser.parse_args()
    works, programs, rounds = asked.works or [*WORKS], asked.programs.split(","), asked.rounds
    for names, known in ((works, WORKS), (programs, PROGRAMS)):
        if unknown := [name for name in names if name not in known]:
            parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(known)}")
    there = [name for name in programs if find_spec(PROGRAMS[name])]
    if len(there) < len(programs):
        say("Lightning is not installed, so fabric is left out; pip install -e '.[bench]' brings it")
    if asked.quick:
        there, rounds = ["raw", "ours"], 1
    chosen = QUICK if asked.quick else [WORKS[name] for name in works]
    page = "\n\n".join([machine(), *(table(work, measure(work, there, rounds)) for work in chosen)]) + "\n"
    print(page)
    if asked.write:
        PAGE.write_text(PAGE.read_text(encoding="utf-8").split(MARK)[0] + MARK + "\n" + page, encoding="utf-8")


def measure(work: Work, programs: list[str], rounds: int) -> Figures:
    """All rounds of one workload."""
    found: Figures = {name: [] for name in programs}
    for number in range(rounds):
        first = number % len(programs)
        for name in programs[first:] + programs[:first]:
            found[name].append(run(name, work))
            say(f"{work}, round {number + 1}, {name}: {found[name][-1]['step']:,.0f} µs")
    return found


def run(name: str, work: Work) -> dict[str, float]:
    """The figures of one program, from its command to its end. Where it fails this ends with its last words."""
    with TemporaryDirectory(prefix="bench-") as folder:
        result = Path(folder) / "result.json"
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={work.ranks}", "-m"]
        program = ["trainer", *words(work, folder)] if name == "ours" else ["scripts.benchmarks.others", name]
        # where Python may not keep what it compiled, this program would be compiled each time, but no installed one
        kept = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        asked = {"BENCH_WORK": work.words(), "BENCH_FOLDER": folder, "BENCH_RESULT": str(result)}
        environment = {**kept, **asked, "OMP_NUM_THREADS": "1", "BENCH_START": repr(time.time())}
        command = [sys.executable, "-m", *(launcher if work.ranks > 1 else []), *program]
        ended = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=PATIENCE)
        if ended.returncode or not result.exists():
            sys.exit(f"{work}, {name}: exit code {ended.returncode}\n{ended.stdout[-1000:]}{ended.stderr[-3000:]}")
        return json.loads(result.read_text())


def words(work: Work, folder: str) -> list[str]:
    """What a user of this program types for the work that work.py describes."""
    adam = ["optimizer=adamw", "optimizer.lr=3e-4", "optimizer.weight_decay=0.01"]
    plain = ["optimizer=sgd", "optimizer.lr=0.01", "optimizer.nesterov=false", "optimizer.weight_decay=0"]
    lab = [f"--config-dir={CHECKOUT}/scripts/benchmarks/conf", "model=work", "data=work", "task=work"]
    loop = [f"loop.steps={work.steps}", f"loop.global_batch={work.batch * work.ranks}", "loop.log_every=50"]
    rare = ["loop.eval_every=null", "loop.save_every=null", f"loop.eval_batch={work.eval_batch * work.ranks}"]
    place = ["device=cpu", f"strategy={'ddp' if work.ranks > 1 else 'single'}", f"run.dir='{folder}/ours'"]
    return [*lab, *(adam if work.name == "gpt" else plain), "schedule=constant", *loop, *rare, *place]


def table(work: Work, found: Figures) -> str:
    """One workload: medians over the rounds, and in brackets those of the ratios to raw within a round."""
    head = ["", *COLUMNS.values(), "accuracy", "rounds"]
    lines = [f"### {work}", "", f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    for name, rounds in found.items():
        cells = [name]
        for figure in COLUMNS:
            cells.append(f"{median(one[figure] for one in rounds):,.{2 if figure.startswith('first') else 0}f}")
            if "raw" in found:  # what the machine does meanwhile meets both
                ratios = [one[figure] / raw[figure] for one, raw in zip(rounds, found["raw"], strict=True)]
                cells[-1] += f" ({median(ratios):.2f})"
        accuracy = f"{median(one['accuracy'] for one in rounds):.3f}"
        lines.append(f"| {' | '.join([*cells, accuracy, str(len(rounds))])} |")
    return "\n".join(lines)


def machine() -> str:
    """What was measured where, and by which command."""
    facts = Path("/proc/cpuinfo").read_text().splitlines()
    model = [line.split(":")[1].strip() for line in facts if line.startswith("model name")] or [platform.processor()]
    packages = [name for name in ("torch", "lightning") if find_spec(name)]
    return (
        f"`{shlex.join(['scripts/bench', *sys.argv[1:]])}`, {time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores of "
        f"{model[0]}, {os.getloadavg()[2]:.0f} processes wanted one at its end; Python {platform.python_version()}, "
        f"{', '.join(f'{name} {version(name)}' for name in packages)}."
    )


def say(sentence: str) -> None:
    """Progress, on stderr."""
    print(sentence, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
