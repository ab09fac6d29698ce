"""What a task returns as its loss: one number, or parts that add up to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainer.messages import Refusal
from trainer.strategies.loss import name_losses, total_loss

ONE = torch.tensor(1.0)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (torch.ones(3), r"what it returns is of shape \(3,\)"),
        (torch.ones(1), r"what it returns is of shape \(1,\)"),
        (None, "what it returns is of type NoneType"),
        ({}, "what it returns is of type dict"),
        ({"a": ONE, "b": 0.0}, "its part b is of type float"),
        ({"a": ONE, "b": torch.ones(2)}, r"its part b is of shape \(2,\)"),
        ({"loss": ONE, "a": ONE}, "a part may not be called loss"),
        ({"lr": ONE, "a": ONE}, "a part may not be called lr, as another number of a training line is"),
    ],
)
def test_a_loss_that_is_no_number_is_refused(loss: Any, said: str) -> None:
    with pytest.raises(Refusal, match=f"Task.loss: {said}"):
        name_losses(loss)


def test_parts_add_up_and_an_evaluation_may_have_none() -> None:
    assert name_losses({"a": ONE, "b": 2 * ONE}) == {"a": ONE, "b": 2 * ONE, "loss": torch.tensor(3.0)}
    assert total_loss(0) == 0  # type: ignore[arg-type]
