"""Texts with a label each, from a CSV or JSONL file, as token numbers; batches of texts of similar length."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from recipes.splits import class_count
from recipes.text.table import column, table
from recipes.text.tokenizer import loaded
from trainer.data.data import Data
from trainer.data.raw import Preparation
from trainer.home import at_home
from trainer.refusal import Refusal

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
        where = ADDRESSES if file is None else at_home(file)
        rows = table(where, "data.file")
        groups = range(len(rows)) if group is None else column(rows, group, "data.group", where)
        back = _held_back(groups, 0.0 if evaluation else held)
        parts = {True: [row for row, out in zip(rows, back, strict=True) if not out]}
        parts[False] = [row for row, out in zip(rows, back, strict=True) if out]
        if evaluation:
            parts[False] = table(at_home(evaluation), "data.evaluation")

        # labels are numbered by their order, in both parts together; numbers by their size
        labels = {at: column(part, label, "data.label", where) for at, part in parts.items()}
        names = sorted({each for part in labels.values() for each in part}, key=_by_size)
        numbers = {name: number for number, name in enumerate(names)}
        self.class_names = [str(name) for name in names]
        self.num_classes = class_count(num_classes, len(names), f"the column {label} of {where}")

        encode = loaded(tokenizer)
        self.vocab_size, self._batch = len(encode), batch
        self._tokenizer, self._length = tokenizer, length
        self._texts = {}
        for at, part in parts.items():
            texts = [str(each) for each in column(part, text, "data.text", where)]
            ids = encode(texts, truncation=True, max_length=length)["input_ids"] if texts else []
            if texts and not any(ids):
                raise Refusal(
                    f"data.tokenizer={tokenizer} makes no token of any text in {where}: transformers loads it as a"
                    f" {type(encode).__name__}, by the model_type of the config.json beside it"
                )
            self._texts[at] = Texts(ids, [numbers[each] for each in labels[at]], encode.pad_token_id or 0)

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
