"""The stream of data: one global order, whoever reads it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from trainer import Data, Refusal, Strategy
from trainer.data.loader import EvalLoader, LoaderOptions, TrainLoader, digest_indices
from trainer.parallel.ranks import Ranks
from trainer.strategies.machine import Machine


class Numbers(Dataset):
    """Item i is ({"x": i}, i); random items add what the three global generators say."""

    def __init__(self, size: int, noisy: bool = False) -> None:
        self.size, self.noisy = size, noisy

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        noise = random.random() + numpy.random.rand() + float(torch.rand(())) if self.noisy else 0.0
        return {"x": torch.tensor([index + noise], dtype=torch.float64)}, index


class InMemory(Numbers):
    def batch(self, indices: Tensor) -> Any:
        return {"x": indices.unsqueeze(1).double()}, indices.clone()


class NumberData(Data):
    """Augmented by numbers of the sample."""

    def train(self) -> Any:
        raise NotImplementedError

    def augment(self, inputs: Any, targets: Any, random: Any, training: bool) -> Any:
        return {"x": inputs["x"] + (random.uniform(len(targets), 1) if training else 0)}, targets


class OwnOrder(NumberData):
    def __init__(self, own: Any) -> None:
        self.own = own

    def order(self, epoch: int, generator: torch.Generator) -> Tensor:
        return self.own(epoch, generator)


class Slice(Ranks):
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def sampler(rank: int = 0, size: int = 1, seed: int = 5) -> Any:
    """The samples of one rank, as a strategy deals them."""
    strategy = Strategy(machine=Machine(seed=seed, device="cpu"))
    strategy.__enter__()
    strategy.data_group = Slice(rank, size)
    return strategy.slice


def stream(
    dataset: Any, rank: int = 0, size: int = 1, slices: int = 1, *, data: Any = None, workers: int = 0, seed: int = 5
) -> TrainLoader:
    options = LoaderOptions(workers=workers, timeout=30 if workers else 0)
    return TrainLoader(data or NumberData(), dataset, sampler(rank, size, seed), 12, slices, options)


def plain(dataset: Any, batch: int = 2, **words: Any) -> Any:
    """One batch of these first samples, which nobody augments or puts in another order."""

    class FileOrder(Data):
        def order(self, epoch: int, generator: torch.Generator) -> Tensor:
            return torch.arange(4)

    loader = TrainLoader(FileOrder(), dataset, sampler(), batch, 1, LoaderOptions(**{"workers": 0} | words))
    return next(loader.epoch(0))[0]


def read(one: TrainLoader, epoch: int = 0, start: int = 0) -> list[list[Any]]:
    return [
        [(i, float(x)) for batch in batches for i, x in zip(batch.indices.tolist(), batch.inputs["x"], strict=True)]
        for batches in one.epoch(epoch, start)
    ]


def order_of(dataset: Any, epoch: int = 0) -> Tensor:
    """The samples of an epoch, as one process reads them."""
    return torch.cat([batch.indices for batches in stream(dataset).epoch(epoch) for batch in batches])


# ---------------------------------------------------------------------------- whatever ranks and micro-batches


@pytest.mark.parametrize("kind", [Numbers, InMemory])
@pytest.mark.parametrize(("size", "slices"), [(1, 1), (1, 3), (2, 2), (3, 4), (5, 2), (7, 1), (12, 1)])
def test_every_micro_batch_holds_the_same_samples_with_the_same_augmentation(
    kind: type, size: int, slices: int
) -> None:
    """Dealt to ranks in turn; what does not divide is shared out to within one sample."""
    alone = list(stream(kind(50), slices=slices).epoch(1))
    shared = [list(stream(kind(50), rank, size, slices).epoch(1)) for rank in range(size)]
    whole = [dict(step) for step in read(stream(kind(50)), 1)]
    order = order_of(kind(50), 1)
    assert len(alone) == 4  # floor(50 / 12); two samples are left out
    for step in range(4):
        for rank in range(size):
            own = torch.cat([batch.indices for batch in shared[rank][step]])
            assert own.tolist() == order[step * 12 : step * 12 + 12][rank::size].tolist()
        for part in range(slices):
            held = [shared[rank][step][part] for rank in range(size)]
            indices = torch.cat([batch.indices for batch in held])
            assert sorted(indices.tolist()) == sorted(alone[step][part].indices.tolist())
            assert all(batch.span == alone[step][part].span and batch.total == 12 for batch in held)
            seen = zip(indices.tolist(), torch.cat([batch.inputs["x"] for batch in held])[:, 0].tolist(), strict=True)
            assert all(whole[step][index] == x for index, x in seen)
        sizes = [len(batch.indices) for rank in range(size) for batch in shared[rank][step]]
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1


class PairedData(NumberData):
    def mix(self, inputs: Any, targets: Any, others: Any, other_targets: Any, random: Any) -> Any:
        draw = random.uniform(len(targets), 1)
        return {"x": torch.cat((inputs["x"], others["x"], draw), 1)}, torch.stack((targets, other_targets), 1)


@pytest.mark.parametrize(
    ("kind", "size", "slices"), [(Numbers, 1, 2), (InMemory, 2, 1), (Numbers, 3, 2), (InMemory, 5, 2), (Numbers, 5, 1)]
)
def test_the_partner_of_a_sample_is_half_a_global_batch_away(kind: type, size: int, slices: int) -> None:
    order = order_of(kind(50), 1).view(4, 12)
    partner = dict(zip(order.flatten().tolist(), order.roll(-6, 1).flatten().tolist(), strict=True))
    augmented = {i: x for step in read(stream(kind(50)), 1) for i, x in step}  # not mixed

    def mixed(rank: int, ranks: int, cuts: int) -> dict[int, list[float]]:
        found: dict[int, list[float]] = {}
        for batches in stream(kind(50), rank, ranks, cuts, data=PairedData()).epoch(1):
            for batch in batches:
                assert batch.targets.tolist() == [[i, partner[i]] for i in batch.indices.tolist()]
                found |= dict(zip(batch.indices.tolist(), batch.inputs["x"].tolist(), strict=True))
        return found

    alone = mixed(0, 1, 1)
    assert {i: x[:2] for i, x in alone.items()} == {i: [x, augmented[partner[i]]] for i, x in augmented.items()}
    assert len({x[2] for x in alone.values()}) == 48  # each draws for itself
    shared = [mixed(rank, size, slices) for rank in range(size)]
    assert {i: x for part in shared for i, x in part.items()} == alone
    assert sum(map(len, shared)) == 48
    assert all(len(stream(kind(50), rank, size, data=PairedData()).example()[1][0]) == 2 for rank in range(size))


@pytest.mark.parametrize(("before", "after"), [(1, 2), (3, 5), (5, 1), (2, 7)])
def test_another_number_of_ranks_goes_on_in_the_middle_of_an_epoch(before: int, after: int) -> None:
    def steps(size: int, start: int) -> list[list[Any]]:
        shared = [read(stream(InMemory(50), rank, size), 3, start) for rank in range(size)]
        return [sorted(pair for one in step for pair in one) for step in zip(*shared, strict=True)]

    assert steps(after, 24) == steps(before, 0)[2:]


@pytest.mark.parametrize("kind", [Numbers, InMemory])
@pytest.mark.parametrize(("count", "size", "slices"), [(1, 4, 2), (3, 2, 1), (7, 4, 3), (24, 2, 3), (25, 4, 1)])
def test_evaluation_gives_every_sample_once_in_as_many_calls_on_every_rank(
    kind: type, count: int, size: int, slices: int
) -> None:
    seen, calls = [], set()
    for rank in range(size):
        loader = EvalLoader(NumberData(), kind(count), sampler(rank, size), 8, slices, LoaderOptions(workers=0))
        batches = list(loader.batches())
        calls.add(tuple(batch.span for batch, _ in batches))
        for batch, valid in batches:
            assert valid == len(batch.span[(rank - batch.span.start) % size :: size])
            assert max(valid, 1) == len(batch.indices) <= -(-8 // (size * slices))
            assert len(batch.inputs["x"]) == len(batch.targets) == len(batch.indices)
            seen += [float(x) for x in batch.inputs["x"][:valid]]  # as they are: nothing is augmented here
    assert sorted(seen) == list(range(count))
    assert len(calls) == 1


# ------------------------------------------------------------------------------------------------------- orders


def test_epochs_differ_and_leave_out_other_samples() -> None:
    one, other, seeded = (read(stream(InMemory(50), seed=seed), epoch) for epoch, seed in ((0, 5), (1, 5), (0, 6)))
    left = [set(range(50)) - {i for step in epoch for i, _ in step} for epoch in (one, other)]
    assert [len(rest) for rest in left] == [2, 2]
    assert left[0] != left[1]
    assert {i for i, _ in one[0]} != {i for i, _ in seeded[0]}
    # so a digest of the samples tells epochs apart
    digests = [digest_indices(torch.tensor([i for i, _ in step])) for step in (*one, *other)]
    assert len(set(map(int, digests))) == 8


def test_an_order_is_as_it_always_was() -> None:
    """Other numbers would be another curve of every run, and a resumed one would see samples twice."""
    assert order_of(Numbers(50), 1)[:5].tolist() == [35, 5, 37, 28, 20]
    # some millions are dealt at once
    loader = TrainLoader(Data(), InMemory(2**22 + 2**20 + 3), sampler(), 2**20, 1, LoaderOptions(workers=0))
    drawn = torch.cat([batch.indices for (batch,) in loader.epoch(0)])
    assert drawn.numel() == 5 * 2**20
    assert int(drawn.bincount().max()) == 1
    # of more than are permuted in memory the places are enciphered: the last ones of an epoch
    size = 10**8 + 1
    loader = TrainLoader(Data(), InMemory(size), sampler(), 1000, 1, LoaderOptions(workers=0))
    one, again, other = (
        torch.cat([batch.indices for (batch,) in loader.epoch(epoch, start)])
        for epoch, start in ((1, 99_900_000), (1, 99_950_000), (2, 99_950_000))
    )
    assert one.unique().numel() == len(one) == 100_000
    assert 0 <= int(one.min()) < 10**6 < 99 * 10**6 < int(one.max()) < size
    assert torch.equal(one[50_000:], again)
    assert not torch.equal(again, other)


def test_an_order_of_ones_own_may_repeat_samples_and_decides_the_length() -> None:
    data = OwnOrder(lambda epoch, generator: torch.randint(0, 10, (37,), generator=generator))
    one = stream(InMemory(10), data=data)
    assert (one.length, one.steps_per_epoch) == (37, 3)
    assert read(one) == read(stream(InMemory(10), data=data)) != read(one, 1)


@pytest.mark.parametrize("indices", [torch.tensor([0, 10]), torch.tensor([-1]), torch.tensor([[1]])])
def test_an_order_that_is_none_is_refused(indices: Tensor) -> None:
    with pytest.raises(Refusal, match=r"OwnOrder.order\(0\) must be a list of indices in 0..9"):
        stream(Numbers(10), data=OwnOrder(lambda epoch, generator: indices))


# ---------------------------------------------------------------------------------------- random, by the sample


def test_augmentation_follows_from_seed_epoch_and_sample() -> None:
    def noise(epoch: int, seed: int) -> set[tuple[int, float]]:
        return {(i, x - i) for step in read(stream(InMemory(12), seed=seed), epoch) for i, x in step}

    one, *others = noise(1, 5), noise(2, 5), noise(1, 6)
    assert one == noise(1, 5)
    assert len({x for _, x in one}) == len(one) == 12
    assert all(one.isdisjoint(other) for other in others)


@pytest.mark.parametrize("workers", [0, 2])
def test_random_items_depend_on_seed_epoch_and_index_alone(workers: int) -> None:
    def generators() -> tuple[float, ...]:
        return random.random(), numpy.random.rand(), float(torch.rand(()))

    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    expected = generators()
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    noisy = Numbers(50, noisy=True)
    alone = {pair for step in read(stream(noisy)) for pair in step}
    shared = [read(stream(noisy, rank, 2, workers=workers)) for rank in range(2)]
    assert {pair for part in shared for step in part for pair in step} == alone
    assert {pair for step in read(stream(noisy), 1) for pair in step}.isdisjoint(alone)
    assert generators() == expected  # a loader draws nothing of the run's own


# ------------------------------------------------------------------------------------------------------ workers


def test_an_error_of_a_data_set_that_would_be_lost_on_its_way_is_told_with_its_sample() -> None:
    class Lost(Exception):
        """Nobody finds a class of this name in another process."""

    class Broken(Numbers):
        def __getitem__(self, index: int) -> Any:
            raise (StopIteration if self.noisy else Lost)("a bad record")

    for noisy, name in ((True, "StopIteration"), (False, "Lost")):
        for workers in (0, 1):
            with pytest.raises(RuntimeError, match=rf"data: sample 0 raised .*{name}: a bad record"):
                plain(Broken(4, noisy=noisy), workers=workers, timeout=30 if workers else 0)


# -------------------------------------------------------------------------------------------- kinds of samples


@pytest.mark.parametrize(("width", "batch"), [(16, 8), (5, 8), (16, 3), (2**16, 8)])
def test_a_data_set_of_tensors_is_read_in_whole_batches_with_the_same_bits(width: int, batch: int) -> None:
    class ItemByItem(TensorDataset):
        pass

    columns = torch.randn(100, width), torch.arange(100)
    options = LoaderOptions(workers=0)
    items, whole = (
        [one for (one,) in TrainLoader(Data(), kind(*columns), sampler(), batch, 1, options).epoch(0)]
        for kind in (ItemByItem, TensorDataset)
    )
    for one, other in zip(items, whole, strict=True):
        assert torch.equal(one.inputs, other.inputs)
        assert torch.equal(one.targets, other.targets)
        # or a product may be rounded in another way than that of a tensor by itself, which a resumed run may have
        assert other.inputs.data_ptr() % 64 == 0
        weight = torch.ones(width, requires_grad=True)
        other.inputs.add_(weight).sum().backward()  # a network may change its inputs in place
        assert weight.grad is not None
    many = len({one.inputs.untyped_storage().data_ptr() for one in whole}) < len(whole)
    assert many == (width == 16 and batch == 8)


class Pictures(Dataset):
    """Three channels of a number that says which item it is; as many boxes as it has of them, 1 to 4."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return torch.full((3, 4 + index % 2, 4), float(index)), {"boxes": torch.full((1 + index % 4, 4), float(index))}


