"""Count the shape of `trainer/`: files, arrows, long functions, comments, names. Print it as a table.

    python scripts/house.py            each figure, its limit, and its goal
    python scripts/house.py --list     below each figure what was counted, where that is a list
    python scripts/house.py --check    says which figures are beyond their limits; ends with 1 if any is

- Files: all but `__init__.py`. Entries: folders and files right inside trainer/. Rooms: all folders, and those files.
  Arrows: imports between rooms, also inside functions or for types only. Floors: entries in the longest chain of them.
- Code is each line that is not blank, a comment, a docstring or an import. Comments count also at the end of a line.
- A function has the lines from `def` to its end, without its docstring. p95: 95 % of the functions are not longer.
- A file has one user if one other file of trainer/ imports it. A definition has one user if its own file never reads it
  and one file of trainer/ imports it, but no test, recipe or script.
- Names are classes, functions and variables of modules, without methods. An unused one is not read in its own file,
  imported by no file, and not a word in a string, in conf/, or in code in docs/.

The order of the entries and the words of parallelism are those of tests/test_imports.py. Nothing of trainer/ is run.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
VAGUE = ("one", "own", "found", "said", "told")  # variables that do not say what they hold
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

# The limit and the goal of each figure. A limit that is not yet the goal is what was counted when it was set: whoever
# makes the figure better sets it anew, and it gets looser only with a reason in the commit.
LIMITS: dict[str, tuple[float, float]] = {
    "files": (221, 165),
    "lines": (40_100, 21_500),  # to the next hundred
    "imports, % of the lines": (9.1, 8),
    "entries": (14, 14),
    "rooms": (19, 21),
    "floors": (10, 12),
    "arrows": (105, 104),
    "arrows upward": (0, 0),
    "circles of files": (0, 0),
    "lines of a function, p95": (22, 22),
    "lines of a function, longest": (47, 47),
    "comments per 100 lines": (8.3, 8),
    "comments per 100 lines, least of a folder": (8, 8),
    "files with one user": (50, 25),
    "definitions with one user": (247, 60),
    "names in several files": (61, 30),
    "public names in several files": (6, 10),
    "unused names": (0, 0),
    "words of parallelism in the loop": (0, 0),
    f"uses of {', '.join(VAGUE)}": (6, 0),
}
AT_LEAST = ("comments per 100 lines", "comments per 100 lines, least of a folder")  # of all others: at most
Figures = dict[str, tuple[float, list[str]]]  # a number, and what was counted


@dataclass(frozen=True)
class File:
    """A Python file, and what the counts ask of it."""

    path: Path  # trainer/data/data.py
    text: str

    @property
    def module(self) -> str:
        """Its name in an import."""
        return ".".join(self.path.with_suffix("").parts).removesuffix(".__init__")

    @property
    def entry(self) -> str:
        """The folder or file right inside trainer/ that it belongs to."""
        return self.path.parts[1].removesuffix(".py")

    @property
    def room(self) -> str:
        """Its folder; itself, if it is right inside trainer/."""
        return str(self.path.parent if len(self.path.parts) > 2 else self.path)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of its syntax."""
        return list(ast.walk(ast.parse(self.text, str(self.path))))

    @cached_property
    def tokens(self) -> Counter[tuple[int, str]]:
        """Its tokens: the type and the text of each. Comments are among them, unlike in the syntax."""
        return Counter(token[:2] for token in tokenize.generate_tokens(io.StringIO(self.text).readline))

    @cached_property
    def definitions(self) -> dict[str, ast.stmt]:
        """What the module defines, by name."""
        named: dict[str, ast.stmt] = {}
        for node in getattr(self.nodes[0], "body", ()):
            if isinstance(node, DEFINITIONS):
                named[node.name] = node
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                named |= {part.id: node for each in targets for part in ast.walk(each) if isinstance(part, ast.Name)}
        return {name: node for name, node in named.items() if not name.startswith("__")}

    @cached_property
    def imported(self) -> set[str]:
        """What it imports, `trainer.data.data.Data`; of a module that it imports also the names that it reads."""
        bound: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom):
                above = self.path.parts[: len(self.path.parts) - node.level] if node.level else ()
                package = ".".join([*above, *([node.module] if node.module else [])])
                bound |= {alias.asname or alias.name: f"{package}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                bound |= {f"import {alias.name}": alias.name for alias in node.names}
        pairs = [(node.value, node.attr) for node in self.nodes if isinstance(node, ast.Attribute)]
        read = {f"{bound[of.id]}.{name}" for of, name in pairs if isinstance(of, ast.Name) and of.id in bound}
        return read | set(bound.values())

    def reads(self, name: str) -> bool:
        """Does it read a name that it defines, outside of the definition?"""
        uses = [node for node in self.nodes if isinstance(node, ast.Name) and node.id == name]
        return not {use.lineno for use in uses if isinstance(use.ctx, ast.Load)} <= span([self.definitions[name]])


def span(nodes: Iterable[ast.stmt]) -> set[int]:
    """The numbers of all their lines."""
    return {line for node in nodes for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def docstrings(nodes: Iterable[ast.AST]) -> set[int]:
    """The numbers of the lines of their docstrings."""
    owners = [node for node in nodes if isinstance(node, (ast.Module, *DEFINITIONS))]
    return span(node.body[0] for node in owners if ast.get_docstring(node) is not None)


def strings(node: ast.AST, file: File) -> Iterator[str]:
    """The texts in the tuples and sets of a definition, and in those that stand in them with a star."""
    for item in (item for part in ast.walk(node) if isinstance(part, (ast.Tuple, ast.Set)) for item in part.elts):
        if isinstance(item, ast.Constant):
            yield str(item.value)
        elif isinstance(item, ast.Starred):
            yield from strings(file.definitions[ast.unparse(item.value)], file)


def measured(root: Path) -> Figures:
    """All figures of a checkout."""
    folders = [root / name for name in ("trainer", "recipes", "scripts", "tests")]
    paths = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    everything = [File(path.relative_to(root), path.read_text(encoding="utf-8")) for path in paths]
    files = [file for file in everything if file.path.parts[0] == "trainer" and file.path.name != "__init__.py"]
    rules = next(file for file in everything if file.path == Path("tests/test_imports.py"))
    floors = list(strings(rules.definitions["FLOORS"], rules))
    parallel = set(strings(rules.definitions["test_the_loop_has_no_word_of_parallelism"], rules))
    counts = (sizes(files), arrows(files, floors), users(files, everything), names(files, everything, root))
    return {label: figure for each in (*counts, words(files, parallel)) for label, figure in each.items()}


def counted(**lists: Iterable[str]) -> Figures:
    """How many different ones there are in each list; the keys have _ for spaces."""
    different = {label.replace("_", " "): sorted(set(each)) for label, each in lists.items()}
    return {label: (len(each), each) for label, each in different.items()}


def sizes(files: list[File]) -> Figures:
    """How much there is to read: lines, of which kinds, and in which portions."""
    whole: Counter[str] = Counter()
    folders: defaultdict[str, Counter[str]] = defaultdict(Counter)
    functions: list[tuple[int, str]] = []
    for file in files:
        lines = file.text.splitlines()
        imports = span(node for node in file.nodes if isinstance(node, (ast.Import, ast.ImportFrom)))
        other = imports | (prose := docstrings(file.nodes))
        code = [text for line, text in enumerate(lines, 1) if line not in other and text.strip()[:1] not in ("", "#")]
        comments = sum(times for (kind, _), times in file.tokens.items() if kind == tokenize.COMMENT)
        for kinds in (whole, folders[str(file.path.parent)]):
            kinds.update(all=len(lines), code=len(code), docs=len(prose), imports=len(imports), comments=comments)
        for node in file.nodes:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                functions.append((len(span([node])) - len(docstrings([node])), f"{file.path}: {node.name}"))
    longest = max(functions)[0]
    shares = sorted((round(100 * kinds["comments"] / kinds["all"], 1), folder) for folder, kinds in folders.items())
    return {
        "files": (len(files), []),
        "lines": (whole["all"], []),
        "lines of code": (whole["code"], []),
        "lines of docstrings": (whole["docs"], []),
        "lines of imports": (whole["imports"], []),
        "imports, % of the lines": (round(100 * whole["imports"] / whole["all"], 1), []),
        "lines of a function, p95": (sorted(functions)[int(0.95 * len(functions))][0], []),
        "lines of a function, longest": (longest, [name for length, name in functions if length == longest]),
        AT_LEAST[0]: (round(100 * whole["comments"] / whole["all"], 1), []),
        AT_LEAST[1]: (shares[0][0], [f"{folder}: {share}" for share, folder in shares]),
    }


def home(name: str, modules: Iterable[str]) -> str:
    """The module that an imported name is in; nothing if it is none of these."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


def arrows(files: list[File], floors: list[str]) -> Figures:
    """Who imports whom."""
    if without := {file.entry for file in files} - set(floors):
        sys.exit(f"FLOORS in tests/test_imports.py has no place for {', '.join(sorted(without))} of trainer/")
    homes = {file.module: file for file in files}
    below = {file: {homes[found] for name in file.imported if (found := home(name, homes))} - {file} for file in files}
    pairs = [(file, other) for file, others in below.items() for other in others]
    floor = {entry: number for number, entry in enumerate(floors)}
    depth = dict.fromkeys(floors, 1)
    for entry in reversed(floors):
        others = {other.entry for file, other in pairs if file.entry == entry and floor[entry] < floor[other.entry]}
        depth[entry] += max((depth[other] for other in others), default=0)
    upward = [f"{file.path} → {other.path}" for file, other in pairs if floor[file.entry] > floor[other.entry]]
    return {
        "floors": (max(depth.values()), []),
        **counted(entries=[file.entry for file in files], rooms=[file.room for file in files]),
        **counted(arrows=[f"{file.room} → {other.room}" for file, other in pairs if file.room != other.room]),
        **counted(arrows_upward=upward, circles_of_files=circles(below)),
    }


def circles(below: dict[File, set[File]]) -> Iterator[str]:
    """Each circle; an arrow of it is taken away before the next is looked for."""
    while True:
        try:
            return TopologicalSorter(below).prepare()
        except CycleError as error:
            yield " → ".join(str(file.path) for file in reversed(error.args[1]))
            below[error.args[1][1]].discard(error.args[1][0])


def users(files: list[File], everything: list[File]) -> Figures:
    """What might as well stand where it is used."""
    homes = {file.module: file for file in files}
    of_file: defaultdict[str, set[str]] = defaultdict(set)
    of_name: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for user in everything:
        for name in user.imported:
            if (module := home(name, homes)) not in ("", user.module):
                of_file[module] |= {user.module} if user.path.parts[0] == "trainer" else set()
                of_name[module, name[len(module) + 1 :]].add(user.module)
    single = [
        (module, name, *by)
        for (module, name), by in of_name.items()
        if len(by) == 1 and by <= set(homes) and name in homes[module].definitions and not homes[module].reads(name)
    ]
    files_with_one = [f"{module} ← {min(by)}" for module, by in of_file.items() if len(by) == 1 and by <= set(homes)]
    return {
        **counted(files_with_one_user=files_with_one),
        **counted(definitions_with_one_user=[f"{module}.{name} ← {user}" for module, name, user in single]),
        "their lines": (sum(len(span([homes[module].definitions[name]])) for module, name, _ in single), []),
    }


def names(files: list[File], everything: list[File], root: Path) -> Figures:
    """Names that mean several things, and those that nobody mentions."""
    times = Counter(name for file in files for name in file.definitions)
    several = [name for name, count in times.items() if count > 1]
    texts = [path.read_text(encoding="utf-8") for path in (root / "conf").rglob("*.yaml")]
    for page in (root / "docs").rglob("*.md"):
        texts += re.findall(r"```(?:python|yaml)\n.*?```|`[^`\n]+`", page.read_text(encoding="utf-8"), re.DOTALL)
    for file in everything:
        prose = docstrings(file.nodes)
        texts += [str(n.value) for n in file.nodes if isinstance(n, ast.Constant) and n.lineno not in prose]
    known = {word for text in texts for word in re.findall(r"\w+", text)}
    rest = [(file, name) for file in files for name in set(file.definitions) - known if not file.reads(name)]
    unused = {f"{file.module}.{name}" for file, name in rest}.difference(*(file.imported for file in everything))
    public = [name for name in several if not name.startswith("_")]
    return counted(names_in_several_files=several, public_names_in_several_files=public, unused_names=unused)


def words(files: list[File], parallel: set[str]) -> Figures:
    """Words that the loop must not know, and variables that do not say what they hold."""
    tokens = (file.tokens for file in files if "Trainer" in file.definitions)
    loop = {name for each in tokens for kind, name in each if kind == tokenize.NAME}
    loop |= {word for name in loop for word in name.split("_")}
    vague = {name: sum(file.tokens[tokenize.NAME, name] for file in files) for name in VAGUE}
    return {
        **counted(words_of_parallelism_in_the_loop=loop & parallel),
        f"uses of {', '.join(VAGUE)}": (sum(vague.values()), [f"{name}: {uses}" for name, uses in vague.items()]),
    }


def beyond(figures: Figures, limits: dict[str, tuple[float, float]]) -> Iterator[str]:
    """A sentence for each figure that is beyond its limit."""
    for label, (limit, _) in limits.items():
        value, places = figures[label]
        if value < limit if label in AT_LEAST else value > limit:
            which = f": {'; '.join(places)}" if 0 < len(places) <= 13 else "; --list shows them" if places else ""
            yield f"{label}: {value:g} is {'less' if label in AT_LEAST else 'more'} than the limit of {limit:g}{which}"


def main() -> None:
    """Print the table, or what is beyond its limit."""
    parser = argparse.ArgumentParser(description="Count the shape of trainer/.")
    parser.add_argument("--list", action="store_true", help="print below each figure what was counted")
    parser.add_argument("--check", action="store_true", help="end with 1 if a figure is beyond its limit")
    asked = parser.parse_args()
    figures = measured(CHECKOUT)
    if asked.check:
        sys.exit("\n".join(beyond(figures, LIMITS)) or print("the shape of trainer/ is within its limits"))
    print("| trainer/ | figure | limit | goal |\n| --- | --- | --- | --- |")
    for label, (value, places) in figures.items():
        limits = [f"{'≥' if label in AT_LEAST else '≤'} {number:g}" for number in LIMITS.get(label, ())] or ["–", "–"]
        print(f"| {' | '.join((label, f'{value:g}', *limits))} |")
        if asked.list and places:
            print("", *places, "", sep="\n")


if __name__ == "__main__":
    main()
