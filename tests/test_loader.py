"""The stream of data: one global order, whoever reads it."""

from __future__ import annotations

import multiprocessing
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from trainer import Data
from trainer.data import loader, sampler
from trainer.data.dataset_reader import LoaderOptions, make_reader
from trainer.data.loader import EvalLoader, TrainLoader, digest_indices
from trainer.data.rng import SeededDataset
from trainer.data.sampler import EpochOrder, dataset_size
from trainer.data.sampler import RankSampler as Dealt
from trainer.messages import Refusal
from trainer.parallel.ranks import Ranks
from trainer.strategies.base import Strategy
from trainer.strategies.machine import Machine


class Numbers(Dataset):
    """Item i is ({"x": i}, [i, "name"]); random items add what the three global generators say."""

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
    def __init__(self, dataset: Any, order: Any = None) -> None:
        self.dataset, self.own_order = dataset, order

    def order(self, epoch: int, generator: torch.Generator) -> Tensor:
        return self.own_order(epoch, generator) if self.own_order else super().order(epoch, generator)

    def train(self) -> Any:
        return self.dataset

    def augment(self, inputs: Any, targets: Any, random: Any, training: bool) -> Any:
        return {"x": inputs["x"] + (random.uniform(len(targets), 1) if training else 0)}, targets


class Slice(Ranks):
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def stream(
    data: Data, dataset: Any, rank: int = 0, size: int = 1, slices: int = 1, workers: int = 0, seed: int = 5
) -> TrainLoader:
    strategy = Strategy(machine=Machine(seed=seed, device="cpu"))
    strategy.__enter__()
    strategy.data_group = Slice(rank, size)
    return TrainLoader(data, dataset, strategy.slice, 12, slices, LoaderOptions(workers=workers))


def read(one: TrainLoader, epoch: int = 0, start: int = 0) -> list[list[Any]]:
    return [
        [(i, float(x)) for batch in batches for i, x in zip(batch.indices.tolist(), batch.inputs["x"], strict=True)]
        for batches in one.epoch(epoch, start)
    ]


@pytest.mark.parametrize("kind", [Numbers, InMemory])
@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_every_step_holds_the_same_samples_with_the_same_augmentation(kind: type, size: int, slices: int) -> None:
    data = NumberData(kind(50))
    alone = read(stream(data, data.dataset))
    shared = [read(stream(data, data.dataset, rank, size, slices)) for rank in range(size)]
    assert len(alone) == 4  # floor(50 / 12); two samples are left out
    for step, whole in enumerate(alone):
        assert sorted(pair for part in shared for pair in part[step]) == sorted(whole)


