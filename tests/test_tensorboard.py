"""What TensorBoard shows of a run, read from its event files as TensorBoard reads them; the same on any placement."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from recipes.vision.augment import Augment
from recipes.vision.digits import Digits
from recipes.vision.vit import VisionTransformer
from tests.ranks import Processes
from tests.run import SMALL, TRANSFORMER, Finished, run
from trainer.records.image_plots import plot_confusion_matrix

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of tensorboard's reader

STEPS = 6
WORDS = (
    *(*TRANSFORMER, "model.depth=1", "precision=fp64", "optimizer=sgd", "schedule=constant", "ema.decay=0.5"),
    *(f"loop.steps={STEPS}", "loop.eval_every=3", "loop.global_batch=120", "loop.micro_batches=2", "run.dir=run"),
    # 360 samples: the last batch has 10
    *("loop.eval_batch=50", "loop.histograms_every=3", "log=[console,tensorboard]", "loop.log_every=1"),
)
SPREAD = {"ddp": 3, "fsdp": 2, "pp": 2, "zero1": 2, "tp": 2, "fsdp_tp": 4}


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    every = dict.fromkeys(("scalars", "images", "tensors", "histograms"), 0)
    return EventAccumulator(str(folder), size_guidance=every).Reload()


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(one.step, one.value) for one in events(folder).Scalars(tag)]


def pictures(folder: Path) -> dict[tuple[str, int], Any]:
    """Every picture of a run by its tag and step, as an array (height, width, 3)."""
    read = events(folder / "tensorboard")
    return {
        (tag, one.step): numpy.asarray(Image.open(io.BytesIO(one.encoded_image_string)))
        for tag in read.Tags()["images"]
        for one in read.Images(tag)
    }


def bins(folder: Path) -> dict[tuple[str, int], Any]:
    """Every histogram of a run by its tag and step."""
    read = events(folder / "tensorboard")
    return {(tag, one.step): one.histogram_value for tag in read.Tags()["histograms"] for one in read.Histograms(tag)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run on one process, in two starts: it must be one curve; the steps after the save are said again."""
    place = tmp_path_factory.mktemp("alone")
    words = [*WORDS, "strategy=single", "loop.save_every=2", "checkpoint.keep=2"]
    stopped = "task._target_=tests.test_endings.Acting", "+task.act=error", "+task.at=[5]", "trust=[tests]"
    run([*words, *stopped, "run.accept_changes=true"], place=place, code=1)
    return run([*words, "run.accept_changes=true"], place=place)


def test_what_a_user_finds_after_a_run(alone: Finished) -> None:
    folder = alone.folder
    assert f"curves      tensorboard --logdir_spec run:{folder}\n" in alone.out
    train, evaluation = events(folder / "tensorboard"), events(folder / "tensorboard" / "eval")
    groups = {"loss/loss", "loss/loss_mean", "optimizer/lr", "optimizer/grad_norm", "speed/samples_per_s"}
    assert groups | {"speed/step_s", "memory/host_gib"} <= set(train.Tags()["scalars"])
    assert {tag.split("/")[0] for tag in train.Tags()["scalars"]} == {"loss", "optimizer", "speed", "memory"}
    assert {"loss/loss", "accuracy/accuracy", "accuracy/macro_accuracy"} <= set(evaluation.Tags()["scalars"])
    assert scalars(folder / "tensorboard", "loss/loss") == [
        (step, pytest.approx(loss)) for step, loss in enumerate(alone.curve(), 1)
    ]
    accuracy = [(line["step"], pytest.approx(line["accuracy"])) for line in alone.lines("eval")]
    assert scalars(folder / "tensorboard" / "eval", "accuracy/accuracy") == accuracy
    assert set(train.Tags()["images"]) >= {"pictures/inputs", "pictures/confusion", "pictures/ema_confusion"}
    assert "configuration/text_summary" in train.Tags()["tensors"]


def test_runs_are_compared_by_what_they_were_asked_for(alone: Finished) -> None:
    from tensorboard.plugins.hparams import metadata

    content = events(alone.folder / "tensorboard").PluginTagToContent("hparams")[metadata.SESSION_START_INFO_TAG]
    settings = metadata.parse_session_start_info_plugin_data(content).hparams
    assert settings["optimizer"].string_value == "SGD"
    assert settings["loop.global_batch"].number_value == 120
    assert settings["model.width"].number_value == 24
    assert not [name for name in settings if name.startswith(("run.", "log.", "job"))]


