"""From what people have to what a network is called with: an evaluation's own preparation, as a module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Preparation:
    """A module that prepares raw inputs as an evaluation prepares its samples; an exported program contains it.

    `torch.export` must be able to follow the module, for any number of samples.
    """

    module: nn.Module  # raw inputs → inputs of the network
    example: Any  # raw inputs of two samples
    raw: str  # what raw inputs are, for people: "uint8 (B, 3, H, W)"
    ready: str  # what the module makes of them, for who prepares by himself
    facts: Mapping[str, Any] = field(default_factory=dict)  # mean, std, image_size, as JSON takes them
    processor: Mapping[str, Any] = field(default_factory=dict)  # the same as transformers' preprocessor_config.json
