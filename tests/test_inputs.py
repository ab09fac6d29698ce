"""The last mile: a trained run, and the class of new pictures and texts."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors.torch import load_file

from recipes.vision.augment import Augment
from recipes.vision.digits import Digits
from tests.inside import here, product
from tests.processes import Processes
from tests.test_class_names import COLOURS, TRAINING, colours
from trainer.launch.rendezvous import Launch
from trainer.messages import Refusal

WORDS = ("job=predict", "run.dir=run")
SPREAD = {"ddp on 3": (3, ("strategy=ddp",)), "fsdp on 2": (2, ("strategy=fsdp",)), "pp on 2": (2, ("strategy=pp",))}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose training pictures are gone."""
    place = tmp_path_factory.mktemp("inputs")
    colours(place / "own", {name: name for name in COLOURS})
    assert product(Launch(), place, [*TRAINING, f"data.root={place / 'own'}", "model.depth=2"]) == 0
    shutil.rmtree(place / "own")
    return place


@pytest.fixture
def new(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of new pictures, two of them damaged, beside the run."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained / "run", "run")
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


def test_the_class_of_one_photo_is_on_the_screen(new: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert here(*WORDS, "job.inputs=new/bee/0.png") == 0
    (row,), (line,) = answers()
    assert (row["file"], row["class"], line["error"]) == ("new/bee/0.png", "bee", None)
    assert float(row["probability"]) == line["probabilities"]["bee"] == max(line["probabilities"].values()) > 0.34
    assert sorted(line["probabilities"]) == [*COLOURS]
    assert sum(line["probabilities"].values()) == pytest.approx(1, abs=1e-4)
    assert f"new/bee/0.png  bee {100 * float(row['probability']):.1f} %" in capsys.readouterr().out


@pytest.mark.parametrize("where", ["new", "new/**/*", "list.txt"])
def test_a_row_for_each_input_and_damaged_ones_say_so(
    new: Path, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures = sorted(str(path.relative_to(new.parent)) for path in new.rglob("*") if path.suffix in (".png", ".jpg"))
    Path("list.txt").write_text("\n".join(reversed(pictures)) + "\n\n")
    assert here(*WORDS, f"job.inputs={where}") == 0
    rows, lines = answers()
    assert [row["file"] for row in rows] == pictures
    damaged = {"new/cut.jpg", "new/ant/empty.png"}
    assert {line["file"] for line in lines if line["error"]} == damaged
    assert all(line["class"] == Path(line["file"]).parent.name for line in lines if not line["error"])
    assert all(row["class"] == row["probability"] == "" for row in rows if row["file"] in damaged)
    screen = capsys.readouterr().out
    assert "damaged     2 of 8 inputs" in screen
    assert all(name in screen for name in damaged)


def test_what_a_list_names_and_is_not_there_is_a_row(new: Path) -> None:
    Path("new/list").write_text("bee/0.png\nnowhere.png\n")  # as seen from the list
    assert here(*WORDS, "job.inputs=new/list") == 0
    _, (found, missing) = answers()
    assert (found["file"], found["class"]) == ("new/bee/0.png", "bee")
    assert missing == {
        "file": "new/nowhere.png",
        "class": None,
        "probabilities": {},
        "error": "cannot be read as a picture: No such file or directory",
    }


@pytest.mark.long
@pytest.mark.parametrize("where", SPREAD)
def test_on_any_placement_the_same_rows(new: Path, processes: Processes, where: str) -> None:
    assert here(*WORDS, "job.inputs=new", "loop.eval_batch=5") == 0
    one = answers()[1]
    size, words = SPREAD[where]
    assert (
        processes.run(size, product, Path.cwd(), [*WORDS, "job.inputs=new", "loop.eval_batch=5", *words]) == [0] * size
    )
    for left, right in zip(one, answers()[1], strict=True):
        assert left["probabilities"] == pytest.approx(right["probabilities"], abs=1e-5)
        assert {**left, "probabilities": 0} == {**right, "probabilities": 0}
    # fewer inputs than ranks
    alone = [*WORDS, "job.inputs=new/bee/0.png", *words]
    assert processes.run(size, product, Path.cwd(), alone) == [0] * size
    assert [line["class"] for line in answers()[1]] == ["bee"]


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("nowhere", "there is no such file or folder"),
        ("empty", "nothing was found there; expected files ending in .jpg"),
        ("texts", "nothing was found there"),
        ("'new/*.tiff'", "nothing was found there"),
        ("new/cut.jpg", "none of 1 input could be read; the reason of each is in .*predictions.csv"),
    ],
)
def test_nothing_to_look_at_is_said(new: Path, where: str, said: str) -> None:
    Path("empty").mkdir()
    Path("texts").mkdir()
    shutil.copy("new/notes.txt", "texts")
    with pytest.raises(Refusal, match=said):
        here(*WORDS, f"job.inputs={where}")


@pytest.mark.long
def test_new_pictures_are_prepared_as_the_evaluation_prepares_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert here("model=mlp", "model.width=32", "loop.steps=40", "loop.global_batch=120", "run.dir=run") == 0
    assert here(*WORDS) == 0
    own = load_file("run/predict/predictions.safetensors")["output"].softmax(1)
    # grey pictures of 8×8, white on black as the set's own, whose white is 16
    samples = Digits(Augment()).evaluation()
    Path("new").mkdir()
    for at in range(20):
        pixels = (samples.images[at, 0].float() * 255 / 16).round().byte()
        Image.fromarray(pixels.numpy()).save(f"new/{at:02}.png")
    assert here(*WORDS, "job.inputs=new") == 0
    assert not Path("run/predict/predictions.safetensors").exists()  # of other samples
    for row, line in zip(own, answers()[1], strict=False):
        assert line["class"] == str(row.argmax().item())
        assert len(line["probabilities"]) == 5
        assert [*line["probabilities"].values()] == pytest.approx(row.topk(5).values.tolist(), abs=5e-3)
    assert here(*WORDS) == 0
    assert not Path("run/predict/predictions.jsonl").exists()


@pytest.mark.long
def test_what_does_not_tell_classes_apart_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("task=language", "data=text", "model=gpt_nano", "data.length=16", "model.width=16", "model.depth=1")
    assert here(*words, "loop.steps=1", "loop.global_batch=4", "loop.eval_every=null", "run.dir=run") == 0
    Path("new.txt").write_text("a line\n")
    with pytest.raises(Refusal, match=r"NextToken does not say how its outputs are classes.*job=generate"):
        here(*WORDS, "job.inputs=new.txt")
