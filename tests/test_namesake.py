"""Something else called `trainer` on the same machine: the command says so in words."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import trainer as product
from trainer import Refusal

CHECKOUT = Path(__file__).resolve().parent.parent
THEIRS = '__version__ = "0.0.36"\n'


def said(folder: Path, *words: str, **environment: str) -> tuple[int, str]:
    ended = subprocess.run(
        [sys.executable, *words], cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True
    )
    return ended.returncode, ended.stderr


@pytest.fixture
def overwritten(tmp_path: Path) -> Path:
    """Two wheels in one folder, the other distribution's installed last: its __init__.py stands over this one's."""
    site = tmp_path / "site"
    shutil.copytree(CHECKOUT / "trainer", site / "trainer", ignore=shutil.ignore_patterns("__pycache__"))
    (site / "trainer" / "__init__.py").write_text(THEIRS)
    for name, version in (("trainer", "0.0.36"), ("one_curve_trainer", product.__version__)):
        facts = site / f"{name}-{version}.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text(f"Name: {name.replace('_', '-')}\nVersion: {version}\n")
        (facts / "RECORD").write_text("trainer/__init__.py,,\n")
    return site


def test_files_that_another_distribution_has_overwritten_are_named(overwritten: Path, tmp_path: Path) -> None:
    code, screen = said(tmp_path, "-m", "trainer", "--version", PYTHONPATH=str(overwritten))
    assert code == 2
    assert screen.startswith(f"{overwritten}/trainer holds another program's __init__.py, or none. Installed there: ")
    assert "trainer 0.0.36" in screen
    assert f"one-curve-trainer {product.__version__}" in screen
    assert screen.count("\n") == 1


@pytest.mark.parametrize("name", ["trainer.py", pytest.param("trainer/__init__.py", marks=pytest.mark.long)])
@pytest.mark.parametrize("words", [["processes=2"], ["-m", "seed=0,1"]])
def test_processes_are_not_started_where_they_would_run_something_else(
    name: str, words: list[str], tmp_path: Path
) -> None:
    theirs = tmp_path / name
    theirs.parent.mkdir(exist_ok=True)
    theirs.write_text(THEIRS)
    # as the installed command `trainer`, which looks for packages beside itself first
    start = f"import sys; sys.path[0] = {str(CHECKOUT)!r}; from trainer.__main__ import main; main()"
    code, screen = said(tmp_path, "-c", start, *words, "loop.steps=1", "run.dir=run")
    assert code == 2, screen
    assert screen.startswith(f"{theirs} is not this program, and processes that start in {tmp_path} find it first")
    assert screen.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_from_python_it_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trainer.py").write_text(THEIRS)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refusal, match="is not this program"):
        product.run(["loop.steps=1", "run.dir=run"], processes=2)


def test_an_empty_folder_of_that_name_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer.launch.child_processes import refuse_namesake

    (tmp_path / "trainer").mkdir()
    monkeypatch.chdir(tmp_path)
    refuse_namesake()
    monkeypatch.chdir(CHECKOUT)
    refuse_namesake()


def test_scripts_train_says_so_too(tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text(THEIRS)
    code, screen = said(tmp_path, "-P", str(CHECKOUT / "scripts" / "launch.py"), "strategy=single", "loop.steps=1")
    assert (code, screen) == (
        2,
        f"scripts/train: {tmp_path}/trainer.py is not this program, and Python finds it first;"
        " start in another folder, or pip uninstall what has put it there.\n",
    )
