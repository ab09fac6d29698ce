from math import ceil

import pytest

from trainer.configuration.compose import compose
from trainer.configuration.schema import parse_settings
from trainer.data.sampler import split_evenly
from trainer.jobs.batch_sizes import BatchSizes, compute_length, divide_batch, more_micro_batches
from trainer.messages import Refusal


def test_a_global_batch_is_dealt_to_ranks_and_micro_batches() -> None:
    assert divide_batch(128, 4, 2, None) == BatchSizes(128, micro_batches=2, ranks=4)
    assert divide_batch(128, 4, 1, micro_batch=8) == BatchSizes(128, micro_batches=4, ranks=4)
    assert str(divide_batch(128, 2, 2, None)) == "32 samples × 2 micro-batches × 2 data ranks = global batch 128"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((100, 8, 4, None), ["100 / 8 data ranks / 4 micro-batches", "96 or 128", "; or loop.uneven=true"]),
        ((128, 3, 1, None), ["128 / 3 data ranks", "126 or 129; or loop.uneven=true"]),
        ((2, 3, 1, None), ["loop.global_batch=3"]),
        ((128, 2, 3, None), ["126 or 132", "loop.micro_batches=2 or 4"]),
        ((128, 2, 1, 24), ["loop.micro_batch 24", "96 or 144", "loop.micro_batch=16 or 32; or loop.uneven=true"]),
    ],
)
def test_what_is_not_whole_is_refused_with_the_nearest_that_is(words: tuple, said: list[str]) -> None:
    with pytest.raises(Refusal) as refused:
        divide_batch(*words)
    assert all(part in str(refused.value) for part in said), str(refused.value)


def test_uneven_shares_are_named_only_where_they_would_do() -> None:
    for words in ((2, 3, 1, None), (10, 4, 3, None), (50, 3, 1, 1)):
        with pytest.raises(Refusal) as refused:
            divide_batch(*words)
        assert "uneven" not in str(refused.value)


def test_uneven_shares_differ_by_at_most_one_sample() -> None:
    assert str(divide_batch(128, 3, 1, None, uneven=True)) == (
        "42 to 43 samples × 1 micro-batch × 3 data ranks = global batch 128"
    )
    assert str(divide_batch(128, 3, 4, None, uneven=True)) == (
        "10 to 11 samples × 4 micro-batches × 3 data ranks = global batch 128"
    )
    assert str(divide_batch(128, 2, 2, None, uneven=True)) == str(divide_batch(128, 2, 2, None))
    assert divide_batch(7, 7, 1, None, uneven=True).largest == 1


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("local", [2, 3, 7, 64])
def test_the_size_of_an_uneven_micro_batch_is_the_most_that_one_has(ranks: int, local: int) -> None:
    batches = divide_batch(50, ranks, 1, local, uneven=True)
    assert batches.largest <= local
    assert batches.smallest >= 1
    assert batches.micro_batches == ceil(ceil(50 / ranks) / local)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            (2, 3, 1, None),
            "2 / 3 data ranks / 1 micro-batch leaves some without a sample; nearest: loop.global_batch=3",
        ),
        ((10, 4, 3, None), "nearest: loop.global_batch=12; or loop.micro_batches=1 or 2"),
        ((50, 3, 1, 1), "loop.micro_batch 1 leaves .* loop.global_batch=48 or 51; or loop.micro_batch=2 or 3"),
    ],
)
def test_every_uneven_micro_batch_needs_a_sample(words: tuple[int, int, int, int | None], said: str) -> None:
    with pytest.raises(Refusal, match=said + "$"):
        divide_batch(*words, uneven=True)


def test_the_command_line_asks_for_it() -> None:
    assert not parse_settings(compose([])).loop.uneven
    assert parse_settings(compose(["loop.uneven=true"])).loop.uneven
    with pytest.raises(Refusal, match=r"loop.uneven=true and compile.mode=default: .*; set compile.mode=null"):
        parse_settings(compose(["loop.uneven=true", "compile.mode=default"]))


def test_parts_of_a_step_differ_by_at_most_one_larger_first() -> None:
    assert split_evenly(48, 4) == [range(12), range(12, 24), range(24, 36), range(36, 48)]
    assert [len(part) for part in split_evenly(50, 4)] == [13, 13, 12, 12]
    assert [sample for part in split_evenly(50, 7) for sample in part] == list(range(50))


def test_the_next_number_of_micro_batches_halves_nothing_that_is_one() -> None:
    assert more_micro_batches(BatchSizes(64, micro_batches=1, ranks=4)) == 2
    assert more_micro_batches(BatchSizes(5, micro_batches=1, ranks=1)) == 5
    assert more_micro_batches(BatchSizes(8, micro_batches=8, ranks=1)) is None


def test_with_uneven_shares_the_next_number_need_not_divide() -> None:
    assert more_micro_batches(divide_batch(5, 1, 1, None, uneven=True)) == 2
    assert more_micro_batches(divide_batch(128, 3, 1, None, uneven=True)) == 2
    assert more_micro_batches(divide_batch(50, 1, 10, None, uneven=True)) == 13  # 11 and 12 would leave one of 5
    assert more_micro_batches(divide_batch(50, 3, 13, None, uneven=True)) is None  # 17 × 3 > 50
    assert more_micro_batches(divide_batch(48, 3, 16, None, uneven=True)) is None


def test_the_length_is_the_bound_that_is_reached_first() -> None:
    assert compute_length(1437, 128, 10, None, unit=1).steps == 110
    assert compute_length(1437, 128, 10, 50, unit=1).steps == 50
    assert compute_length(1437, 128, None, 500, unit=1).steps == 500
    assert compute_length(1437, 128, 1, None, unit=1).left_out == 29


@pytest.mark.parametrize(("samples", "said"), [(0, "empty"), (100, "100 samples")])
def test_too_little_data_is_refused(samples: int, said: str) -> None:
    with pytest.raises(Refusal, match=said):
        compute_length(samples, 128, 1, None, unit=1)
    with pytest.raises(Refusal, match=r"has 81 samples, .* at most 80 fits"):  # and can be dealt to two
        compute_length(81, 128, 1, None, unit=2)
    with pytest.raises(Refusal, match=r"; the smallest that these processes can divide is 4"):
        compute_length(3, 128, 1, None, unit=4)
