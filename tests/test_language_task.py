"""`recipes.language.next_token`: what its loss takes."""

import pytest
import torch

from recipes.language.next_token import NextToken
from trainer import BadData


@pytest.mark.parametrize(("output", "target"), [((6, 10), (6,)), ((2, 3, 5), (2, 4)), ((2, 3, 5), (2,))])
def test_a_network_or_data_of_another_kind_is_said(output: tuple[int, ...], target: tuple[int, ...]) -> None:
    with pytest.raises(
        BadData, match=r"the network gives .*; task=language takes scores \(samples, tokens, vocabulary\)"
    ):
        NextToken().loss(torch.zeros(output), torch.zeros(target, dtype=torch.int64))
