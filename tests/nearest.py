"""Which test files are about some files of the program: named like them, importing them, or importing who imports them.

For `scripts/test --changed`, and for the mistakes of tests/baseline.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

CONTRACT = "tests/strategies/test_contract.py"  # what many strategies share is its business
SHARED = ("trainer/strategies", "trainer/parallel", "trainer/data", "trainer/loop", "trainer/learning")
RUNNERS = ("tests.run", "tests.ranks", "tests.imported")  # they reach everything, and say nothing about a test


def nearest_tests(root: Path, changed: list[str]) -> list[str]:
    """All test files, the nearest first: (arrows to a changed file, named for what lies there or not, imports)."""
    files = {
        _module(path.relative_to(root)): path
        for folder in ("trainer", "recipes", "scripts", "tests")
        for path in sorted((root / folder).rglob("*.py"))
    }
    imports = {name: set() if name in RUNNERS else _imports(path, files) for name, path in files.items()}
    arrows = {_module(Path(file)): 0 for file in changed}
    for file in changed:  # a yaml is about what it names
        if file.endswith(".yaml") and (root / file).is_file():
            arrows |= dict.fromkeys(_named(root / file, files), 0)
    front = [*arrows]
    for distance in range(1, 6):
        front = [name for name in files if name not in arrows and any(each in imports[name] for each in front)]
        arrows |= dict.fromkeys(front, distance)
    ranked = []
    for name, path in files.items():
        if path.name.startswith("test_"):
            own = set(path.stem.removeprefix("test_").split("_"))
            named = [at for each, at in arrows.items() if own <= set(re.split("[._]", each)[1:])]
            direct = [arrows[each] for each in imports[name] if each in arrows]
            near = min([*((at, 0) for at in named), *((at, 1) for at in direct), (9, 1)])
            file = str(path.relative_to(root))
            if file == CONTRACT and any(one.startswith(SHARED) for one in changed):
                near = min(near, (0, 1))
            ranked.append((0, 0, 0, file) if file in changed else (*near, len(imports[name]), file))
    return [file for *_, file in sorted(ranked)]


def _module(path: Path) -> str:
    return str(path.with_suffix("")).replace("/", ".").removesuffix(".__init__")


def _imports(path: Path, files: dict[str, Path]) -> set[str]:
    """The modules that a file imports, also inside functions, and those that it names in a text."""
    found = _named(path, files)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)} & files.keys()
    return found - {"trainer"}


def _named(path: Path, files: dict[str, Path]) -> set[str]:
    """The modules whose names, or names of whose classes and functions, stand in a text."""
    dotted = set(re.findall(r"\b(?:trainer|recipes|scripts|tests)(?:\.\w+)+", path.read_text()))
    return (dotted | {name.rpartition(".")[0] for name in dotted}) & files.keys()
