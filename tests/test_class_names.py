"""Classes have names: another folder with the same ones is taken, with others it is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from PIL import Image

from tests.run import quickly, run

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
    run([*TRAINING, f"data.root={place / 'own'}"], place=place)
    return place


@pytest.fixture
def folder(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(trained / "run", tmp_path / "run"))


def test_a_run_and_each_of_its_checkpoints_know_the_names(folder: Path) -> None:
    for path in folder.glob("checkpoints/step-*/state.json"):
        assert json.loads(path.read_text())["data"]["classes"] == [*COLOURS]
    assert json.loads((folder / "environment.json").read_text())["classes"] == [*COLOURS]


def test_another_folder_with_the_same_classes_is_taken_and_a_table_does_not_outlive_its_tensors(folder: Path) -> None:
    other = colours(Path("two"), {name: name for name in COLOURS})
    run(["job=evaluate", "run.dir=run", f"data.root={other}"])
    assert json.loads((folder / "evaluate" / "metrics.jsonl").read_text().splitlines()[-1])["accuracy"] == 1
    run(["job=predict", "run.dir=run", f"data.root={other}"])
    _, *rows = (folder / "predict" / "predictions.csv").read_text().splitlines()
    assert [row.split(",")[1].split(os.sep)[-2] for row in rows] == [row.split(",")[2] for row in rows]
    # tensors of what has no names: the old table would be one of other samples
    nameless = ("data=synthetic_images", "data.num_classes=3", "data.image_size=8", "data.channels=3")
    run(["job=predict", "run.dir=run", *nameless])
    assert not (folder / "predict" / "predictions.csv").exists()


OTHER = [("ants", "bee", "cat"), ("bee", "cat"), ("ant", "bee", "cat", "dog")]


@pytest.mark.parametrize(
    ("names", "job"),
    quickly(
        [*((names, "evaluate") for names in OTHER), (OTHER[0], "predict"), (OTHER[0], "export")],
        (OTHER[0], "evaluate"),
    ),
)
def test_a_set_with_other_classes_is_refused_with_both_lists(folder: Path, names: tuple[str, ...], job: str) -> None:
    other = colours(Path("other"), {name: name if name in COLOURS else "ant" for name in names})
    said = run([f"job={job}", "run.dir=run", f"data.root={other}"], code=2).out
    assert f"the classes of this data are {', '.join(names)}; the run was trained on ant, bee, cat: take data" in said
    said = run([*TRAINING, f"data.root={other}", "loop.epochs=13"], code=2).out
    assert re.search(rf"classes: ant, bee, cat → {', '.join(names)}", said)


@pytest.mark.long
def test_an_export_says_the_classes_that_its_checkpoint_has_learned(folder: Path) -> None:
    card = folder / "export" / "model.json"
    # the pictures need not be there
    for words in ((), ("data.root=nowhere",), ("data.root=nowhere", "job.format=pt2", "job.prepared=true")):
        run(["job=export", "run.dir=run", *words])
        assert json.loads(card.read_text())["classes"] == [*COLOURS]
        card.unlink()
