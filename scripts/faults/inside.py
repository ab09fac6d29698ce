"""Faults that strike inside a run, through its task: a loss that is NaN, a weight that drifts on one rank.

The run's own task is wrapped in a class that is written into a folder of the chaos (`write`). That class looks for a
file in every step, and takes it away when it strikes: so a fault strikes once, whoever goes on with the run.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

FOLDER = "CHAOS_INSIDE"  # in the environment: where the files are
PACKAGE = "chaos_lab"
TASK = f"{PACKAGE}.task.Struck"


class Strikes:
    """Mixed into a task: everything is the task's own, until a file says otherwise."""

    def loss(self, output: Any, target: Any) -> Any:
        """The task's own, or once NaN. On the ranks of a pipeline that have no loss nothing strikes."""
        import torch

        loss = super().loss(output, target)  # type: ignore[misc]
        if not torch.is_grad_enabled() or not _taken("nan"):
            return loss
        return (
            {name: part * float("nan") for name, part in loss.items()}
            if isinstance(loss, dict)
            else loss * float("nan")
        )

    def after_step(self, network: Any, step: int) -> None:
        """The task's own, and once another value in the first weight of rank 1."""
        super().after_step(network, step)  # type: ignore[misc]
        if os.environ.get("RANK") == "1" and _taken("drift"):
            weight = next(network.parameters()).detach()
            getattr(weight, "to_local", lambda: weight)().view(-1)[0] += 0.5


def _taken(what: str) -> bool:
    """Was the file there, and is it this process that took it away?"""
    try:
        os.unlink(f"{os.environ[FOLDER]}/{what}")
    except FileNotFoundError:
        return False
    return True


def write(folder: Path, target: str) -> None:
    """Write a package with the wrapped task into this folder, from where a run can import it."""
    package = folder / PACKAGE
    package.mkdir()
    (package / "__init__.py").touch()
    shutil.copyfile(__file__, package / "inside.py")  # not by its name here: the user may have `scripts`, too
    module, _, name = target.rpartition(".")
    lines = [f"from {module} import {name} as Own", f"from {PACKAGE}.inside import Strikes"]
    (package / "task.py").write_text("\n".join([*lines, "class Struck(Strikes, Own):", "    pass", ""]))
