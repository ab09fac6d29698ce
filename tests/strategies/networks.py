"""Networks, data and tasks small enough to prove a strategy with. conf/ beside it makes words of a command of them."""

from __future__ import annotations

from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
)

from recipes.language.decoder import Decoder
from recipes.language.next_token import NextToken
from trainer import Data, Plan, Task, gather

WIDTH, CLASSES, BATCH = 12, 4, 48
VOCABULARY, LENGTH, IGNORED = 24, 8, -100


class Net(nn.Module):
    """Two cut layers, a whole norm between them and an unplanned head; no dropout, no batch statistics."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 24)
        self.down = nn.Linear(24, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.norm(x + self.down(F.gelu(self.up(x)))))) * self.scale

    def plan(self) -> Plan:
        return Plan(tensor={"up": ColwiseParallel(), "down": RowwiseParallel()})


class Block(nn.Module):
    """What a transformer repeats, but for its attention: a mask says who sees whom."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.down, self.dropout = nn.Linear(2 * width, width), nn.Dropout(dropout)

    def forward(self, hidden: Tensor, *, mask: Tensor) -> tuple[Tensor, Tensor]:
        return hidden + self.dropout(self.down(F.gelu(self.up(mask @ self.norm(hidden))))), mask


class Blocks(nn.Module):
    """A network as people write it: a len(), a type that is asked for, a train() of its own."""

    def __init__(self, depth: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Linear(1, 8)
        self.place = nn.Parameter(torch.linspace(-1, 1, 8))
        self.blocks = nn.ModuleList(Block(8, dropout) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, CLASSES)
        self.scale: Tensor
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)
        self.spare = nn.Linear(3, 3)  # nobody calls it

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.blocks[-1].eval()  # as those do that keep a part frozen
        return self

    def begin(self, x: Tensor) -> Tensor:
        """(B, WIDTH) to (B, WIDTH, 8)."""
        return self.embed(x[..., None]) + self.place

    def through(self, hidden: Tensor, x: Tensor) -> Tensor:
        size = len(hidden[0])
        mask = (
            hidden.new_ones(size, size).tril() * (x > -1)[:, None] / size
        )  # (B, WIDTH, WIDTH), of every batch another
        for block in self.blocks:
            hidden, mask = block(hidden, mask=mask) if isinstance(hidden, Tensor) else (hidden, mask)
        return hidden

    def end(self, hidden: Tensor) -> Tensor:
        return self.head(self.norm(hidden[:, -1] * self.scale))

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.through(self.begin(x), x))

    def plan(self) -> Plan:
        return Plan(tensor={"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()})


class Activated(nn.BatchNorm1d):
    """A BatchNorm that does more, as timm's do."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(super().forward(x))


class BatchNormNet(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 16), Activated(16), nn.Linear(16, CLASSES))


class DrawingBlock(nn.Module):
    """Dropout on what tensor ranks have parts of, in attention there, and on what all have; stochastic depth; noise."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.dropout(torch.tanh(self.up(x))).unflatten(-1, (-1, 4, 1))  # (B, heads, 4, 1)
        heads = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.2 * self.training)
        y = self.dropout(self.down(heads.flatten(1)))
        if self.training:
            y = y * x.new_empty(x.shape[0], 1).bernoulli_(0.8) + 0.1 * torch.randn_like(x) * torch.rand(1)
        return x + y


class DrawingNet(nn.Module):
    """Blocks that draw in every way, batch statistics where they are asked for, and a head."""

    def __init__(self, normed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DrawingBlock() for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH) if normed else nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def plan(self) -> Plan:
        return Plan({"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}, shard=("blocks.*",))


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


class Rows:
    """Samples in memory, in whole batches; the target holds the class and whether the sample counts."""

    def __init__(self, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(size, WIDTH, generator=generator)
        self.y = (self.x @ torch.randn(WIDTH, CLASSES, generator=generator)).argmax(1)
        self.counts = torch.rand(size, generator=generator) < 0.7

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], (self.y[index], self.counts[index])

    def batch(self, indices: Tensor) -> Any:
        return self.x[indices], (self.y[indices], self.counts[indices])


class ToyData(Data):
    def train(self) -> Any:
        return Rows(220, 1)

    def evaluation(self) -> Any:
        return Rows(101, 2)

    def augment(self, inputs: Any, targets: Any, random: Any, training: bool) -> Any:
        return inputs + (0.1 * random.normal(*inputs.shape) if training else 0.0), targets


class Plain(Task):
    """Every sample weighs the same."""

    def loss(self, output: Tensor, target: Any) -> Any:
        return F.cross_entropy(output, target[0])

    def metrics(self, output: Tensor, target: Any) -> dict[str, Tensor]:
        cells = target[0] * CLASSES + output.argmax(-1)
        return {
            "confusion": torch.bincount(cells, minlength=CLASSES**2),
            "correct": (output.argmax(-1) == target[0]).sum(),
        }

    def finish(self, totals: dict[str, Tensor]) -> dict[str, float]:
        table = totals["confusion"].view(CLASSES, CLASSES).double()
        macro = (table.diagonal() / table.sum(1).clamp(min=1)).mean()
        mean = totals["loss"] / totals["weight"]
        return {"loss": float(mean), "perplexity": float(mean.exp()), "macro": float(macro)}


class Weighted(Plain):
    """Samples that do not count; how many do differs between micro-batches and ranks."""

    def loss(self, output: Tensor, target: Any) -> Any:
        each = F.cross_entropy(output, target[0], reduction="none") * target[1]
        mean = each.sum() / target[1].sum().clamp(min=1)
        return {"entropy": mean, "decay": 0.1 * mean}

    def weight(self, target: Any) -> Tensor:
        return target[1].sum()


class Contrast(Plain):
    """Every sample against every other of the global batch; the next one in their order is alike."""

    def loss(self, output: Tensor, target: Any) -> Any:
        likeness = gather(output) @ gather(output).T
        return F.cross_entropy(likeness, torch.arange(len(likeness), device=output.device).roll(1))


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


class TokenData(Data):
    kind: type[Tokens] = Tokens

    def train(self) -> Any:
        return self.kind(220, 1)

    def evaluation(self) -> Any:
        return self.kind(101, 2)


class PackedData(TokenData):
    kind = Packed


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
