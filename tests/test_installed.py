"""The program where it is installed: what the wheel holds, its own conf/ and recipes/, others of the same name."""

import os
import subprocess
import sys
from email.parser import Parser
from pathlib import Path, PurePosixPath
from zipfile import ZipFile

import pytest

import trainer as product
from tests.run import ROOT
from trainer import Refusal

THEIRS = '__version__ = "0.0.36"\n'


def said(folder: Path, *words: str, **environment: str) -> tuple[int, str]:
    ended = subprocess.run(
        [sys.executable, *words], cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True
    )
    return ended.returncode, ended.stderr


# ------------------------------------------------------------------------------------------------------- the wheel


def build(target: str, source: Path, out: Path) -> Path:
    """Build a `wheel` or an `sdist` of the source folder, without the network, and return the file."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, text=True)
    (file,) = out.iterdir()
    return file


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> ZipFile:
    return ZipFile(build("wheel", ROOT, tmp_path_factory.mktemp("wheel")))


def test_nothing_but_the_package_is_installed(wheel: ZipFile) -> None:
    assert {PurePosixPath(name).parts[0] for name in wheel.namelist()} == {
        "trainer",
        "one_curve_trainer-0.1.0.dist-info",
    }


def tracked(folder: str) -> set[str]:
    """The files of a folder of the checkout that belong to the product."""
    paths = (ROOT / folder).rglob("*")
    return {str(path.relative_to(ROOT)) for path in paths if path.is_file() and "__pycache__" not in path.parts}


@pytest.mark.parametrize(
    ("folder", "place"), [("trainer", ""), ("conf", "trainer/_bundle/"), ("recipes", "trainer/_bundle/")]
)
def test_every_file_travels(wheel: ZipFile, folder: str, place: str) -> None:
    files = tracked(folder)
    assert files
    assert {place + name for name in files} <= set(wheel.namelist())


def test_requirements_are_bounded_where_it_matters(wheel: ZipFile) -> None:
    facts = Parser().parsestr(wheel.read("one_curve_trainer-0.1.0.dist-info/METADATA").decode())
    needs = facts.get_all("Requires-Dist") or []
    assert "torch<2.16,>=2.11" in needs
    assert facts["Requires-Python"] == ">=3.11"
    assert all("extra ==" in need for need in needs if need.startswith(("pytest", "ruff", "mypy")))


@pytest.mark.long
def test_the_source_archive_builds_the_same_wheel(wheel: ZipFile, tmp_path: Path) -> None:
    archive = build("sdist", ROOT, tmp_path / "sdist")
    subprocess.run(["tar", "-xf", archive, "-C", tmp_path], check=True)
    again = ZipFile(build("wheel", tmp_path / "one_curve_trainer-0.1.0", tmp_path / "again"))
    assert sorted(again.namelist()) == sorted(wheel.namelist())


@pytest.mark.long
def test_the_wheel_carries_its_options_and_recipes_though_others_have_those_names(
    wheel: ZipFile, tmp_path: Path
) -> None:
    wheel.extractall(site := tmp_path / "a site")
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "__init__.py").touch()
    start = f"import sys; sys.path.insert(0, {str(site)!r}); from trainer.__main__ import main; main()"
    words = ["loop.steps=1", "device=cpu", "model=mlp", "run.dir=run", "log=[]"]
    code, screen = said(tmp_path, "-P", "-c", start, *words)
    assert code == 0, screen
    assert (tmp_path / "run" / "checkpoints").is_dir()


# ------------------------------------------------------------------------------------------- others of the same name


@pytest.mark.parametrize(
    ("name", "words"), [("trainer.py", ["processes=2"]), ("trainer/__init__.py", ["-m", "seed=0,1"])]
)
def test_processes_are_not_started_where_they_would_run_something_else(
    name: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / name
    theirs.parent.mkdir(exist_ok=True)
    theirs.write_text(THEIRS)
    # as the installed command `trainer`, which looks for packages beside itself first
    start = f"import sys; sys.path[0] = {str(ROOT)!r}; from trainer.__main__ import main; main()"
    code, screen = said(tmp_path, "-c", start, *words, "loop.steps=1", "run.dir=run")
    assert code == 2, screen
    assert screen.startswith(f"{theirs} is not this program, and processes that start in {tmp_path} find it first")
    assert screen.count("\n") == 1
    assert not (tmp_path / "run").exists()
    monkeypatch.chdir(tmp_path)  # from Python it is a refusal
    with pytest.raises(Refusal, match="is not this program"):
        product.run(["loop.steps=1", "run.dir=run"], processes=2)
