"""What TensorBoard shows of a run, read from its event files as TensorBoard reads them; the same on any placement."""

from __future__ import annotations

import io
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from recipes.vision.augment import Augment
from recipes.vision.classification import Classification
from recipes.vision.digits import Digits
from recipes.vision.vit import VisionTransformer
from tests.commands import SMALL, TRANSFORMER, finish, lines, single
from tests.inside import here, product
from tests.processes import Processes
from tests.quick import quickly
from trainer.data.data import Data
from trainer.data.loader import Batch
from trainer.jobs.run_messages import curves_command
from trainer.learning.intervals import Trigger
from trainer.loop.media_logging import MediaLogger, NoTextSample
from trainer.messages import Refusal
from trainer.parallel.ranks import COMPLETED, Ranks, Waitable
from trainer.parallel.tensor_statistics import BINS, compute_histograms
from trainer.records import tensorboard
from trainer.records.image_plots import plot_confusion_matrix, plot_image_grid
from trainer.records.sinks import Log, Sink
from trainer.strategies.loss_scaler import NoScaler, Scaler

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of tensorboard's reader

STEPS = 6
WORDS = (
    *(*TRANSFORMER, "model.depth=1", "precision=fp64", "optimizer=sgd", "schedule=constant", "ema.decay=0.5"),
    *(f"loop.steps={STEPS}", "loop.eval_every=3", "loop.global_batch=120", "loop.micro_batches=2"),
    *("loop.eval_batch=50", "loop.histograms_every=3", "log=[tensorboard]"),  # 360 samples: the last batch has 10
)
SPREAD: dict[str, tuple[int, list[str]]] = {
    "ddp on 3": (3, ["strategy=ddp", "loop.micro_batches=1"]),
    "fsdp_tp on 4": (4, ["strategy=fsdp_tp", "strategy.tensor=2"]),
    "pp on 2": (2, ["strategy=pp"]),
    "fsdp on 2": (2, ["strategy=fsdp"]),
    "zero1 on 2": (2, ["strategy=zero1"]),
    "tp on 2": (2, ["strategy=tp"]),
    "ddp_pp on 4": (4, ["strategy=ddp_pp"]),
}


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    every = dict.fromkeys(("scalars", "images", "tensors", "histograms"), 0)
    return EventAccumulator(str(folder), size_guidance=every).Reload()


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
def alone(tmp_path_factory: pytest.TempPathFactory, processes: Processes) -> Path:
    """A run on one process."""
    place = tmp_path_factory.mktemp("show")
    assert processes.run(1, product, place, [*WORDS, "run.dir=alone", "strategy=single"]) == [0]
    return place / "alone"


# ------------------------------------------------------------------------------------------------- a run on one process


@pytest.mark.slow
def test_what_a_user_finds_after_a_run(tmp_path: Path) -> None:
    words = [*SMALL, "loop.steps=12", "run.name=first", "loop.histograms_every=6", "loop.log_every=5"]
    screen = finish(single(*words), tmp_path)
    assert f"curves      tensorboard --logdir {tmp_path / 'runs'}\n" in screen
    folder = tmp_path / "runs" / "first"
    train, evaluation = events(folder / "tensorboard"), events(folder / "tensorboard" / "eval")
    groups = {"loss/loss", "loss/loss_mean", "optimizer/lr", "optimizer/grad_norm", "speed/samples_per_s"}
    assert groups | {"speed/step_s", "memory/host_gib"} <= set(train.Tags()["scalars"])
    assert {tag.split("/")[0] for tag in train.Tags()["scalars"]} == {"loss", "optimizer", "speed", "memory"}
    assert set(evaluation.Tags()["scalars"]) == {"loss/loss", "accuracy/accuracy", "accuracy/macro_accuracy"}
    assert [one.value for one in train.Scalars("loss/loss")] == pytest.approx(
        [line["loss"] for line in lines(folder, "train")]
    )
    *_, accuracy = evaluation.Scalars("accuracy/accuracy")
    assert accuracy.value == pytest.approx(lines(folder, "eval")[-1]["accuracy"])
    memory = [one.value for one in train.Scalars("memory/host_gib")]
    assert all(0.05 < value < 8 for value in memory)
    assert set(train.Tags()["images"]) == {"pictures/inputs", "pictures/confusion"}
    assert {tag.split("/")[0] for tag in train.Tags()["histograms"]} == {"weights", "gradients"}
    assert "configuration/text_summary" in train.Tags()["tensors"]


