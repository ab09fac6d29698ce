"""Decoders, and attention as somebody else writes it, small enough to prove a strategy with; sequences for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.language.decoder import Decoder
from recipes.language.next_token import NextToken
from trainer import Data, GatheredKeys, Plan, ShiftedPlaces, Task

VOCABULARY, LENGTH, CLASSES, IGNORED = 24, 8, 4, -100
LLAMA: dict[str, Any] = {"norm": "rms", "mlp": "swiglu", "rotary": 1e4, "bias": False, "groups": 2}


def decoder(words: str) -> Decoder:
    """A small decoder in the manner of GPT, or of Llama where the words say so, with what else they say."""
    chosen = LLAMA if "llama" in words else {}
    asked = {word: word in words for word in ("tied", "sequence", "loss_parallel")}
    drops = 0.3 if "dropout" in words else 0.0
    return Decoder(VOCABULARY, LENGTH, width=16, depth=2, heads=4, dropout=drops, **chosen, **asked)  # type: ignore[arg-type]  # mypy takes all of them for one kind


class Look(nn.Module):
    """Attention of the last tokens that are there: (B, T, width), (B, S, width) and the same to (B, T, width)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        later = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(1 + k.shape[1] - q.shape[1])
        return (q @ k.transpose(1, 2)).masked_fill(later, -torch.inf).softmax(-1) @ v


class Looking(nn.Module):
    """Numbers (B, T) to a class for each of them; a plan for stretches, and for nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(1, 8), nn.Embedding(LENGTH, 8)
        self.look, self.head = Look(), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x[..., None]) + self.place(torch.arange(x.shape[1]))
        return self.head(x + self.look(x, x, x))

    def plan(self) -> Plan:
        return Plan(context={"look": GatheredKeys(dim=1), "place": ShiftedPlaces()})


class Tokens:
    """Sequences in memory; some of their targets do not count, fewer of them towards the end."""

    def __init__(self, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(VOCABULARY, (size, LENGTH + 1), generator=generator)
        counts = torch.rand(size, LENGTH, generator=generator) < torch.linspace(0.2, 1, LENGTH)
        self.targets = self.tokens[:, 1:].masked_fill(~counts, IGNORED)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Any:
        return self.tokens[index, :-1], self.targets[index]

    def batch(self, indices: Tensor) -> Any:
        return self.tokens[indices, :-1], self.targets[indices]


class Numbers(Tokens):
    """The same as numbers, and a class for each of them."""

    def __init__(self, size: int, seed: int) -> None:
        super().__init__(size, seed)
        self.targets = self.tokens[:, 1:] % CLASSES
        self.tokens = self.tokens / VOCABULARY


class TokenData(Data):
    kind: type[Tokens] = Tokens

    def train(self) -> Any:
        return self.kind(220, 1)

    def evaluation(self) -> Any:
        return self.kind(101, 2)


class NumberData(TokenData):
    kind = Numbers


class Next(NextToken):
    """The next token, with sums of some shape."""

    def __init__(self) -> None:
        super().__init__(bytes_per_token=1.0, ignored=IGNORED)

    def metrics(self, output: Tensor, target: Any) -> dict[str, Tensor]:
        hits = target[output.argmax(-1) == target]
        return {"hits": torch.bincount(hits, minlength=VOCABULARY)}

    def finish(self, totals: dict[str, Tensor]) -> dict[str, float]:
        best = float(totals["hits"].argmax())  # of all tokens the one that is known best
        return {**super().finish(totals), "best": best, "hits": float(totals["hits"].sum())}


class Each(Task):
    """A class for each number of a sample; samples weigh alike."""

    def loss(self, output: Tensor, target: Any) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    def metrics(self, output: Tensor, target: Any) -> dict[str, Tensor]:
        return {"correct": (output.argmax(-1) == target).sum()}


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    words: partial(decoder, words)
    for kind in ("gpt", "llama")
    for more in ("", " tied", " sequence", " tied sequence", " loss_parallel", " sequence loss_parallel")
    for words in (f"{kind}{more}", f"{kind}{more} dropout")
}
NETWORKS["looking"] = Looking
TASKS: dict[str, Callable[[], Task]] = {"next": Next, "each": Each}
DATA: dict[str, Callable[[], Data]] = {"next": TokenData, "each": NumberData}
