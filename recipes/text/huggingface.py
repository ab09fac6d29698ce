"""Texts out of a Hugging Face data set, as token numbers: in a folder, or by its name on the hub."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from recipes.splits import class_count, class_names, labels, numbered, splits
from recipes.text.tokenizer import loaded
from recipes.text.unlabelled import Unlabelled, new_texts
from trainer.data.data import Data, Preparation
from trainer.messages import Refusal

_IGNORED = -100  # the target that a cross entropy of torch's leaves out

# (what a row's columns hold) → (length,) int64 each, by the names that networks of transformers have for them
Encode = Callable[[list[Any]], dict[str, Tensor]]


class HuggingFaceText(Data):
    """The texts of one column, or of two as pairs, and the labels of another one (extra `hf`; `path` as for images).

    Inputs are what networks of transformers take: {"input_ids", "attention_mask"} and what else a tokenizer gives, each
    (B, length). Targets are class numbers (B,); without a column of labels the token numbers, -100 where there is none.
    """

    def __init__(
        self,
        path: str,
        columns: Sequence[str] = ("text",),
        label: str | None = "label",
        tokenizer: str | None = None,
        length: int = 128,
        subset: str | None = None,
        train: str = "train",
        evaluation: str | None = "test",
        num_classes: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        if length < 1:
            raise Refusal(f"data.length is {length}; it is a number of tokens, 1 or more")
        wanted = {f"data.columns[{at}]": name for at, name in enumerate(columns)}
        found = splits(path, subset, train, evaluation, {**wanted, **({} if label is None else {"data.label": label})})
        self._tokenizer, self._length = tokenizer, length
        encode = PretokenizedTexts(length) if tokenizer is None else Tokenizer(tokenizer, length)
        for column in columns if len(found[True]) else ():
            if (kind := _kind(found[True][0][column])) != encode.kind:
                remedy = "" if tokenizer else "; data.tokenizer=NAME makes numbers of text"
                raise Refusal(f"data.columns: {column} of {path} holds {kind}, not {encode.kind}{remedy}")
        self._encode, self._columns = encode, list(columns)
        found = found if label is None else numbered(found, label)
        self.class_names = [] if label is None else class_names(found[True], label)
        self._texts = {at: Texts(split, list(columns), label, encode) for at, split in found.items()}
        # what a network must know of them
        self.vocab_size = encode.vocab_size if vocab_size is None else vocab_size
        classes = max(texts.classes for texts in self._texts.values())
        self.num_classes = class_count(num_classes, classes, f"the column {label} of {path}")

    def inputs(self, where: str) -> Unlabelled:
        """New texts: lines, or rows of a table with these columns. Refusal where the data has token numbers."""
        encode = self._encode
        if not isinstance(encode, Tokenizer):
            raise Refusal(f"job.inputs={where}: without data.tokenizer this data has no way to make numbers of texts")

        def batch(rows: list[list[str]]) -> Any:
            return default_collate([encode(row) for row in rows])

        return Unlabelled(new_texts(where, self._columns), len(self._columns), batch)

    def train(self) -> Texts:
        """The texts for training."""
        return self._texts[True]

    def evaluation(self) -> Texts | None:
        """The texts of the split for evaluation; None where none was named."""
        return self._texts.get(False)

    def preparation(self) -> Preparation:
        """Tokens as the tokenizer makes them."""
        example, _ = self.collate([self._texts[True][0]] * 2)
        raw = f"{{{', '.join(example)}}}: int64 (B, {self._length}) each, as the tokenizer makes them"
        return Preparation(nn.Identity(), example, raw, raw, {"tokenizer": self._tokenizer, "length": self._length})


class Texts(Dataset):
    """The rows of a split, made numbers one by one: in the workers of a run."""

    def __init__(self, split: Any, columns: list[str], label: str | None, encode: Encode) -> None:
        self._split, self._columns, self._encode = split.select_columns(columns), columns, encode
        self._labels: Tensor | None = None  # (N,) class numbers
        self.classes = 0
        if label is not None:
            self._labels, self.classes = labels(split, label)

    def __len__(self) -> int:
        return len(self._split)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        row = self._split[index]
        inputs = self._encode([row[column] for column in self._columns])
        if self._labels is not None:
            return inputs, self._labels[index]
        return inputs, inputs["input_ids"].where(inputs["attention_mask"] == 1, _IGNORED)


class Tokenizer:
    """Texts to token numbers, by a tokenizer of transformers: a folder, or a name on the hub."""

    kind = "text"

    def __init__(self, name: str, length: int) -> None:
        self._tokenizer = loaded(name)
        self.vocab_size, self._length = len(self._tokenizer), length

    def __call__(self, texts: list[str]) -> dict[str, Tensor]:
        """A text, or two as a pair, cut off or filled up."""
        form: dict[str, Any] = {"truncation": True, "padding": "max_length", "return_tensors": "pt"}
        found = self._tokenizer(*texts, max_length=self._length, **form)
        return {name: one[0] for name, one in found.items()}


class PretokenizedTexts:
    """Lists of token numbers, those of a row one behind the other, cut off or filled up with 0."""

    kind, vocab_size = "lists of whole numbers", None

    def __init__(self, length: int) -> None:
        self._length = length

    def __call__(self, lists: list[list[int]]) -> dict[str, Tensor]:
        """The lists of one row."""
        own = torch.tensor(list(chain.from_iterable(lists))[: self._length], dtype=torch.int64)
        ids = torch.cat((own, own.new_zeros(self._length - len(own))))
        return {"input_ids": ids, "attention_mask": (torch.arange(self._length) < len(own)).long()}


def _kind(value: Any) -> str:
    """What a column holds, by one of its values."""
    numbers = isinstance(value, list) and all(isinstance(each, int) for each in value)
    return "text" if isinstance(value, str) else "lists of whole numbers" if numbers else type(value).__name__
