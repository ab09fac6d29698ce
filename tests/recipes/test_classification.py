"""`task=classification`: its loss, its figures, and labels that are no classes."""

import re

import pytest
import torch
from torch.nn import functional

from recipes.vision.augment import Augment
from recipes.vision.classification import Classification
from recipes.vision.images import Images
from recipes.vision.pictures import Pictures
from tests.run import SMALL, run
from trainer import BadData, Refusal


def outputs(batch=12, classes=4):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, classes, generator=generator), torch.arange(batch) % 3


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_the_mean_over_samples_whose_targets_may_be_shares_of_classes(smoothing):
    output, target = outputs()
    task = Classification(label_smoothing=smoothing)
    expected = functional.cross_entropy(output, target, label_smoothing=smoothing)
    assert torch.allclose(task.loss(output, target), expected)
    whole = functional.one_hot(target, 4).float()
    assert torch.allclose(task.loss(output, whole), expected)
    assert task.weight(target) == task.weight(whole) == 12
    mixed = 0.7 * whole + 0.3 * whole.roll(1, 0)
    expected = 0.7 * task.loss(output, target) + 0.3 * task.loss(output, target.roll(1))
    assert torch.allclose(task.loss(output, mixed), expected)
    for name, value in task.metrics(output, target).items():
        assert torch.equal(task.metrics(output, mixed)[name], value)  # the larger share counts
    empty = torch.zeros(0, 4, requires_grad=True)
    for nothing in (mixed[:0], target[:0]):
        (loss := task.loss(empty, nothing)).backward()
        assert loss == 0


def test_a_network_that_does_not_suit_is_told_so_at_the_first_step(tmp_path):
    words = (*SMALL, "loop.steps=1", "model.num_classes=7")
    tokens = ("data=synthetic_tokens", "data.length=4", "model=gpt_nano", "task=classification", "loop.steps=1")
    for given, said in (
        (words, r"the data has 10 classes, and the network\'s output is 7 wide: .*num_classes: "),
        # where nobody says how many classes there are, the first label without an output does
        (
            (*words, "task.num_classes=null"),
            r"a label is [789]; the network's output is 7 wide, for labels",
        ),
        ((*tokens, "strategy=single"), r"\(samples, classes\), task=language "),
    ):
        assert re.search(said, run(given, place=tmp_path, code=1).out)


@pytest.mark.parametrize(("label", "smoothing"), [(-1, 0.0), (4, 0.1), (-100, 0.0)])
def test_a_label_without_an_output_is_named(label, smoothing):
    output, target = outputs()
    target[5] = label
    with pytest.raises(BadData, match=f"a label is {label}; the network's output is 4 wide, for labels from 0 to 3"):
        Classification(smoothing).loss(output, target)


class Strange(Pictures):
    num_classes = 5

    def _read(self, training):
        return Images(torch.zeros(10, 1, 8, 8, dtype=torch.uint8), torch.arange(10))


def test_labels_that_are_no_classes_are_refused_before_the_run():
    with pytest.raises(
        Refusal, match="labels of the training pictures go from 0 to 9; with num_classes=5 they are 0 to 4"
    ):
        Strange(Augment()).train()


@pytest.mark.parametrize("classes", [4, 1001])  # with a confusion matrix, and without
def test_figures_do_not_depend_on_the_batches(classes):
    output, target = outputs(classes=classes)
    task = Classification()

    def figures(parts):
        totals = {"loss": torch.tensor(6.0), "weight": torch.tensor(12), "samples": torch.tensor(12)}
        for part in parts:
            for name, value in task.metrics(output[part], target[part]).items():
                totals[name] = totals.get(name, 0) + value
        return task.finish(totals)

    assert max(value.numel() for value in task.metrics(output, target).values()) <= max(16, classes)
    whole = figures([torch.arange(12)])
    assert figures([torch.arange(5), torch.arange(0), torch.arange(5, 12)]) == whole
    right = output.argmax(1) == target
    assert whole["loss"] == 0.5
    assert whole["accuracy"] == pytest.approx(right.double().mean().item())
    # class 3 has no sample and does not count
    assert whole["macro_accuracy"] == pytest.approx(
        sum(right[target == c].double().mean().item() for c in range(3)) / 3
    )
