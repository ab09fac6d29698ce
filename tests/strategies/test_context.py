"""Sequences cut over ranks: networks of others, shares of the work, masks, and the words for what cannot be cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.ranks import Processes
from tests.run import lines, run
from tests.strategies.networks import CLASSES, LENGTH, VOCABULARY, TokenData, Tokens
from tests.strategies.runs import Train, alike
from trainer import GatheredKeys, Plan, ShiftedPlaces, Task


class Look(nn.Module):
    """Attention of the last tokens that are there: (B, T, width), (B, S, width) and the same to (B, T, width)."""

    def __init__(self, file: str = "") -> None:
        super().__init__()
        self.file = file  # where each training step says how many pairs of a query and a key it has computed

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.file and q.requires_grad and q.shape[0] == 24:
            queries, keys = q.shape[1], k.shape[1]
            with Path(f"{self.file}-{dist.get_rank() if dist.is_initialized() else 0}").open("a") as file:
                file.write(f"{queries * keys - queries * (queries - 1) // 2}\n")  # each query sees one key more
        later = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(1 + k.shape[1] - q.shape[1])
        return (q @ k.transpose(1, 2)).masked_fill(later, -torch.inf).softmax(-1) @ v


class Looking(nn.Module):
    """Numbers (B, T) to a class for each of them; a plan for stretches, and for nothing else."""

    def __init__(self, file: str = "") -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(1, 8), nn.Embedding(LENGTH, 8)
        self.look, self.head = Look(file), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x[..., None]) + self.place(torch.arange(x.shape[1]))
        return self.head(x + self.look(x, x, x))

    def plan(self) -> Plan:
        return Plan(context={"look": GatheredKeys(dim=1), "place": ShiftedPlaces()})


class Numbers(Tokens):
    """The same as numbers, and a class for each of them."""

    def __init__(self, size: int, seed: int) -> None:
        super().__init__(size, seed)
        self.targets = self.tokens[:, 1:] % CLASSES
        self.tokens = self.tokens / VOCABULARY


class Sixes(Numbers):
    """Six of them: three for each of two ranks, which is one piece."""

    length = 6


class NumberData(TokenData):
    kind = Numbers


class SixData(TokenData):
    kind = Sixes


class Each(Task):
    """A class for each number of a sample; samples weigh alike."""

    def loss(self, output: Tensor, target: Any) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    def metrics(self, output: Tensor, target: Any) -> dict[str, Tensor]:
        return {"correct": (output.argmax(-1) == target).sum()}


@pytest.mark.parametrize(
    "data",
    [NumberData, SixData],  # 6 / 4 pieces is not whole
)
def test_a_network_of_others_learns_from_stretches_by_its_plan(train: Train, data: Any) -> None:
    # samples weigh alike, so no rank asks another for their weight
    parts = {"model": Looking, "data": data, "task": Each}
    alike(train("strategy=cp loop.steps=4 loop.micro_batches=2", 2, **parts), train("loop.steps=4", **parts))


def test_context_ranks_compute_the_same_share_of_attention(train: Train, tmp_path: Path) -> None:
    words = f"strategy=cp loop.steps=1 loop.global_batch=24 loop.eval_batch=25 +model.file={tmp_path / 'pairs'}"
    train(words, 2, model=Looking, data=NumberData, task=Each)
    pairs = [sum(map(int, (tmp_path / f"pairs-{rank}").read_text().split())) for rank in range(2)]
    assert pairs == [LENGTH * (LENGTH + 1) / 4] * 2


BOOK = "data=text task=language model=gpt_nano model.width=16 model.depth=2 data.length=8 strategy=cp run.dir=run"
WORDS = {
    "a network without a plan": (
        "model=cnn strategy=cp",
        "CNN cannot be trained on stretches of its sequences: its plan has no context=",
    ),
    "tokens": (
        f"{BOOK} data.length=9",
        "inputs has sequences of 9 tokens, and 9 / 2 context ranks is not whole; lengths that work: 8 and 10",
    ),
    "stages": (
        f"{BOOK} strategy=mesh strategy.pipe=2 strategy.context=2",
        "the stages of a pipeline take whole sequences; strategy.pipe=1 with",
    ),
    "split again": (
        f"{BOOK} data.length=6 strategy=ddp_cp strategy.context=2 strategy.tensor=2 model.sequence=true",
        "6 / 2 context ranks / 2 tensor ranks is not whole; lengths that work: 4 and 8",
    ),
    "ddp": (f"{BOOK} strategy=ddp strategy.context=2", "It is a key of strategy=cp or ddp_cp or"),
    "processes": (
        f"{BOOK} strategy=ddp_cp strategy.context=4",
        "2 processes / (strategy.context 4 × strategy.tensor 1 = 4) is not whole; nearest: strategy.context=2",
    ),
}


def typed(words: str) -> list[str]:
    """Of several words for one key the last."""
    return [f"{key}={value}" for key, value in dict(word.split("=", 1) for word in words.split()).items()]


@pytest.mark.parametrize("what", WORDS)
def test_what_cannot_be_cut_is_refused_before_any_group(processes: Processes, tmp_path: Path, what: str) -> None:
    words, said = WORDS[what]
    ended = run(typed(words), 4 if "tensor=2" in words else 2, "group", place=tmp_path, code=2)
    assert said in ended.out
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_what_is_trained_on_stretches_is_evaluated_by_any_strategy_and_predicts_nothing(
    processes: Processes, tmp_path: Path
) -> None:
    words = f"{BOOK} data.held=0.001 loop.steps=2 loop.global_batch=8"
    trained = run(typed(words), 2, "group", place=tmp_path).lines("eval")[-1]
    for ranks, more in ((2, []), (1, ["strategy=single"])):
        how: Any = "group" if ranks > 1 else "here"
        run(["run.dir=run", "job=evaluate", *more], ranks, how, place=tmp_path)
        again = lines(tmp_path / "run" / "evaluate", "eval")[-1]
        assert again["samples"] == trained["samples"]
        assert again["perplexity"] == pytest.approx(trained["perplexity"], rel=1e-5)
    # one rank continues a text by itself, with the plain network
    run(["run.dir=run", "job=generate", "job.tokens=2", "job.prompt=Call me"], place=tmp_path)
    said = run(["run.dir=run", "job=predict"], 2, "group", place=tmp_path, code=2).out
    assert "job=predict needs outputs of whole sequences" in said
