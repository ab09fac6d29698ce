"""What autograd and torch.func are doing right now: torch 2.11 to 2.15 tell it by these private names alone."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch


def in_backward() -> bool:
    """Does autograd's engine call this code?"""
    return torch._C._current_graph_task_id() != -1


def outside_transforms() -> AbstractContextManager[Any]:
    """Inside, new tensors belong to no transform (`torch.func.grad`) that is under way."""
    return torch._C._DisableFuncTorch()
