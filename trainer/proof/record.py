"""What a training of a few steps leaves to be compared: signatures, in the order of time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from trainer.proof.layout import Layout

# The phases of a step, in the order of time.
INITIAL, DATA, FORWARD, LOSS, GRADIENT = "initial values", "data", "forward", "loss", "gradient"
NORM, RATE, CLIPPED, STEP = "norm", "learning rate", "clipped gradient", "optimizer step"
UPDATE, RESUME, EVALUATION = "update", "resume", "evaluation"


class Key(NamedTuple):
    """What a signature is of."""

    step: int  # from 1 on; 0: before the first
    phase: str
    name: str  # of a module, a parameter, a part of the loss
    call: int = 0  # of a module in one forward


@dataclass
class Record:
    """Signatures by what they are of; the keys stand in the order of time."""

    values: dict[Key, list[tuple[Sequence[int], Tensor]]] = field(default_factory=dict)  # rows, and their (n, 3)
    layouts: dict[tuple[str, str, int], Layout] = field(default_factory=dict)  # phase, name, call → where samples lie
    facts: dict[str, Any] = field(default_factory=dict)  # what it is a record of

    def add(self, key: Key, rows: Sequence[int], signatures: Tensor) -> None:
        """Keep the signatures of these rows: samples of the global batch, or 0 of what is one thing."""
        self.values.setdefault(key, []).append((rows, signatures))

    def table(self, key: Key, least: int = 0) -> Tensor:
        """(rows, 3): the signatures of all rows of a key, so many at least; zeros where one has no such thing."""
        rows = torch.tensor([row for part, _ in self.values[key] for row in part])
        table = torch.zeros(max(least, 1 + int(rows.max())), 3, dtype=torch.float64)
        table[rows] = torch.cat([signatures for _, signatures in self.values[key]])
        return table

    def write(self, path: Path) -> None:
        """Write a whole record to a file of safetensors."""
        tables = {str(at): self.table(key) for at, key in enumerate(self.values)}
        layouts = [[*key, *layout] for key, layout in self.layouts.items()]
        told = {"keys": [*self.values], "layouts": layouts, "facts": self.facts}
        path.unlink(missing_ok=True)  # it may be a link
        save_file(tables, path, {name: json.dumps(value) for name, value in told.items()})

    @classmethod
    def read(cls, path: Path) -> Record:
        """What `write` has written."""
        with safe_open(path, "pt") as file:
            told = {name: json.loads(text) for name, text in (file.metadata() or {}).items()}
            keys = [Key(*key) for key in told["keys"]]
            tables = [file.get_tensor(str(at)) for at in range(len(keys))]
        values: dict[Key, list[tuple[Sequence[int], Tensor]]]
        values = {key: [(range(len(table)), table)] for key, table in zip(keys, tables, strict=True)}
        layouts = {(phase, name, call): Layout(*rest) for phase, name, call, *rest in told["layouts"]}
        return cls(values, layouts, told["facts"])
