"""Sequences cut over ranks: networks of others, what travels, masks, and the words for what cannot be cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tests.commands import lines
from tests.inside import product
from tests.processes import Processes
from tests.quick import quickly
from tests.strategies.counting import collectives_of_a_step
from tests.strategies.sequences import LENGTH, NETWORKS, Next, TokenData
from tests.strategies.toys import BATCH, STRATEGIES, Case, built, run
from trainer.data.dataset_reader import LoaderOptions
from trainer.data.loader import TrainLoader
from trainer.launch.rendezvous import Launch
from trainer.messages import Refusal
from trainer.parallel.context_parallel import Pieces, rank_pieces
from trainer.parallel.rng.random_draw import DrawSites, TensorPart, find_part
from trainer.strategies.machine import Machine
from trainer.strategies.tp import TP

OTHERS = [
    ("looking", "each"),
    ("looking", "each of six"),  # 6 / 4 pieces is not whole
    ("attending", "each"),
    ("attending", "each of six"),
    ("attending by others", "each"),
]


@pytest.mark.parametrize(("network", "task"), OTHERS)
def test_a_network_of_others_learns_from_stretches_by_its_plan(processes: Processes, network: str, task: str) -> None:
    case = Case(network=network, task=task, precision="fp64", steps=4)
    (reference,) = processes.run(1, run, case)
    # samples weigh alike, so no rank asks another for their weight
    for rank in processes.run(2, run, case.but(strategy="cp", micro_batches=2)):
        assert rank["losses"] == pytest.approx(reference["losses"], rel=1e-10)
        assert rank["norms"] == pytest.approx(reference["norms"], rel=1e-10)
        assert rank["figures"] == pytest.approx(reference["figures"], rel=1e-10)


def test_context_ranks_send_keys_and_values_and_each_gradient_once(processes: Processes) -> None:
    case = Case("cp", network="llama", task="next")
    one, four = (
        [size for _, size in processes.run(2, collectives_of_a_step, case.but(micro_batches=n))[0]] for n in (1, 4)
    )
    parameters = sum(parameter.numel() for parameter in NETWORKS["llama"]().parameters())
    # two layers with two heads of keys and values of width 4: gathered, and their gradients, which gloo adds up whole
    stretch = 4 * BATCH * 2 * (LENGTH // 2) * (4 + 4)
    assert [size for size in one if size > 1000] == sorted([stretch, stretch, 2 * stretch, 2 * stretch, 4 * parameters])
    # what is left are a byte for each parameter, and sums of losses and of their weights
    assert sum(size for size in one if size <= 1000) < 100
    assert four.count(4 * parameters) == 1
    assert sum(size for size in four if size > 100) == sum(size for size in one if size > 100)


def seen(launch: Launch, place: Path, words: list[str]) -> int:
    """How many pairs of a query and a key that it sees are computed in a run."""
    pairs = 0

    def attend(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
        nonlocal pairs
        queries, keys = q.shape[2], k.shape[2]
        pairs += q.shape[:2].numel() * (queries * keys - queries * (queries - 1) // 2)  # each query one key more
        return scaled_dot_product_attention(q, k, v, **more)

    # without the forwards of whole sequences at the start, which look for draws
    without = patch("trainer.strategies.base.find_draw_sites", lambda *_: DrawSites())
    with without, patch("recipes.language.causal.scaled_dot_product_attention", attend):
        assert product(launch, place, words) == 0
    return pairs


@pytest.mark.parametrize("ranks", quickly([2, 3], 3))
def test_context_ranks_compute_the_same_share_of_attention(processes: Processes, tmp_path: Path, ranks: int) -> None:
    words = [*BOOK, "data.length=12", "data.held=0", "loop.steps=1", "loop.global_batch=2", "run.dir=run"]
    (whole,) = processes.run(1, seen, tmp_path, [*words, "strategy=single"])
    words[-1] = "run.dir=stretches"
    assert processes.run(ranks, seen, tmp_path, [*words, "strategy=cp"]) == [whole / ranks] * ranks


def kept(launch: Launch, word: str) -> int:
    """Bytes that a step keeps for its backward, besides the parameters."""
    data, storages = TokenData(), {}

    def keep(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with STRATEGIES[word](machine=Machine(launch=launch, device="cpu")) as strategy:
        stream = TrainLoader(data, data.train(), strategy.slice, BATCH, 1, LoaderOptions())
        parallel_model = strategy.build(Next(), built(strategy, NETWORKS["gpt"]), stream.example())
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            parallel_model.forward_backward(next(stream.epoch(0)), 0)
        own = {parameter.untyped_storage().data_ptr() for parameter in parallel_model.network.parameters()}
    return sum(storage.nbytes() for at, storage in storages.items() if at not in own)


@pytest.mark.long
def test_activations_fall_with_the_degree(processes: Processes) -> None:
    (alone,), two, four = (processes.run(n, kept, word) for n, word in ((1, "single"), (2, "cp"), (4, "cp")))
    # all but keys and values, which are those of whole sequences
    assert max(two) < 0.65 * alone
    assert max(four) < 0.45 * alone


class Drawing(Next):
    """Says what a generator would give next, whenever a loss is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[float] = []

    def loss(self, output: Tensor, target: Tensor) -> Tensor | dict[str, Tensor]:
        self.drawn.append(float(torch.rand(())))
        return super().loss(output, target)


def drawn(launch: Launch, word: str) -> list[float]:
    """One step of two micro-batches."""
    task, data = Drawing(), TokenData()
    with STRATEGIES[word](machine=Machine(launch=launch, device="cpu", seed=3, dropout="native")) as strategy:
        stream = TrainLoader(data, data.train(), strategy.slice, BATCH, 2, LoaderOptions())
        parallel_model = strategy.build(task, built(strategy, NETWORKS["gpt"]), stream.example())
        parallel_model.forward_backward(next(stream.epoch(0)), 0)
    return task.drawn