class AtOnce(Pictures):
    def batch(self, indices: Tensor) -> Any:
        return tuple(zip(*(self[index] for index in indices.tolist()), strict=True))


class Lists(Data):
    def collate(self, items: list[Any]) -> Any:
        return tuple(zip(*items, strict=True))

    def augment(self, inputs: Any, targets: Any, random: Any, training: bool) -> Any:
        shift = random.uniform(len(inputs)) if training else torch.zeros(len(inputs))
        return [x + s for x, s in zip(inputs, shift, strict=True)], targets


@pytest.mark.parametrize(("kind", "size"), [(Pictures, 1), (AtOnce, 2), (Pictures, 3)])
def test_a_micro_batch_of_lists_holds_its_own_samples_whole(kind: type, size: int) -> None:
    """Three images of three channels in three micro-batches are no channels, and nobody gets all of them."""
    seen: dict[int, float] = {}
    for slices, rank in ((slices, rank) for slices in (1, 2, 4) for rank in range(size)):
        for batches in stream(kind(), rank, size, slices, data=Lists()).epoch(0):
            assert len(batches) == slices
            for batch in batches:
                assert len(batch.inputs) == len(batch.targets) == len(batch.indices)
                for index, image, target in zip(batch.indices.tolist(), batch.inputs, batch.targets, strict=True):
                    assert image.shape == (3, 4 + index % 2, 4)
                    assert target["boxes"].tolist() == [[index] * 4] * (1 + index % 4)
                    assert seen.setdefault(index, float(image[0, 0, 0])) == float(image[0, 0, 0])
    assert all(index < value < index + 1 for index, value in seen.items())
    # an evaluation, in which the last batch leaves a rank without a sample
    found = []
    for rank in range(size):
        loader = EvalLoader(Lists(), kind(), sampler(rank, size), 7, 3, LoaderOptions(workers=0))
        for batch, valid in loader.batches():
            assert len(batch.inputs) == len(batch.targets) == len(batch.indices) == max(valid, 1)
            assert [int(x[0, 0, 0]) for x in batch.inputs] == batch.indices.tolist()
            found += batch.indices[:valid].tolist()
    assert sorted(found) == list(range(24))


