"""Draw docs/curves.svg: one configuration under four strategies, and how far their losses are apart.

    python scripts/curves.py                    trains single, ddp, tp and ddp_tp in a temporary folder, then draws
    python scripts/curves.py RUN_FOLDER ...     draws runs that are there; the others are compared with the first

The runs must have been logged at every step (loop.log_every=1). Nothing but the standard library is needed to draw.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

CHECKOUT = Path(__file__).resolve().parent.parent
WORDS = ["model=vit_tiny", "model.dropout=0.1", "loop.epochs=4", "loop.log_every=1", "checkpoint.keep=1"]
RUNS = {"single": 1, "ddp": 2, "tp": 2, "ddp_tp": 4}  # strategy → processes

WIDTH, LEFT, RIGHT = 880, 72, 24  # pixels; the margins hold the numbers of the axes
UPPER, LOWER = (118, 358), (428, 538)  # top and bottom of the two panels
BOTTOM = 588
STROKES = [("c0", 10, ""), ("c1", 6, ""), ("c2", 3, ""), ("c3", 1.4, "5 4")]  # each lies on the one before
LIGHT = {
    ".card": "fill: #ffffff",
    "text, .dot": "fill: #1c2430",
    "text.faint": "fill: #5b6675",
    ".grid": "stroke: #e3e7ec",
    ".c0": "stroke: #b9c3d0",
    ".c1": "stroke: #4f9bea",
    ".c2": "stroke: #ffd23f",
    ".c3": "stroke: #b3123f",
}
DARK = LIGHT | {
    ".card": "fill: #12171e",
    "text, .dot": "fill: #e8edf3",
    "text.faint": "fill: #9aa7b6",
    ".grid": "stroke: #2a323d",
    ".c0": "stroke: #566376",
    ".c3": "stroke: #e0447a",
}
SHAPES = """  text { font-family: system-ui, sans-serif; font-size: 13px }
  text.title { font-size: 16px; font-weight: 600 }
  text.code { font-family: monospace; font-size: 12px }
  .curve { fill: none; stroke-linecap: round; stroke-linejoin: round }
"""


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
    asked.out.write_text(picture(runs, steps), encoding="utf-8")
    apart = [largest_difference(runs, step) for step in steps]
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


def common_steps(runs: list[Run]) -> list[int]:
    """The steps that all runs have logged. Ends the program where they are none, or not about the same samples."""
    steps = sorted(set.intersection(*(set(run.losses) for run in runs)))
    if len(steps) < 2:
        sys.exit("these runs share no steps; log every one of them: loop.log_every=1")
    for step in steps:
        if len({run.digests[step] for run in runs}) > 1:
            sys.exit(f"these runs saw different samples in step {step}: they are not of one configuration")
    return steps


def largest_difference(runs: list[Run], step: int) -> float:
    """How far the losses of this step are from the first run's, at most."""
    return max(abs(run.losses[step] - runs[0].losses[step]) for run in runs)


# ----------------------------------------------------------------------------------------------------------------------


def picture(runs: list[Run], steps: list[int]) -> str:
    """The whole drawing, as SVG that follows the reader's light or dark scheme."""
    shared = [word for word in runs[0].words if all(word in run.words for run in runs)]
    schemes = [" ".join(f"{name} {{ {what} }}" for name, what in colours.items()) for colours in (LIGHT, DARK)]
    style = f"{SHAPES}  {schemes[0]}\n  @media (prefers-color-scheme: dark) {{ {schemes[1]} }}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {BOTTOM}" width="{WIDTH}" role="img">',
        f"<title>Training loss under {', '.join(run.strategy for run in runs)}</title><style>\n{style}\n</style>",
        f'<rect class="card" width="{WIDTH}" height="{BOTTOM}" rx="8"/>',
        text(LEFT, 30, "Training loss at every step: one configuration, several strategies", "title"),
        text(LEFT, 50, "trainer " + " ".join(shared), "faint code"),
        *legend(runs),
        *loss_panel(runs, steps),
        *difference_panel(runs, steps),
        text((LEFT + WIDTH - RIGHT) / 2, BOTTOM - 10, "optimizer step", "faint", "middle"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def legend(runs: list[Run]) -> list[str]:
    """A sample of each stroke with its strategy and processes."""
    parts, x = [], float(LEFT)
    for run, (colour, width, dash) in zip(runs, STROKES, strict=False):
        words = f"{run.strategy}, {run.processes} process{'es' * (run.processes > 1)}"
        parts.append(curve([(x, 73), (x + 34, 73)], colour, width, dash))
        parts.append(text(x + 44, 78, words))
        x += 200
    return parts


def loss_panel(runs: list[Run], steps: list[int]) -> list[str]:
    """The curves on each other."""
    top = max(loss for run in runs for loss in run.losses.values())
    ticks = [0.5 * number for number in range(math.ceil(top / 0.5) + 1)]
    parts = axis([(tick, f"{tick:.1f}") for tick in ticks], UPPER, "loss")
    for run, (colour, width, dash) in zip(runs, STROKES, strict=False):
        points = [(across(step, steps), height(run.losses[step], (0, ticks[-1]), UPPER)) for step in steps]
        parts.append(curve(points, colour, width, dash))
    return parts


def difference_panel(runs: list[Run], steps: list[int]) -> list[str]:
    """The largest difference to the first run at each step, on a logarithmic axis; none at all is the lowest line."""
    apart = [largest_difference(runs, step) for step in steps]
    powers = [math.log10(value) for value in apart if value] or [0.0]
    low, high = math.floor(min(powers)) - 1, math.ceil(max(powers))
    parts = axis([(low, "0"), *((power, f"1e{power}") for power in range(low + 1, high + 1))], LOWER, "")
    parts.append(text(LEFT, LOWER[0] - 14, f"largest difference to {runs[0].strategy}", "faint"))
    for step, value in zip(steps, apart, strict=True):
        y = height(math.log10(value) if value else low, (low, high), LOWER)
        parts.append(f'<circle class="dot" cx="{across(step, steps):.1f}" cy="{y:.1f}" r="2.6"/>')
    ticks = [step for step in steps if step % max(1, round(len(steps) / 40) * 4) == 0]
    return parts + [text(across(step, steps), LOWER[1] + 20, str(step), "faint", "middle") for step in ticks]


def axis(ticks: list[tuple[float, str]], panel: tuple[int, int], name: str) -> list[str]:
    """Horizontal lines with their numbers, the lowest tick at the panel's bottom and the highest at its top."""
    parts = [text(LEFT, panel[0] - 4, name, "faint")] if name else []
    for value, words in ticks:
        y = height(value, (ticks[0][0], ticks[-1][0]), panel)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(text(LEFT - 10, y + 4, words, "faint", "end"))
    return parts


def across(step: int, steps: list[int]) -> float:
    """Where a step stands, in pixels from the left."""
    return LEFT + (WIDTH - LEFT - RIGHT) * (step - steps[0]) / (steps[-1] - steps[0])


def height(value: float, span: tuple[float, float], panel: tuple[int, int]) -> float:
    """Where a value stands, in pixels from the top."""
    return panel[1] - (panel[1] - panel[0]) * (value - span[0]) / max(span[1] - span[0], 1e-12)


def curve(points: list[tuple[float, float]], colour: str, width: float, dash: str) -> str:
    """One stroke through all points."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<polyline class="curve {colour}" stroke-width="{width}"{dashes} points="{path}"/>'


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """Words at a place."""
    safe = words.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{safe}</text>'


if __name__ == "__main__":
    main()