def test_masks_differ_over_context_ranks(processes: Processes) -> None:
    (alone,), (first, second) = processes.run(1, drawn, "single"), processes.run(2, drawn, "cp")
    assert first == alone
    assert len({*first, *second}) == 4


def refused(launch: Launch, place: Path, words: list[str]) -> str:
    """What the command says where it cannot work."""
    try:
        product(launch, place, words)
    except Refusal as refusal:
        return str(refusal)
    return "nothing"


BOOK = ["data=text", "task=language", "model=gpt_nano", "model.width=16", "model.depth=2", "data.length=8"]
WORDS = {
    "a network without a plan": (
        ["strategy=cp", "model=cnn"],
        "CNN cannot be trained on stretches of its sequences: its plan has no context=",
    ),
    "tokens": (
        [*BOOK, "strategy=cp", "data.length=9"],
        "inputs has sequences of 9 tokens, and 9 / 2 context ranks is not whole; lengths that work: 8 and 10",
    ),
    "stages": (
        [*BOOK, "strategy=mesh", "strategy.pipe=2", "strategy.context=2"],
        "the stages of a pipeline take whole sequences; strategy.pipe=1 with",
    ),
    "ddp": ([*BOOK, "strategy=ddp", "strategy.context=2"], "It is a key of strategy=cp or ddp_cp or"),
    "processes": (
        [*BOOK, "strategy=ddp_cp", "strategy.context=4"],
        "2 processes / (strategy.context 4 × strategy.tensor 1 = 4) is not whole; nearest: strategy.context=2",
    ),
}


@pytest.mark.parametrize("what", WORDS)
def test_what_cannot_be_cut_is_refused_before_any_group(processes: Processes, tmp_path: Path, what: str) -> None:
    words, said = WORDS[what]
    answers = processes.run(2, refused, tmp_path, [*words, "run.dir=run"])
    assert all(said in answer for answer in answers), answers
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("size", "ranks"), [(6, 1), (6, 2), (6, 3), (12, 4)])
def test_tensor_ranks_that_cut_a_stretch_once_more_know_its_places(size: int, ranks: int) -> None:
    """A stretch of so many tokens, the second of three context ranks'; the tensor ranks' parts are equal."""
    stretch = rank_pieces(1, 3, size, 2)
    places = [*range(size // 2, size), *range(2 * size, 5 * size // 2)]
    for rank in range(ranks):
        pieces = stretch.part(Pieces((rank,), ranks))
        part = find_part((3 * size, 4), (size // ranks, 4), pieces, loosely=False)
        assert part is not None
        assert (part.dim, part.size) == (1, 3 * size)
        own = places[rank * size // ranks : (rank + 1) * size // ranks]
        assert [place for each in part.places for place in each] == own


def test_heads_of_a_tensor_rank_are_told_from_tokens_that_are_as_many_as_its_channels() -> None:
    """Weights of attention by hand, (heads, tokens, tokens): 16 · 16 is what a rank has of 4 heads of width 128."""
    part = find_part((4, 16, 16), (2, 16, 16), Pieces((1,), 2), loosely=False)
    assert part == TensorPart(1, (range(2, 4),), 4)


def test_of_two_dimensions_at_once_no_part_is_known() -> None:
    """Weights of attention, (heads, tokens, tokens), whose heads tensor ranks share and whose tokens context ranks."""
    stretch, heads = rank_pieces(0, 2, 6, 2), Pieces((1,), 2)
    for pieces in (stretch, heads, stretch.part(heads)):
        assert find_part((2, 12, 12), (1, 6, 12), pieces, loosely=False) is None


def test_stretches_that_tensor_ranks_split_again_must_divide_too() -> None:
    strategy = TP(context=2, tensor=2)
    plan, example = NETWORKS["llama sequence"](), torch.zeros(2, 6, dtype=torch.int64)
    with pytest.raises(Refusal, match=r"6 / 2 context ranks / 2 tensor ranks is not whole; lengths that work: 4 and 8"):
        strategy.refuse_forward(Next(), plan, 4, lambda: (example, example))
    strategy.refuse_forward(Next(), NETWORKS["llama"](), 4, lambda: (example, example))
    with pytest.raises(Refusal, match=r"targets has the shape \(2,\), without tokens"):
        strategy.refuse_forward(Next(), plan, 4, lambda: (torch.zeros(2, 8), torch.zeros(2)))


@pytest.mark.long
def test_a_run_on_stretches_is_evaluated_by_any_strategy_and_predicts_nothing(
    processes: Processes, tmp_path: Path
) -> None:
    words = [*BOOK, "data.held=0.001", "loop.steps=2", "loop.global_batch=8", "strategy=cp", "run.dir=run"]
    assert processes.run(2, product, tmp_path, words) == [0, 0]
    (trained,) = lines(tmp_path / "run", "eval")
    assert processes.run(2, product, tmp_path, ["run.dir=run", "job=evaluate"]) == [0, 0]
    assert product(Launch(), tmp_path, ["run.dir=run", "job=evaluate", "strategy=single"]) == 0
    for again in lines(tmp_path / "run" / "evaluate", "eval"):
        assert again["samples"] == trained["samples"]
        assert again["perplexity"] == pytest.approx(trained["perplexity"], rel=1e-5)
    # one rank continues a text by itself, with the plain network
    assert product(Launch(), tmp_path, ["run.dir=run", "job=generate", "job.tokens=2", "job.prompt=Call me"]) == 0
    said = "job=predict needs outputs of whole sequences"
    assert all(said in one for one in processes.run(2, refused, tmp_path, ["run.dir=run", "job=predict"]))