@pytest.mark.parametrize(
    ("dir", "path", "said"),
    [
        (None, "runs/first", "tensorboard --logdir runs"),
        ("/data/a run", "/data/a run", "tensorboard --logdir_spec 'a run:/data/a run'"),
        ("sweep/0_seed=1,x=2", "sweep/0_seed=1,x=2", "tensorboard --logdir sweep/0_seed=1,x=2"),
    ],
)
def test_the_command_for_the_curves_looks_where_runs_lie_alone(dir: str | None, path: str, said: str) -> None:
    run: Any = SimpleNamespace(
        folder=SimpleNamespace(path=Path(path)), settings=SimpleNamespace(run=SimpleNamespace(dir=dir))
    )
    assert curves_command(run) == said


@pytest.mark.slow
def test_runs_are_compared_by_what_they_were_asked_for(alone: Path) -> None:
    from tensorboard.plugins.hparams import metadata

    content = events(alone / "tensorboard").PluginTagToContent("hparams")[metadata.SESSION_START_INFO_TAG]
    settings = metadata.parse_session_start_info_plugin_data(content).hparams
    assert settings["optimizer"].string_value == "SGD"
    assert settings["loop.global_batch"].number_value == 120
    assert settings["model.width"].number_value == 24
    assert not [name for name in settings if name.startswith(("run.", "log.", "job"))]


@pytest.mark.slow
def test_the_confusion_matrix_is_that_of_the_whole_set(alone: Path) -> None:
    found = pictures(alone)
    assert {tag for tag, _ in found} >= {"pictures/confusion", "pictures/ema_confusion"}
    files = (alone / "checkpoints" / f"step-{STEPS:08d}").glob("*.safetensors")
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


@pytest.mark.slow
def test_histograms_count_every_number_of_every_weight(alone: Path) -> None:
    found = bins(alone)
    network = VisionTransformer(num_classes=10, channels=1, image_size=8, width=24, heads=4, depth=1)
    for kind in ("weights", "gradients"):
        own = {
            tag.removeprefix(f"{kind}/"): one
            for (tag, step), one in found.items()
            if tag.startswith(kind) and step == 3
        }
        assert {name: one.num for name, one in own.items()} == {
            name: parameter.numel() for name, parameter in network.named_parameters()
        }
    assert {step for _, step in found} == {3, 6}


# ----------------------------------------------------------------------------------------------------- on several ranks


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("spread", quickly(SPREAD, "ddp on 3", "fsdp on 2", "pp on 2"))
def test_ranks_show_what_one_process_shows(alone: Path, processes: Processes, spread: str, tmp_path: Path) -> None:
    size, words = SPREAD[spread]
    assert processes.run(size, product, tmp_path, [*WORDS, "run.dir=spread", *words]) == [0] * size
    one, several = pictures(alone), pictures(tmp_path / "spread")
    wanted = {(f"pictures/{view}confusion", STEPS) for view in ("", "ema_")}
    assert wanted <= one.keys() & several.keys()
    for key in wanted:
        assert numpy.array_equal(one[key], several[key]), key
    whole, shards = bins(alone), bins(tmp_path / "spread")
    assert whole.keys() == shards.keys()
    for key, expected in whole.items():
        found = shards[key]
        assert found.num == expected.num, key
        assert (found.min, found.max) == pytest.approx((expected.min, expected.max), rel=1e-9, abs=1e-12), key
        # a number at the border of two bins may be rounded into the other
        moved = sum(abs(a - b) for a, b in zip(found.bucket, expected.bucket, strict=True)) / 2
        assert moved <= 0.02 * expected.num + 1, key


def test_gradients_of_fp16_are_shown_without_their_scale() -> None:
    scaler = Scaler(torch.device("cpu"))
    scaled = scaler.scale(torch.tensor(0.25))
    assert (float(scaled) > 1000, float(scaled) * scaler.unscale_factor(), NoScaler().unscale_factor()) == (
        True,
        0.25,
        1.0,
    )


