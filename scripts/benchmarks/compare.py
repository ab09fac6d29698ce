"""Run this program and others on the same work, interleaved, and say medians and ratios; see scripts/bench.

Each program is a process of its own on one thread a rank. In each round another one goes first, and ratios are taken
within a round, so that what else the machine does meets all of them.
"""

from __future__ import annotations

import argparse
import gzip
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
from typing import Any

from scripts.benchmarks.report import Row, picture, tables
from scripts.benchmarks.work import Work

CHECKOUT = Path(__file__).resolve().parents[2]
PAGE, DRAWING = CHECKOUT / "docs" / "benchmarks.md", CHECKOUT / "docs" / "benchmarks.svg"
MARK = "<!-- What follows is written by scripts/bench --write. -->\n"
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
PATIENCE = 600.0  # seconds until a program is given up

PEERS = {  # program → the package that it needs
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
    "fmnist": Work("fmnist", 200, 128),
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
    parser.add_argument("--peers", default=",".join(PEERS), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="0: only show what --rows holds; default: %(default)s")
    parser.add_argument("--rows", type=Path, help="a file that each measurement is added to; all of it is shown")
    parser.add_argument("--write", action="store_true", help="put the tables and the plot into docs/")
    parser.add_argument("--quick", action="store_true", help="a few steps of raw and ours: do figures come out?")
    asked = parser.parse_args()
    if unknown := [name for name in asked.works if name not in WORKS]:
        parser.error(f"no such workload: {', '.join(unknown)}; there are {', '.join(WORKS)}")
    works = QUICK if asked.quick else [WORKS[name] for name in asked.works or WORKS]
    peers = [peer for peer in (("raw", "ours") if asked.quick else asked.peers.split(",")) if is_there(peer)]
    with TemporaryDirectory(prefix="bench-") as scratch:
        file = asked.rows or Path(scratch) / "rows.jsonl"
        for work in works if asked.rounds else []:
            measure(work, peers, 1 if asked.quick else asked.rounds, Path(scratch), file)
        rows: list[Row] = [json.loads(line) for line in file.read_text().splitlines()]
    page = f"{machine()}\n\n{tables(rows)}\n"
    print(page)
    drawing = picture(rows)
    if asked.write:
        PAGE.write_text(PAGE.read_text(encoding="utf-8").split(MARK)[0] + MARK + "\n" + page, encoding="utf-8")
        DRAWING.write_text(drawing, encoding="utf-8")
    sys.exit("some programs failed, see above" if asked.quick and any("error" in row for row in rows) else 0)


def is_there(peer: str) -> bool:
    """Can it run here? Says so where it cannot."""
    found = find_spec(PEERS[peer]) is not None
    if not found:
        say(f"{peer} is left out: {PEERS[peer]} is not installed; pip install -e '.[bench]' brings it")
    return found


def measure(work: Work, peers: list[str], rounds: int, scratch: Path, file: Path) -> None:
    """All rounds of one workload."""
    if work.name == "fmnist" and not unpack_fashion_mnist(scratch):
        say(f"fmnist is left out: {DEBIAN} is not there; apt-get install dataset-fashion-mnist brings it")
        return
    begun = int(time.time())
    for number in range(rounds):
        first = number % len(peers)
        for peer in peers[first:] + peers[:first]:
            row = {"work": str(work), "peer": peer, "round": f"{begun}-{number}", **run(peer, work, scratch)}
            with file.open("a") as rows:
                rows.write(json.dumps(row) + "\n")
            figures = row.get("figures")
            say(
                f"{work}, round {number + 1}, {peer}: {figures['step']:,.0f} µs"
                if figures
                else f"{peer}: {row['error']}"
            )


def run(peer: str, work: Work, scratch: Path) -> dict[str, Any]:
    """One program, from its command to its end: `figures`, or `error` with its last words."""
    result = scratch / "result.json"
    result.unlink(missing_ok=True)
    with TemporaryDirectory(dir=scratch) as folder:
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={work.ranks}", "-m"]
        program = ["trainer", *words(work, Path(folder))] if peer == "ours" else [f"scripts.benchmarks.{peer}"]
        command = [sys.executable, "-m", *(launcher if work.ranks > 1 else []), *program]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "BENCH_WORK": work.words(),
            "BENCH_FOLDER": str(scratch),
            "BENCH_RESULT": str(result),
            "BENCH_START": repr(time.time()),
        }
        try:
            ended = subprocess.run(
                command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=PATIENCE
            )
        except subprocess.TimeoutExpired:
            return {"error": f"still running after {PATIENCE:g} s"}
    if ended.returncode or not result.exists():
        return {"error": f"exit code {ended.returncode}\n{ended.stdout[-1000:]}{ended.stderr[-3000:]}"}
    return {"figures": json.loads(result.read_text())}


def words(work: Work, folder: Path) -> list[str]:
    """What a user of this program types for the work that work.py describes."""
    adam = ["optimizer=adamw", "optimizer.lr=3e-4", "optimizer.weight_decay=0.01"]
    plain = ["optimizer=sgd", "optimizer.lr=0.01", "optimizer.nesterov=false", "optimizer.weight_decay=0"]
    lab = [f"--config-dir={CHECKOUT}/scripts/benchmarks/conf", "model=work", "data=work", "task=work"]
    loop = [f"loop.steps={work.steps}", f"loop.global_batch={work.batch * work.ranks}", "loop.log_every=50"]
    rare = ["loop.eval_every=null", "loop.save_every=null", f"loop.eval_batch={work.eval_batch * work.ranks}"]
    place = ["device=cpu", f"strategy={'ddp' if work.ranks > 1 else 'single'}", f"run.dir='{folder}'"]
    return [*lab, *(adam if work.name == "gpt" else plain), "schedule=constant", *loop, *rare, *place]


def unpack_fashion_mnist(scratch: Path) -> bool:
    """Lay Debian's files where torchvision looks for them; False where there are none."""
    target = scratch / "FashionMNIST" / "raw"
    target.mkdir(parents=True, exist_ok=True)
    for packed in DEBIAN.glob("*.gz"):
        (target / packed.stem).write_bytes(gzip.decompress(packed.read_bytes()))
    return any(target.iterdir())


def machine() -> str:
    """What was measured where, and by which command."""
    facts = Path("/proc/cpuinfo").read_text().splitlines()
    model = [line.split(":")[1].strip() for line in facts if line.startswith("model name")]
    packages = ["torch", *(name for name in sorted({*PEERS.values()} - {"torch", "trainer"}) if find_spec(name))]
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    return (
        f"`{shlex.join(['scripts/bench', *sys.argv[1:]])}`, {time.strftime('%Y-%m-%d')}, {len(model)} cores of "
        f"{model[0] if model else platform.processor()}, {os.getloadavg()[2]:.0f} processes wanted one at its end; "
        f"Python {platform.python_version()}, {versions}."
    )


def say(sentence: str) -> None:
    """Progress, on stderr."""
    print(sentence, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
