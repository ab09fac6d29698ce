"""Any classifier of torchvision by its name."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from recipes.vision.backbone import marked
from recipes.vision.published import offer
from trainer.messages import Refusal, did_you_mean, first_line


def torchvision_model(
    name: str, num_classes: int, channels: int, image_size: int, weights: str = "DEFAULT", **more: Any
) -> nn.Module:
    """A classifier of torchvision by name, with its own initialisation and stem.

    Where images do not have three channels, the first convolution is made anew for as many, with weights as large as
    leave its outputs as large as torchvision meant them; everything else stays, and so do all names. more: what the
    function that builds this network takes: dropout, stochastic_depth_prob, …
    """
    from torchvision import models  # here, because the import takes seconds

    names = models.list_models(module=models)
    if name not in names:
        raise Refusal(f"torchvision has no classifier {name!r}{did_you_mean(name, names)}")
    arguments = {**_special(name, channels, image_size), **more}
    try:
        network = models.get_model(name, num_classes=num_classes, **arguments)
        _fit_channels(network, channels)
        try_on_shapes(network, channels, image_size)
    except (RuntimeError, ValueError, AssertionError, TypeError, ZeroDivisionError) as error:
        refuse_unknown(error, f"torchvision's {name}", more)
        images = f"images of {channels} × {image_size} × {image_size}"
        reason = first_line(error).strip(" .")
        raise Refusal(
            f"torchvision's {name} cannot take {images} ({reason}); larger ones, model=cnn or model=resnet18 would work"
        ) from error
    return offer(marked(network), name, weights)


def refuse_unknown(error: Exception, whose: str, more: Mapping[str, Any]) -> None:
    """Refuse the key that a network's own constructor does not take."""
    said = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    if said and said[1] in more:
        raise Refusal(f"model.{said[1]}: {whose} takes no such key: {first_line(error)}") from error


def _special(name: str, channels: int, image_size: int) -> dict[str, object]:
    """Arguments that only some networks have: the image size; no auxiliary outputs, which would be a second loss.

    Two were published for colours of another normalisation than all others, and change them themselves.
    """
    if name.startswith("vit_"):
        return {"image_size": image_size}
    if name == "maxvit_t":
        return {"input_size": (image_size, image_size)}
    if name in ("googlenet", "inception_v3"):
        return {"aux_logits": False, "init_weights": True, "transform_input": channels == 3}
    return {}


def _fit_channels(network: nn.Module, channels: int) -> None:
    """Give the first convolution, in place, as many input channels as the images have."""
    first = next(module for module in network.modules() if isinstance(module, nn.Conv2d))
    if channels != first.in_channels:
        old = first.weight.detach()
        spread = float(old.std()) * math.sqrt(first.in_channels / channels)
        first.weight = nn.Parameter(old.new_empty(old.shape[0], channels, *old.shape[2:]).normal_(0, spread))
        first.in_channels = channels


def try_on_shapes(network: nn.Module, channels: int, image_size: int) -> None:
    """Run the network on shapes alone, which shows images that it cannot take."""
    shapes = {
        name: tensor.detach().to("meta") for name, tensor in chain(network.named_parameters(), network.named_buffers())
    }
    network.eval()
    with torch.no_grad():
        functional_call(network, shapes, torch.empty(2, channels, image_size, image_size, device="meta"))
    network.train()