@pytest.mark.parametrize("kind", [Numbers, InMemory])
@pytest.mark.parametrize("slices", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [2, 5, 7, 12])
def test_unequal_shares_are_the_same_samples_in_every_micro_batch(kind: type, size: int, slices: int) -> None:
    slices = min(slices, 12 // size)
    data = NumberData(kind(50))
    alone = list(stream(data, data.dataset, slices=slices).epoch(1))
    shared = [list(stream(data, data.dataset, rank, size, slices).epoch(1)) for rank in range(size)]
    order = EpochOrder(data, data.dataset, 5)(1)
    for step in range(4):
        for rank in range(size):
            own = torch.cat([batch.indices for batch in shared[rank][step]])
            assert own.tolist() == order[step * 12 : step * 12 + 12][rank::size].tolist()
        for part in range(slices):
            held = [shared[rank][step][part] for rank in range(size)]
            indices = torch.cat([batch.indices for batch in held])
            assert sorted(indices.tolist()) == sorted(alone[step][part].indices.tolist())
            assert all(batch.span == alone[step][part].span for batch in held)
            assert all(batch.total == 12 for batch in held)
        sizes = [len(batch.indices) for rank in range(size) for batch in shared[rank][step]]
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1


class PairedData(NumberData):
    def mix(self, inputs: Any, targets: Any, others: Any, other_targets: Any, random: Any) -> Any:
        draw = random.uniform(len(targets), 1)
        return {"x": torch.cat((inputs["x"], others["x"], draw), 1)}, torch.stack((targets, other_targets), 1)


@pytest.mark.parametrize("kind", [Numbers, InMemory])
@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_partner_of_a_sample_is_half_a_global_batch_away(kind: type, size: int, slices: int) -> None:
    data = PairedData(kind(50))
    order = EpochOrder(data, data.dataset, 5)(1)[:48].view(4, 12)
    partner = dict(zip(order.flatten().tolist(), order.roll(-6, 1).flatten().tolist(), strict=True))
    plain = {i: x for step in read(stream(NumberData(kind(50)), kind(50)), 1) for i, x in step}  # augmented, not mixed

    def mixed(rank: int, ranks: int, cuts: int) -> dict[int, list[float]]:
        found: dict[int, list[float]] = {}
        for batches in stream(data, data.dataset, rank, ranks, cuts).epoch(1):
            for batch in batches:
                assert batch.targets.tolist() == [[i, partner[i]] for i in batch.indices.tolist()]
                found |= dict(zip(batch.indices.tolist(), batch.inputs["x"].tolist(), strict=True))
        return found

    alone = mixed(0, 1, 1)
    assert {i: x[:2] for i, x in alone.items()} == {i: [x, plain[partner[i]]] for i, x in plain.items()}
    assert len({x[2] for x in alone.values()}) == 48  # each draws for itself
    shared = [mixed(rank, size, slices) for rank in range(size)]
    assert {i: x for part in shared for i, x in part.items()} == alone
    assert sum(map(len, shared)) == 48
    assert all(len(stream(data, data.dataset, rank, size).example()[1][0]) == 2 for rank in range(size))


@pytest.mark.parametrize(
    ("batch", "ranks", "read"), [(12, 1, [12]), (12, 2, [6, 6]), (12, 3, [4] * 3), (12, 4, [6] * 4), (5, 2, [4, 3])]
)
def test_partners_are_read_once_where_ranks_have_as_many_samples_an_even_number(
    batch: int, ranks: int, read: list[int]
) -> None:
    slices = [Dealt(rank, ranks, torch.device("cpu"), 0) for rank in range(ranks)]
    assert [len(own.find_partners(batch)[0]) for own in slices] == read


@pytest.mark.parametrize(("before", "after"), [(3, 5), (5, 3), (5, 1), (2, 7)])
def test_another_number_of_ranks_goes_on_in_the_middle_of_an_epoch(before: int, after: int) -> None:
    data = NumberData(InMemory(50))

    def steps(size: int, start: int) -> list[list[int]]:
        shared = [list(stream(data, data.dataset, rank, size).epoch(3, start)) for rank in range(size)]
        return [
            sorted(torch.cat([b.indices for one in step for b in one]).tolist()) for step in zip(*shared, strict=True)
        ]

    assert steps(after, 24) == steps(before, 0)[2:]


@pytest.mark.parametrize(("samples", "size", "rows"), [(50, 12, 2), (16, 12, 1), (12, 5, 2)])
def test_an_example_has_as_many_samples_on_every_rank(samples: int, size: int, rows: int) -> None:
    data = NumberData(InMemory(samples))
    for rank in range(size):
        inputs, targets = stream(data, data.dataset, rank, size).example()
        assert (len(inputs["x"]), len(targets)) == (rows, rows)


def test_epochs_differ_and_leave_out_other_samples() -> None:
    data = NumberData(InMemory(50))
    one, other = (read(stream(data, data.dataset), epoch) for epoch in (0, 1))
    assert one != other
    left = [set(range(50)) - {i for step in epoch for i, _ in step} for epoch in (one, other)]
    assert [len(rest) for rest in left] == [2, 2]
    assert left[0] != left[1]
    assert {i for i, _ in one[0]} != {i for i, _ in read(stream(data, data.dataset, seed=6))[0]}


def test_the_middle_of_an_epoch_goes_on_where_it_stopped() -> None:
    data = NumberData(InMemory(50))
    for size in (1, 2):
        assert (
            read(stream(data, data.dataset, 0, size), 3, start=24) == read(stream(data, data.dataset, 0, size), 3)[2:]
        )


def test_the_digest_notices_an_order_that_every_epoch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    data = NumberData(InMemory(50))

    def digests() -> list[int]:
        one = stream(data, data.dataset)
        return [int(digest_indices(batches[0].indices)) for epoch in (0, 1) for batches in one.epoch(epoch)]

    honest = digests()
    assert len(set(honest)) == 8
    original = EpochOrder.__call__
    monkeypatch.setattr(EpochOrder, "__call__", lambda self, epoch: original(self, 0))
    assert len(set(digests())) == 4


def test_the_digest_is_a_sum_in_which_a_sample_counts_twice_if_it_is_drawn_twice() -> None:
    one = digest_indices(torch.tensor([3, 9, 4]))
    assert (
        one
        == digest_indices(torch.tensor([4, 3, 9]))
        == digest_indices(torch.tensor([3])) + digest_indices(torch.tensor([9, 4]))
    )
    assert one != digest_indices(torch.tensor([3, 9, 4, 4]))
    assert digest_indices(torch.tensor([1, 4])) != digest_indices(torch.tensor([2, 3]))
    assert len({int(digest_indices(torch.tensor([i]))) for i in range(10_000)} | {0}) == 10_001


def test_augmentation_follows_from_seed_epoch_and_sample() -> None:
    def noise(epoch: int, seed: int) -> set[tuple[int, float]]:
        data = NumberData(InMemory(12))
        return {(i, x - i) for step in read(stream(data, data.dataset, seed=seed), epoch) for i, x in step}

    one, *others = noise(1, 5), noise(2, 5), noise(1, 6)
    assert one == noise(1, 5)
    assert len({x for _, x in one}) == len(one) == 12
    assert all(one.isdisjoint(other) for other in others)


@pytest.mark.parametrize("workers", [0, 2])
def test_random_items_depend_on_seed_epoch_and_index_alone(workers: int) -> None:
    data = NumberData(Numbers(50, noisy=True))
    alone = {pair for step in read(stream(data, data.dataset)) for pair in step}
    shared = [read(stream(data, data.dataset, rank, 2, 1, workers)) for rank in range(2)]
    assert {pair for part in shared for step in part for pair in step} == alone
    assert {pair for step in read(stream(data, data.dataset), 1) for pair in step}.isdisjoint(alone)


def test_workers_hand_tensors_over_where_the_temporary_folder_has_a_long_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deep = tmp_path / ("long" * 20)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    monkeypatch.delitem(vars(multiprocessing.current_process())["_config"], "tempdir", raising=False)  # chosen once
    read = make_reader(Numbers(4), Data().collate, 0, LoaderOptions(workers=1, timeout=30), pin=False)
    ((_, inputs, _),) = read(0, [torch.arange(4)])
    assert inputs["x"].tolist() == [[0], [1], [2], [3]]


def test_in_the_main_process_generators_are_put_back_after_each_item() -> None:
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    expected = random.random(), numpy.random.rand(), float(torch.rand(()))
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    assert SeededDataset(Numbers(3, noisy=True), 0)[0, 1] != SeededDataset(Numbers(3, noisy=True), 0)[1, 1]
    assert (random.random(), numpy.random.rand(), float(torch.rand(()))) == expected


def test_an_error_of_a_data_set_that_would_be_lost_on_its_way_is_told_with_its_sample() -> None:
    class Lost(Exception):
        """Nobody finds a class of this name in another process."""

    class Broken(Numbers):
        def __getitem__(self, index: int) -> Any:
            raise (StopIteration if self.noisy else Lost)("a bad record")

    for noisy, name in ((True, "StopIteration"), (False, "Lost")):
        for workers in (0, 1):
            options = LoaderOptions(workers=workers, timeout=30 if workers else 0)
            read = make_reader(Broken(4, noisy=noisy), Data().collate, 0, options, pin=False)
            with pytest.raises(RuntimeError, match=rf"data: sample 2 raised .*{name}: a bad record"):
                list(read(0, [torch.tensor([2, 3])]))


def test_a_data_set_of_tensors_is_read_in_whole_batches_with_the_same_bits() -> None:
    class ItemByItem(TensorDataset):
        pass

    class Own(Data):
        def collate(self, items: Any) -> Any:
            return super().collate(items)[::-1]

    columns = torch.randn(50, 3, 2), torch.arange(50, dtype=torch.int16)
    lists = [torch.tensor([7, 7, 49]), torch.arange(50)[::5]]

    def read(dataset: Dataset, data: Data) -> Any:
        batches = make_reader(dataset, data.collate, 0, LoaderOptions(workers=0), pin=False)(0, lists)
        return [batch for _, *batch in batches]

    items = read(ItemByItem(*columns), Data())
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(TensorDataset, "__getitem__")
        whole = read(TensorDataset(*columns), Data())
    for one, other in zip(items, whole, strict=True):
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(one, other, strict=True))
    assert read(TensorDataset(*columns), Own())[0][0].dtype == torch.int16  # whoever collates in a way of their own


