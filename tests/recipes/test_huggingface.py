"""Hugging Face data sets in folders that the tests make; needs the extra `hf`."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.vision.augment import Augment
from recipes.vision.huggingface import HuggingFaceImages
from tests.ranks import Processes
from tests.recipes.test_folder import CLASSES, SHORT, WHOLE, picture
from tests.run import far, run

datasets = pytest.importorskip("datasets", reason="the package datasets is not installed: pip install '.[hf]'")

WORDS = ("data=huggingface", "data.image_size=16", "model=mlp", "model.width=16", "loop.global_batch=12", *SHORT)


def table(count: int, words: bool = False) -> Any:
    """Pictures of three classes in a table, as PNGs; the labels as numbers with names, or as words."""
    labels = [at % 3 for at in range(count)]
    encoded = []
    for at in range(count):
        picture(at).save(file := io.BytesIO(), "png")
        encoded.append({"bytes": file.getvalue(), "path": None})
    kind = datasets.Value("string") if words else datasets.ClassLabel(names=list(CLASSES))
    features = datasets.Features({"img": datasets.Image(), "kind": kind})
    columns = {"img": encoded, "kind": [CLASSES[label] for label in labels] if words else labels}
    return datasets.Dataset.from_dict(columns, features=features)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tables")
    datasets.DatasetDict({"train": table(48), "test": table(15)}).save_to_disk(str(place / "numbers"))
    datasets.DatasetDict({"train": table(48, words=True), "test": table(2, words=True)}).save_to_disk(
        str(place / "words")
    )
    return place


def data(path: Path, **fields: Any) -> HuggingFaceImages:
    columns = {"image": "img", "label": "kind"} | fields
    return HuggingFaceImages(Augment(), WHOLE, path=str(path), image_size=16, **columns)


@pytest.mark.long
def test_one_curve_whoever_decodes(place: Path, processes: Processes) -> None:
    start = [f"data.path={place / 'numbers'}", "data.image=img", "data.label=kind", *WORDS]
    alone = run([*start, "run.dir=alone", "strategy=single", "loader.workers=1"], place=place)
    words = [*start, "run.dir=two", "strategy=ddp", "loader.workers=0", "loop.micro_batches=2"]
    two = run(words, 2, "group", place=place)
    assert far(two.curve(), alone.curve()) < 1e-6
    assert {line["samples"] for line in two.lines("eval")} == {15}


def test_words_as_labels_are_numbered_in_all_splits_together(place: Path) -> None:
    one = data(place / "words")
    assert (one.num_classes, sorted(one.class_names)) == (3, sorted(CLASSES))
    assert one.train().labels.tolist() == [at % 3 for at in range(48)]
    assert one.evaluation().labels.tolist() == [0, 1]
    assert torch.equal(one.train()[4][0], data(place / "numbers").train()[4][0])
    assert data(place / "numbers", evaluation=None).evaluation() is None


def test_a_set_is_told_from_another_by_its_pictures(place: Path) -> None:
    one, other = data(place / "numbers"), data(place / "numbers", repeat=2)
    assert one.fingerprint(one.train()) == other.fingerprint(other.train()) != ""
    assert one.fingerprint(one.evaluation()) != one.fingerprint(one.train())


def test_what_is_not_there_is_refused_in_words(place: Path, tmp_path: Path) -> None:
    columns = ("data.image=img", "data.label=kind")
    for words, said in (
        (("data.path=/nowhere/at/all",), r"data\.path=/nowhere/at/all: there is no folder"),
        (("data.evaluation=valid",), r"data\.evaluation=valid: .* has no such split; it has train, test"),
        (("data.image=picture",), r"data\.image=picture: split train of .* has no such column; it has img, kind"),
        (("data.image=kind", "data.label=kind"), r"data\.image=kind: this column of .* holds no pictures"),
        (("data.image=img", "data.label=kinds"), r"no such column; it has img, kind; did you mean 'kind'"),
        ((*columns, "data.num_classes=2"), r"data\.num_classes=2, but .* has 3 classes"),
    ):
        refused = run([f"data.path={place / 'numbers'}", *WORDS, *words, "run.dir=run"], place=tmp_path, code=2).out
        assert re.search(said, refused), refused
