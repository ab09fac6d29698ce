"""The record of CIFAR-10: its first layer, its optimizer, its views; resumed to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from recipes.vision.airbench import Airbench, whitening
from recipes.vision.lookahead import LookaheadSGD
from recipes.vision.resnet import BlurredConv, resnet18
from recipes.vision.views import ViewedClassification
from tests.commands import curve, lines
from tests.inside import product
from tests.recipes.test_cifar import write_ten
from tests.recipes.test_folder import picture
from trainer.launch.rendezvous import Launch
from trainer.messages import Refusal
from trainer.parallel.pipeline.cut import cut_stages
from trainer.strategies.loss import TaskNetwork


def test_the_first_layer_gives_independent_numbers_of_variance_one() -> None:
    pixels = [torch.tensor(list(picture(at, 32, 32).tobytes())).view(32, 32, 3).permute(2, 0, 1) for at in range(40)]
    noise = torch.randn(40, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    images = torch.stack(pixels) / 64 - 2 + 0.3 * noise
    weight = whitening(images)
    assert torch.equal(weight[:12], -weight[12:])
    found = nn.functional.conv2d(images, weight[:12]).permute(1, 0, 2, 3).flatten(1)  # (12, places)
    assert torch.allclose(found @ found.T / found.shape[1], torch.eye(12), atol=0.02)
    # a group begins as a copy of its inputs, and only biases of the norms learn
    group = Airbench(10, 3, 64, 0.6, 1 / 9).groups[0]
    assert torch.allclose(group.conv1(torch.ones(1, 24, 9, 9))[:, :24], torch.ones(1, 24, 9, 9))  # type: ignore[operator]
    assert (group.norm1.weight.requires_grad, group.norm1.bias.requires_grad) == (False, True)  # type: ignore[union-attr]


def test_lookahead_is_what_the_paper_says() -> None:
    own = nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64))
    plain = nn.Parameter(own.detach().clone())
    ahead = LookaheadSGD([own], 0.1, 0.9, every=2, keep=0.9, power=2.0, begin=3, restart=5, steps=11)
    sgd, slow = torch.optim.SGD([plain], 0.1, 0.9), None
    for step in range(1, 12):
        for weights, optimizer in ((own, ahead), (plain, sgd)):
            weights.grad = weights.detach().sin() + step
            optimizer.step()
        if step >= 4 and step % 2 == 0:
            kept = 0.9**2 * (step / 11) ** 2
            slow = plain.detach().clone() if slow is None else kept * slow + (1 - kept) * plain.detach()
        if slow is not None and (step % 2 == 0 or step in (5, 10, 11)):
            plain.data.copy_(slow)
        assert torch.allclose(own, plain, rtol=1e-14, atol=0)
        if step == 7:  # what a checkpoint holds is enough
            state, ahead = ahead.state_dict(), LookaheadSGD([own], 0.1, 0.9, every=2, keep=0.9, power=2.0, begin=3,
                                                            restart=5, steps=11)  # fmt: skip
            ahead.load_state_dict(state)
    with pytest.raises(Refusal, match=r"optimizer\.every=0"):
        LookaheadSGD([own], every=0)


def test_an_evaluation_averages_views_and_training_does_not() -> None:
    network, images = nn.Sequential(nn.Flatten(), nn.Linear(48, 5)), torch.rand(2, 3, 4, 4)
    scores = {}
    for views in ("flip", "flip_shift"):
        task = ViewedClassification(views=views)
        assert torch.equal(task.forward(network.train(), images, None), network(images))
        scores[views] = task.forward(network.eval(), images, None)
    # a linear network's mean of scores is its score of the mean of the views
    larger = nn.functional.pad(images, (1, 1, 1, 1), mode="reflect")
    seen = (images + (larger[..., :4, :4] + larger[..., 2:, 2:]) / 2) / 2
    for views, image in (("flip", images), ("flip_shift", seen)):
        assert torch.allclose(scores[views], network((image + image.flip(-1)) / 2), atol=1e-6)


def test_a_pipeline_refuses_an_evaluation_of_several_views() -> None:
    """Its stages run once: the second view would have had the first one's scores."""
    network, example = resnet18(3, 3, 32), (torch.rand(2, 3, 32, 32), torch.tensor([0, 1]))
    with pytest.raises(Refusal, match=r"is called 2 times in an evaluation, and a stage runs once"):
        cut_stages(TaskNetwork(ViewedClassification(), network), (), 2, example)


def test_a_blurred_resnet_blurs_before_each_stride_but_the_first() -> None:
    network = resnet18(10, 3, 224, blur=True)
    names = [name for name, module in network.named_modules() if isinstance(module, BlurredConv)]
    assert names == [f"layer{at}.0.{part}" for at in (2, 3, 4) for part in ("conv1", "downsample.0")]
    assert network.state_dict().keys() == resnet18(10, 3, 224).state_dict().keys()
    conv, images = network.layer2[0].downsample[0], torch.rand(2, 64, 9, 9)  # type: ignore[index,union-attr]
    row = torch.tensor([0.25, 0.5, 0.25])
    kernel = torch.outer(row, row).expand(64, 1, 3, 3)
    blurred = nn.functional.conv2d(images, kernel, padding=1, groups=64)
    expected = nn.functional.conv2d(blurred, conv.weight, stride=2)
    assert torch.allclose(conv(images), expected, atol=1e-6)


@pytest.mark.long
@pytest.mark.slow
def test_the_recipe_resumes_to_the_bit(tmp_path: Path) -> None:
    write_ten(tmp_path)
    words = ["experiment=cifar10_airbench", "data.root=.", "model.width=8", "loop.global_batch=8", "loop.steps=12"]
    words += ["loop.log_every=1", "optimizer.begin=3", "optimizer.every=2", "optimizer.restart=5", "schedule.warmup=3"]
    whole = [*words, "run.dir=whole", "loop.save_every=7", "checkpoint.keep=9"]
    assert product(Launch(), tmp_path, whole) == 0
    rest = [*words, "run.dir=rest", "run.resume=whole/checkpoints/step-00000007"]
    assert product(Launch(), tmp_path, rest) == 0
    for key in ("loss", "lr", "sample_digest"):
        assert [line[key] for line in lines(tmp_path / "rest", "train")] == curve(tmp_path / "whole", key)[7:]
    ends = [lines(tmp_path / name, "eval")[-1] for name in ("rest", "whole")]
    assert ends[0]["loss"] == ends[1]["loss"]
    rates = curve(tmp_path / "whole", "lr")
    assert [rates[at] / 1.5 for at in (0, 2, 3)] == pytest.approx([0.2 + 0.8 / 3, 1.0, 1.0])
