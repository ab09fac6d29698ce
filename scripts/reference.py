"""Write docs/reference.md: every name that a lab imports from `trainer`, with its signature and its docstring.

    python scripts/reference.py            writes the page anew
    python scripts/reference.py --check    writes nothing; ends with 1 if the page is not what the code says

The names are those of trainer/__init__.py, those that the programs in PAGES import, and GIVEN, which a lab gets as
arguments. Files are parsed and not imported, so the page is the same with every version of Python and torch.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
PAGE = CHECKOUT / "docs" / "reference.md"
PAGES = ("extending.md", "own-strategy.md", "python.md")
GIVEN = (
    "trainer.data.rng.Random",
    "trainer.launch.rendezvous.Launch",
    "trainer.parallel.ranks.Ranks",
    "trainer.records.checkpoint.manifest.Manifest",
)
IMPORTED = re.compile(r"^from (trainer(?:\.\w+)+) import ([\w, ]+)$", re.MULTILINE)

HEAD = """# Reference: the names that a lab imports

This page is for people who write their own network, data, task, strategy or logger, and want to look up one name. How
they are used together is in [extending.md](extending.md), [own-strategy.md](own-strategy.md) and
[python.md](python.md).

`python scripts/reference.py` writes this page from the docstrings and signatures of the code; a test compares the two.
*Collective* in front of a description means: every rank must call it, in the same order.
"""


@dataclass(frozen=True)
class Name:
    """A class or function: where it is defined, and from where a lab imports it."""

    module: str  # trainer.data.data
    name: str
    importable: str  # the module that a lab writes behind `from`

    @property
    def node(self) -> ast.ClassDef | ast.FunctionDef:
        """Its definition."""
        node = defined(self.module).get(self.name)
        if node is None:
            sys.exit(f"{self.module} defines no class or function {self.name}; scripts/reference.py asks for it")
        return node


def main() -> None:
    """Write, or compare; the exit code says whether page and code agree."""
    parser = argparse.ArgumentParser(description="Write docs/reference.md from the code.")
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 if the page is out of date")
    asked = parser.parse_args()
    text = page()
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text:
        print("docs/reference.md is what the code says")
    elif asked.check:
        sys.exit("docs/reference.md is not what the code says; python scripts/reference.py writes it anew")
    else:
        PAGE.write_text(text, encoding="utf-8")
        print("docs/reference.md written anew")


def page() -> str:
    """The whole page: a table of all names, then each of them."""
    public, inner, given = from_trainer(), from_pages(), [_named(name) for name in GIVEN]
    parts = [HEAD]
    for title, names in (
        ("`from trainer import …`", public),
        ("From modules of `trainer`", inner),
        ("Not imported: what your methods get", given),
    ):
        rows = [f"| [`{name.name}`](#{anchor(name.name)}) | {first_sentence(name.node)} |" for name in names]
        parts.append("\n".join([f"| {title} | |", "| --- | --- |", *rows, ""]))
    all_names = [*public, *inner, *given]
    listed = {(name.module, name.name) for name in all_names}
    parts += [described(name, listed, imported=name not in given) for name in all_names]
    return "\n".join(parts)


def from_trainer() -> list[Name]:
    """The names that trainer/__init__.py offers, classes first."""
    homes: dict[str, str] = {}
    for node in parsed("trainer").body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOMES":
            homes = ast.literal_eval(node.value)
    names = [Name(home, name, "trainer") for name, home in sorted(homes.items())]
    if not names:
        sys.exit("trainer/__init__.py has no table _HOMES of its public names; scripts/reference.py reads it")
    return names


def from_pages() -> list[Name]:
    """The names that programs in the pages import from deeper modules."""
    found: dict[tuple[str, str], Name] = {}
    for file in PAGES:
        for module, names in IMPORTED.findall((CHECKOUT / "docs" / file).read_text(encoding="utf-8")):
            for name in names.split(","):
                found[module, name.strip()] = Name(module, name.strip(), module)
    return [found[key] for key in sorted(found)]


def _named(dotted: str) -> Name:
    module, _, name = dotted.rpartition(".")
    return Name(module, name, module)


@cache
def source(module: str) -> str:
    """The text of a module of the checkout."""
    path = CHECKOUT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        sys.exit(f"there is no module {module}; scripts/reference.py asks for it")
    return file.read_text(encoding="utf-8")


@cache
def parsed(module: str) -> ast.Module:
    """The syntax of a module."""
    return ast.parse(source(module))


def defined(module: str) -> dict[str, ast.ClassDef | ast.FunctionDef]:
    """The classes and functions of a module by name."""
    return {node.name: node for node in parsed(module).body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}


def bases(module: str, node: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
    """The classes of `trainer` that it derives from directly: the module and the definition of each."""
    homes = {
        alias.asname or alias.name: (line.module or "", alias.name)
        for line in parsed(module).body
        if isinstance(line, ast.ImportFrom) and (line.module or "").startswith("trainer")
        for alias in line.names
    }
    for base in node.bases:
        home, name = homes.get(ast.unparse(base), (module, ast.unparse(base)))
        if isinstance(parent := defined(home).get(name), ast.ClassDef):
            yield home, parent


def described(name: Name, listed: set[tuple[str, str]], imported: bool) -> str:
    """The section of one name."""
    node = name.node
    way = f"`from {name.importable} import {name.name}`" if imported else f"Defined in `{name.module}`."
    lines = [f"## {name.name}", "", way, ""]
    if isinstance(node, ast.FunctionDef):
        return "\n".join([*lines, *signature(node), ast.get_docstring(node) or "", ""])
    lines += [ast.get_docstring(node) or "", ""]
    if parents := [parent.name for home, parent in bases(name.module, node) if (home, parent.name) in listed]:
        lines += [f"It has everything of {', '.join(f'[{p}](#{anchor(p)})' for p in parents)}, and:", ""]
    # a parent that has no section of its own is described here, as if it were a part of this class
    known: set[str] = set()
    fields: list[str] = []
    methods: list[str] = []
    for module, part in hidden_parents(name.module, node, listed):
        if (made := constructor(part)) and "__init__" not in known:
            known.add("__init__")
            lines[4:4] = ["```python", call(name.name, made.args), "```", ""]
        fields += [row for field, row in attributes(module, part) if field not in known]
        known |= {field for field, _ in attributes(module, part)}
        for method in part.body:
            if isinstance(method, ast.FunctionDef) and shown(method) and method.name not in known:
                known.add(method.name)
                heading = f"### {name.name}.{method.name}"
                methods += [heading, "", *signature(method), ast.get_docstring(method) or "", ""]
    if fields:
        lines += ["| attribute | type | default | meaning |", "| --- | --- | --- | --- |", *fields, ""]
    return "\n".join([*lines, *methods])


def hidden_parents(module: str, node: ast.ClassDef, listed: set[tuple[str, str]]) -> Iterator[tuple[str, ast.ClassDef]]:
    """A class, and those above it that the page does not list."""
    yield module, node
    for home, parent in bases(module, node):
        if (home, parent.name) not in listed:
            yield from hidden_parents(home, parent, listed)


def shown(method: ast.FunctionDef) -> bool:
    """Is it for the reader? Not the constructor, which stands above all methods, nor what only repeats a base's."""
    if "override" in map(ast.unparse, method.decorator_list) and ast.get_docstring(method) is None:
        return False
    return not method.name.startswith("_") or method.name == "__call__"


