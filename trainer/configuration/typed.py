"""Values of the groups' keys: of the type that stands in their yaml. What the target itself takes is checked later."""

from __future__ import annotations

from typing import Any, NamedTuple

from omegaconf import DictConfig

from trainer.configuration.resolved import UNRESOLVED, as_written, resolved
from trainer.configuration.settings import GROUPS, in_steps, shown


def mistyped(cfg: DictConfig, base: DictConfig) -> list[str]:
    """One line for each value that is of another type than the one which its group's yaml gives this key."""
    values, expected = resolved(cfg)[0], resolved(base)[0]
    written, before = as_written(cfg), as_written(base)
    problems: list[str] = []
    for group in GROUPS:
        if group in values and group in expected:
            _compare(_Pair(values[group], written[group]), _Pair(expected[group], before[group]), group, problems)
    return problems


class _Pair(NamedTuple):
    """A value, and how it was written: an interpolation may stand for it."""

    value: Any
    written: Any

    def below(self, key: str) -> _Pair:
        return _Pair(self.value[key], self.written[key] if isinstance(self.written, dict) else self.written)


def _compare(given: _Pair, base: _Pair, path: str, problems: list[str]) -> None:
    value, expected = given.value, base.value
    if expected is None or value is None or value is UNRESOLVED or expected is UNRESOLVED:
        return  # null says nothing about the type; the target's signature does
    if given.written == base.written and not isinstance(value, dict):
        return  # not changed here; where an interpolation leads to, it is looked at itself
    wanted = _wanted(value, expected)
    if wanted:
        problems.append(f"{path}={shown(given.written, '')}: expected {wanted}")
    elif isinstance(expected, dict) and value.get("_target_") == expected.get("_target_"):
        for key in value:
            if key in expected:
                _compare(given.below(key), base.below(key), f"{path}.{key}", problems)


def _wanted(value: Any, expected: Any) -> str | None:
    """What was expected instead of this value, or None where it fits."""
    match expected:
        case bool():
            return None if isinstance(value, bool) else "true or false"
        case int():
            if isinstance(value, float):
                return f"a whole number (its yaml has {expected}; {expected}.0 there would allow fractions)"
            whole = isinstance(value, int) and not isinstance(value, bool)
            return None if whole else f"a whole number{in_steps(value)}"
        case float():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            return None if number else "a number"
        case str():
            return None if isinstance(value, str | int | float) and not isinstance(value, bool) else "text"
        case list():
            kinds = {type(item) for item in expected}
            of = {(int,): " of whole numbers", (float,): " of numbers"}.get(tuple(kinds), "")
            fits = isinstance(value, list) and not (of and any(_wanted(item, expected[0]) for item in value))
            return None if fits else f"a list{of}, like {shown(expected, '')}{in_steps(value)}"
        case dict():
            return None if isinstance(value, dict) else "a section; its keys are " + ", ".join(list(expected)[:5])
    return None
