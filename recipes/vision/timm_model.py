"""Any network of timm by its name."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from recipes.vision.backbone import marked
from recipes.vision.published import from_hub
from recipes.vision.zoo import refuse_unknown, try_on_shapes
from trainer.messages import Refusal, did_you_mean, first_line


def timm_model(name: str, num_classes: int, channels: int, image_size: int, **more: Any) -> nn.Module:
    """A network of timm by name, with its own initialisation: `resnet18`, `vit_tiny_patch16_224.augreg_in21k`, …

    What stands behind the point is timm's name of published weights, which `pretrained()` finds; without it timm's own
    choice. more: what timm's `create_model` hands on to this network: drop_path_rate, …
    """
    try:
        import timm  # here, because the import takes seconds
    except ImportError as error:
        raise Refusal("model=timm needs the package timm: pip install -e '.[timm]'") from error

    if not timm.is_model(name):
        near = did_you_mean(name.split(".")[0], timm.list_models())
        raise Refusal(f"timm has no network {name!r}{near}; timm.list_models('*{name[:4]}*') lists some")
    try:
        config: Any = vars(timm.models)["get_pretrained_cfg"](name)
    except RuntimeError as error:  # a tag behind the point that it does not know
        near = did_you_mean(name, timm.list_pretrained(f"{name.split('.')[0]}.*"))
        raise Refusal(f"timm has no such weights: {error}{near}") from error
    # networks of tokens are built for one size of images; others take any, and no such argument
    size = {"img_size": image_size} if config is not None and config.fixed_input_size else {}
    arguments = {**size, **more}
    try:
        network = timm.create_model(name, num_classes=num_classes, in_chans=channels, **arguments)
        try_on_shapes(network, channels, image_size)
    except (RuntimeError, ValueError, AssertionError, TypeError, ZeroDivisionError) as error:
        refuse_unknown(error, f"timm's {name}", more)
        reason = first_line(error).strip(" .")
        images = f"images of {channels} × {image_size} × {image_size}"
        raise Refusal(f"timm's {name} cannot take {images} ({reason}); other sizes may work") from error
    if config is not None and config.has_weights:
        vars(network)["pretrained"] = partial(_published, config)
    heads = network.get_classifier()  # several where it was distilled
    return marked(network, *_names_of(network, heads if isinstance(heads, tuple) else (heads,)))


def _published(config: Any) -> Path:
    """The file of these weights: in Hugging Face's cache, or in torch's, downloaded where it is not there."""
    if not config.hf_hub_id:
        return from_hub(config.url)
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache

    file = config.hf_hub_filename or "model.safetensors"
    # what is there is taken as it is: the download would first ask the network for a newer one
    if isinstance(there := try_to_load_from_cache(config.hf_hub_id, file), str):
        return Path(there)
    try:
        return Path(hf_hub_download(config.hf_hub_id, file))
    except Exception as error:  # whatever a download that failed raises, of which there is no one base
        raise Refusal(
            f"{file} of {config.hf_hub_id} cannot be downloaded ({first_line(error)}); download it elsewhere (hf"
            f" download {config.hf_hub_id}) and give its path: init_from=/…/{file}; or put Hugging Face's cache of"
            f" there into {constants.HF_HUB_CACHE}"
        ) from error


def _names_of(network: nn.Module, wanted: tuple[nn.Module, ...]) -> list[str]:
    return [name for name, module in network.named_modules() if name and module in wanted]
