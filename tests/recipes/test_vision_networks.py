"""The networks: shapes, names, initialisation, what they say of being split, and what they refuse."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torchvision import models

from recipes.vision.cnn import CNN
from recipes.vision.mlp import MLP
from recipes.vision.resnet import resnet18
from recipes.vision.vit import VisionTransformer
from recipes.vision.zoo import torchvision_model
from trainer import Refusal

OWN: dict[str, Callable[..., nn.Module]] = {
    "cnn": CNN,
    "mlp": MLP,
    "vit": VisionTransformer,
    "resnet18": resnet18,
}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize(("channels", "side"), [(1, 8), (3, 64)])
def test_each_network_takes_images_of_each_data_set_and_the_seed_decides_its_weights(name, channels, side):
    def build(seed):
        torch.manual_seed(seed)
        return OWN[name](num_classes=7, channels=channels, image_size=side).eval()

    network = build(0)
    with torch.no_grad():
        assert network(torch.randn(2, channels, side, side)).shape == (2, 7)
    first, again, other = network.state_dict(), build(0).state_dict(), build(1).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)
    if not name.startswith("resnet"):  # the learning curve of the others is the same under every strategy
        kinds = nn.modules.batchnorm._BatchNorm, nn.Dropout
        assert not any(isinstance(one, kinds) and getattr(one, "p", 1) for one in network.modules())


def test_a_transformer_that_does_not_divide_is_refused():
    with pytest.raises(Refusal, match=r"28 pixels do not divide into patches of 16; \[2, 4, 7, 14, 28\]"):
        VisionTransformer(10, 1, 28, patch_size=16)
    with pytest.raises(Refusal, match="width 100 ÷ heads 12 is not whole; width 108"):
        VisionTransformer(10, 1, 28, width=100)


@pytest.mark.parametrize(
    ("name", "channels"),
    [("resnet18", 1), pytest.param("googlenet", 4, marks=pytest.mark.long)],
)
def test_torchvisions_networks_take_any_number_of_channels(name, channels):
    network = torchvision_model(name, num_classes=6, channels=channels, image_size=40)
    assert network.training
    names = network.state_dict().keys()
    assert network(torch.randn(2, channels, 40, 40)).shape == (2, 6)
    own = {"aux_logits": False, "init_weights": True} if name == "googlenet" else {}
    assert names == models.get_model(name, **own).state_dict().keys()


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(Refusal, match="torchvision has no classifier 'resnet19'; did you mean 'resnet1"):
        torchvision_model("resnet19", 10, 3, 32)


@pytest.mark.parametrize("name", ["vit_b_16", "alexnet"])
def test_images_that_a_network_cannot_take_are_refused(name):
    with pytest.raises(Refusal, match=f"{name} cannot take images of 1 × 8 × 8 .*model=cnn"):
        torchvision_model(name, num_classes=10, channels=1, image_size=8)
