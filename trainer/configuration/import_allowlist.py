"""Which Python a configuration may call. A yaml file is data: what it names is looked up here, and nowhere else."""

from __future__ import annotations

import re
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from trainer.configuration.value_types import shown
from trainer.refusal import Refusal, nearest

PACKAGES = ("trainer", "recipes", "torch", "torchvision", "timm", "transformers")


@dataclass(frozen=True)
class Names:
    """The packages and folders whose Python may be called."""

    trust: tuple[str, ...] = ()  # packages named on the command line
    folders: tuple[Path, ...] = ()  # of yaml files, given by --config-dir: Python that lies beside one may be called

    def find(self, name: Any, where: str) -> Callable[..., Any]:
        """The class or function of this name. Refusal where it may not be called or is not there; calls nothing."""
        if not isinstance(name, str) or not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", name):
            raise Refusal(f"{where}: {shown(name)} is not the name of a class or function, like lab.net.Net")
        if name.startswith("__main__."):
            own = name.rpartition(".")[2]
            raise Refusal(
                f"{where}: {name} is written in a notebook's cell or a script, where a configuration, and every process"
                f" that is started, finds nothing. Write it into a file (in a notebook: %%writefile mine.py) and use "
                f"mine.{own} with trust=[mine]; or give the object itself to a Trainer (docs/python.md)"
            )
        # By its name alone, before anything is imported: importing runs code.
        if not self._permits(name):
            raise Refusal(f"{where}: {name} may not be called from a configuration{self._remedy(name)}")
        if any(part.startswith("_") for part in name.split(".")):
            raise Refusal(f"{where}: {name} is private; name a public class or function")
        found = _walk(name, where)

        # A permitted module holds names of others that it imported (torch.os.system): where was this one written?
        if not callable(found):
            raise Refusal(f"{where}: {name} is a {type(found).__name__}, not a class or function")
        home = getattr(found, "__module__", None)
        if not isinstance(home, str) or not self._permits(home):
            raise Refusal(f"{where}: {name} is really {real_name(found)}, which may not be called from a configuration")
        return found

    def beside(self, target: Any) -> bool:
        """Was it written in a lab, beside a folder of yaml files?"""
        return self._beside(str(getattr(target, "__module__", "")))

    def trusted(self, target: Any) -> bool:
        """Does it come from a package that the command line names?"""
        return str(getattr(target, "__module__", "")).split(".")[0] in self.trust

    def _remedy(self, name: str) -> str:
        first = name.split(".")[0]
        # A lab is named like the folder that holds it, which is importable from the folder above.
        for lab in (folder.parent for folder in self.folders):
            if lab.name == first:
                return f": {first} is not importable here; start in {lab.parent}"
            if (lab / f"{first}.py").is_file():
                return f"; {first}.py lies in {lab}: write {lab.name}.{name}"
        return f"; names come from {', '.join(PACKAGES)}, from beside a --config-dir, or from trust=[{first}]"

    def _permits(self, name: str) -> bool:
        return name.split(".")[0] in (*PACKAGES, *self.trust) or self._beside(name)

    def _beside(self, name: str) -> bool:
        """Does the module of this name lie beside a folder of yaml files? Nothing is imported to find out."""
        place = _place(name)
        homes = [folder.resolve().parent for folder in self.folders]
        return place is not None and any(place.is_relative_to(home) for home in homes) and not _installed(place)


def real_name(found: Any) -> str:
    """Where it was written and what it is called there."""
    return f"{getattr(found, '__module__', None)}.{getattr(found, '__qualname__', type(found).__name__)}"


def _place(name: str) -> Path | None:
    """Where what has this dotted name would lie: its package's folder and the names below it; imports nothing."""
    first, *rest = name.split(".")
    try:
        spec = find_spec(first)
    except (ImportError, ValueError):
        return None
    # A class has no file of its own; that its name would lie below the lab's folder is all that is asked.
    if spec is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)), *rest).resolve()
    return Path(spec.origin).resolve() if spec is not None and spec.origin and spec.has_location else None


def _installed(place: Path) -> bool:
    """Does it belong to Python or to an installed package, although its folder contains the lab's?"""
    library = Path(sysconfig.get_path("stdlib")).resolve()
    return place.is_relative_to(library) or not {"site-packages", "dist-packages"}.isdisjoint(place.parts)


def _walk(name: str, where: str) -> Any:
    """Import the modules that the name begins with, then look into classes."""
    first, *parts = name.split(".")
    found, so_far = _import(first, name, where), first
    for part in parts:
        if hasattr(found, part):
            found = getattr(found, part)
        elif isinstance(found, ModuleType):
            found = _import(f"{so_far}.{part}", name, where)
        else:
            raise Refusal(f"{where}: {name}: {so_far} has no {part}{nearest(part, dir(found))}")
        so_far = f"{so_far}.{part}"
    return found


def _import(module: str, name: str, where: str) -> Any:
    try:
        return import_module(module)
    except Exception as error:
        # Is it this module that is missing, or something that it imports itself?
        missing = error.name if isinstance(error, ModuleNotFoundError) and error.name else "."
        if module != missing and not module.startswith(f"{missing}."):
            error.add_note(f"while importing {module}, which {where}={name} names")
            raise
    parent, _, last = module.rpartition(".")
    hint = nearest(last, dir(sys.modules[parent])) if parent in sys.modules else "; is it installed?"
    raise Refusal(f"{where}: {name}: there is no {module}{hint}")
