"""`trainer.configuration.resource_paths`: where conf/ and recipes/ are, in a checkout and in a wheel."""

import subprocess
import sys
from pathlib import Path

import pytest

from trainer.configuration import resource_paths

CHECKOUT = Path(__file__).resolve().parent.parent


def test_the_checkout_is_its_own_bundle() -> None:
    assert resource_paths.resource_root() == CHECKOUT
    assert (resource_paths.resource_root() / "conf" / "config.yaml").is_file()
    assert (resource_paths.resource_root() / "recipes").is_dir()


def run(code: str, cwd: Path, *path: Path) -> str:
    """What a fresh Python prints that sees only these folders, so not the checkout."""
    lines = f"import sys\nsys.path[:0] = {[str(folder) for folder in path]!r}\n{code}"
    command = [sys.executable, "-I", "-S", "-W", "error", "-c", lines]
    return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A site-packages folder as the wheel leaves it, with small stand-ins for conf/ and recipes/."""
    package = tmp_path / "a site" / "trainer"
    (package / "_bundle" / "conf").mkdir(parents=True)
    (package / "_bundle" / "recipes" / "vision").mkdir(parents=True)
    (package / "_bundle" / "recipes" / "__init__.py").touch()
    (package / "__init__.py").touch()
    own = Path("configuration", "resource_paths.py")
    (package / own).parent.mkdir()
    (package / own).write_bytes((CHECKOUT / "trainer" / own).read_bytes())
    return package.parent


def test_a_wheel_carries_its_bundle_inside(installed: Path, tmp_path: Path) -> None:
    code = "from trainer.configuration import resource_paths; print(resource_paths.resource_root())"
    assert run(code, tmp_path, installed) == str(installed / "trainer" / "_bundle")


def test_recipes_are_importable_after_asking(installed: Path, tmp_path: Path) -> None:
    asked = "from trainer.configuration import resource_paths; resource_paths.make_recipes_importable()"
    code = f"{asked}; import recipes.vision; print(recipes.__file__)"
    assert run(code, tmp_path, installed) == str(installed / "trainer" / "_bundle" / "recipes" / "__init__.py")


def test_recipes_are_the_products_own_though_others_have_that_name(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "__init__.py").touch()
    code = (
        "from trainer.configuration import resource_paths; resource_paths.make_recipes_importable();"
        " import recipes; print(recipes.__file__)"
    )
    assert run(code, tmp_path, tmp_path, installed).startswith(str(installed))


def test_asking_twice_changes_nothing(installed: Path, tmp_path: Path) -> None:
    code = (
        "from trainer.configuration import resource_paths; resource_paths.make_recipes_importable()\n"
        "once = list(sys.path)\n"
        "resource_paths.make_recipes_importable(); print(sys.path == once)"
    )
    assert run(code, tmp_path, installed) == "True"


def test_needs_no_torch(tmp_path: Path) -> None:
    code = "from trainer.configuration import resource_paths; resource_paths.make_recipes_importable();"
    code += "print('torch' in sys.modules)"
    assert run(code, tmp_path, CHECKOUT) == "False"
