"""Activation checkpointing."""

from __future__ import annotations

from typing import Literal

from torch import nn


def recompute(network: nn.Module, names: list[str], mode: Literal["units", "operators"]) -> None:
    """Each unit keeps its inputs only and is run again in the backward."""
