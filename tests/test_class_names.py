"""Classes have names: another folder with the same ones is taken, with others it is refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from PIL import Image

from tests.inside import here, product
from trainer.data.class_names import refuse_other_classes
from trainer.launch.rendezvous import Launch
from trainer.messages import Refusal

COLOURS = {"ant": (200, 30, 30), "bee": (30, 200, 30), "cat": (30, 30, 200)}
WORDS = ("data=imagefolder", "data.image_size=8", "data.window.area=[1,1]", "model=mlp", "model.width=16")
TRAINING = (*WORDS, "loop.global_batch=12", "loop.epochs=12", "optimizer.lr=0.01", "loader.workers=0", "run.dir=run")


def colours(root: Path, names: dict[str, str]) -> Path:
    """Six pictures of each class in train and in val: folder → the class whose colour they have."""
    for part in ("train", "val"):
        for at, (folder, kind) in enumerate(names.items()):
            place = root / part / folder
            place.mkdir(parents=True)
            for number in range(6):
                shade = tuple(value + 5 * number + at for value in COLOURS[kind])
                Image.new("RGB", (12, 10), shade).save(place / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("classes")
    colours(place / "own", {name: name for name in COLOURS})
    assert product(Launch(), place, [*TRAINING, f"data.root={place / 'own'}"]) == 0
    return place


@pytest.fixture
def run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained / "run", "run")
    return tmp_path / "run"


def accuracy(run: Path) -> float:
    return json.loads((run / "evaluate" / "metrics.jsonl").read_text().splitlines()[-1])["accuracy"]


def test_a_run_and_each_of_its_checkpoints_know_the_names(run: Path) -> None:
    for path in run.glob("checkpoints/step-*/state.json"):
        assert json.loads(path.read_text())["data"]["classes"] == [*COLOURS]
    assert json.loads((run / "environment.json").read_text())["classes"] == [*COLOURS]


def test_another_folder_with_the_same_classes_is_taken(run: Path) -> None:
    other = colours(Path("two"), {name: name for name in COLOURS})
    assert here("job=evaluate", "run.dir=run", f"data.root={other}") == 0
    assert accuracy(run) == 1
    assert here("job=predict", "run.dir=run", f"data.root={other}") == 0
    _, *rows = (run / "predict" / "predictions.csv").read_text().splitlines()
    assert [row.split(",")[1].split(os.sep)[-2] for row in rows] == [row.split(",")[2] for row in rows]


@pytest.mark.parametrize(
    "names",
    [
        {"ants": "ant", "bee": "bee", "cat": "cat"},
        pytest.param({"bee": "bee", "cat": "cat"}, marks=pytest.mark.long),
        pytest.param({"roses": "ant", "tulips": "bee"}, marks=pytest.mark.long),
        pytest.param(dict.fromkeys(("ant", "bee", "cat", "dog"), "ant"), marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("job", ["evaluate", "predict", "export"])
def test_a_set_with_other_classes_is_refused_with_both_lists(run: Path, names: dict[str, str], job: str) -> None:
    other = colours(Path("other"), {name: kind if kind in COLOURS else "ant" for name, kind in names.items()})
    said = f"the classes of this data are {', '.join(names)}; the run was trained on ant, bee, cat: take data"
    with pytest.raises(Refusal, match=said):
        here(f"job={job}", "run.dir=run", f"data.root={other}")


@pytest.mark.long
def test_an_export_says_the_classes_that_its_checkpoint_has_learned(run: Path) -> None:
    card = run / "export" / "model.json"
    for words in (
        (),
        ("data.root=nowhere",),  # the pictures need not be there
        ("data.root=nowhere", "job.format=pt2", "job.prepared=true"),
    ):
        assert here("job=export", "run.dir=run", *words) == 0
        assert json.loads(card.read_text())["classes"] == [*COLOURS]
        card.unlink()


def test_another_order_is_other_classes_and_no_names_are_none() -> None:
    refuse_other_classes(["a", "b"], ["a", "b"])
    refuse_other_classes([], ["a", "b"])
    refuse_other_classes(["a", "b"], [])
    with pytest.raises(Refusal, match="the classes of this data are b, a; the run was trained on a, b:"):
        refuse_other_classes(["b", "a"], ["a", "b"])


def test_a_run_does_not_go_on_with_other_classes(run: Path) -> None:
    other = colours(Path("other"), {"ants": "ant", "bee": "bee", "cat": "cat"})
    with pytest.raises(Refusal, match=r"classes: ant, bee, cat → ants, bee, cat"):
        here(*TRAINING, f"data.root={other}", "loop.epochs=13")


def test_a_table_does_not_outlive_its_tensors(run: Path) -> None:
    assert here("job=predict", "run.dir=run") == 0
    assert (run / "predict" / "predictions.csv").is_file()
    # tensors of what has no names: the old table would be one of other samples
    nameless = ("data=synthetic_images", "data.num_classes=3", "data.image_size=8", "data.channels=3")
    assert here("job=predict", "run.dir=run", *nameless) == 0
    assert not (run / "predict" / "predictions.csv").exists()