@pytest.mark.parametrize(("width", "rows"), [(16, 8), (5, 8), (16, 3), (2**16, 8)])
def test_small_batches_of_tensors_are_indexed_many_at_once_with_the_same_bits(width: int, rows: int) -> None:
    columns = torch.randn(100, width), torch.arange(100)
    lists = list(torch.randperm(100).split(rows))  # of these sizes, and a shorter one
    read = make_reader(TensorDataset(*columns), Data().collate, 0, LoaderOptions(workers=0), pin=False)
    batches = [batch for _, *batch in read(0, iter(lists))]
    for indices, batch in zip(lists, batches, strict=True):
        assert all(torch.equal(got, column[indices]) for got, column in zip(batch, columns, strict=True))
        # or a product may be rounded in another way than that of a tensor by itself, which a resumed run may have
        assert all(got.data_ptr() % 64 == 0 for got in batch)
        weight = torch.ones(width, requires_grad=True)
        batch[0].add_(weight).sum().backward()  # a network may change its inputs in place
        assert weight.grad is not None
    many = len({batch[0].untyped_storage().data_ptr() for batch in batches}) < len(batches)
    assert many == (width == 16 and rows == 8)


def test_a_loader_draws_nothing_from_the_global_generator() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    read = make_reader(Numbers(8), Data().collate, 0, LoaderOptions(workers=0), pin=False)
    list(read(0, [torch.arange(4), torch.arange(4, 8)]))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", [Numbers, InMemory])
