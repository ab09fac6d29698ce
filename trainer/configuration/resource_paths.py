"""Where `conf/` and `recipes/` lie: beside the package in a checkout, inside it in an installed wheel."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path


def root() -> Path:
    """The folder that holds `conf/` and `recipes/`."""
    package = Path(__file__).resolve().parents[1]
    bundled = package / "_bundle"
    return bundled if bundled.is_dir() else package.parent


def make_importable() -> None:
    """Let `import recipes` find the product's own recipes, in this process and in those that it starts."""
    own = root() / "recipes"
    found = find_spec("recipes")
    places = list(found.submodule_search_locations or []) if found else []
    if not places or Path(places[0]).resolve() != own:
        # In front, because the configuration means these recipes and no other folder that has the same name.
        # sys.path and not sys.modules, because worker processes inherit the one and not the other.
        sys.path.insert(0, str(root()))


@contextmanager
def present_folder() -> Iterator[None]:
    """Inside, what lies in the present folder can be imported, as with `python -m`: a lab, from its parent folder."""
    here = os.getcwd()
    added = here not in sys.path and "" not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        yield
    finally:
        if added and here in sys.path:
            sys.path.remove(here)
