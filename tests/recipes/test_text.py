"""Texts of Hugging Face data sets in folders that the tests make; needs the extra `hf`, tokenizers transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recipes.text.huggingface import HuggingFaceText
from tests.ranks import Processes
from tests.run import far, run

datasets = pytest.importorskip("datasets", reason="the package datasets is not installed: pip install '.[hf]'")

NETWORK = (
    *("model=mlp", "model._target_=tests.recipes.test_text.Bag", "+model.vocab_size=${data.vocab_size}"),
    *("trust=[tests]", "~model.channels", "~model.image_size", "~model.width", "~model.depth"),
)
SHORT = ("data=huggingface_text", "data.length=6", "loop.global_batch=8", "loop.epochs=2", "loop.log_every=1")
LISTS = ("data.columns=[ids]", "data.vocab_size=5", "data.label=mood")


class Bag(nn.Module):
    """Says a class by the mean of the tokens."""

    def __init__(self, num_classes: int, vocab_size: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab_size, 4), nn.Linear(4, num_classes)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        mask = inputs["attention_mask"][..., None].float()  # (B, length, 1)
        return self.head((self.embed(inputs["input_ids"]) * mask).sum(1) / mask.sum(1))


def table(count: int) -> Any:
    """Sentences of one to seven words out of four, their words as numbers, and moods as words."""
    words = [[1 + (at * (at + place)) % 4 for place in range(1 + at % 7)] for at in range(count)]
    said = [" ".join(f"w{word}" for word in own) for own in words]
    moods = [("glad", "sad")[own[0] % 2] for own in words]
    return datasets.Dataset.from_dict({"text": said, "ids": words, "mood": moods})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("texts")
    datasets.DatasetDict({"train": table(40), "test": table(15)}).save_to_disk(str(place / "set"))
    return place


@pytest.mark.long
def test_one_curve_whoever_reads(place: Path, processes: Processes) -> None:
    start = [f"data.path={place / 'set'}", *SHORT, *LISTS, *NETWORK]
    alone = run([*start, "run.dir=alone", "strategy=single", "loader.workers=1"], place=place)
    two = run([*start, "run.dir=two", "strategy=ddp", "loader.workers=0"], 2, "group", place=place)
    assert far(two.curve(), alone.curve()) < 1e-6
    assert {line["samples"] for line in two.lines("eval")} == {15}


def test_lists_are_cut_off_or_filled_up(place: Path) -> None:
    data = HuggingFaceText(str(place / "set"), columns=["ids", "ids"], label=None, length=5)
    inputs, targets = data.train()[1]  # two words, twice
    assert inputs["attention_mask"].tolist() == [1, 1, 1, 1, 0]
    assert inputs["input_ids"].tolist() == [*table(2)[1]["ids"] * 2, 0]
    assert targets.tolist() == [*table(2)[1]["ids"] * 2, -100]
    assert data.train()[6][0]["attention_mask"].tolist() == [1] * 5


@pytest.mark.long
def test_a_tokenizer_makes_numbers_of_texts_and_says_how_many_there_are(place: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"?": 0, **{f"w{at}": at for at in range(1, 5)}}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    own = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", eos_token="?")
    own.save_pretrained(place / "tokenizer")
    path, tokenizer = str(place / "set"), str(place / "tokenizer")
    data = HuggingFaceText(path, label="mood", tokenizer=tokenizer, length=6)
    assert (data.vocab_size, data.num_classes, len(data.class_names)) == (5, 2, 2)
    lists = HuggingFaceText(path, columns=["ids"], label="mood", length=6)
    for at in range(15):
        (one, label), (other, same) = data.train()[at], lists.train()[at]
        assert all(torch.equal(one[name], other[name]) for name in other)
        assert label == same
    start = [f"data.path={path}", f"data.tokenizer={tokenizer}", "data.label=mood", *SHORT, *NETWORK]
    texts = run([*start, "run.dir=tokens", "loader.workers=1"], place=place)
    numbers = run([f"data.path={path}", *SHORT, *LISTS, *NETWORK, "run.dir=lists"], place=place)
    assert texts.curve("loss_hex") == numbers.curve("loss_hex")


@pytest.mark.long
def test_what_cannot_be_is_refused_in_words(place: Path, tmp_path: Path) -> None:
    for words, said in (
        (("data.columns=[text]",), r"data\.columns: text of .* holds text, not lists .*; data\.tokenizer=NAME makes"),
        (("data.columns=[tex]",), r"data\.columns\[0\]=tex: split train of .* no such column; .*did you mean 'text'"),
        (("data.columns=[ids]", "data.length=0"), r"data\.length is 0"),
        (("data.columns=[ids]", "data.num_classes=1"), r"data\.num_classes=1, but the column mood of .* has 2 classes"),
    ):
        start = [f"data.path={place / 'set'}", *SHORT, "data.label=mood", *NETWORK]
        assert re.search(said, run([*start, *words, "run.dir=run"], place=tmp_path, code=2).out)
