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
from tests.run import lines, quickly, run
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


class Turn(nn.Module):
    """Tells tokens where they are: (B, heads, T, head), with the place of the first one, or the places of all."""

    def forward(self, x: Tensor, start: int | Tensor) -> Tensor:
        places = start if isinstance(start, Tensor) else torch.arange(start, start + x.shape[2])
        return x + (places[:, None] * 0.3).sin()


class Heads(nn.Module):
    """Attention as others write it: drops in two ways, moves tokens to (B, T, heads, head), and shows its weights."""

    def __init__(self, drop: nn.Module) -> None:
        super().__init__()
        self.drop = drop

    def forward(self, q: Tensor, k: Tensor, v: Tensor, opened: Tensor, *, mask: Tensor) -> tuple[Tensor, Tensor]:
        length, seen = q.shape[2], k.shape[2]
        sees = torch.ones(length, seen, dtype=torch.bool).tril(seen - length)
        drops = 0.3 * self.training
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=sees, dropout_p=drops)
        mixed = mixed + F.scaled_dot_product_attention(q, k, v, attn_mask=sees, dropout_p=drops)
        return self.drop((opened * mask * mixed).transpose(1, 2)), (q @ k.mT).softmax(-1)


PLACES = {"place": ShiftedPlaces(), "first": ShiftedPlaces(1, dim=2), "all": ShiftedPlaces(1, dim=-2)}


class Attending(nn.Module):
    """Numbers (B, T) to a class for each of them; a module that drops is called inside and outside of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.embed, self.place = nn.Dropout(0.2), nn.Linear(1, 12), nn.Embedding(LENGTH, 12)
        self.first, self.all, self.core, self.head = Turn(), Turn(), Heads(self.drop), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        x = self.drop(self.embed(x[..., None]) + self.place(places))
        for _ in range(2):
            heads = x.unflatten(-1, (3, 4)).transpose(1, 2)  # (B, heads, T, head)
            q, k = self.first(heads, 0), self.all(heads, places)
            mask = torch.ones(1, 1, x.shape[1], 1, dtype=x.dtype)
            x = x + self.core(q, k, heads, heads.sigmoid(), mask=mask)[0].flatten(2)
        return self.head(self.drop(x))

    def plan(self) -> Plan:
        return Plan(context={"core": GatheredKeys(), **PLACES})


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
    ("network", "data"),
    [
        (Looking, NumberData),
        (Looking, SixData),  # 6 / 4 pieces is not whole
        (Attending, NumberData),
        (Attending, SixData),
    ],
)
def test_a_network_of_others_learns_from_stretches_by_its_plan(train: Train, network: Any, data: Any) -> None:
    # samples weigh alike, so no rank asks another for their weight
    parts = {"model": network, "data": data, "task": Each}
    alike(train("strategy=cp loop.steps=4 loop.micro_batches=2", 2, **parts), train("loop.steps=4", **parts))


class Twelve(Numbers):
    length = 12


class TwelveData(TokenData):
    kind = Twelve


@pytest.mark.parametrize("ranks", quickly([2, 3], 2))
def test_context_ranks_compute_the_same_share_of_attention(train: Train, tmp_path: Path, ranks: int) -> None:
    def pairs(words: str) -> list[int]:
        file = tmp_path / str(ranks)
        words = f"{words} loop.steps=1 loop.global_batch=24 loop.eval_batch=25 +model.file={file}"
        train(words, ranks, model=Looking, data=TwelveData if ranks == 3 else NumberData, task=Each)
        return [sum(map(int, Path(f"{file}-{rank}").read_text().split())) for rank in range(ranks)]

    length = 12 if ranks == 3 else LENGTH
    whole = length * (length + 1) // 2
    assert pairs("strategy=cp") == [whole / ranks] * ranks


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
