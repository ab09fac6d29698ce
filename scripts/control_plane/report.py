"""Counts what ranks say to each other, and writes it as tables; `--write` puts them into docs/scale.md.

    scripts/scale --ranks 8 64 256          each number of ranks: a run that is stopped, its resume on half of them
    scripts/scale --store 8 64 256          the store alone: a start, a failure, a hang

Each of them is a process of its own, whose threads are the ranks (ranks_as_threads.py, ranks_at_the_store.py).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from scripts.control_plane.counting import Ledger, make_repeatable

PAGE = Path(__file__).resolve().parents[2] / "docs" / "scale.md"
STEPS, STOP = 6, 3  # of the run; the step at which rank 1 is asked to stop
# a network whose steps take no time. All numbers of ranks have one batch, so they do the same evaluations
WORDS = f"model=mlp model.width=32 model.depth=2 loop.steps={STEPS} loop.log_every=2 loop.save_every=2".split()
WORDS += ["loop.global_batch=1024", "log=[]", "device=cpu", "strategy=ddp"]
# how often these come depends on how long something takes: who waits looks again and again
TIMED = ("watch",)


def main() -> None:
    """Count, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 64, 256], help="run the program on so many ranks")
    parser.add_argument("--store", type=int, nargs="*", default=[8, 64, 256], help="let so many ranks meet at a store")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/scale.md")
    parser.add_argument("--part", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        kind, ranks, folder = options.part
        print(json.dumps(count_part(kind, int(ranks), Path(folder))))
        sys.stdout.flush()
        os._exit(0)  # threads of gloo and of the watch need not end
    with TemporaryDirectory() as scratch:
        runs = {ranks: run_parts(ranks, Path(scratch)) for ranks in options.ranks}
        meetings = {ranks: meet(ranks, Path(scratch)) for ranks in options.store}
    text = "\n".join([traffic_table(runs), "", cost_table(runs), "", store_table(meetings)])
    print(text)
    if options.write:
        begin, end = "<!-- scripts/scale --write -->\n", "<!-- end -->"
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(begin)
        PAGE.write_text(f"{before}{begin}\n{text}\n\n{end}{rest.partition(end)[2]}", encoding="utf-8")


def run_parts(ranks: int, scratch: Path) -> list[dict[str, Any]]:
    """A run of so many ranks until it is stopped, and its resume on half of them."""
    folder = scratch / f"run-{ranks}"
    return [in_process("stop", ranks, folder), in_process("resume", max(2, ranks // 2), folder)]


def meet(ranks: int, scratch: Path) -> list[dict[str, Any]]:
    """So many ranks at a store, with a failure and with a hang."""
    return [in_process(kind, ranks, scratch) for kind in ("failure", "hang")]


def in_process(kind: str, ranks: int, folder: Path) -> dict[str, Any]:
    """What a process counts in which all ranks are threads."""
    print(f"{kind}: {ranks} ranks", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "scripts.control_plane.report", "--part", kind, str(ranks), str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def count_part(kind: str, ranks: int, folder: Path) -> dict[str, Any]:
    """In a process of its own: let the ranks do it, and what was counted."""
    from scripts.control_plane.ranks_as_threads import run_as_threads
    from scripts.control_plane.ranks_at_the_store import run_at_store

    ledger, began, answer = Ledger(), time.monotonic(), {}
    if kind in ("failure", "hang"):
        answer = run_at_store(ranks, folder, ledger, hangs=kind == "hang")
    else:
        make_repeatable(STOP if kind == "stop" else None)
        codes = run_as_threads(ranks, [f"run.dir={folder}", *WORDS], ledger)
        assert {*codes} == {75 if kind == "stop" else 0}, codes
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return {**ledger.to_json(), **answer, "wall_s": time.monotonic() - began, "memory_mb": memory}


# ------------------------------------------------------------------------------------------------------------- tables


def traffic_table(runs: Mapping[int, Sequence[Mapping[str, Any]]]) -> str:
    """Phase, purpose and way of all messages, for each number of ranks; how they grow, as a power of it."""
    rows: dict[tuple[str, ...], dict[int, list[float]]] = {}
    for ranks, parts in runs.items():
        for part in parts:
            for phase, purpose, way, *numbers in part["rows"]:
                sums = rows.setdefault((phase, purpose, way), {}).setdefault(ranks, [0.0, 0.0, 0.0])
                sums[:] = [a + b for a, b in zip(sums, numbers, strict=True)]
    heads = [f"{what}, {ranks} ranks" for ranks in runs for what in ("messages", "bytes", "seconds of rank 0")]
    lines = [f"| phase | purpose | by | {' | '.join(heads)} | grows as N to the |", "| --- " * (4 + len(heads)) + "|"]
    for kind, counts in sorted(rows.items()):
        cells = [cell for ranks in runs for cell in _cells(counts.get(ranks))]
        growth = "(time)" if kind[0] in TIMED else _growth({n: c[0] for n, c in counts.items()})
        lines.append(f"| {' | '.join([*kind, *cells, growth])} |")
    return "\n".join(lines)


def _cells(numbers: Sequence[float] | None) -> list[str]:
    messages, nbytes, seconds = numbers or (0, 0, 0)
    return [f"{messages:,.0f}", f"{nbytes:,.0f}", f"{seconds:.2f}"]


def _growth(messages: Mapping[int, float]) -> str:
    """The exponent from the smallest to the largest number of ranks."""
    few, many = min(messages), max(messages)
    if few == many or not messages[few] or not messages[many]:
        return ""
    return f"{math.log(messages[many] / messages[few]) / math.log(many / few):.2f}"


def cost_table(runs: Mapping[int, Sequence[Mapping[str, Any]]]) -> str:
    """What the process with all ranks took."""
    lines = ["| ranks | connections to the store | open files of all | MB for each rank | wall s |", "| --- " * 5 + "|"]
    for ranks, (part, _) in runs.items():
        memory = part["memory_mb"] / ranks
        lines.append(
            f"| {ranks} | {part['connections']:,} | {part['open_files']:,} | {memory:.1f} | {part['wall_s']:.0f} |"
        )
    return "\n".join(lines)


def store_table(meetings: Mapping[int, Sequence[Mapping[str, Any]]]) -> str:
    """How soon all ranks have started, know a failure, and know who hangs."""
    lines = [
        "| ranks | start, s | open files | a failure is known to all after, s | a hang, s after its limit | named |",
        "| --- " * 6 + "|",
    ]
    for ranks, (failed, hung) in meetings.items():
        who = hung["reason"].partition(" (")[0]
        lines.append(
            f"| {ranks} | {failed['start_s']} | {failed['open_files']:,} | {failed['known_s']} | {hung['known_s']} |"
            f" {who} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
