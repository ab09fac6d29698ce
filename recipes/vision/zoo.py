"""Any classifier of torchvision by its name."""

from __future__ import annotations

import math

import torch
from torch import nn

from trainer.refusal import Refusal, nearest


def torchvision_model(name: str, num_classes: int, channels: int, image_size: int) -> nn.Module:
    """A classifier of torchvision by name, with its own initialisation and stem.

    Where images do not have three channels, the first convolution is made anew for as many, with weights as large as
    leave its outputs as large as torchvision meant them; everything else stays, and so do all names.
    """
    from torchvision import models  # here, because the import takes seconds

    names = models.list_models(module=models)
    if name not in names:
        raise Refusal(f"torchvision has no classifier {name!r}{nearest(name, names)}")
    arguments: dict[str, object] = {"num_classes": num_classes, **_special(name, image_size)}
    _try(name, arguments, channels, image_size)
    return _fit_channels(models.get_model(name, **arguments), channels)


def _special(name: str, image_size: int) -> dict[str, object]:
    """Arguments that only some networks have: the image size; no auxiliary outputs, which would be a second loss."""
    if name.startswith("vit_"):
        return {"image_size": image_size}
    if name == "maxvit_t":
        return {"input_size": (image_size, image_size)}
    if name in ("googlenet", "inception_v3"):
        return {"aux_logits": False, "init_weights": True}
    return {}


def _try(name: str, arguments: dict[str, object], channels: int, image_size: int) -> None:
    """Refuse images that the network cannot take, found out without memory or arithmetic."""
    from torchvision import models

    try:
        with torch.device("meta"), torch.no_grad():
            network = _fit_channels(models.get_model(name, **arguments), channels).eval()
            network(torch.empty(2, channels, image_size, image_size))
    except (RuntimeError, ValueError, AssertionError, ZeroDivisionError) as error:
        images = f"images of {channels} × {image_size} × {image_size}"
        reason = str(error).splitlines()[0].strip(" .") if str(error) else type(error).__name__
        raise Refusal(
            f"torchvision's {name} cannot take {images} ({reason}); larger ones, model=cnn or model=resnet18 would work"
        ) from error


def _fit_channels(network: nn.Module, channels: int) -> nn.Module:
    """Give the first convolution, in place, as many input channels as the images have."""
    if channels == 3:
        return network
    name, old = next((name, module) for name, module in network.named_modules() if isinstance(module, nn.Conv2d))
    new = nn.Conv2d(
        channels, old.out_channels, old.kernel_size, old.stride, old.padding, old.dilation, bias=old.bias is not None
    )
    with torch.no_grad():
        spread = float(old.weight.std()) if not old.weight.is_meta else 1.0
        new.weight.normal_(0, spread * math.sqrt(old.in_channels / channels))
        if old.bias is not None and new.bias is not None:
            new.bias.copy_(old.bias)
    network.set_submodule(name, new)
    return network
