"""The norm of a gradient is as exact as its type, however large the gradient; clipping by it: test_optim."""

from __future__ import annotations

import pytest
import torch

from trainer.parallel.gradient_clipping import global_norm


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_norm_of_millions_of_numbers_is_as_exact_as_its_dtype(layout: torch.memory_format) -> None:
    """torch adds up the squares of a whole tensor on a CPU in one chain: five million of them lose three digits."""
    gradient = torch.randn(1000, 50, 10, 10).to(memory_format=layout)
    torch.testing.assert_close(global_norm([gradient]).double(), gradient.double().norm(), rtol=2e-7, atol=0)
    halves = [torch.randn(3, 5), gradient[:500], gradient[500:]]
    whole = torch.cat([half.double().flatten() for half in halves]).norm()
    torch.testing.assert_close(global_norm(halves).double(), whole, rtol=2e-7, atol=0)
