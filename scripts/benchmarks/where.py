"""Where the microseconds of a tiny step go, and the seconds of a start: `scripts/bench --where`.

A profiler sees each call, and makes Python look slower than it is; kernels it leaves as they are. So read shares.
"""

from __future__ import annotations

import pstats
import re
import subprocess
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
_IMPORT = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s+([\w.]+)")
# what a package counts as; others stand for themselves
_GROUPS = {"omegaconf": "hydra", "antlr4": "hydra", "yaml": "hydra", "recipes": "trainer", "torchgen": "torch"}
_GROUPS |= {"functorch": "torch", "sympy": "torch (sympy)", "mpmath": "torch (sympy)", "scripts": "the lab"}


def step_parts(profile: Path, steps: int) -> dict[str, float]:
    """Microseconds of a step by the file that spends them; what is compiled counts for the file that calls it."""
    spent: Counter[str] = Counter()
    numbers: dict[Any, Any] = vars(pstats.Stats(str(profile)))["stats"]
    for (file, _, _), (_, _, seconds, _, callers) in numbers.items():
        if file != "~":
            spent[_part(file)] += seconds
            continue
        for (caller, _, _), (_, _, of_caller, _) in callers.items():
            spent[_part(caller)] += of_caller
    return {part: 1e6 * seconds / steps for part, seconds in spent.most_common() if seconds * 1e6 > steps / 2}


def _part(file: str) -> str:
    path = Path(file)
    if path.is_relative_to(CHECKOUT / "trainer"):
        return "/".join(path.relative_to(CHECKOUT).parts[:2])
    if path.is_relative_to(CHECKOUT / "scripts"):
        return "the lab, with its clock"
    for part in ("torch/nn", "torch/optim", "torch/autograd", "tensorboard"):
        if f"/{part}/" in file or file.endswith(f"/{part}.py"):
            return part
    return "torch, the rest" if "/torch/" in file else "Python and others"


def start_parts(command: list[str], **how: Any) -> dict[str, float]:
    """Milliseconds of imports by package, of a command that ends after its first step."""
    ended = subprocess.run([command[0], "-X", "importtime", *command[1:]], **how, check=True)
    spent: Counter[str] = Counter()
    for line in ended.stderr.splitlines():
        if found := _IMPORT.match(line):
            package = found[2].split(".")[0]
            spent[_GROUPS.get(package, package)] += int(found[1])
    most = {package: microseconds / 1000 for package, microseconds in spent.most_common(6)}
    return most | {"all others": sum(spent.values()) / 1000 - sum(most.values())}


def table(title: str, unit: str, parts: dict[str, float]) -> str:
    """A table in Markdown, the largest part first."""
    whole = sum(parts.values())
    rows = [f"| {name} | {value:,.0f} | {100 * value / whole:.0f} % |" for name, value in parts.items()]
    return "\n".join([f"| {title} | {unit} | of all |", "| --- | --- | --- |", *rows])


def where(run: Any, work: Any, quick: Any) -> str:
    """Both tables. run: a program over some work, with more of an environment; quick: work of a few steps."""
    with TemporaryDirectory(prefix="where-") as folder:
        profile = Path(folder) / "step"
        run("ours", work, {"BENCH_PROFILE": str(profile)})
        parts = step_parts(profile, work.steps - 2 * work.young)
    starting = run("ours", quick, {}, start_parts)
    return f"{table('a step of `overhead`, profiled', 'µs', parts)}\n\n{table('imports of a start', 'ms', starting)}"
