"""Documents that are rows of a Hugging Face data set, packed into samples: for networks that predict the next token."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from recipes.language.tokens import PackedData
from recipes.splits import splits
from recipes.text.tokenizer import loaded
from trainer.messages import Refusal, first_line

_AT_ONCE = 10_000  # rows whose lengths are read at once


class RowDocuments(PackedData):
    """Rows of a data set as documents, one behind the other in windows.

    The column holds texts, of which the tokenizer makes numbers once, with its end of a text behind each; or lists of
    numbers, which are taken as they are.
    """

    def __init__(
        self,
        path: str,
        column: str = "text",
        tokenizer: str | None = None,
        length: int = 1024,
        subset: str | None = None,
        train: str = "train",
        evaluation: str | None = "test",
        boundaries: bool = False,
        pack: bool = False,
        vocab_size: int | None = None,
    ) -> None:
        self._name = tokenizer
        found = splits(path, subset, train, evaluation, {"data.column": column})
        if tokenizer is not None:
            found = {training: self._numbers(split, column) for training, split in found.items()}
            vocab_size = len(self._tokenizer) if vocab_size is None else vocab_size
            column = "tokens"
        rows = {training: Rows(split, column, path) for training, split in found.items()}
        super().__init__(rows[True], rows.get(False), f"data.path={path}", length, boundaries, pack)
        self.vocab_size = vocab_size

    def encode(self, text: str) -> Tensor:
        """The tokens (T,) of a text. Refusal where the data has token numbers."""
        if self._name is None:
            raise Refusal("without data.tokenizer this data has no way to make numbers of texts")
        return torch.tensor(self._tokenizer(text)["input_ids"], dtype=torch.int64)

    def decode(self, tokens: Tensor) -> str:
        """The text of tokens (T,); without a tokenizer their numbers."""
        return str(tokens.tolist()) if self._name is None else self._tokenizer.decode(tokens.tolist())

    @cached_property
    def _tokenizer(self) -> Any:
        return loaded(str(self._name))

    def _numbers(self, split: Any, column: str) -> Any:
        """The split with lists of token numbers; `datasets` keeps them in its cache, so one process makes them."""
        import datasets

        tokenizer = self._tokenizer
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

        def numbers(texts: list[str]) -> dict[str, list[list[int]]]:
            found = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
            return {"tokens": [own + end for own in found]}

        kind = datasets.Features({"tokens": datasets.Sequence(datasets.Value("int32"))})
        form: dict[str, Any] = {"batched": True, "features": kind, "remove_columns": split.column_names}
        try:
            return split.map(numbers, input_columns=column, desc="tokens of the documents", **form)
        except Exception as error:  # a row that is no text, a folder that takes no file
            raise Refusal(
                f"data.tokenizer={self._name} makes no numbers of column {column}: {first_line(error)}."
                " scripts/prepare_tokens.py writes tokens into a folder of your choice, for data=tokens"
            ) from error


class Rows:
    """The tokens of a split, row after row, read by place."""

    def __init__(self, split: Any, column: str, path: str) -> None:
        from pyarrow import compute, types

        self._column, self._split = column, split.select_columns([column]).with_format("arrow")
        kind = split.features.arrow_schema.field(column).type
        if not types.is_list(kind) or not types.is_integer(kind.value_type):
            raise Refusal(
                f"data.column={column}: this column of {path} holds {kind}, not lists of whole numbers;"
                " data.tokenizer=NAME makes numbers of text"
            )
        read = self._split.iter(_AT_ONCE)
        counted = [compute.list_value_length(rows[column]).fill_null(0).to_numpy() for rows in read]
        sizes = numpy.concatenate([numpy.zeros(0, numpy.int64), *counted]).astype(numpy.int64)  # (rows,)
        edges = numpy.concatenate(([0], numpy.cumsum(sizes)))
        self.starts: NDArray[numpy.int64] = edges[:-1]
        self.ends: NDArray[numpy.int64] = edges[-1:]  # one piece: windows run through all rows
        self.tokens = int(edges[-1])

    def read(self, start: int, count: int) -> NDArray[Any]:
        """So many tokens from a place on."""
        from pyarrow import compute

        first, last = (int(numpy.searchsorted(self.starts, at, side="right")) - 1 for at in (start, start + count - 1))
        rows = self._split[first : last + 1][self._column]
        return compute.list_flatten(rows).slice(start - int(self.starts[first]), count).to_numpy()