def test_padding_goes_to_the_longest_of_a_micro_batch_but_of_a_pipeline_all_are_alike() -> None:
    class Padded(Data):
        def collate(self, items: list[Any]) -> Any:
            longest = 1 + max(index % 5 for _, index in items)
            return torch.zeros(len(items), longest), torch.tensor([index for _, index in items])

    for alike in (False, True):
        own = replace(sampler(), same_shape=alike)
        for batches in TrainLoader(Padded(), Numbers(50), own, 10, 5).epoch(0):
            whole = torch.cat([batch.indices for batch in batches])
            for batch in batches:
                assert batch.targets.tolist() == batch.indices.tolist()
                longest = (whole if alike else batch.indices) % 5
                assert batch.inputs.shape == (2, 1 + int(longest.max()))


def test_what_cannot_be_cut_is_refused_where_it_must_be_cut() -> None:
    class Pairs(Lists):
        def mix(self, *_: Any) -> Any:
            raise AssertionError

    with pytest.raises(Refusal, match=r"inputs.0 has the shape \(3, .*strategy=ddp and strategy=fsdp"):
        next(TrainLoader(Lists(), Pictures(), replace(sampler(), same_shape=True), 12, 4).epoch(0))
    with pytest.raises(Refusal, match=r"rows of its tensors \(B, …\), and of 12 samples inputs.0 has the shape \(3,"):
        next(TrainLoader(Pairs(), Pictures(), sampler(), 12, 1).epoch(0))


class Flow(IterableDataset):
    def __iter__(self) -> Any:
        return iter(())


class Endless(Dataset):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        (Flow(), "iterable only"),
        (Endless(), "no len"),
        ([(torch.zeros(3), torch.zeros(3), 0)] * 4, r"a sample is \(input, target\), and this set gives 3 parts"),
        ([{"image": torch.zeros(3), "label": 0}] * 4, "gives a dict of image, label"),
        ([torch.zeros(3)] * 4, "gives a Tensor alone"),  # whose batch of two would come apart into two rows
        (TensorDataset(torch.zeros(4, 3)), "gives 1 part"),
    ],
)
def test_what_is_no_set_of_inputs_and_targets_is_refused_in_words(dataset: Any, said: str) -> None:
    with pytest.raises(Refusal, match=said):
        plain(dataset)
