"""What many ranks share on one machine: cores; and what a thread of autograd's lacks."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from trainer import gather
from trainer.data import dataset_reader
from trainer.parallel.activation_checkpointing import apply_activation_checkpointing


@pytest.mark.parametrize(
    ("own", "others", "wanted"),
    [
        (range(8), [range(8 * rank, 8 * rank + 8) for rank in range(1, 4)], 8),  # each is bound to cores of its own
        (range(16), [range(16), range(16, 32), range(16, 32)], 8),  # two share a half of the machine
        (range(32), [range(32)] * 3, 8),  # nobody is bound
        (range(32), [range(32)] * 5, 8),  # other children of the parent: as if nobody were
    ],
)
def test_cores_are_divided_once(monkeypatch: pytest.MonkeyPatch, own: range, others: list[range], wanted: int) -> None:
    of = {0: set(own), 1: set(own), **{pid: set(cores) for pid, cores in enumerate(others, 2)}}
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(os, "sched_getaffinity", of.__getitem__)
    monkeypatch.setattr(dataset_reader.Path, "read_text", lambda path: " ".join(str(pid) for pid in of if pid))
    assert dataset_reader._count_cores() == wanted


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
