"""What would make a curve depend on ranks, micro-batches or workers is said at the first step, and only that."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from tests.run import run
from trainer import Data, Task, gather

OWN = numpy.random.default_rng(0)  # nobody seeds it
PADDING, MEAN, RANDOM = "collate pads samples", "Task.loss is no mean", "an item is another one"


class Sentences(Dataset):
    """2 to 9 words each; the class is that of the first one."""

    def __init__(self, kind: str) -> None:
        self.kind, self.read = kind, 0

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read += self.kind == "counts"
        generator = torch.Generator().manual_seed(index)
        words = torch.randint(1, 20, (2 + index * 5 % 8,), generator=generator)
        words[-1] = 1 + (self.read + int(OWN.integers(19)) if self.kind == "own" else self.read) % 19
        numpy.random.rand(), torch.rand(())  # seeded: no matter
        return words, words[0] % 3


class Words(Data):
    """Sentences, padded to the longest of a batch, or to the longest of all."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def train(self) -> Dataset:
        return Sentences(self.kind)

    def collate(self, items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        words = pad_sequence([words for words, _ in items], batch_first=True)  # (B, T)
        words = functional.pad(words, (0, 9 - words.shape[1])) if self.kind == "fixed" else words
        return words, torch.stack([label for _, label in items])


class Mean(nn.Module):
    """The mean of the words' vectors: of all, or of those that are no padding."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.words, self.kind, self.norm, self.head = nn.Embedding(20, 8), kind, nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, words: Tensor) -> dict[str, Tensor]:
        x = self.words(words)  # (B, T, 8)
        if self.kind == "norm":
            x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        mask = torch.ones_like(words) if self.kind == "all" else words > 0
        x = (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return {"scores": self.head(self.norm(x) if self.kind == "pooled" else x), "scale": self.head.bias}


class Rows(Task):
    """Cross entropy: a mean over samples, or over other units; with the words that say which, or without."""

    def __init__(self, kind: str) -> None:
        self.kind, self.calls, self.classes = kind, 0, torch.tensor([1.0, 5.0, 0.2])

    def loss(self, output: dict[str, Tensor], target: Tensor) -> Tensor:
        scores = output["scores"]
        if self.kind in ("classes", "weighed"):
            return functional.cross_entropy(scores, target, self.classes)
        if self.kind == "remembers":  # nothing can be told, and to call it again would change what it learns
            self.calls += 1
            assert self.calls <= 2 * 2  # steps, micro-batches
            return functional.cross_entropy(scores, target, self.classes) + self.calls
        if self.kind in ("pairs", "gathers"):
            scores = gather(scores) if self.kind == "gathers" else scores
            return functional.cross_entropy(scores @ scores.T, torch.arange(len(scores)))
        return functional.cross_entropy(scores, target)

    def weight(self, target: Tensor) -> Tensor | int:
        return self.classes[target].sum() if self.kind == "weighed" else len(target)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], []),
        (["model.kind=all"], [PADDING]),
        (["model.kind=all", "loop.micro_batches=1"], []),
        (["model.kind=all", "data.kind=fixed"], []),
        (["model.kind=norm"], [PADDING]),
        (["model.kind=pooled"], []),  # this BatchNorm has never seen padding
        (["data.kind=own"], [RANDOM]),
        (["data.kind=counts"], [RANDOM]),
        (["task.kind=classes"], [MEAN]),
        (["task.kind=classes", "loop.micro_batches=1"], []),
        (["task.kind=weighed"], []),
        (["task.kind=remembers", "data.kind=fixed"], []),
        (["task.kind=pairs"], [MEAN]),
        (["task.kind=gathers"], []),
    ],
)
def test_what_divides_a_curve_is_said_and_nothing_else(tmp_path: Path, words: list[str], said: list[str]) -> None:
    for group, name in (("data", "Words"), ("model", "Mean"), ("task", "Rows")):
        path = tmp_path / "conf" / group / "lab.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(f"_target_: tests.test_first_lines.{name}\nkind: plain\n")
    lab = ["--config-dir", "conf", "trust=[tests]", "data=lab", "model=lab", "task=lab", "run.dir=run"]
    brief = ["loop.steps=2", "loop.global_batch=16", "loop.micro_batches=2", "loader.workers=0", "schedule=constant"]
    words = [*lab, *(word for word in brief if word.partition("=")[0] not in "".join(words)), *words]
    screen = (run(words, place=tmp_path).folder / "logs" / "rank-0.log").read_text()
    assert [note for note in (PADDING, MEAN, RANDOM) if note in screen] == said
