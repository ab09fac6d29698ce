"""Networks without values, which remember how their values come about."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class NotDeferrable(Exception):
    """A constructor needs values; it must be run the ordinary way."""


def deferred(make: Callable[[], nn.Module]) -> nn.Module:
    """Build on the meta device."""
    raise NotDeferrable("not yet")


def is_deferred(network: nn.Module) -> bool:
    """Was it built by `deferred`?"""
    return False


def materialise(network: nn.Module, take: Callable[[str, Tensor], None]) -> None:
    """Compute the values in the order of construction."""
