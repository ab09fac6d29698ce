"""Decoders, and attention as somebody else writes it, small enough to prove a strategy with; sequences for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from recipes.language.decoder import Decoder
from recipes.language.next_token import NextToken
from trainer import Data, GatheredKeys, Plan, ShiftedPlaces, Task

VOCABULARY, LENGTH, CLASSES, IGNORED = 24, 8, 4, -100
LLAMA: dict[str, Any] = {"norm": "rms", "mlp": "swiglu", "rotary": 1e4, "bias": False, "groups": 2}

EXPERTS: dict[str, Any] = {**LLAMA, "experts": 4, "expert_inner": 8}
KINDS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "experts biased": {**EXPERTS, "shared": 1, "scores": "sigmoid", "scaling": 1.5, "bias_rate": 0.01, "active": 3},
    "experts shared": {**EXPERTS, "shared": 2, "auxiliary": 0.1, "normalised": False},
    "experts behind": {**EXPERTS, "dense_first": 1, "auxiliary": 0.1, "bias_rate": 0.01},
}


def decoder(words: str) -> Decoder:
    """A small decoder in the manner of GPT, or of Llama where the words say so, with what else they say."""
    chosen = next((settings for kind, settings in KINDS.items() if words.startswith(kind)), {})
    asked = {word: word in words for word in ("tied", "sequence", "loss_parallel")}
    drops, window = 0.3 if "dropout" in words else 0.0, 3 if "window" in words else None
    return Decoder(VOCABULARY, LENGTH, width=16, depth=2, heads=4, dropout=drops, window=window, **chosen, **asked)  # type: ignore[arg-type]  # mypy takes all of them for one kind


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


class Attending(nn.Module):
    """Numbers (B, T) to a class for each of them; a module that drops is called inside and outside of attention."""

    def __init__(self, styles: Callable[[], dict[str, Any]]) -> None:
        super().__init__()
        self.styles = styles
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
        return Plan(context=self.styles())


class InOnePiece(ParallelStyle):
    """What somebody else may have written for attention, who takes it that a rank's tokens are one piece."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            own = [DTensor.from_local(x, device_mesh, [Shard(2)]) for x in args[1:3]]
            wholes = [x.full_tensor(grad_placements=[Partial()]) for x in own]
            seen = (device_mesh.get_local_rank() + 1) * args[0].shape[2]
            return args[0], *(whole[:, :, :seen] for whole in wholes), *args[3:]

        module.register_forward_pre_hook(gather)
        return module


PLACES = {"place": ShiftedPlaces(), "first": ShiftedPlaces(1, dim=2), "all": ShiftedPlaces(1, dim=-2)}


class Tokens:
    """Sequences in memory; some of their targets do not count, fewer of them towards the end."""

    length = LENGTH

    def __init__(self, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(VOCABULARY, (size, self.length + 1), generator=generator)
        counts = torch.rand(size, self.length, generator=generator) < torch.linspace(0.2, 1, self.length)
        self.targets = self.tokens[:, 1:].masked_fill(~counts, IGNORED)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Any:
        return self.tokens[index, :-1], self.targets[index]

    def batch(self, indices: Tensor) -> Any:
        return self.tokens[indices, :-1], self.targets[indices]


class Packed(Tokens):
    """The same, of documents: inputs are tokens and where in the sample their documents begin."""

    def __init__(self, size: int, seed: int) -> None:
        super().__init__(size, seed)
        new = torch.rand(size, self.length + 1, generator=torch.Generator().manual_seed(seed)) < 0.3
        self.begins = torch.where(new, torch.arange(self.length + 1), 0).cummax(1).values[:, :-1].contiguous()
        self.targets = self.targets.masked_fill(new[:, 1:], IGNORED)

    def __getitem__(self, index: int) -> Any:
        return (self.tokens[index, :-1], self.begins[index]), self.targets[index]

    def batch(self, indices: Tensor) -> Any:
        return (self.tokens[indices, :-1], self.begins[indices]), self.targets[indices]


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


class Sixes(Numbers):
    """Six of them: three for each of two ranks, which is one piece."""

    length = 6


class PackedData(TokenData):
    kind = Packed


class NumberData(TokenData):
    kind = Numbers


class SixData(TokenData):
    kind = Sixes


class Next(NextToken):
    """The next token, with sums of some shape."""

    def __init__(self, pack: bool = False) -> None:
        super().__init__(bytes_per_token=1.0, ignored=IGNORED, pack=pack)

    def metrics(self, output: Any, target: Any) -> dict[str, Tensor]:
        scores = output["tokens"] if isinstance(output, dict) else output
        hits = target[scores.argmax(-1) == target]
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
    for kind in ("gpt", *KINDS)
    for more in ("", " tied", " sequence", " tied sequence", " loss_parallel", " sequence loss_parallel")
    for words in (f"{kind}{more}", f"{kind}{more} dropout", f"{kind} window{more}")
}
NETWORKS["looking"] = Looking
NETWORKS["attending"] = partial(Attending, lambda: {"core": GatheredKeys(), **PLACES})
NETWORKS["attending by others"] = partial(Attending, lambda: {"core": InOnePiece(), **PLACES})
TASKS: dict[str, Callable[[], Task]] = {
    "next": Next,
    "packed": partial(Next, pack=True),
    "each": Each,
    "each of six": Each,
}
DATA: dict[str, Callable[[], Data]] = {
    "next": TokenData,
    "packed": PackedData,
    "each": NumberData,
    "each of six": SixData,
}
