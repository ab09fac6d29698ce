"""Run this program and others on the same work, interleaved, and say medians and ratios; see scripts/bench.

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
from tempfile import TemporaryDirectory

from scripts.benchmarks.report import Row, picture, tables
from scripts.benchmarks.work import Work

CHECKOUT = Path(__file__).resolve().parents[2]
PAGE, DRAWING = CHECKOUT / "docs" / "benchmarks.md", CHECKOUT / "docs" / "benchmarks.svg"
MARK = "<!-- What follows is written by scripts/bench --write. -->\n"
PATIENCE = 600.0  # seconds until a program is given up

PACKAGES = {  # program → the package that it needs
    "raw": "torch",
    "ours": "trainer",
    "fabric": "lightning",
    "lightning": "lightning",
    "accelerate": "accelerate",
    "hf": "transformers",
}
WORKS = {
    "overhead": Work("overhead", 2000, 32),
    "overhead-dl": Work("overhead-dl", 2000, 32),
    "resnet18": Work("resnet18", 20, 64),
    "gpt": Work("gpt", 60, 8),
    "overhead-ddp": Work("overhead", 1000, 32, ranks=2),
    "gpt-ddp": Work("gpt", 40, 8, ranks=2),
}
QUICK = [Work("overhead", 40, 32), Work("overhead", 40, 32, ranks=2)]


def main() -> None:
    """Measure what was asked for; print tables, or write them into the docs."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Measure this program beside others.")
    parser.add_argument("works", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(WORKS)}; default: all")
    parser.add_argument("--peers", default=",".join(PACKAGES), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--write", action="store_true", help="put the tables and the plot into docs/")
    parser.add_argument("--quick", action="store_true", help="a few steps of raw and ours: do figures come out?")
    asked = parser.parse_args()
    if unknown := [name for name in asked.works if name not in WORKS]:
        parser.error(f"no such workload: {', '.join(unknown)}; there are {', '.join(WORKS)}")
    works, peers, rounds = [WORKS[name] for name in asked.works or WORKS], asked.peers.split(","), asked.rounds
    if asked.quick:
        works, peers, rounds = QUICK, ["raw", "ours"], 1

    there = [peer for peer in peers if find_spec(PACKAGES[peer])]
    if left_out := sorted({*peers} - {*there}):
        say(f"not installed, so left out: {', '.join(left_out)}; pip install -e '.[bench]' brings them")
    rows = [row for work in works for row in measure(work, there, rounds)]
    page = f"{machine()}\n\n{tables(rows)}\n"
    print(page)
    if asked.write:
        PAGE.write_text(PAGE.read_text(encoding="utf-8").split(MARK)[0] + MARK + "\n" + page, encoding="utf-8")
        DRAWING.write_text(picture(rows), encoding="utf-8")
    sys.exit("some programs failed, see above" if any("error" in row for row in rows) else 0)


def measure(work: Work, peers: list[str], rounds: int) -> list[Row]:
    """All rounds of one workload."""
    rows: list[Row] = []
    for number in range(rounds):
        first = number % len(peers)
        for peer in peers[first:] + peers[:first]:
            row = {"work": str(work), "peer": peer, "round": number, **run(peer, work)}
            said = f"{row['figures']['step']:,.0f} µs" if "figures" in row else row["error"]
            say(f"{work}, round {number + 1}, {peer}: {said}")
            rows.append(row)
    return rows


def run(peer: str, work: Work) -> Row:
    """One program, from its command to its end: `figures`, or `error` with its last words."""
    with TemporaryDirectory(prefix="bench-") as folder:
        result = Path(folder) / "result.json"
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={work.ranks}", "-m"]
        program = ["trainer", *words(work, folder)] if peer == "ours" else ["scripts.benchmarks.peers", peer]
        # where Python may not keep what it compiled, this program would be compiled each time, but no installed one
        kept = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        environment = {
            **kept,
            "OMP_NUM_THREADS": "1",
            "BENCH_WORK": work.words(),
            "BENCH_FOLDER": folder,
            "BENCH_RESULT": str(result),
            "BENCH_START": repr(time.time()),
        }
        command = [sys.executable, "-m", *(launcher if work.ranks > 1 else []), *program]
        try:
            ended = subprocess.run(
                command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=PATIENCE
            )
        except subprocess.TimeoutExpired:
            return {"error": f"still running after {PATIENCE:g} s"}
        if ended.returncode or not result.exists():
            return {"error": f"exit code {ended.returncode}\n{ended.stdout[-1000:]}{ended.stderr[-3000:]}"}
        return {"figures": json.loads(result.read_text())}


def words(work: Work, folder: str) -> list[str]:
    """What a user of this program types for the work that work.py describes."""
    adam = ["optimizer=adamw", "optimizer.lr=3e-4", "optimizer.weight_decay=0.01"]
    plain = ["optimizer=sgd", "optimizer.lr=0.01", "optimizer.nesterov=false", "optimizer.weight_decay=0"]
    lab = [f"--config-dir={CHECKOUT}/scripts/benchmarks/conf", "model=work", "data=work", "task=work"]
    loop = [f"loop.steps={work.steps}", f"loop.global_batch={work.batch * work.ranks}", "loop.log_every=50"]
    rare = ["loop.eval_every=null", "loop.save_every=null", f"loop.eval_batch={work.eval_batch * work.ranks}"]
    place = ["device=cpu", f"strategy={'ddp' if work.ranks > 1 else 'single'}", f"run.dir='{folder}/ours'"]
    return [*lab, *(adam if work.name == "gpt" else plain), "schedule=constant", *loop, *rare, *place]


def machine() -> str:
    """What was measured where, and by which command."""
    facts = Path("/proc/cpuinfo").read_text().splitlines()
    model = [line.split(":")[1].strip() for line in facts if line.startswith("model name")] or [platform.processor()]
    packages = [name for name in ("torch", "lightning", "accelerate", "transformers") if find_spec(name)]
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
