"""What a thread of autograd's lacks."""

import pytest
import torch
from torch import nn

from trainer import gather
from trainer.parallel.activation_checkpointing import apply_activation_checkpointing


class Gathering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gather(self.inner(x)).relu()


def test_gather_in_a_unit_that_is_computed_again_is_refused() -> None:
    """On a GPU the second time runs in a thread of autograd's, where it would give this rank's rows alone."""
    network = nn.Sequential(Gathering())
    apply_activation_checkpointing(network, ["0"], "units")
    loss = network(torch.randn(2, 4)).sum()
    with pytest.raises(ValueError, match="in a method of the task"):
        loss.backward()
