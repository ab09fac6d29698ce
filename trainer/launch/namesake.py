"""Something else called `trainer`: a file, or another distribution, that Python would find instead of this program."""

from __future__ import annotations

import os
from importlib.machinery import PathFinder
from pathlib import Path

import trainer
from trainer.messages import Refusal

PACKAGE_FOLDER = Path(__file__).resolve().parent.parent  # the folder of this program's package


def refuse_overwritten() -> None:
    """Refuse where another distribution has written its files over this program's, or taken them away again."""
    if hasattr(trainer, "_HOMES"):
        return
    from importlib.metadata import packages_distributions, version  # looks at all that is installed

    names = ", ".join(f"{name} {version(name)}" for name in packages_distributions().get("trainer", []))
    raise Refusal(
        f"{PACKAGE_FOLDER} holds another program's __init__.py, or none. Installed there: {names or 'not known'}. Do:"
        " pip uninstall trainer one-curve-trainer, then install one-curve-trainer into an environment of its own"
    )


def refuse_namesake() -> None:
    """Refuse to start `python -m trainer` in the present folder, where something else of that name is found first."""
    folder = os.getcwd()
    spec = PathFinder.find_spec("trainer", [folder])
    if spec and spec.origin and Path(spec.origin).resolve().parent != PACKAGE_FOLDER:
        raise Refusal(
            f"{spec.origin} is not this program, and processes that start in {folder} find it first, because it is"
            " called trainer too; rename it, or start in another folder"
        )
