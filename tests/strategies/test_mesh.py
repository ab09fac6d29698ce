"""Degrees that multiply to the processes, and words where they do not."""

from __future__ import annotations

from typing import Any

import pytest

from trainer import Refusal
from trainer.parallel.device_mesh import resolve_degrees


def test_an_open_degree_takes_what_the_others_leave() -> None:
    assert resolve_degrees(8, {"replicate": 2, "shard": None, "tensor": 2}) == {"replicate": 2, "shard": 2, "tensor": 2}
    assert resolve_degrees(1, {"replicate": 1, "shard": None}) == {"replicate": 1, "shard": 1}
    assert resolve_degrees(16, {"pipe": 2, "replicate": 1, "shard": 4, "tensor": 2})["shard"] == 4


@pytest.mark.parametrize(
    ("size", "wanted", "said"),
    [
        (
            6,
            {"replicate": 2, "shard": 2, "tensor": 1},
            "strategy.replicate 2 × strategy.shard 2 × strategy.tensor 1 = 4, but 6 processes were started;"
            " nearest: strategy.shard=3, or strategy.replicate=3; or start 4 processes",
        ),
        (
            1,
            {"replicate": 2, "shard": 3},
            "= 6, but 1 process was started; nearest: strategy.replicate=1 strategy.shard=1",
        ),
        (8, {"replicate": 0, "shard": None}, "strategy.replicate=0: a degree is 1 (nothing) or more"),
    ],
)
def test_degrees_that_do_not_multiply_are_refused_with_the_sum(size: int, wanted: Any, said: str) -> None:
    with pytest.raises(Refusal) as refused:
        resolve_degrees(size, wanted)
    assert said in str(refused.value)
