"""Weights that torchvision publishes for a network, and the network that knows where they lie."""

from __future__ import annotations

import re
from functools import partial
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlparse

import torch
from torch import nn

from recipes.vision.cached import patiently
from trainer.messages import Refusal, did_you_mean


def offer(network: nn.Module, name: str, weights: str) -> nn.Module:
    """The network of torchvision, with `pretrained()`: the file of its published weights.

    weights: torchvision's name for them, or DEFAULT. Refusal where it has none of that name.
    """
    from torchvision.models import get_model_weights  # here, because the import takes seconds

    known = get_model_weights(name).__members__  # DEFAULT is one of the names
    if weights not in known:
        listed = f"there are: {', '.join(known) or 'none'}"
        raise Refusal(
            f"model.weights={weights}: torchvision's {name} has no such weights{did_you_mean(weights, known)}; {listed}"
        )
    find = partial(_refuse_old_names, name) if name.startswith("densenet") else partial(from_hub, known[weights].url)
    vars(network)["pretrained"] = find
    return network


def from_hub(url: str) -> Path:
    """The file of this address in torch's hub cache, downloaded where it is not there. Refusal where it cannot be."""
    file = Path(torch.hub.get_dir()) / "checkpoints" / Path(urlparse(url).path).name
    if file.is_file():
        return file
    digits = re.search(r"-([0-9a-f]{8,})\.", file.name)  # of its sha256, as torch's hub has it
    print(f"downloading {url} to {file}", flush=True)  # one process does, before anything else is said
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        prefix = digits and digits[1]
        patiently(lambda _: torch.hub.download_url_to_file(url, str(file), prefix, progress=False), file.parent)
    except (OSError, RuntimeError, HTTPException) as error:
        raise Refusal(
            f"{file.name} cannot be downloaded from {url} ({error}); put it into {file.parent}, or name another folder"
            " for such files in TORCH_HOME"
        ) from error
    return file


def _refuse_old_names(name: str) -> Path:
    raise Refusal(
        f"torchvision's file for {name} has names of an older {name}, which torchvision changes when it reads it; save"
        f" them once: torch.save(torchvision.models.{name}(weights='DEFAULT').state_dict(), '{name}.pt'), then"
        f" init_from={name}.pt"
    )