@pytest.mark.parametrize("count", [1, 3, 7, 24, 25])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("slices", [1, 2, 3])
def test_evaluation_gives_every_sample_once_in_as_many_calls_on_every_rank(
    kind: type, count: int, size: int, slices: int
) -> None:
    seen, calls = [], set()
    for rank in range(size):
        strategy = Strategy(machine=Machine(seed=5, device="cpu"))
        strategy.__enter__()
        strategy.data_group = Slice(rank, size)
        stream = EvalLoader(NumberData(None), kind(count), strategy.slice, 8, slices, LoaderOptions(workers=0))
        batches = list(stream.batches())
        calls.add(tuple(batch.span for batch, _ in batches))
        for batch, valid in batches:
            assert valid == len(batch.span[(rank - batch.span.start) % size :: size])
            assert max(valid, 1) == len(batch.indices) <= -(-8 // (size * slices))
            assert len(batch.inputs["x"]) == len(batch.targets) == len(batch.indices)
            seen += [float(x) for x in batch.inputs["x"][:valid]]  # as they are: nothing is augmented here
    assert sorted(seen) == list(range(count))
    assert len(calls) == 1


class Pictures(Dataset):
    """Three channels of a number that says which item it is; as many boxes as it has of them, 1 to 4."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return torch.full((3, 4 + index % 2, 4), float(index)), {"boxes": torch.full((1 + index % 4, 4), float(index))}


class AtOnce(Pictures):
    def batch(self, indices: Tensor) -> Any:
        return tuple(zip(*(self[index] for index in indices.tolist()), strict=True))


class Lists(NumberData):
    def collate(self, items: list[Any]) -> Any:
        return tuple(zip(*items, strict=True))

    def augment(self, inputs: Any, targets: Any, random: Any, training: bool) -> Any:
        shift = random.uniform(len(inputs)) if training else torch.zeros(len(inputs))
        return [x + s for x, s in zip(inputs, shift, strict=True)], targets


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", [Pictures, AtOnce])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_micro_batch_of_lists_holds_its_own_samples_whole(kind: type, size: int, workers: int) -> None:
    """Three images of three channels in three micro-batches are no channels, and nobody gets all of them."""
    if workers and kind is AtOnce:
        return
    data = Lists(kind())
    seen: dict[int, float] = {}
    for slices in (1, 2, 4):
        for rank in range(size):
            one = stream(data, data.dataset, rank, size, slices, workers)
            for batches in one.epoch(0):
                assert len(batches) == slices
                for batch in batches:
                    images, targets = batch.inputs, batch.targets
                    assert len(images) == len(targets) == len(batch.indices)
                    for index, image, target in zip(batch.indices.tolist(), images, targets, strict=True):
                        assert image.shape == (3, 4 + index % 2, 4)
                        assert target["boxes"].tolist() == [[index] * 4] * (1 + index % 4)
                        assert seen.setdefault(index, float(image[0, 0, 0])) == float(image[0, 0, 0])
    assert all(index < value < index + 1 for index, value in seen.items())
    # an evaluation, in which the last batch leaves a rank without a sample
    found = []
    for rank in range(size):
        own = Dealt(rank, size, torch.device("cpu"), 5)
        for batch, valid in EvalLoader(data, kind(), own, 7, 3, LoaderOptions(workers=workers)).batches():
            assert len(batch.inputs) == len(batch.targets) == len(batch.indices) == max(valid, 1)
            assert [int(x[0, 0, 0]) for x in batch.inputs] == batch.indices.tolist()
            found += batch.indices[:valid].tolist()
    assert sorted(found) == list(range(24))


class Chain(Data):
    """Graphs whose nodes stand one after the other; each node knows its graph."""

    def collate(self, items: list[Any]) -> Any:
        sizes = torch.tensor([1 + index % 3 for _, index in items])
        owner = torch.repeat_interleave(torch.arange(len(items)), sizes)
        return {"nodes": torch.cat([x["x"].expand(int(n)) for n, (x, _) in zip(sizes, items, strict=True)])}, owner


@pytest.mark.parametrize("slices", [1, 3, 6])
def test_graphs_are_put_together_micro_batch_by_micro_batch(slices: int) -> None:
    data = Chain()
    for batches in stream(data, Numbers(50), slices=slices).epoch(0):
        for batch in batches:
            sizes = 1 + batch.indices % 3
            assert batch.targets.bincount().tolist() == sizes.tolist()  # counted from 0 in each
            assert batch.inputs["nodes"].tolist() == batch.indices.repeat_interleave(sizes).tolist()


def test_padding_goes_to_the_longest_of_a_micro_batch_but_of_a_pipeline_all_are_alike() -> None:
    class Padded(Data):
        def collate(self, items: list[Any]) -> Any:
            longest = 1 + max(index % 5 for _, index in items)
            return torch.zeros(len(items), longest), torch.tensor([index for _, index in items])

    own = Dealt(0, 1, torch.device("cpu"), 5)
    for alike in (False, True):
        one = TrainLoader(Padded(), Numbers(50), replace(own, same_shape=alike), 10, 5, LoaderOptions(workers=0))
        for batches in one.epoch(0):
            whole = torch.cat([batch.indices for batch in batches])
            for batch in batches:
                assert batch.targets.tolist() == batch.indices.tolist()
                longest = (whole if alike else batch.indices) % 5
                assert batch.inputs.shape == (2, 1 + int(longest.max()))


def test_what_cannot_be_cut_is_refused_where_it_must_be_cut() -> None:
    class Pairs(Lists):
        def mix(self, *_: Any) -> Any:
            raise AssertionError

    own = Dealt(0, 1, torch.device("cpu"), 5)
    with pytest.raises(Refusal, match=r"inputs.0 has the shape \(3, .*strategy=ddp and strategy=fsdp"):
        next(TrainLoader(Lists(Pictures()), Pictures(), replace(own, same_shape=True), 12, 4).epoch(0))
    with pytest.raises(Refusal, match=r"rows of its tensors \(B, …\), and of 12 samples inputs.0 has the shape \(3,"):
        next(TrainLoader(Pairs(Pictures()), Pictures(), own, 12, 1).epoch(0))


def test_an_order_of_ones_own_may_repeat_samples_and_decides_the_length() -> None:
    data = NumberData(InMemory(10), lambda epoch, generator: torch.randint(0, 10, (37,), generator=generator))
    one = stream(data, data.dataset)
    assert (one.length, one.steps_per_epoch) == (37, 3)
    assert read(one) == read(stream(data, data.dataset)) != read(one, 1)


@pytest.mark.parametrize("indices", [torch.tensor([0, 10]), torch.tensor([-1]), torch.tensor([[1]])])
def test_an_order_that_is_none_is_refused(indices: Tensor) -> None:
    with pytest.raises(Refusal, match=r"NumberData.order\(0\) must be a list of indices in 0..9"):
        EpochOrder(NumberData(None, lambda epoch, generator: indices), Numbers(10), 0)


class PlainData(NumberData):
    order = Data.order


@pytest.mark.parametrize("most", [10**8, 16])  # a permutation; a cipher of the places, which is computed slice by slice
def test_an_order_has_every_sample_once_and_is_as_it_always_was(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(sampler, "_MOST_PERMUTED", most)
    data = PlainData(Numbers(50))
    order = EpochOrder(data, data.dataset, 5)
    whole = order(1)[:]
    assert (sorted(whole.tolist()), len(order(1))) == ([*range(50)], 50)
    assert torch.equal(torch.cat([order(1)[:7], order(1)[7:50]]), whole)
    assert not torch.equal(order(2)[:], whole)
    assert whole[:5].tolist() == {10**8: [35, 5, 37, 28, 20], 16: [47, 38, 0, 1, 4]}[most]
    monkeypatch.setattr(loader, "_SLICE", 24)  # two steps of 12
    assert [i for step in stream(data, data.dataset).epoch(1) for batch in step for i in batch.indices] == whole[
        :48
    ].tolist()


def test_an_order_must_stay_as_long() -> None:
    order = EpochOrder(NumberData(None, lambda epoch, generator: torch.arange(10 - epoch)), Numbers(10), 0)
    with pytest.raises(ValueError, match=r"order\(1\) has 9"):
        order(1)


class Flow(IterableDataset):
    def __iter__(self) -> Any:
        return iter(())


class Endless(Dataset):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(("dataset", "said"), [(Flow(), "iterable only"), (Endless(), "no len")])
def test_data_that_cannot_be_indexed_is_refused_in_words(dataset: Any, said: str) -> None:
    with pytest.raises(Refusal, match=said):
        dataset_size(dataset)


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        ([(torch.zeros(3), torch.zeros(3), 0)] * 4, "gives 3 parts"),
        ([{"image": torch.zeros(3), "label": 0}] * 4, "gives a dict of image, label"),
        ([torch.zeros(3)] * 4, "gives a Tensor alone"),  # whose batch of two would come apart into two rows
        (TensorDataset(torch.zeros(4, 3)), "gives 1 part"),
    ],
)
def test_samples_that_are_no_input_and_target_are_refused(dataset: Any, said: str) -> None:
    with pytest.raises(Refusal, match=rf"a sample is \(input, target\), and this set {said}\."):
        list(make_reader(dataset, Data().collate, 0, LoaderOptions(workers=0), False)(0, [torch.tensor([0, 1])]))
