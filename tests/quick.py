"""Which cases of a test every change must pass; `--long` runs the others, which show more of the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def quickly(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """The cases for `parametrize`, all but the quick ones marked as long."""
    all_of_them = list(cases)
    assert all(one in all_of_them for one in quick)  # a case that was renamed must not drop out in silence
    return [case if case in quick else _long(case) for case in all_of_them]


def _long(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