def test_the_confusion_matrix_is_that_of_the_whole_set(alone: Finished) -> None:
    found = pictures(alone.folder)
    files = (alone.folder / "checkpoints" / f"step-{STEPS:08d}").glob("*.safetensors")
    weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
    data = Digits(Augment(mean=(0.305,), std=(0.376,), full_scale=16.0))
    inputs, true = data.images[-360:].double() / 16, data.labels[-360:]
    for view, prefix in (("", ""), ("ema_", "ema/")):
        network = VisionTransformer(num_classes=10, channels=1, image_size=8, width=24, heads=4, depth=1).double()
        network.load_state_dict({name: weights.get(prefix + name, weights[name]) for name in network.state_dict()})
        with torch.no_grad():
            said = network(((inputs.float() - 0.305) / 0.376).double()).argmax(1)
        counts = torch.zeros(10, 10).index_put_((true, said), torch.ones(360), accumulate=True)
        assert (found[f"pictures/{view}confusion", STEPS] == plot_confusion_matrix(counts, [])).all()


def test_histograms_count_every_number_of_every_weight(alone: Finished) -> None:
    found = bins(alone.folder)
    network = VisionTransformer(num_classes=10, channels=1, image_size=8, width=24, heads=4, depth=1)
    sizes = {name: parameter.numel() for name, parameter in network.named_parameters()}
    for kind in ("weights", "gradients"):
        assert {name: found[f"{kind}/{name}", 3].num for name in sizes} == sizes
    assert {step for _, step in found} == {3, 6}


@pytest.mark.long
@pytest.mark.parametrize("strategy", SPREAD)
def test_ranks_show_what_one_process_shows(
    alone: Finished, processes: Processes, strategy: str, tmp_path: Path
) -> None:
    words = [*WORDS, f"strategy={strategy}", *(["loop.micro_batches=1"] if strategy == "ddp" else [])]
    words += ["strategy.tensor=2"] if strategy == "fsdp_tp" else []
    spread = run(words, SPREAD[strategy], "group", place=tmp_path).folder
    one, several = pictures(alone.folder), pictures(spread)
    for view in ("", "ema_"):
        assert numpy.array_equal(one[f"pictures/{view}confusion", STEPS], several[f"pictures/{view}confusion", STEPS])
    whole, shards = bins(alone.folder), bins(spread)
    assert whole.keys() == shards.keys()
    for key, expected in whole.items():
        found = shards[key]
        assert found.num == expected.num, key
        assert (found.min, found.max) == pytest.approx((expected.min, expected.max), rel=1e-9, abs=1e-12), key
        # a number at the border of two bins may be rounded into the other
        moved = sum(abs(a - b) for a, b in zip(found.bucket, expected.bucket, strict=True)) / 2
        assert moved <= 0.02 * expected.num + 1, key


def test_histograms_that_nobody_shows_and_a_clock_are_refused(tmp_path: Path) -> None:
    for words, said in (
        (
            ["log=[console]", "loop.histograms_every=1ep"],
            r"none of the run's sinks .* log=\[console,tensorboard\] does",
        ),
        (["log=[tensorboard]", "loop.histograms_every=5min"], r"histograms_every=5min: expected steps \(500\), epochs"),
    ):
        assert re.search(said, run([*SMALL, *words], place=tmp_path, code=2).out)


# -------------------------------------------------------------------------------------------------------- the drawing


def test_only_pictures_are_shown_as_pictures_and_mixed_ones_have_the_words_of_both() -> None:
    data = Digits(Augment(mean=(0.25,), std=(0.5,), full_scale=16.0, mixup=1.0))
    targets = torch.tensor([[0.0] * 3 + [0.7] + [0.0] * 4 + [0.3, 0.0], [1.0] + [0.0] * 9])
    assert data.as_words(targets) == ["3 70 %, 8 30 %", "0 100 %"]
    assert data.as_words(torch.tensor([4, 9])) == ["4", "9"]
    assert data.as_words({"label": torch.zeros(2)}) == data.as_words(torch.zeros(2, 8, 8)) == []
    shown = data.as_pictures(torch.tensor([[[[-0.5, 1.5]]]]))
    assert shown is not None
    assert shown.flatten().tolist() == [0.0, 1.0]
    assert data.as_pictures({"real": torch.zeros(2, 1, 8, 8)}) is None


@pytest.mark.parametrize("classes", [1, 10, 100, 1000])
def test_a_confusion_matrix_of_any_size_is_blue_where_it_is_right(classes: int) -> None:
    names = [f"class {number}" for number in range(classes)]
    drawn = plot_confusion_matrix(torch.eye(classes) * 12345, names).astype(int)
    assert max(drawn.shape) < 1300
    assert (drawn[..., 0] - drawn[..., 2] > 60).sum() == 0 < (drawn[..., 2] - drawn[..., 0] > 60).sum()
    wrong = plot_confusion_matrix(torch.eye(classes).roll(1, 0) * 7, names).astype(int)
    red, blue = (wrong[..., 0] - wrong[..., 2] > 60).any(), (wrong[..., 2] - wrong[..., 0] > 60).any()
    assert classes == 1 or (red, blue) == (True, False)
