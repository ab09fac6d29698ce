"""Draw docs/book.svg: bits per byte of `experiment=gpt_book` with several optimizers and networks, three seeds each.

    python scripts/book_curves.py              trains what is not in runs/book yet, about a minute a run on a GPU; draws
    python scripts/book_curves.py FOLDER       the same in another folder: FOLDER/adamw-0/metrics.jsonl and so on

Prints the table of docs/language.md, too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

from trainer.verify.loss_plot import DARK, LEFT, LIGHT, RIGHT, SHAPES, WIDTH, svg_text

CHECKOUT = Path(__file__).resolve().parent.parent
STEPS, EVERY, GOAL = 2400, 100, 2.3
SHARED = ["experiment=gpt_book", f"loop.steps={STEPS}", f"loop.eval_every={EVERY}", "loop.save_every=null"]
# as many products for a token as without experts: 3 × 115 numbers inside, for 344
EXPERTS = ["model=moe_nano", "model.dense_first=0", "model.groups=null", "model.expert_inner=115"]
RUNS = {
    "adamw": ["optimizer=adamw"],
    "experts": [*EXPERTS, "optimizer=adamw"],
    "muon": ["optimizer=muon"],
}
COLOURS = ("c1", "c3", "c2")  # of the style sheet
GREEN = {".c2": "stroke: #2f9e5b"}  # thin yellow could not be seen
SEEDS = (0, 1, 2)
TOP, BOTTOM, SPAN = 96, 420, (2.0, 3.6)  # pixels, and bits per byte from bottom to top


def main() -> None:
    """Train what is not there, draw, and print the table of the docs."""
    parser = argparse.ArgumentParser(description="AdamW, Muon and experts on the book: curves of three seeds.")
    parser.add_argument("folder", nargs="?", type=Path, default=CHECKOUT / "runs" / "book")
    parser.add_argument("--out", type=Path, default=CHECKOUT / "docs" / "book.svg")
    asked = parser.parse_args()
    curves = {name: [read(asked.folder, name, words, seed) for seed in SEEDS] for name, words in RUNS.items()}
    asked.out.write_text("\n".join(drawn(curves)) + "\n", encoding="utf-8")
    shown = (100, 400, 800, 1200, 1600, 2000, 2400)
    print(f"| | {' | '.join(str(step) for step in shown)} | {GOAL} is reached after |")
    for name, seeds in curves.items():
        numbers = [f"{mean(curve[step // EVERY - 1] for curve in seeds):.2f}" for step in shown]
        reached = [next((at for at, bits in enumerate(c, 1) if bits <= GOAL), None) for c in seeds]
        steps = ", ".join(f"{at * EVERY:,}" if at else "–" for at in reached)
        print(f"| {name} | {' | '.join(numbers)} | {steps} |")


def read(folder: Path, name: str, words: list[str], seed: int) -> list[float]:
    """Bits per byte at each evaluation of one run, which is trained unless it is there."""
    run = folder / f"{name}-{seed}"
    if not (run / "metrics.jsonl").exists():
        command = [sys.executable, "-m", "trainer", *SHARED, *words, f"seed={seed}", f"run.dir={run}"]
        subprocess.run(command, cwd=CHECKOUT, check=True)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    bits = [float(line["bits_per_byte"]) for line in lines if line["kind"] == "eval"]
    if len(bits) != STEPS // EVERY:
        sys.exit(f"{run} has {len(bits)} evaluations, of {STEPS // EVERY}: remove it, and it is trained again")
    return bits


def drawn(curves: dict[str, list[list[float]]]) -> Iterator[str]:
    """The lines of the SVG: axes, then a thin stroke for each seed."""
    schemes = [
        " ".join(f"{name} {{ {what} }}" for name, what in colours.items()) for colours in (LIGHT | GREEN, DARK | GREEN)
    ]
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {BOTTOM + 50}" width="{WIDTH}" role="img">'
    yield f"<title>Bits per byte: {', '.join(curves)}</title>"
    yield f"<style>\n{SHAPES}  {schemes[0]}\n  @media (prefers-color-scheme: dark) {{ {schemes[1]} }}\n</style>"
    yield f'<rect class="card" width="{WIDTH}" height="{BOTTOM + 50}" rx="8"/>'
    yield svg_text(LEFT, 30, "Bits per byte on the last tenth of the book; three seeds each", "title")
    yield svg_text(LEFT, 50, " ".join(["trainer", *SHARED]), "faint code")
    for number in range(round(SPAN[0] * 10), round(SPAN[1] * 10) + 1, 2):
        y = height(number / 10)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield svg_text(LEFT - 10, y + 4, f"{number / 10:.1f}", "faint", "end")
    for step in range(400, STEPS + 1, 400):
        yield svg_text(across(step), BOTTOM + 20, f"{step:,}", "faint", "middle")
    yield svg_text((LEFT + WIDTH - RIGHT) / 2, BOTTOM + 40, "optimizer step", "faint", "middle")
    for number, ((name, seeds), colour) in enumerate(zip(curves.items(), COLOURS, strict=True)):
        x = LEFT + 200 * number
        yield f'<polyline class="curve {colour}" stroke-width="3" points="{x},73 {x + 34},73"/>'
        yield svg_text(x + 44, 78, name)
        for curve in seeds:
            points = " ".join(f"{across(at * EVERY):.1f},{height(bits):.1f}" for at, bits in enumerate(curve, 1))
            yield f'<polyline class="curve {colour}" stroke-width="1.6" points="{points}"/>'
    yield "</svg>"


def across(step: int) -> float:
    """Where a step stands, in pixels from the left."""
    return LEFT + (WIDTH - LEFT - RIGHT) * step / STEPS


def height(bits: float) -> float:
    """Where a number of bits stands, in pixels from the top."""
    return BOTTOM - (BOTTOM - TOP) * (bits - SPAN[0]) / (SPAN[1] - SPAN[0])


if __name__ == "__main__":
    main()