def constructor(node: ast.ClassDef) -> ast.FunctionDef | None:
    """What makes an object of a class, where the class says it; that of a dataclass follows from its fields."""
    made = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
    return made[0] if made else None


def attributes(module: str, node: ast.ClassDef) -> list[tuple[str, str]]:
    """Each public attribute in the body of a class, and its row: type, default, and the comment behind or above it."""
    rows = []
    for line in node.body:
        if not isinstance(line, ast.AnnAssign) or ast.unparse(line.target).startswith("_"):
            continue
        name, default = ast.unparse(line.target), ast.unparse(line.value) if line.value else ""
        if default.startswith("field("):
            made = re.search(r"default_factory=([\w.]+)", default)
            default = f"{made[1]}()" if made else "set by the program" if "init=False" in default else ""
        default = "" if "lambda" in default else f"`{default}`" if default and " " not in default else default
        kind = ast.unparse(line.annotation).replace(" | ", " or ")  # a bar ends a cell of a table
        cells = [f"`{name}`", f"`{kind}`", default, comment(module, line)]
        rows.append((name, "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"))
    return rows


def comment(module: str, line: ast.AnnAssign) -> str:
    """The comment at the end of a line; where there is none, the lines of comment right above it."""
    text = source(module).splitlines()
    if "  # " in (here := text[(line.end_lineno or line.lineno) - 1]):
        return here[here.index("  # ") + 4 :]
    above: list[str] = []
    for before in reversed(text[: line.lineno - 1]):
        if not before.strip().startswith("# "):
            break
        above.insert(0, before.strip()[2:])
    return " ".join(above)


def signature(node: ast.FunctionDef) -> list[str]:
    """The signature as a block of code, on one line, or an argument a line where that is too long."""
    decorators = [f"@{ast.unparse(each)}" for each in node.decorator_list if ast.unparse(each) in SAID]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return ["```python", *decorators, f"def {call(node.name, node.args)}{returns}", "```", ""]


def call(name: str, arguments: ast.arguments) -> str:
    """A name and its arguments without `self`: on one line, or each on its own where that is too long."""
    listed = ast.unparse(arguments).removeprefix("self").removeprefix(", ")
    return f"{name}({listed})" if len(listed) < 90 else f"{name}(\n    {broken(listed)},\n)"


SAID = ("property", "staticmethod", "classmethod", "cached_property")


def broken(arguments: str) -> str:
    """Arguments, each on a line of its own: broken at commas outside of brackets."""
    text, depth = "", 0
    for letter in arguments:
        depth += letter in "([{"
        depth -= letter in ")]}"
        text += ",\n   " if letter == "," and depth == 0 else letter
    return text


def first_sentence(node: ast.ClassDef | ast.FunctionDef) -> str:
    """What the docstring says first, for the table."""
    paragraph = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) ", paragraph)[0].replace("|", "\\|")


def anchor(name: str) -> str:
    """The anchor of the heading that is this name."""
    return name.lower()


if __name__ == "__main__":
    main()
