"""Scaled rotary positions, for texts that are longer than those a network was first trained with.

A kind and its numbers have the names that they have in a config.json of transformers (`rope_scaling`, in version 5
`rope_parameters`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from trainer.messages import Refusal, did_you_mean


@dataclass(frozen=True)
class Unscaled:
    """Positions as they are: the neutral element of all kinds."""

    def speeds(self, width: int, base: float) -> Tensor:
        """How far each pair of numbers of a head turns from token to token, in radians: (width / 2,), in fp64."""
        return base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)


@dataclass(frozen=True)
class Linear(Unscaled):
    """Every pair turns `factor` times slower (Chen et al. 2023, arXiv:2306.15595)."""

    factor: float

    def speeds(self, width: int, base: float) -> Tensor:
        """(width / 2,)"""
        return super().speeds(width, base) / self.factor


@dataclass(frozen=True)
class Llama3(Unscaled):
    """Llama 3.1's: only pairs that turn seldom in `original` tokens turn slower; between both there is a ramp.

    Less than low_freq_factor turns: slower by the whole factor. More than high_freq_factor: as they were.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def speeds(self, width: int, base: float) -> Tensor:
        """(width / 2,)"""
        speeds = super().speeds(width, base)
        turns = speeds * self.original_max_position_embeddings / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return torch.lerp(speeds / self.factor, speeds, kept.clamp(0, 1))


KINDS: dict[str, type[Unscaled]] = {"default": Unscaled, "linear": Linear, "llama3": Llama3}


def scaling_of(words: Mapping[str, Any] | None, where: str = "model.rotary_scaling") -> Unscaled:
    """The scaling that these words mean, with a kind in `rope_type` (or `type`). Refusal where there is none of it."""
    given = {key: value for key, value in (words or {}).items() if value is not None and key != "rope_theta"}
    kind = given.pop("type", None if given else "default")
    kind = given.pop("rope_type", kind)
    if kind not in KINDS:
        why = "; its positions would depend on the length of each text" if kind in ("dynamic", "longrope") else ""
        there = ", ".join(name for name in KINDS if name != "default")
        raise Refusal(f"{where}: rope_type {kind} is not there, only {there}{why}{did_you_mean(str(kind), KINDS)}")
    known = {field.name for field in fields(KINDS[kind])}
    if unknown := sorted(given.keys() - known):
        raise Refusal(
            f"{where}: rope_type {kind} has no {', '.join(unknown)}; it has {', '.join(sorted(known)) or 'none'}"
        )
    try:
        return _checked(KINDS[kind](**given), where)
    except TypeError as error:  # one that has no default
        raise Refusal(f"{where}: rope_type {kind} needs {str(error).partition('argument')[2].lstrip('s: ')}") from None


def words_of(scaling: Unscaled) -> dict[str, Any] | None:
    """The way back, as a config.json has it; None: not scaled."""
    kind = next(name for name, each in KINDS.items() if type(scaling) is each)
    return None if kind == "default" else {"rope_type": kind, **asdict(scaling)}


def _checked(scaling: Unscaled, where: str) -> Unscaled:
    """Refuse numbers that no scaling can have."""
    numbers = asdict(scaling)
    for key, value in numbers.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise Refusal(f"{where}: {key} is {value!r}; it is a number above 0")
    if numbers.get("factor", 1) < 1:
        raise Refusal(f"{where}: factor is {numbers['factor']}; it says how much longer texts may be: 1 or more")
    if isinstance(scaling, Llama3) and scaling.low_freq_factor >= scaling.high_freq_factor:
        raise Refusal(
            f"{where}: low_freq_factor {scaling.low_freq_factor} is not below high_freq_factor"
            f" {scaling.high_freq_factor}"
        )
    return scaling
