"""What `job=verify` says of planted mistakes, each found by commands as a user types them.

    python -m tests.planted                 their names
    python -m tests.planted lost_position   one of them, or several: rows of the table
    python -m tests.planted --all           the whole table, twenty minutes on two cores
    python -m tests.planted --all --write   and write it into docs/verify.md

A row by its name is one `python -m trainer processes=N job=verify strategy=…`. The mistake is in the processes that
are checked; the reference, a process of its own, has only what is wrong with the user's classes. The whole table is
made in processes that stay, because to start them takes longer than a proof.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from tests.planted import PLANTS, PRODUCT
from tests.planted.plant import ENVIRONMENT, EXACT, Plant, write_lab
from tests.planted.proofs import said_of
from tests.processes import Processes

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "verify.md"
BEGIN, END = "<!-- written by python -m tests.planted -->", "<!-- end of planted mistakes -->"
HEADER = (
    "| mistake | strategy | what is wrong | found at | gap | cause said | seconds |\n"
    "| --- | --- | --- | --- | --- | --- | --- |"
)


class Row(NamedTuple):
    """A row of the table."""

    name: str
    verdict: str  # the first line
    seconds: float

    @property
    def found(self) -> str:
        """Where the first difference is; "missed" where there is none."""
        where = re.match(r"DIFFERS (?:at )?(.*?)(?:, [\d.e+-]+)?; cause: ", self.verdict)
        rounded = re.match(
            r"DIFFERS (in its precision) alone.*; first at (.*?)(?:, [\d.e+-]+ \(.*?)?; cause: ", self.verdict
        )
        if found := rounded or where:
            return ": ".join(found.groups())
        return "**missed**" if self.verdict.startswith("SAME") else f"**{self.verdict}**"

    @property
    def gap(self) -> str:
        """How far apart it is there, relative to the norm; empty where something is missing or not finite."""
        said = re.search(r", (\d[\d.e+-]*)(?: \(noise floor .*?\))?; cause: ", self.verdict)
        return said[1] if said else ""

    @property
    def cause(self) -> str:
        """What is said of the cause: the first clause."""
        said = self.verdict.partition("; cause: ")[2]
        return re.split(r"(?<=.{20})[:;.] ", said, maxsplit=1)[0][:160]

    @property
    def is_false(self) -> bool:
        """Is a cause named that is none?"""
        return bool(self.cause) and not self.cause.startswith((*PLANTS[self.name].true, "not known"))

    def __str__(self) -> str:
        plant = PLANTS[self.name]
        own = " ".join([f"`{plant.strategy}`", *(f"`{word}`" for word in plant.own if "strategy=" not in word)])
        place = f"`{self.name}`", f"{own}, {plant.size}", plant.what, self.found, self.gap
        return f"| {' | '.join([*place, self.cause, f'{self.seconds:.0f}'])} |"


def command(plant: Plant) -> list[str]:
    """The words after `python -m`."""
    several = [f"processes={plant.size}"] if plant.size > 1 else []
    return ["trainer", *several, "job=verify", EXACT, *plant.words, *plant.own, "device=cpu", "log=[]"]


def row(name: str) -> Row:
    """Run one."""
    plant = PLANTS[name]
    with TemporaryDirectory() as place:
        write_lab(Path(place))
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        environment |= {ENVIRONMENT: name} if name in PRODUCT else {}
        began = time.monotonic()
        ended = subprocess.run(
            [sys.executable, "-m", *command(plant), "run.dir=run"],
            cwd=place,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        seconds = time.monotonic() - began
    said = re.search(r"^(SAME|DIFFERS).*", ended.stdout, re.MULTILINE)
    return Row(name, said[0] if said else (ended.stderr.strip().splitlines() or ["nothing was said"])[-1], seconds)


def rows_in_one_group(names: list[str]) -> Iterator[Row]:
    """The same of many, in processes that are started once; seconds are those of the proof, and its reference."""
    group = Processes()
    with TemporaryDirectory() as place:
        write_lab(Path(place))
        for name in names:
            began = time.monotonic()
            said = said_of(group, Path(place), name)
            yield Row(name, said.partition("\n")[0], time.monotonic() - began)
    group.close()


def table(rows: list[Row]) -> str:
    """The table in Markdown, and what it comes to."""
    missed = sum(row.found.startswith("**") for row in rows)
    false = [f"`{row.name}`" for row in rows if row.is_false]
    named = sum(bool(row.cause) and not row.cause.startswith("not known") for row in rows) - len(false)
    counted = f"{len(rows)} mistakes: {len(rows) - missed} found, {missed} missed; {named} causes named and true"
    sums = f"{counted}, {len(false)} false{': ' if false else ''}{', '.join(false)}."
    least = min((row for row in rows if row.gap), key=lambda row: float(row.gap))
    smallest = f"The smallest gap is {least.gap}, of `{least.name}`."
    return "\n".join([HEADER, *map(str, rows), "", f"{sums} {smallest}"])


def main() -> None:
    """Run what is asked for, and print the table."""
    parser = ArgumentParser(prog="python -m tests.planted", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="mistakes; without one their names are listed")
    parser.add_argument("--all", action="store_true", help="all of them")
    parser.add_argument(
        "--write", action="store_true", help=f"with --all: write the table into {PAGE.relative_to(ROOT)}"
    )
    asked = parser.parse_args()
    if unknown := set(asked.names) - PLANTS.keys():
        parser.error(f"no such mistake: {', '.join(sorted(unknown))}")
    if asked.write and not asked.all:
        parser.error("--write writes the whole table: --all --write")
    names = [*PLANTS] if asked.all else asked.names
    if not names:
        for name, plant in PLANTS.items():
            print(f"{name:26}{plant.strategy:10}{plant.what}")
        return
    rows = []
    for each in rows_in_one_group(names) if asked.all else map(row, names):
        rows.append(each)
        print(each, file=sys.stderr if asked.all else sys.stdout, flush=True)
    if asked.all:
        print(table(rows))
    if asked.write:
        page = PAGE.read_text()
        begin, end = page.index(BEGIN) + len(BEGIN), page.index(END)
        PAGE.write_text(f"{page[:begin]}\n\n{table(rows)}\n\n{page[end:]}")


if __name__ == "__main__":
    main()
