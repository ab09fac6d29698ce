"""Where `conf/` and `recipes/` lie: beside the package in a checkout, inside it in an installed wheel."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path


def resource_root() -> Path:
    """The folder that holds `conf/` and `recipes/`."""
    package = Path(__file__).resolve().parents[1]
    bundled = package / "_bundle"
    return bundled if bundled.is_dir() else package.parent


def make_recipes_importable() -> None:
    """Let `import recipes` find the product's own recipes, in this process and in those that it starts."""
    recipes = resource_root() / "recipes"
    spec = find_spec("recipes")
    places = list(spec.submodule_search_locations or []) if spec else []
    if not places or Path(places[0]).resolve() != recipes:
        # In front, because the configuration means these recipes and no other folder that has the same name.
        # sys.path and not sys.modules, because worker processes inherit the one and not the other.
        sys.path.insert(0, str(resource_root()))


@contextmanager
def working_directory_importable() -> Iterator[None]:
    """Inside, what lies in the present folder can be imported, as with `python -m`: a lab, from its parent folder."""
    working_directory = os.getcwd()
    added = working_directory not in sys.path and "" not in sys.path
    if added:
        sys.path.insert(0, working_directory)
    try:
        yield
    finally:
        if added and working_directory in sys.path:
            sys.path.remove(working_directory)