def test_what_two_ranks_hold_counts_once_and_what_is_no_number_not_at_all() -> None:
    class Twice(Ranks):
        """Two ranks that hold the same."""

        def all_reduce_sum_(self, tensor: torch.Tensor) -> Waitable:
            tensor.mul_(2)
            return COMPLETED

    numbers = torch.tensor([1.0, math.nan, 2.0, 3.0, math.inf, 3.0])
    (found,) = compute_histograms({"w": numbers}, {"w": 6, "elsewhere": 4}, 2.0, Twice()).values()
    assert (found.low, found.high, sum(found.counts), found.counts[0], found.counts[-1]) == (2.0, 6.0, 4, 1, 2)
    assert (found.sum, found.squares, len(found.counts)) == (18.0, 92.0, BINS)
    (alike,) = compute_histograms({"w": torch.zeros(5)}, {"w": 5}, 1.0, Ranks()).values()
    assert (alike.low, alike.high, alike.counts[0]) == (0.0, 0.0, 5)
    assert (
        compute_histograms({"w": torch.full((2,), math.nan), "none": torch.zeros(0)}, {"w": 2, "none": 0}, 1.0, Ranks())
        == {}
    )


# ------------------------------------------------------------------------------------------------ where nobody can look


def test_where_nobody_looks_nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for verb in ("record_totals", "log_evaluation", "log_inputs", "log_parameters"):
        monkeypatch.setattr(MediaLogger, verb, None)
    assert here(*SMALL, "log=[console]", "loop.steps=2", "run.dir=quiet") == 0


def test_histograms_that_nobody_shows_and_a_clock_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refusal, match=r"histograms_every: none of the run's sinks .* log=\[console,tensorboard\] does"):
        here(*SMALL, "log=[console]", "loop.histograms_every=1ep")
    with pytest.raises(Refusal, match=r"histograms_every=5min: expected steps \(500\), epochs"):
        here(*SMALL, "log=[tensorboard]", "loop.histograms_every=5min")


class Seen(Sink):
    """Remembers the images it is given."""

    def __init__(self) -> None:
        self.shown: list[Any] = []

    def images(self, *given: Any) -> None:
        self.shown.append(given)


@pytest.mark.parametrize(
    ("inputs", "targets", "words"),
    [
        ({"ids": torch.zeros(3, 7)}, torch.zeros(3).long(), None),
        (torch.zeros(3, 7), torch.zeros(3).long(), None),
        (torch.rand(3, 1, 4, 4), torch.tensor([0, 1, 2]), ["cat", "dog", "2"]),
        (torch.rand(3, 1, 4, 4), torch.tensor([0.25, 1, 2e9]), ["0.25", "1", "2e+09"]),
        (torch.rand(3, 1, 4, 4), {"mask": torch.zeros(3, 4, 4)}, []),
    ],
)
def test_only_pictures_are_shown_as_pictures(inputs: Any, targets: Any, words: Any) -> None:
    data, seen = Data(), Seen()
    data.class_names = ("cat", "dog")
    show = MediaLogger(data, Ranks(), Log([seen]), Trigger([]), NoTextSample())
    show.log_inputs(Batch(inputs, targets, torch.arange(3), range(3), 3))
    if words is None:
        assert seen.shown == []
        return
    ((tag, shown, step, below),) = seen.shown
    assert (tag, tuple(shown.shape), step, below) == ("inputs", (3, 1, 4, 4), 0, words)
    assert (float(shown.min()), float(shown.max())) == (0, 1)


def test_mixed_pictures_have_the_words_and_the_colours_of_both() -> None:
    data = Digits(Augment(mean=(0.25,), std=(0.5,), full_scale=16.0, mixup=1.0))
    targets = torch.tensor([[0.0] * 3 + [0.7] + [0.0] * 4 + [0.3, 0.0], [1.0] + [0.0] * 9])
    assert data.as_words(targets) == ["3 70 %, 8 30 %", "0 100 %"]
    assert data.as_words(torch.tensor([4, 9])) == ["4", "9"]
    assert data.as_pictures(torch.tensor([[[[-0.5, 1.5]]]])).flatten().tolist() == [0.0, 1.0]


def test_a_task_derived_from_classification_may_have_other_sums() -> None:
    task: Any = Classification()
    assert task.confusion({"hits": torch.zeros(())}) is None


