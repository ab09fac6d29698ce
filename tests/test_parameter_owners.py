"""Who owns which tensor."""

from __future__ import annotations

import random

import pytest

from trainer.parallel.parameter_owners import assign_owners


@pytest.mark.parametrize("ranks", [1, 2, 3, 100])
def test_no_rank_owns_more_than_the_largest_tensor_above_another(ranks: int) -> None:
    for seed in range(5):
        draw = random.Random(seed)
        sizes = [draw.choice([1, 64, 64, 4096, draw.randrange(1, 10**6)]) for _ in range(draw.randrange(1, 60))]
        owner = assign_owners(sizes, ranks)
        assert owner == assign_owners(sizes, ranks)
        loads = [sum(size for size, who in zip(sizes, owner, strict=True) if who == rank) for rank in range(ranks)]
        assert max(loads) - min(loads) <= max(sizes)
    assert assign_owners([], ranks) == []
    if ranks == 3:  # those of one size go round
        assert assign_owners([7] * 6, ranks) == [0, 1, 2, 0, 1, 2]
