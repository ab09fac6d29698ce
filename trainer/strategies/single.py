"""One process, one device."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.strategies.base import Strategy


@dataclass
class Single(Strategy):
    """One process on one device: what every other strategy must equal."""