def test_what_a_lab_makes_of_pictures_may_be_none() -> None:
    data = Digits(Augment(mean=(0.25, 0.5), std=(0.5, 0.5), full_scale=16.0))
    assert data.as_pictures({"real": torch.zeros(2, 1, 8, 8)}) is None
    assert data.as_pictures((torch.zeros(2, 1, 8, 8), torch.zeros(2, 1, 8, 8))) is None
    assert data.as_pictures(torch.zeros(2, 3, 8, 8)).shape == (2, 3, 8, 8)
    assert data.as_words({"label": torch.zeros(2)}) == data.as_words(torch.zeros(2, 8, 8)) == []


def test_drawing_holds_up_nobody_and_the_last_pictures_are_always_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]

    def slowly(*_: Any) -> Any:
        now[0] += 1  # second
        return numpy.zeros((4, 4, 3), numpy.uint8)

    monkeypatch.setattr(tensorboard, "monotonic", lambda: now[0])
    monkeypatch.setattr(tensorboard, "plot_confusion_matrix", slowly)
    monkeypatch.setattr(tensorboard, "plot_image_grid", slowly)
    sink = tensorboard.TensorBoard()
    sink.open(tmp_path, 0, None, None)
    for step in range(1, 30):
        sink.images("inputs", torch.zeros(1), step)
        sink.confusion("confusion", torch.zeros(1), step)
        now[0] += 5
    sink.close()
    steps = {tag: sorted(step for other, step in pictures(tmp_path) if other == tag) for tag, _ in pictures(tmp_path)}
    assert steps == {"pictures/inputs": [1, 9, 17, 25, 29], "pictures/confusion": [1, 9, 17, 25, 29]}


# -------------------------------------------------------------------------------------------------------- the drawing


def test_a_grid_has_gaps_and_words_below_its_pictures() -> None:
    drawn = plot_image_grid(torch.zeros(6, 1, 8, 8), ["a"] * 6)  # black on white
    black = (drawn < 8).all(2)
    columns, rows = black[: 8 + 96].any(0), black[:, 8 : 8 + 96].sum(1) == 96
    edges = numpy.flatnonzero(numpy.diff(columns.astype(int)))
    assert len(edges) == 2 * 5  # five pictures in a row, none touches the next
    assert set(numpy.diff(edges)) == {96, 8}
    assert numpy.flatnonzero(numpy.diff(rows.astype(int))).tolist() == [7, 103, 128, 224]  # room for a line of words
    bare = plot_image_grid(torch.zeros(6, 1, 8, 8), [])
    assert bare.shape[0] == drawn.shape[0] - 2 * 17
    with_words = numpy.abs(drawn[104:128].astype(int) - 255).sum(2) > 200
    assert with_words.any(), "nothing stands below the first row"


@pytest.mark.parametrize(
    ("shape", "words"),
    [((1, 3, 300, 200), ["long " * 40]), ((3, 5, 4, 9), []), ((2, 2, 28, 28), ["one\ntwo", "Grüße"])],
)
def test_any_picture_can_be_drawn(shape: tuple[int, ...], words: list[str]) -> None:
    drawn = plot_image_grid(torch.full(shape, 0.5, dtype=torch.bfloat16), words)
    assert drawn.dtype == numpy.uint8
    assert drawn.shape[1] < 8 * 200 + 60


@pytest.mark.parametrize("classes", [1, 2, 10, 31, 100, 1000])
def test_a_confusion_matrix_of_any_size_is_blue_where_it_is_right(classes: int) -> None:
    names = [f"class {number}" for number in range(classes)]
    drawn = plot_confusion_matrix(torch.eye(classes) * 12345, names).astype(int)
    assert max(drawn.shape) < 1300
    red = (drawn[..., 0] - drawn[..., 2] > 60).sum()
    blue = (drawn[..., 2] - drawn[..., 0] > 60).sum()
    assert red == 0 < blue
    wrong = plot_confusion_matrix(torch.eye(classes).roll(1, 0) * 7, names).astype(int)
    assert classes == 1 or (
        (wrong[..., 0] - wrong[..., 2] > 60).any() and not (wrong[..., 2] - wrong[..., 0] > 60).any()
    )
