"""Proofs in processes that stay: what `job=verify` says of a planted mistake, for a second or some."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.inside import product
from tests.planted import PLANTS
from tests.planted.plant import EXACT, planted
from tests.processes import Processes
from trainer.launch.rendezvous import Launch
from trainer.messages import FatalRunError, Refusal


def verified(launch: Launch, place: Path, words: list[str]) -> tuple[Any, str]:
    """The exit code of `job=verify` with these words, or the refusal; and what it says."""
    with redirect_stdout(io.StringIO()) as said:
        try:
            code: Any = product(launch, place, ["job=verify", *words])
        except (Refusal, FatalRunError) as ended:
            return str(ended), ""
    return code, said.getvalue()


def verdict(processes: Processes, place: Path, size: int, words: list[str], own: list[str], how: Any = verified) -> str:
    """What the ranks say of these words with their own ones (strategy, micro-batches), after the reference was made."""
    file = place / f"{abs(hash(tuple(words)))}.safetensors"
    if not file.exists():  # without a process of its own: that would cost its imports each time
        assert processes.run(1, verified, place, [*words, f"run.dir={file}.run", f"job.record={file}"]) == [(0, "")]
    run = f"run.dir={place / f'{file.stem}-run'}"
    (code, said), *others = processes.run(size, how, place, [*words, *own, run, f"job.reference={file}"])
    assert others == [(code, "")] * (size - 1)  # one rank speaks
    assert code == (0 if said.startswith(("SAME", "OWN CURVE")) else 1), code
    out = place / f"{file.stem}-run/verify"
    assert json.loads((out / "verify.json").read_text())["same"] == said.startswith("SAME")
    ElementTree.parse(out / "curves.svg")
    assert not (place / f"{file.stem}-run/verify/trial").exists()
    return said


def with_mistake(launch: Launch, place: Path, words: list[str], name: str) -> tuple[Any, str]:
    """The same where the program has this mistake."""
    with planted(PLANTS[name]):
        return verified(launch, place, words)


def said_of(processes: Processes, place: Path, name: str) -> str:
    """The verdict on a planted mistake."""
    plant = PLANTS[name]
    return verdict(processes, place, plant.size, [EXACT, *plant.words], [*plant.own], partial(with_mistake, name=name))
