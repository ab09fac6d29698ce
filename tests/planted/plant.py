"""What a planted mistake is: words of a run, perhaps another function in the program, and what is true of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

Change = Callable[[Any], Any]  # what stands in the program → what stands there instead

ENVIRONMENT = "TRAINER_PLANT"  # the name of what is planted, for processes of their own
STRATEGY = ("the strategy",)  # how a true cause begins, of every mistake of the program itself

_RUN = ("--config-dir", "conf", "trust=[tests]", "loader.workers=0")
_DECODER = ("model=gpt_nano", "model.width=32", "model.depth=2", "data=synthetic_tokens", "data.length=16")
# networks that are small, and right everywhere
NET = (*_RUN, "model=net", "data=numbers", "task=classes", "loop.global_batch=24")
VIT = (
    *_RUN,
    "model=vit_tiny",
    "model.width=24",
    "model.heads=4",
    "model.depth=2",
    "task=classes",
    "data=digits",
    "loop.global_batch=24",
)
GPT = (*_RUN, *_DECODER, "data.size=64", "data.evaluation_size=16", "task=tokens", "loop.global_batch=8")
_MOE = ("model=moe_nano", "model.width=32", "model.depth=2", "model.experts=4", "model.dense_first=0")
MOE = (*_RUN, *_MOE, *_DECODER[3:], *GPT[len(_RUN) + len(_DECODER) :])
EXACT = "precision=fp64"  # a proof has no second half then, in another precision, where most finds nothing new
DROPOUT = "model.dropout=0.1"

# group → option → class, as the yaml files of a lab name them
_LAB = {
    "data": {
        "numbers": "users.Numbers",
        "counted": "users.Counted",
        "scaled": "users.Scaled",
        "listed": "users.Listed",
        "in_dict": "users.InDict",
        "read": "users.Read",
        "triples": "users.Triples",
        "recalling": "users.Recalling",
        "drawn": "users.Drawn",
        "padded": "users.Padded",
        "same_order": "users.SameOrder",
        "odd": "users.Odd",
        "global_order": "hearing.GlobalOrder",
    },
    "task": {
        "classes": "users.Classes",
        "summed": "users.Summed",
        "mixed_by_task": "hearing.MixedByTask",
        "meaned": "users.Meaned",
        "class_weights": "users.ClassWeights",
        "negatives": "users.Negatives",
        "own_meter": "users.OwnMeter",
        "own_decay": "users.OwnDecay",
        "of_dicts": "users.OfDicts",
        "counts": "users.Counts",
        "last_decay": "users.LastDecay",
        "late_metric": "users.LateMetric",
        "weighted": "users.Weighted",
        "contrast": "users.Contrast",
        "ranked": "users.Ranked",
        "tokens": "users.Tokens",
    },
    "schedule": {"remembering": "users.Remembering", "hearing": "hearing.Hearing", "even": "users.Even"},
    "optimizer": {
        "scaled_rate": "users.ScaledRate\nlr: 0.1",
        "by_shard": "hearing.ByShard\nlr: 0.1",
    },
    "model": {
        "net": "networks.net",
        "of_rows": "users.OfRows",
        "of_nodes": "users.OfNodes",
        "of_padded": "users.OfPadded",
    },
}


@dataclass(frozen=True)
class Plant:
    """A mistake, where `job=verify` must find it, and what a true cause says."""

    what: str  # in words
    words: tuple[str, ...]  # of the run and of its reference
    own: tuple[str, ...]  # of the run alone: strategy, micro-batches, recomputing
    found: tuple[str, ...]  # a verdict begins with `DIFFERS` and one of these
    true: tuple[str, ...]  # a true cause begins with one of these; "not known" is never false
    changes: Mapping[str, Change] = field(default_factory=dict)  # name in the program → what it becomes
    size: int = 2  # processes
    why: str = ""  # what the cause says; empty: that is left open

    @property
    def strategy(self) -> str:
        """The word that chose it."""
        return next(word.removeprefix("strategy=") for word in self.own if word.startswith("strategy="))


@contextmanager
def planted(plant: Plant) -> Iterator[None]:
    """Inside, the program has this mistake."""
    with ExitStack() as stack:
        for name, change in plant.changes.items():
            stack.enter_context(patch(name, change(resolve_name(name))))
        yield


def wanted() -> str:
    """What this process is to have planted: nothing where it makes the reference."""
    makes_reference = any(word.startswith("job.record=") for word in sys.argv)
    return "" if makes_reference else os.environ.get(ENVIRONMENT, "")


def write_lab(place: Path) -> None:
    """Write the yaml files that name the classes of this package to the folder `place`/conf."""
    for group, options in _LAB.items():
        folder = place / "conf" / group
        folder.mkdir(parents=True)
        for option, target in options.items():
            (folder / f"{option}.yaml").write_text(f"_target_: tests.planted.{target}\n")
