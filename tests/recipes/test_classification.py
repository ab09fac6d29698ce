import pytest
import torch
from torch import nn
from torch.nn import functional

from recipes.vision.augment import Augment
from recipes.vision.classification import Classification
from recipes.vision.images import Images
from recipes.vision.pictures import Pictures
from tests.commands import SMALL
from tests.inside import here
from trainer.learning.parallel_plan import Plan
from trainer.messages import BadData, Refusal


def outputs(batch=12, classes=4):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, classes, generator=generator), torch.arange(batch) % 3


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_the_mean_over_samples(smoothing):
    output, target = outputs()
    task = Classification(label_smoothing=smoothing)
    expected = functional.cross_entropy(output, target, label_smoothing=smoothing)
    assert torch.allclose(task.loss(output, target), expected)
    assert task.weight(target) == 12


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_targets_may_be_shares_of_classes(smoothing):
    output, target = outputs()
    task = Classification(label_smoothing=smoothing)
    whole = functional.one_hot(target, 4).float()
    assert torch.allclose(task.loss(output, whole), task.loss(output, target))
    assert task.weight(whole) == 12
    mixed = 0.7 * whole + 0.3 * whole.roll(1, 0)
    expected = 0.7 * task.loss(output, target) + 0.3 * task.loss(output, target.roll(1))
    assert torch.allclose(task.loss(output, mixed), expected)
    for name, value in task.metrics(output, target).items():
        assert torch.equal(task.metrics(output, mixed)[name], value)  # the larger share counts
    assert task.loss(output[:0], mixed[:0]) == 0


def test_the_loss_of_nothing_is_zero_and_has_a_gradient():
    output = torch.zeros(0, 4, requires_grad=True)
    loss = Classification(label_smoothing=0.1).loss(output, torch.zeros(0, dtype=torch.long))
    loss.backward()
    assert loss.item() == 0


def test_a_network_with_too_few_outputs_is_told_so_at_the_first_step(tmp_path):
    words = (*SMALL, "loop.steps=1", f"run.dir={tmp_path / 'run'}", "model.num_classes=7")
    with pytest.raises(BadData, match=r"the data has 10 classes, and the network\'s output is 7 wide: .*num_classes: "):
        here(*words)
    # where nobody says how many classes there are, the first label without an output does
    with pytest.raises(BadData, match=r"a label is [789]; the network's output is 7 wide, for labels from 0 to 6"):
        here(*words, "task.num_classes=null")


def test_scores_of_tokens_are_another_task(tmp_path):
    words = ["data=synthetic_tokens", "data.length=4", "model=gpt_nano", "task=classification", "loop.steps=1"]
    words.append(f"run.dir={tmp_path}/run")
    with pytest.raises(BadData, match=r"\(samples, classes\), task=language "):
        here(*words, "strategy=single")


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("label", [-1, 4, -100])
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


def test_the_confusion_matrix_has_the_truth_in_its_rows():
    output = functional.one_hot(torch.tensor([1, 1, 2]), 3).float()
    confusion = Classification().metrics(output, torch.tensor([0, 1, 1]))["confusion"]
    assert confusion.tolist() == [[0, 1, 0], [0, 1, 1], [0, 0, 0]]


def test_the_best_checkpoint_is_the_most_accurate():
    assert Classification.best == "accuracy"


def test_the_plan_is_the_networks_own_or_none():
    class Planned(nn.Module):
        def plan(self):
            return Plan(cuts=("here",))

    assert Classification().plan(Planned()).cuts == ("here",)
    assert Classification().plan(nn.Linear(2, 2)) == Plan()
