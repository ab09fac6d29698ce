"""The labs in tests/labs, each a folder to copy, trained as their users would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, softplus

from tests.labs.detection.lab import Detection
from tests.labs.gan.lab import Adversarial, Rivals
from tests.labs.recurrent import lab as recurrent
from tests.planted.plants import GRAPHS, NET
from tests.run import curve, far, lines, run

HOME = Path(__file__).parent / "labs"
BRIEF = ["precision=fp64", "loop.steps=6", "loop.log_every=1", "loader.workers=0"]
MICRO = "loop.micro_batches=2"


def words(lab: str, folder: Path, *others: str) -> list[str]:
    return ["--config-dir", f"{lab}/conf", f"experiment={lab}", *BRIEF, *others, f"run.dir={folder}"]


def train(lab: str, folder: Path, *others: str, size: int = 1, code: int = 0) -> str:
    """`python -m trainer --config-dir LAB/conf experiment=LAB …` where the labs lie."""
    return run(words(lab, folder, *others), size, "group" if size > 1 else "here", place=HOME, code=code).out


LABS: dict[str, tuple[str, str, str]] = {  # its figure, how several processes divide a batch, other words
    "segmentation": ("mean_iou", "", ""),
    "masked": ("accuracy", MICRO, ""),  # of unequal weight
    "distillation": ("accuracy", MICRO, ""),
    "contrast": ("found", "", ""),  # with micro-batches a picture would have fewer to be found among
    "gan": ("drawn_believed", MICRO, ""),
    "recurrent": ("loss", MICRO, ""),
    # each micro-batch is collated by itself: lists of images, and graphs whose nodes stand one after the other
    "detection": ("map50", MICRO, ""),
    "graphs": ("accuracy", "loop.micro_batches=5", ""),
    # the large network of the tutorials
    "segmentation, fcn": ("mean_iou", "", "model=fcn optimizer=sgd loop.steps=3 loop.global_batch=4"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", LABS)
def test_a_lab_has_one_curve(processes: object, tmp_path: Path, name: str) -> None:
    figure, divided, more = LABS[name]
    for size, strategy in ((1, "single"), (2, "ddp"), (2, "fsdp")):
        own = ["strategy.sync_bn=true", f"strategy={strategy}", *(divided.split() if size > 1 else [])]
        train(name.partition(",")[0], tmp_path / strategy, *more.split(), *own, "checkpoint.keep=1", size=size)
    alone = tmp_path / "single"
    assert figure in lines(alone, "eval")[-1]
    for spread in (tmp_path / "ddp", tmp_path / "fsdp"):
        assert far(curve(spread), curve(alone)) < 1e-9
        assert curve(spread, "sample_digest") == curve(alone, "sample_digest")
        for one, other in zip(lines(spread, "eval"), lines(alone, "eval"), strict=True):
            assert (one.pop("kind"), other.pop("kind")) == ("eval", "eval")
            assert one == pytest.approx(other, abs=1e-9)


# eight streams of seven windows: an epoch has seven steps, and the evaluation three batches
STREAMS = ["data.numbers=300", "loop.global_batch=8", "loop.eval_batch=2", "loop.max_norm=null"]
STREAMS += ["schedule=constant", "optimizer=adam", "optimizer.lr=3e-3", "loop.epochs=null", "loop.eval_every=7"]


def losses_of_a_loop_over_streams(steps: int) -> tuple[list[float], list[float]]:
    """Truncated backpropagation as people write it: the memory is detached, and zeros where an epoch begins."""
    data = recurrent.Counted(300, 16, 8, 2)
    torch.manual_seed(0)
    reader = recurrent.Reader(32, 2, 8, 2).double()
    optimizer = torch.optim.Adam(reader.parameters(), lr=3e-3)
    losses, evaluations = [], []

    def loss_of(windows: Any, at: slice, memory: Any) -> tuple[Tensor, Any]:
        text, following = windows.text[at], windows.following[at]
        zeros = torch.zeros(len(text), 2, 2, 32, dtype=torch.float64)
        scores, memory = reader(text, zeros if memory is None else memory)
        return cross_entropy(scores.flatten(0, 1), following.flatten()), memory.detach()

    memory: Any = None
    for step in range(steps):
        at = slice(step % 7 * 8, step % 7 * 8 + 8)
        loss, memory = loss_of(data.windows, at, memory if step % 7 else None)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 7 == 6 or step + 1 == steps:
            own, found = None, []
            for batch in range(3):
                loss, own = loss_of(data.rest, slice(batch * 2, batch * 2 + 2), own)
                found.append(loss.item())
            evaluations.append(sum(found) / 3)
    return losses, evaluations


@pytest.mark.parametrize(
    ("size", "own"),
    [(1, ["strategy=single"]), pytest.param(2, ["strategy=ddp", MICRO], marks=pytest.mark.long)],
)
def test_a_memory_passes_from_batch_to_batch_as_in_a_loop_that_detaches_it(
    processes: object, tmp_path: Path, size: int, own: list[str]
) -> None:
    for steps in (5, 12):  # the second one goes on in the middle of an epoch
        train("recurrent", tmp_path / "run", *STREAMS, *own, f"loop.steps={steps}", size=size)
    losses, evaluations = losses_of_a_loop_over_streams(12)
    assert far(curve(tmp_path / "run"), losses) < 1e-9
    found = {line["step"]: line["loss"] for line in lines(tmp_path / "run", "eval")}
    assert far([found[7], found[12]], evaluations) < 1e-9


SEEN: list[Any] = []  # the batches of a run


class Noted(Adversarial):
    """The task of the lab, which keeps what it learns from."""

    def forward(self, network: Any, inputs: Any, targets: Any) -> Any:
        if torch.is_grad_enabled():
            SEEN.append(inputs)
        return super().forward(network, inputs, targets)


def losses_of_a_loop(batches: list[Any]) -> tuple[list[float], list[float]]:
    """The GAN as people write it: two optimizers, two backwards, both networks move at once."""
    torch.manual_seed(0)
    rivals = Rivals(16).double()
    generator, discriminator = rivals.generator, rivals.discriminator
    of_generator, of_discriminator = (
        torch.optim.Adam(network.parameters(), lr=rate, betas=(0.5, 0.999))
        for network, rate in ((generator, 2e-4), (discriminator, 4e-4))
    )
    losses = []
    for batch in batches:
        drawn = generator(batch["noise"])
        of_discriminator.zero_grad()
        unmasked = softplus(-discriminator(batch["image"])).mean() + softplus(discriminator(drawn.detach())).mean()
        unmasked.backward()
        gradients = [parameter.grad.clone() for parameter in discriminator.parameters() if parameter.grad is not None]
        of_generator.zero_grad()
        fooled = softplus(-discriminator(drawn)).mean()
        fooled.backward()
        of_generator.step()
        for parameter, gradient in zip(discriminator.parameters(), gradients, strict=True):
            parameter.grad = gradient  # without what the generator's loss has added
        of_discriminator.step()
        losses.append((fooled.item(), unmasked.item()))
    return [one for one, _ in losses], [other for _, other in losses]


def test_a_gan_learns_as_a_loop_with_two_optimizers_and_a_pipeline_takes_it(processes: object, tmp_path: Path) -> None:
    SEEN.clear()
    noted = ["trust=[tests]", "task._target_=tests.test_labs.Noted"]
    train("gan", tmp_path / "alone", *noted, "strategy=single")
    train("gan", tmp_path / "stages", "strategy=pp", MICRO, size=2)
    by_hand = dict(zip(("generator", "discriminator"), losses_of_a_loop(SEEN[-6:]), strict=True))
    for loss, wanted in by_hand.items():
        assert far(curve(tmp_path / "alone", loss), wanted) < 1e-9
        assert far(curve(tmp_path / "stages", loss), wanted) < 1e-9  # its cut lies in the generator


def test_micro_batches_of_different_shape_have_no_pipeline(processes: object, tmp_path: Path) -> None:
    said = run([*NET, *GRAPHS, "strategy=pp", MICRO, f"run.dir={tmp_path}"], 2, "group", code=2).out
    assert "the 2 micro-batches of a pipeline must have one shape, so they are cut from one batch" in said


class ListMetrics(Detection):
    def metrics(self, output: Any, target: Any) -> Any:
        return {"right": output.argmax(1).sum()}


def test_what_meets_lists_in_an_evaluation_is_told_what_to_write(tmp_path: Path) -> None:
    own = ["trust=[tests]", "task._target_=tests.test_labs.ListMetrics", "data.size=8", "loop.eval_batch=4"]
    screen = train("detection", tmp_path / "run", *own, code=2)
    assert "ListMetrics.metrics fails in an evaluation (AttributeError" in screen
    assert "a list with a dict for each sample (boxes, scores, labels)" in screen
    assert 'return output if isinstance(output, dict) else output[0]["boxes"].new_zeros(())' in screen


@pytest.mark.long
def test_a_network_that_draws_its_anchors_trains_and_finds_boxes(processes: object, tmp_path: Path) -> None:
    train("detection", tmp_path / "run", "model=fasterrcnn", "strategy=ddp", MICRO, "loop.steps=2", size=2)
    assert {"loss_classifier", "loss_box_reg", "loss_objectness"} < set(lines(tmp_path / "run", "train")[-1])
