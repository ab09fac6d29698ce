"""Classes of a test as options of a configuration, without a folder for each of them."""

from __future__ import annotations

import json
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer import Data, Task

GROUPS: dict[str, type] = {"data": Data, "task": Task, "optimizer": torch.optim.Optimizer, "model": nn.Module}


def options(folder: Path, *kinds: Any) -> list[str]:
    """The words with which a run knows these classes, each by its name in small letters, with its defaults as keys."""
    for kind in kinds:
        group = next(group for group, base in GROUPS.items() if issubclass(kind, base))
        keys = {name: one.default for name, one in signature(kind).parameters.items() if one.default != Parameter.empty}
        file = folder / "conf" / group / f"{kind.__name__.lower()}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        target = {"_target_": f"{kind.__module__}.{kind.__qualname__}"}
        file.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in (target | keys).items()))
    return ["--config-dir", str(folder / "conf"), "trust=[tests]"]
