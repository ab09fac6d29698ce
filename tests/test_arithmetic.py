import pytest

from trainer.arithmetic import Batches, deal, measure, more_micro_batches
from trainer.refusal import Refusal


def test_a_global_batch_is_dealt_to_ranks_and_micro_batches() -> None:
    assert deal(128, 4, 2, None) == Batches(local=16, micro_batches=2, ranks=4)
    assert deal(128, 4, 1, local=8) == Batches(local=8, micro_batches=4, ranks=4)
    assert str(deal(128, 2, 2, None)) == "32 samples × 2 micro-batches × 2 data ranks = global batch 128"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((100, 8, 4, None), ["100 / 8 data ranks / 4 micro-batches", "96 or 128"]),
        ((128, 3, 1, None), ["128 / 3 data ranks", "126 or 129"]),
        ((2, 3, 1, None), ["loop.global_batch=3"]),
        ((128, 2, 3, None), ["126 or 132", "loop.micro_batches=2 or 4"]),
        ((128, 2, 1, 24), ["loop.micro_batch 24", "96 or 144", "loop.micro_batch=16 or 32"]),
    ],
)
def test_what_is_not_whole_is_refused_with_the_nearest_that_is(words: tuple, said: list[str]) -> None:
    with pytest.raises(Refusal) as refused:
        deal(*words)
    assert all(part in str(refused.value) for part in said), str(refused.value)


def test_the_next_number_of_micro_batches_halves_nothing_that_is_one() -> None:
    assert more_micro_batches(Batches(local=16, micro_batches=1, ranks=4)) == 2
    assert more_micro_batches(Batches(local=5, micro_batches=1, ranks=1)) == 5
    assert more_micro_batches(Batches(local=1, micro_batches=8, ranks=1)) is None


def test_the_length_is_the_bound_that_is_reached_first() -> None:
    assert measure(1437, 128, 10, None).steps == 110
    assert measure(1437, 128, 10, 50).steps == 50
    assert measure(1437, 128, None, 500).steps == 500
    assert measure(1437, 128, 1, None).left_out == 29


@pytest.mark.parametrize(("samples", "said"), [(0, "empty"), (100, "100 samples")])
def test_too_little_data_is_refused(samples: int, said: str) -> None:
    with pytest.raises(Refusal, match=said):
        measure(samples, 128, 1, None)
