"""The last mile: a trained run, the names of its classes, and the class of new pictures."""

from __future__ import annotations

import csv
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors.torch import load_file

from recipes.vision.augment import Augment
from recipes.vision.digits import Digits
from tests.ranks import Processes
from tests.run import quickly, run

COLOURS = {"ant": (200, 30, 30), "bee": (30, 200, 30), "cat": (30, 30, 200)}
TRAINING = (
    *(
        "data=imagefolder",
        "data.image_size=8",
        "data.window.area=[1,1]",
        "model=mlp",
        "model.width=16",
        "model.depth=2",
    ),
    *("loop.global_batch=12", "loop.epochs=12", "optimizer.lr=0.01", "loader.workers=0", "run.dir=run"),
)


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


WORDS = ("job=predict", "run.dir=run")
SPREAD = {"ddp on 3": (3, ("strategy=ddp",)), "fsdp on 2": (2, ("strategy=fsdp",)), "pp on 2": (2, ("strategy=pp",))}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose training pictures are gone."""
    place = tmp_path_factory.mktemp("inputs")
    colours(place / "own", {name: name for name in COLOURS})
    run([*TRAINING, f"data.root={place / 'own'}"], place=place)
    shutil.rmtree(place / "own")
    return place


@pytest.fixture
def folder(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run, in the present folder."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(trained / "run", tmp_path / "run"))


@pytest.fixture
def new(folder: Path, tmp_path: Path) -> Path:
    """A folder of new pictures, two of them damaged, beside the run."""
    for name, colour in COLOURS.items():
        place = tmp_path / "new" / name
        place.mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (20, 30), colour).save(place / f"{number}.png")
    (tmp_path / "new" / "cut.jpg").write_bytes(b"no picture")
    (tmp_path / "new" / "ant" / "empty.png").write_bytes(b"")
    (tmp_path / "new" / "notes.txt").write_text("nothing of a picture")
    return tmp_path / "new"


def answers() -> tuple[list[dict[str, str]], list[dict[str, Any]]]:
    with Path("run/predict/predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    lines = [json.loads(line) for line in Path("run/predict/predictions.jsonl").read_text().splitlines()]
    assert [row["file"] for row in rows] == [line["file"] for line in lines] == sorted(line["file"] for line in lines)
    assert [row["class"] for row in rows] == [line["class"] or "" for line in lines]
    return rows, lines


def test_the_class_of_one_photo_is_on_the_screen(new: Path) -> None:
    screen = run([*WORDS, "job.inputs=new/bee/0.png"]).out
    (row,), (line,) = answers()
    assert (row["file"], row["class"], line["error"]) == ("new/bee/0.png", "bee", None)
    assert float(row["probability"]) == line["probabilities"]["bee"] == max(line["probabilities"].values()) > 0.34
    assert sorted(line["probabilities"]) == [*COLOURS]
    assert sum(line["probabilities"].values()) == pytest.approx(1, abs=1e-4)
    assert f"new/bee/0.png  bee {100 * float(row['probability']):.1f} %" in screen


@pytest.mark.parametrize("where", ["new", "new/**/*", "list.txt"])
def test_a_row_for_each_input_and_damaged_ones_say_so(new: Path, where: str) -> None:
    pictures = sorted(str(path.relative_to(new.parent)) for path in new.rglob("*") if path.suffix in (".png", ".jpg"))
    Path("list.txt").write_text("\n".join([*reversed(pictures), "nowhere.png"]) + "\n\n")
    screen = run([*WORDS, f"job.inputs={where}"]).out
    rows, lines = answers()
    missing = ["./nowhere.png"] if where == "list.txt" else []
    assert [row["file"] for row in rows] == missing + pictures
    damaged = {"new/cut.jpg", "new/ant/empty.png", *missing}
    assert {line["file"] for line in lines if line["error"]} == damaged
    assert all(line["class"] == Path(line["file"]).parent.name for line in lines if not line["error"])
    assert all(row["class"] == row["probability"] == "" for row in rows if row["file"] in damaged)
    assert f"damaged     {len(damaged)} of {len(rows)} inputs" in screen
    assert all(name in screen for name in damaged)
    if missing:
        assert lines[0]["error"] == "cannot be read as a picture: No such file or directory"


@pytest.mark.long
@pytest.mark.parametrize("where", SPREAD)
def test_on_any_placement_the_same_rows(new: Path, processes: Processes, where: str) -> None:
    words, (size, more) = [*WORDS, "job.inputs=new", "loop.eval_batch=5"], SPREAD[where]
    run(words)
    one = answers()[1]
    run([*words, *more], size, "group")
    for left, right in zip(one, answers()[1], strict=True):
        assert left["probabilities"] == pytest.approx(right["probabilities"], abs=1e-5)
        assert {**left, "probabilities": 0} == {**right, "probabilities": 0}
    # fewer inputs than ranks
    run([*WORDS, "job.inputs=new/bee/0.png", *more], size, "group")
    assert [line["class"] for line in answers()[1]] == ["bee"]


def test_nothing_to_look_at_is_said(new: Path) -> None:
    Path("empty").mkdir()
    Path("texts").mkdir()
    shutil.copy("new/notes.txt", "texts")
    for where, said in (
        ("nowhere", "there is no such file or folder"),
        ("empty", "nothing was found there; expected files ending in .jpg"),
        ("texts", "nothing was found there"),
        ("'new/*.tiff'", "nothing was found there"),
        ("new/cut.jpg", "none of 1 input could be read; the reason of each is in "),
    ):
        assert said in run([*WORDS, f"job.inputs={where}"], code=2).out


@pytest.mark.long
def test_new_pictures_are_prepared_as_the_evaluation_prepares_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(["model=mlp", "model.width=32", "loop.steps=40", "loop.global_batch=120", "run.dir=run"])
    run(WORDS)
    own = load_file("run/predict/predictions.safetensors")["output"].softmax(1)
    # grey pictures of 8×8, white on black as the set's own, whose white is 16
    samples = Digits(Augment()).evaluation()
    Path("new").mkdir()
    for at in range(20):
        pixels = (samples.images[at, 0].float() * 255 / 16).round().byte()
        Image.fromarray(pixels.numpy()).save(f"new/{at:02}.png")
    run([*WORDS, "job.inputs=new"])
    assert not Path("run/predict/predictions.safetensors").exists()  # of other samples
    for row, line in zip(own, answers()[1], strict=False):
        assert line["class"] == str(row.argmax().item())
        assert [*line["probabilities"].values()] == pytest.approx(row.topk(5).values.tolist(), abs=5e-3)
    run(WORDS)
    assert not Path("run/predict/predictions.jsonl").exists()


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


OTHER = ["ants, bee, cat", "bee, cat", "ant, bee, cat, dog"]


@pytest.mark.parametrize("names", quickly(OTHER, OTHER[0]))
def test_a_set_with_other_classes_is_refused_with_both_lists(folder: Path, names: str) -> None:
    other = colours(Path("other"), {name: name if name in COLOURS else "ant" for name in names.split(", ")})
    said = run(["job=evaluate", "run.dir=run", f"data.root={other}"], code=2).out
    assert f"the classes of this data are {names}; the run was trained on ant, bee, cat: take data" in said
    said = run([*TRAINING, f"data.root={other}", "loop.epochs=13"], code=2).out
    # of another number of classes the network is another one
    assert (f"classes: ant, bee, cat → {names}" if names.count(",") == 2 else "is of another network") in said


@pytest.mark.long
def test_an_export_says_the_classes_that_its_checkpoint_has_learned(folder: Path) -> None:
    card = folder / "export" / "model.json"
    # the pictures need not be there
    for words in ((), ("data.root=nowhere",), ("data.root=nowhere", "job.format=pt2", "job.prepared=true")):
        run(["job=export", "run.dir=run", *words])
        assert json.loads(card.read_text())["classes"] == [*COLOURS]
        card.unlink()
