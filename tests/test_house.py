"""scripts/house.py: the shape of trainer/ is counted, and gets no worse."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.house import AT_LEAST, LIMITS, beyond, measured

CHECKOUT = Path(__file__).resolve().parent.parent
VAGUE = "uses of one, own, found, said, told"

# A checkout in which all is well: two entries, an arrow down, a loop.
RULES = """_UPPER = ("loop",)
FLOORS = (*_UPPER, "base", "deep")

def test_the_loop_has_no_word_of_parallelism():
    wrapped = {"unwrap"}
    assert words("loop") & ({"rank", "world"} | wrapped) == set()
"""
LOOP = '''"""The loop."""

from trainer.base import measure, weigh


class Trainer:
    """Trains."""

    def fit(self):
        # a comment
        return weigh(measure)
'''
BASE = '''"""What all use."""


def measure(size):  # in metres
    """Say how long
    it is."""
    return size


def weigh(size):
    return measure(size)
'''
HEALTHY = {
    "tests/test_imports.py": RULES,
    "tests/test_base.py": "from trainer.base import weigh\n",
    "trainer/__init__.py": "from trainer.loop.trainer import Trainer as Trainer\n",
    "trainer/base.py": BASE,
    "trainer/loop/__init__.py": "",
    "trainer/loop/trainer.py": LOOP,
    "trainer/loop/other.py": "# one more\nfrom trainer.base import measure\n\nprint(measure)\n",
    "conf/config.yaml": "_target_: trainer.loop.trainer.Trainer\n",
}


def planted(root: Path, *changes: dict[str, str]) -> Path:
    """The healthy checkout, with some files in place of its own or added."""
    for name, text in [pair for files in (HEALTHY, *changes) for pair in files.items()]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def house(checkout: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, checkout / "scripts/house.py", *words], capture_output=True, text=True)


def test_a_small_tree_is_counted_exactly(tmp_path: Path) -> None:
    figures = {label: value for label, (value, _) in measured(planted(tmp_path)).items()}
    assert figures == {
        "files": 3,
        "lines": 11 + 11 + 4,
        "lines of code": 4 + 3 + 1,  # without blank lines, comments, docstrings, imports
        "lines of docstrings": 2 + 3,
        "lines of imports": 2,
        "imports, % of the lines": 7.7,
        "lines of a function, p95": 3,
        "lines of a function, longest": 3,
        "comments per 100 lines": 11.5,
        "comments per 100 lines, least of a folder": 9.1,
        "floors": 2,
        "entries": 2,
        "rooms": 2,
        "arrows": 1,
        "arrows upward": 0,
        "circles of files": 0,
        "files with one user": 0,
        "definitions with one user": 0,
        "their lines": 0,
        "names in several files": 0,
        "public names in several files": 0,
        "unused names": 0,
        "words of parallelism in the loop": 0,
        VAGUE: 0,
    }


DEEP = {"trainer/deep.py": "def deep():\n    # a comment\n    return deep\n\nprint(deep)\n"}
# What makes a figure worse than in the healthy checkout, and a place that the sentence names.
WORSE: dict[str, tuple[dict[str, str], str]] = {
    "files": (DEEP, ""),
    "lines": (DEEP, ""),
    "imports, % of the lines": ({"trainer/deep.py": "import json\nimport os\n"}, ""),
    "entries": (DEEP, "deep"),
    "rooms": ({"trainer/loop/inside/far.py": "# far\n"}, "trainer/loop/inside"),
    "floors": ({**DEEP, "trainer/base.py": BASE + "import trainer.deep\n"}, ""),
    "arrows": ({**DEEP, "trainer/base.py": BASE + "from trainer import deep\n"}, "trainer/base.py → trainer/deep.py"),
    "arrows upward": (
        {"trainer/base.py": BASE + "    from trainer.loop import other\n"},
        "trainer/base.py → trainer/loop/other.py",
    ),
    "circles of files": (
        {"trainer/loop/other.py": "from . import third\n", "trainer/loop/third.py": "from .other import third\n"},
        "trainer/loop/third.py → trainer/loop/other.py",
    ),
    "lines of a function, p95": ({"trainer/base.py": BASE + "    print()\n    print()\n"}, ""),
    "lines of a function, longest": (
        {"trainer/base.py": BASE + "    print()\n    print()\n"},
        "trainer/base.py: weigh",
    ),
    "comments per 100 lines": ({"trainer/loop/other.py": "from trainer.base import measure\n"}, ""),
    "comments per 100 lines, least of a folder": ({"trainer/loop/bare/none.py": "\n"}, "trainer/loop/bare: 0.0"),
    "files with one user": (
        {**DEEP, "trainer/base.py": BASE + "from trainer.deep import deep\n"},
        "trainer.deep ← trainer.base",
    ),
    "definitions with one user": (
        {"tests/test_base.py": ""},
        "trainer.base.weigh ← trainer.loop.trainer",
    ),
    "names in several files": ({"trainer/loop/third.py": "def weigh(): ...\n"}, "weigh"),
    "public names in several files": ({"trainer/loop/third.py": "def weigh(): ...\n"}, "weigh"),
    "unused names": (
        {"trainer/loop/third.py": '"""lonely and alone."""\n\nalone: int = 1\n\n\ndef lonely():\n    lonely\n'},
        "trainer.loop.third.alone; trainer.loop.third.lonely",
    ),
    "words of parallelism in the loop": (
        {"trainer/loop/trainer.py": LOOP + "        data_rank.unwrap\n        # the world\n"},
        "rank; unwrap",
    ),
    VAGUE: ({"trainer/loop/third.py": "one = self.own\n"}, "one: 1; own: 1; found: 0; said: 0; told: 0"),
}


@pytest.mark.parametrize("label", LIMITS)
def test_each_limit_is_held(label: str, tmp_path: Path) -> None:
    today = {name: (value, value) for name, (value, _) in measured(planted(tmp_path)).items() if name in LIMITS}
    assert list(beyond(measured(tmp_path), today)) == []
    files, place = WORSE[label]
    sentences = [each for each in beyond(measured(planted(tmp_path, files)), today) if each.startswith(f"{label}: ")]
    assert len(sentences) == 1
    assert f" is {'less' if label in AT_LEAST else 'more'} than the limit of {today[label][0]:g}" in sentences[0]
    assert place in sentences[0]


def test_a_definition_is_used_where_only_text_names_it(tmp_path: Path) -> None:
    alone = {"trainer/loop/third.py": "def lonely(): ...\n"}
    for number, (name, text) in enumerate(
        {
            "conf/third.yaml": "_target_: trainer.loop.third.lonely\n",
            "docs/third.md": "Call `lonely()`.\n",
            "tests/test_third.py": "run('from trainer.loop.third import lonely')\n",
            "scripts/third.py": "from trainer.loop import third\n\nthird.lonely()\n",
        }.items()
    ):
        assert measured(planted(tmp_path / str(number), alone, {name: text}))["unused names"] == (0, [])


def test_the_command_says_what_is_worse(tmp_path: Path) -> None:
    (planted(tmp_path) / "scripts").mkdir()
    shutil.copy(CHECKOUT / "scripts/house.py", tmp_path / "scripts")
    done = house(tmp_path, "--check")
    assert (done.returncode, done.stdout) == (0, "the shape of trainer/ is within its limits\n"), done.stderr
    planted(tmp_path, {"trainer/base.py": BASE + "from trainer.loop import other\n\n# a comment\n"})
    done = house(tmp_path, "--check")
    circle = "trainer/base.py → trainer/loop/other.py → trainer/base.py"
    assert (done.returncode, done.stdout) == (1, "")
    upward = "arrows upward: 1 is more than the limit of 0: trainer/base.py → trainer/loop/other.py"
    assert upward in done.stderr.splitlines()
    assert "circles of files: 1 is more than the limit of 0: " in done.stderr
    assert circle in done.stderr or "trainer/loop/other.py → trainer/base.py → trainer/loop/other.py" in done.stderr
    (tmp_path / "trainer/attic.py").write_text("")
    done = house(tmp_path, "--check")
    assert (done.returncode, done.stderr) == (
        1,
        "FLOORS in tests/test_imports.py has no place for attic of trainer/\n",
    )


@pytest.mark.long  # scripts/house.py --check says the same, in CI and before each commit
def test_the_real_tree_is_within_its_limits() -> None:
    figures = measured(CHECKOUT)
    assert set(LIMITS) <= set(figures)
    assert list(beyond(figures, LIMITS)) == []


@pytest.mark.long
def test_the_table_has_every_figure() -> None:
    done = house(CHECKOUT)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in done.stdout.splitlines()[2:]]
    assert {len(row) for row in rows} == {4}
    assert set(LIMITS) <= {row[0] for row in rows}
