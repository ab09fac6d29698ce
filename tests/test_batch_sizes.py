"""A global batch is dealt to ranks and micro-batches, and what cannot be dealt is refused with what can."""

from math import ceil

import pytest

from tests.run import run
from trainer import Refusal
from trainer.jobs.batch_sizes import compute_length, divide_batch

DEALT = {
    (128, 2, 2, None): "32 samples × 2 micro-batches × 2 data ranks = global batch 128",
    (128, 4, 1, 8): "8 samples × 4 micro-batches × 4 data ranks = global batch 128",
}
UNEVEN = {
    (128, 3, 1, None): "42 to 43 samples × 1 micro-batch × 3 data ranks = global batch 128",
    (128, 3, 4, None): "10 to 11 samples × 4 micro-batches × 3 data ranks = global batch 128",
    (128, 2, 2, None): DEALT[128, 2, 2, None],
}


def test_a_global_batch_is_dealt_to_ranks_and_micro_batches() -> None:
    for words, said in DEALT.items():
        assert str(divide_batch(*words)) == said
    for words, said in UNEVEN.items():  # shares differ by at most one sample
        assert str(divide_batch(*words, uneven=True)) == said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((100, 8, 4, None), ["100 / 8 data ranks / 4 micro-batches", "96 or 128", "; or loop.uneven=true"]),
        ((128, 3, 1, None), ["128 / 3 data ranks", "126 or 129; or loop.uneven=true"]),
        ((128, 2, 3, None), ["126 or 132", "loop.micro_batches=2 or 4"]),
        ((128, 2, 1, 24), ["loop.micro_batch 24", "96 or 144", "loop.micro_batch=16 or 32; or loop.uneven=true"]),
        # uneven shares are named only where they would do
        ((2, 3, 1, None), ["loop.global_batch=3"]),
        ((10, 4, 3, None), []),
        ((50, 3, 1, 1), []),
    ],
)
def test_what_is_not_whole_is_refused_with_the_nearest_that_is(words: tuple, said: list[str]) -> None:
    with pytest.raises(Refusal) as refused:
        divide_batch(*words)
    assert all(part in str(refused.value) for part in said), str(refused.value)
    assert ("uneven" in str(refused.value)) == (words[0] >= 100)


@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("local", [2, 7, 64])
def test_the_size_of_an_uneven_micro_batch_is_the_most_that_one_has(ranks: int, local: int) -> None:
    batches = divide_batch(50, ranks, 1, local, uneven=True)
    assert 1 <= batches.smallest <= batches.largest <= local
    assert batches.micro_batches == ceil(ceil(50 / ranks) / local)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((2, 3, 1, None), "2 / 3 data ranks / 1 micro-batch leaves some .* nearest: loop.global_batch=3"),
        ((10, 4, 3, None), "nearest: loop.global_batch=12; or loop.micro_batches=1 or 2"),
        ((50, 3, 1, 1), "loop.micro_batch 1 leaves .* loop.global_batch=48 or 51; or loop.micro_batch=2 or 3"),
    ],
)
def test_every_uneven_micro_batch_needs_a_sample(words: tuple[int, int, int, int | None], said: str) -> None:
    with pytest.raises(Refusal, match=said + "$"):
        divide_batch(*words, uneven=True)


def test_the_length_is_the_bound_that_is_reached_first() -> None:
    for epochs, steps, reached in ((10, None, 110), (10, 50, 50), (None, 500, 500)):
        assert compute_length(1437, 128, epochs, steps, unit=1).steps == reached
    assert compute_length(1437, 128, 1, None, unit=1).left_out == 29


@pytest.mark.parametrize(
    ("samples", "unit", "said"),
    [
        (0, 1, "empty"),
        (100, 1, "100 samples"),
        (81, 2, r"has 81 samples, .* at most 80 fits"),  # and can be dealt to two
        (3, 4, r"; the smallest that these processes can divide is 4"),
    ],
)
def test_too_little_data_is_refused(samples: int, unit: int, said: str) -> None:
    with pytest.raises(Refusal, match=said):
        compute_length(samples, 128, 1, None, unit=unit)


def test_uneven_shares_are_not_compiled() -> None:
    said = run(["loop.uneven=true", "compile.mode=default"], code=2).out
    assert "loop.uneven=true and compile.mode=default: " in said
    assert "; set compile.mode=null" in said
