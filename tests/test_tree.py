"""Batches are trees of tensors: rows are cut of all that has samples, and every kind of tree stays what it is."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.profiler import ProfilerActivity, profile

from trainer.data.nested_tensors import cast_floats, first_tensor, has_rows, map_tensors, slice_rows, tensors, to_device

Pair = namedtuple("Pair", "left right")


def batch() -> dict:
    return {
        "x": torch.arange(12.0).view(4, 3),
        "pair": Pair(torch.arange(4), [torch.arange(4) * 2]),
        "names": ["a", "b", "c", "d"],
        "table": torch.eye(3),
        "temperature": torch.tensor(0.5),
        "note": "the same for all",
    }


def test_rows_are_cut_of_everything_that_has_samples() -> None:
    cut = slice_rows(batch(), 1, 3, 4)
    assert cut["x"].tolist() == [[3, 4, 5], [6, 7, 8]]
    assert isinstance(cut["pair"], Pair)
    assert cut["pair"].left.tolist() == [1, 2]
    assert cut["pair"].right[0].tolist() == [2, 4]
    assert cut["names"] == ["b", "c"]
    assert cut["table"].shape == (3, 3)
    assert cut["temperature"].shape == ()
    assert cut["note"] == "the same for all"


@dataclass(frozen=True)
class Answer:
    logits: torch.Tensor
    more: Any = None


@pytest.mark.parametrize("kind", [UserDict, OrderedDict])
def test_a_change_reaches_every_tensor_and_a_tree_keeps_its_own_kinds(kind: Any) -> None:
    tree = kind(answer=Answer(torch.ones(2), [torch.ones(1)]), name="x")
    doubled = map_tensors(tree, lambda tensor: tensor * 2)
    assert type(doubled) is kind
    assert (doubled["answer"].logits.tolist(), doubled["answer"].more[0].item(), doubled["name"]) == ([2, 2], 2, "x")
    assert [t.sum().item() for t in tensors(tree)] == [2, 1]  # as it was
    assert len(slice_rows(tree, 0, 1, 2)["answer"].logits) == 1
    assert first_tensor([{"name": "x"}, (torch.ones(7, 2),)]).shape[0] == 7
    wide = cast_floats(batch(), torch.float64)
    assert (wide["x"].dtype, wide["pair"].left.dtype) == (torch.float64, torch.int64)


def test_rows_are_certain_only_where_each_tensor_has_one_for_each_sample() -> None:
    x, y = torch.zeros(4, 3), torch.arange(4)
    views = [x, x]  # of two samples it could be an image of each
    for tree in (x, {"x": x, "y": y}, (x, y), Pair(x, [y]), Answer(x), {"x": x, "names": list("abcd")}, views):
        assert has_rows(tree, 4)
    for tree in (x.T, torch.tensor(4), [x, y, x, y], (x, x.T), {"x": x, "scale": 2.0}, {"x": x, "of": list("ab")}):
        assert not has_rows(tree, 4)
    assert not has_rows([x[:2], x[:2]], 2)
    assert not has_rows({"x": x, "graph": object()}, 4)


def test_what_has_a_way_of_its_own_to_a_device_takes_it() -> None:
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    there = to_device({"text": [packed], "names": ["a", "b"]}, torch.device("meta"))
    assert there["text"][0].data.is_meta
    assert there["text"][0].batch_sizes.device.type == "cpu"  # or nobody could read it
    assert there["names"] == ["a", "b"]


def test_where_a_batch_lies_already_nothing_is_copied() -> None:
    own = batch()
    there = to_device(own, torch.device("cpu"))
    assert [t.data_ptr() for t in tensors(there)] == [t.data_ptr() for t in tensors(own)]


@pytest.mark.gpu
def test_a_batch_goes_to_a_gpu_from_pinned_memory() -> None:
    gpu = torch.device("cuda", 0)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as recorded:
        there = to_device(batch(), gpu)
        torch.cuda.synchronize()
    copies = [event.name for event in recorded.events() if event.name.startswith("Memcpy HtoD")]
    assert len(copies) == len(list(tensors(there)))
    assert all("Pinned" in name for name in copies)
    assert all(torch.equal(one.cpu(), other) for one, other in zip(tensors(there), tensors(batch()), strict=True))
