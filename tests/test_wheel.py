"""The wheel: what is in it, and that it can be built from the source archive alone."""

import subprocess
import sys
from email.parser import Parser
from pathlib import Path, PurePosixPath
from zipfile import ZipFile

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent


def build(target: str, source: Path, out: Path) -> Path:
    """Build a `wheel` or an `sdist` of the source folder, without the network, and return the file."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, text=True)
    (file,) = out.iterdir()
    return file


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> ZipFile:
    return ZipFile(build("wheel", CHECKOUT, tmp_path_factory.mktemp("wheel")))


def test_nothing_but_the_package_is_installed(wheel: ZipFile) -> None:
    assert {PurePosixPath(name).parts[0] for name in wheel.namelist()} == {
        "trainer",
        "one_curve_trainer-0.1.0.dist-info",
    }


def tracked(folder: str) -> set[str]:
    """The files of a folder of the checkout that belong to the product."""
    paths = (CHECKOUT / folder).rglob("*")
    return {str(path.relative_to(CHECKOUT)) for path in paths if path.is_file() and "__pycache__" not in path.parts}


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
    archive = build("sdist", CHECKOUT, tmp_path / "sdist")
    subprocess.run(["tar", "-xf", archive, "-C", tmp_path], check=True)
    again = ZipFile(build("wheel", tmp_path / "one_curve_trainer-0.1.0", tmp_path / "again"))
    assert sorted(again.namelist()) == sorted(wheel.namelist())
