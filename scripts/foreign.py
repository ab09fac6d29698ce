"""Code that was not written for this program, under its strategies: the table in docs/foreign.md.

    python scripts/foreign.py                     every case under every strategy, most of half an hour on two cores
    python scripts/foreign.py bert experts        two of them
    python scripts/foreign.py --write             and write the table into the page

Every cell is one `python -m trainer` as a user types it, on tests/foreign. `single` ends with a loss. `ddp`, `fsdp` and
`pp` on two processes are compared with it, step by step; `pp` with one process of two micro-batches. `verify` is the
first line of `job=verify strategy=fsdp`. What differs in fp32 is compared in fp64, too.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from argparse import ArgumentParser
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "foreign.md"
BEGIN, END = "<!-- written by scripts/foreign.py -->", "<!-- end -->"
STEPS = 8
SAME = 1e-5  # relative: in eight steps fp32 rounds by 2.5e-6 at most; masks that differ make 9e-5
SAME_EXACTLY = 1e-9  # the same in fp64

# what each is, and the words that are needed beside experiment=NAME
CASES = {
    "vae": "variational autoencoder",
    "dcgan": "DCGAN",
    "retinanet": "detection: RetinaNet of torchvision",
    "ddpm": "diffusion: a U-Net, with EMA",
    "clip": "CLIP, with `gather`",
    "bert": "BERT of transformers, padded batches",
    "t5": "T5 of transformers, shared embedding",
    "swin": "Swin of torchvision",
    "tabular": "tabular: embeddings, BatchNorm",
    "multitask": "two tasks, learned weights of the losses",
    "graph": "graph network, one graph a batch",
    "experts": "mixture of experts",
    "lightning_module": "a LightningModule",
    "vqvae": "VQ-VAE, codebook of moving averages",
    "fno": "Fourier neural operator, complex weights",
    "speech": "speech: packed sequences, CTC",
    "bag": "EmbeddingBag, sparse gradients",
    "mae": "masked autoencoder of transformers",
}
SINGLE: list[str] = []
COLUMNS = {
    "single": SINGLE,
    "ddp": ["processes=2", "strategy=ddp", "strategy.sync_bn=true"],
    "fsdp": ["processes=2", "strategy=fsdp", "strategy.sync_bn=true"],
    "pp": ["processes=2", "strategy=pp", "loop.micro_batches=2"],
    "verify": ["processes=2", "job=verify", "strategy=fsdp", "strategy.sync_bn=true"],
}
# where fp32 differs: rounding that falls on the other side of a ReLU's corner changes far more than it rounds
EXACT = ("precision=fp64",)
BRIEF = ["log=[console]", "precision=fp32", f"loop.steps={STEPS}", "loop.log_every=1", "loader.workers=0"]


def command(case: str, column: str, *words: str) -> list[str]:
    """The words after `python -m`."""
    return ["trainer", "--config-dir", "foreign/conf", f"experiment={case}", *COLUMNS[column], *BRIEF, *words]


def cell(case: str, column: str) -> str:
    """What stands in one cell: how the command ended."""
    with TemporaryDirectory() as place:
        folder = Path(place) / "run"
        ended = run(command(case, column), folder)
        if verdict := re.search(r"^(SAME|DIFFERS).*", ended.stdout, re.MULTILINE):
            return verdict[0]
        if ended.returncode == 2:
            return f"refused: {' '.join(ended.stderr.split())}"
        if ended.returncode:
            return f"**fails**: {' '.join(ended.stderr.split())[-300:]}"
        losses = read_losses(folder)
    if column == "single":
        return f"loss {losses[-1]:.4f}"
    divided = tuple(word for word in COLUMNS[column] if word.startswith("loop."))
    gap = apart(losses, curve(case, "single", divided))
    if gap < SAME:
        return f"same, {gap:.0e}"
    exact = apart(curve(case, column, EXACT), curve(case, "single", (*divided, *EXACT)))
    return f"same in fp64, {exact:.0e}" if exact < SAME_EXACTLY else f"**differs**, {gap:.0e}"


@cache
def curve(case: str, column: str, words: tuple[str, ...]) -> list[float]:
    """The losses of a case; in one process with as many micro-batches: of BatchNorm and `gather` these are a part."""
    with TemporaryDirectory() as place:
        folder = Path(place) / "run"
        run(command(case, column, *words), folder).check_returncode()
        return read_losses(folder)


def apart(losses: list[float], others: list[float]) -> float:
    """The largest relative difference of two curves."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, others, strict=True))


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, in tests/."""
    words = [sys.executable, "-m", *command, f"run.dir={folder}"]
    return subprocess.run(words, cwd=ROOT / "tests", capture_output=True, text=True, stdin=subprocess.DEVNULL)


def read_losses(folder: Path) -> list[float]:
    """The loss of each step."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "train"]


def table(cells: dict[tuple[str, str], str]) -> str:
    """The table in Markdown; what is longer than a cell stands below it, by number."""
    notes: list[str] = []

    def short(text: str) -> str:
        if len(text) <= 40:
            return text
        if text not in notes:
            notes.append(text)
        return f"{text.partition(':')[0]} [{notes.index(text) + 1}]"

    cases = sorted({case for case, _ in cells}, key=list(CASES).index)
    rows = [f"| case | {' | '.join(COLUMNS)} |", f"| {' | '.join(['---'] * (len(COLUMNS) + 1))} |"]
    for case in cases:
        texts = [short(cells[case, column]) for column in COLUMNS]
        rows.append(f"| `{case}`: {CASES[case]} | {' | '.join(texts)} |")
    return "\n".join([*rows, "", *(f"[{number}] {text}\n" for number, text in enumerate(notes, 1))])


def main() -> None:
    """Run the cells, print the table, and write it where that is asked for."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"all, or some of {', '.join(CASES)}")
    parser.add_argument("--write", action="store_true", help=f"write all rows into {PAGE.relative_to(ROOT)}")
    asked = parser.parse_args()
    if unknown := set(asked.cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    if asked.write and asked.cases:
        parser.error("--write writes the whole table: name no case")
    cells = {}
    for case in asked.cases or CASES:
        for column in COLUMNS:
            cells[case, column] = cell(case, column)
            print(f"{case:18}{column:8}{cells[case, column]}", file=sys.stderr, flush=True)
    print(table(cells))
    if asked.write:
        page = PAGE.read_text()
        begin, end = page.index(BEGIN) + len(BEGIN), page.index(END)
        PAGE.write_text(f"{page[:begin]}\n\n{table(cells)}\n{page[end:]}")


if __name__ == "__main__":
    main()
