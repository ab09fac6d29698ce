"""Texts with a label each, from a CSV or JSONL file, as token numbers; batches of texts of similar length."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from recipes.splits import class_count
from recipes.text.table import column, table
from recipes.text.tokenizer import loaded
from recipes.text.unlabelled import Unlabelled, new_texts
from trainer.data.data import Data, Preparation
from trainer.messages import Refusal, expand_home

ADDRESSES = Path(__file__).with_name("state-of-the-union.jsonl.gz")  # passages of speeches since 1934; public domain
_TOKENS = "{input_ids, attention_mask}: int64 (B, T) each, of at most `length` tokens, filled up behind"
POOL = 50  # batches among whose texts those of similar length are put together


class LabelledText(Data):
    """The rows of a table: one column of texts, one of labels. What is held back of it is the evaluation set.

    Inputs are what networks of transformers take: {"input_ids", "attention_mask"}, each (B, T), filled up to the
    longest text of the batch; targets class numbers (B,). batch: samples of a global batch, whose texts are to be of
    similar length. group: a column whose values are held back as wholes (a speech, an author).
    """

    def __init__(
        self,
        tokenizer: str | None,
        batch: int,
        file: str | None = None,
        evaluation: str | None = None,
        held: float = 0.1,
        group: str | None = None,
        text: str = "text",
        label: str = "label",
        length: int = 256,
        num_classes: int | None = None,
    ) -> None:
        if tokenizer is None:
            raise Refusal("data.tokenizer is null; give the folder of a tokenizer, or its name on the hub")
        if length < 1:
            raise Refusal(f"data.length is {length}; it is a number of tokens, 1 or more")
        if not 0 <= held < 1:
            raise Refusal(f"data.held is {held}; it is a fraction of the rows, from 0 to less than 1")
        self._where = ADDRESSES if file is None else expand_home(file)
        self._evaluation, self._held, self._group, self._columns = evaluation, held, group, (text, label)
        # new texts are looked at without the old ones: then the file need not be there
        self.num_classes = len(self.class_names) if num_classes is None else num_classes
        # only now: a tokenizer of the hub may take a minute, a mistake in the file shows at once
        self._encode, self._tokenizer, self._length, self._batch = loaded(tokenizer), tokenizer, length, batch
        self.vocab_size = len(self._encode)

    @cached_property
    def _parts(self) -> dict[bool, list[dict[str, Any]]]:
        """The rows for training, and those for evaluation."""
        rows = self._table(self._where, "data.file")
        groups = range(len(rows)) if self._group is None else column(rows, self._group, "data.group", self._where)
        back = _held_back(groups, 0.0 if self._evaluation else self._held)
        parts = {at: [row for row, out in zip(rows, back, strict=True) if out != at] for at in (True, False)}
        if self._evaluation:
            parts[False] = self._table(expand_home(self._evaluation), "data.evaluation")
        return parts

    def _table(self, path: Path, key: str) -> list[dict[str, Any]]:
        """The rows of a file, each with a label: a missing one would be a class of its own."""
        rows = table(path, key)
        column(rows, self._columns[1], "data.label", path, filled=True)
        return rows

    @cached_property
    def _labels(self) -> dict[bool, list[Any]]:
        return {at: column(part, self._columns[1], "data.label", self._where) for at, part in self._parts.items()}

    @cached_property
    def _classes(self) -> list[Any]:
        """The labels of both parts together, in their order; numbers by their size."""
        return sorted({each for part in self._labels.values() for each in part}, key=_by_size)

    @cached_property
    def class_names(self) -> list[str]:  # type: ignore[override]
        """The labels as text."""
        return [str(name) for name in self._classes]

    @cached_property
    def _texts(self) -> dict[bool, Texts]:
        """The texts as token numbers, with their class numbers."""
        class_count(self.num_classes, len(self.class_names), f"the column {self._columns[1]} of {self._where}")
        numbers = {name: number for number, name in enumerate(self._classes)}
        made = {}
        for at, part in self._parts.items():
            texts = [str(each) for each in column(part, self._columns[0], "data.text", self._where)]
            ids = self._ids(texts)
            if texts and not any(ids):
                raise Refusal(
                    f"data.tokenizer={self._tokenizer} makes no token of any text in {self._where}: transformers loads"
                    f" it as a {type(self._encode).__name__}, by the model_type of the config.json beside it"
                )
            labels = [numbers[each] for each in self._labels[at]]
            made[at] = Texts(ids, labels, self._encode.pad_token_id or 0)
        return made

    def _ids(self, texts: list[str]) -> list[list[int]]:
        return self._encode(texts, truncation=True, max_length=self._length)["input_ids"] if texts else []

    def inputs(self, where: str) -> Unlabelled:
        """New texts: lines, or rows of a table with the column of texts."""
        padding = self._encode.pad_token_id or 0

        def encode(rows: list[list[str]]) -> dict[str, Tensor]:
            texts = Texts(self._ids([text for (text,) in rows]), [0] * len(rows), padding)
            return texts.batch(torch.arange(len(rows)))[0]

        return Unlabelled(new_texts(where, self._columns[:1]), 1, encode)

    def train(self) -> Texts:
        """The texts for training."""
        return self._texts[True]

    def evaluation(self) -> Texts | None:
        """The texts that were held back, or those of the file for evaluation; None where there are none."""
        return self._texts[False] if len(self._texts[False]) else None

    def preparation(self) -> Preparation:
        """Tokens as the tokenizer makes them."""
        facts = {"tokenizer": self._tokenizer, "length": self._length}
        example, _ = self._texts[True].batch(torch.tensor([0, 0]))
        return Preparation(nn.Identity(), example, _TOKENS, _TOKENS, facts)

    def order(self, epoch: int, generator: torch.Generator) -> Tensor:
        """A permutation (N,) whose global batches hold texts of similar length, in an order of their own."""
        order = torch.randperm(len(self._texts[True]), generator=generator)
        whole = len(order) // self._batch * self._batch
        order, rest = order[:whole], order[whole:]  # the rest of an epoch is drawn like all others, not the longest
        # by length inside of pools that chance has made: which texts meet differs from epoch to epoch
        pools = torch.arange(whole) // (POOL * self._batch)
        by_length = self._texts[True].lengths[order].argsort(stable=True)
        order = order[by_length[pools[by_length].argsort(stable=True)]]
        batches = order.view(-1, self._batch)  # (steps, batch)
        return torch.cat((batches[torch.randperm(len(batches), generator=generator)].flatten(), rest))


class Texts(Dataset):
    """Texts as token numbers in memory, one behind the other, with their class numbers."""

    def __init__(self, ids: Sequence[Sequence[int]], labels: Sequence[int], padding: int) -> None:
        ids = [each or [padding] for each in ids]  # an empty text is one token of padding that counts
        self.lengths = torch.tensor([len(each) for each in ids], dtype=torch.int64)  # (N,)
        self._tokens = torch.tensor([token for each in ids for token in each], dtype=torch.int32)
        self._ends, self._padding = self.lengths.cumsum(0), padding
        self._labels = torch.tensor(labels, dtype=torch.int64)  # (N,)

    def __len__(self) -> int:
        return len(self._labels)

    def batch(self, indices: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """{"input_ids", "attention_mask"}, each (B, T) for the longest of these texts, and class numbers (B,)."""
        lengths = self.lengths[indices]
        starts = (self._ends[indices] - lengths).tolist()
        own = [self._tokens[at : at + size] for at, size in zip(starts, lengths.tolist(), strict=True)]
        ids = pad_sequence(own, batch_first=True, padding_value=self._padding).long()
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        return {"input_ids": ids, "attention_mask": mask}, self._labels[indices]

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        inputs, labels = self.batch(torch.tensor([index]))
        return {name: one[0] for name, one in inputs.items()}, labels[0]

    def fingerprint(self) -> str:
        """Of every token and every label."""
        parts = (self._tokens, self.lengths, self._labels)
        return hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()


def _held_back(groups: Sequence[Any], held: float) -> list[bool]:
    """For each row, whether it is held back: groups at even distances of their order, so large a fraction of them."""
    names = sorted(set(groups), key=_by_size)
    back = {name for at, name in enumerate(names) if int((at + 1) * held) > int(at * held)}
    return [group in back for group in groups]


def _by_size(value: Any) -> tuple[bool, float, str]:
    """Numbers by their size, before words by their letters."""
    number = isinstance(value, (int, float))
    return not number, float(value) if number else 0.0, str(value)
