"""Who owns which tensor, and which of them travel together."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from trainer.parallel.parameter_owners import assign_owners, make_owner_buckets


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


def parameters(*sizes: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]


def test_every_parameter_is_in_one_bucket_of_its_owner_and_type() -> None:
    some = [*parameters(5, 3, 8, 1, 1, 100), *parameters(2, 2, dtype=torch.float64)]
    owner: dict[Tensor, int] = dict(zip(some, [0, 1, 0, 1, 0, 0, 0, 1], strict=True))
    made = make_owner_buckets(some, list(owner.values()), 40)
    assert sorted(id(one) for bucket in made for one in bucket.parameters) == sorted(map(id, some))
    for bucket in made:
        assert {owner[one] for one in bucket.parameters} == {bucket.owner}
        assert len({one.dtype for one in bucket.parameters}) == 1
        # one that is larger than a bucket travels alone
        assert len(bucket.parameters) == 1 or sum(one.nbytes for one in bucket.parameters) <= 40


def test_buckets_stand_in_the_order_in_which_a_backward_fills_them() -> None:
    some = parameters(1, 2, 3, 4, 5, 6)
    made = make_owner_buckets(some, [0, 1, 1, 0, 1, 1], 2**20)
    # a backward comes to 6 first and to 1 last; rank 1's bucket has its last one, 2, before rank 0's has 1
    assert [[one.numel() for one in bucket.parameters] for bucket in made] == [[6, 5, 3, 2], [4, 1]]
