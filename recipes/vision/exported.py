"""A classifier of pictures as a folder that transformers loads: AutoModelForImageClassification."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recipes.vision.vit import VisionTransformer
from trainer.messages import Refusal, first_line

CLOSE = 1e-3  # of scores, relative and absolute: rounding, and nothing else
_LUMA = (0.299, 0.587, 0.114)  # of red, green and blue in a grey pixel, as PIL has it

Named = Iterator[tuple[str, str]]  # theirs → ours, without `.weight` and `.bias`


@torch.no_grad()
def save(network: nn.Module, folder: Path) -> None:
    """Write the folder. Refusal where transformers has no such network, or its scores are others.

    transformers opens pictures in colour: a network of grey ones weighs the colours in its first convolution.
    """
    tensors = {name: value.float() for name, value in network.state_dict().items()}
    grey = _in_colour(network, tensors)
    try:
        theirs, size = _counterpart(network, tensors)
    except ImportError as error:
        raise Refusal("job.format=huggingface needs the package transformers: pip install -e '.[hf]'") from error
    except (RuntimeError, ValueError, AttributeError, KeyError, TypeError, ZeroDivisionError, StopIteration) as error:
        raise Refusal(f"{_strange(network)} ({first_line(error)[:150]}); {_OTHERS}") from error
    images = torch.rand(2, 3, size, size)
    own = (images * torch.tensor(_LUMA)[:, None, None]).sum(1, keepdim=True) if grey else images
    dtype = next(network.parameters()).dtype
    if not torch.allclose(network(own.to(dtype)).float(), theirs.eval()(images).logits, CLOSE, CLOSE):
        raise Refusal(f"{_strange(network)}: its scores are others; {_OTHERS}")
    theirs.save_pretrained(folder)


def _in_colour(network: nn.Module, tensors: dict[str, Tensor]) -> bool:
    """Give the first convolution three channels where it has one; was it so?"""
    first = next((name for name, module in network.named_modules() if isinstance(module, nn.Conv2d)), "")
    weight = tensors.get(f"{first}.weight", torch.empty(0))  # (outputs, channels, …)
    grey = weight.dim() == 4 and weight.shape[1] == 1
    if grey:
        tensors[f"{first}.weight"] = torch.cat([weight * share for share in _LUMA], dim=1)
    return grey


def _counterpart(network: nn.Module, tensors: Mapping[str, Tensor]) -> tuple[Any, int]:
    """The network of transformers with these values, and the size of pictures that it takes."""
    from torchvision.models import ResNet
    from torchvision.models import VisionTransformer as TheirTransformer

    if type(network) is ResNet:
        return _resnet(network, tensors)
    if type(network) is VisionTransformer:
        return _siglip(network, tensors)
    if type(network) is TheirTransformer:
        return _vit(network, tensors)
    if type(network).__module__.startswith("timm."):
        return _timm(network, tensors)
    raise Refusal(f"{_strange(network)}; {_OTHERS}")


def _filled(theirs: Any, tensors: Mapping[str, Tensor], names: Named, more: Mapping[str, Tensor] = {}) -> Any:
    """Their network with our values; RuntimeError where one is missing, or of another shape."""
    pairs = dict(names)
    values = {
        f"{there}.{kind}": tensors[f"{here}.{kind}"]
        for there, here in pairs.items()
        for kind in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
        if f"{here}.{kind}" in tensors
    }
    theirs.load_state_dict({**values, **more})
    return theirs


def _resnet(network: Any, tensors: Mapping[str, Tensor]) -> tuple[Any, int]:
    from transformers import ResNetConfig, ResNetForImageClassification

    if network.conv1.kernel_size != (7, 7):
        raise Refusal(
            "job.format=huggingface: for images of 64 pixels or fewer this network has a stem of its own, which"
            f" transformers' ResNet has not: data.image_size=65 or more, or model=torchvision; {_OTHERS}"
        )
    stages = [getattr(network, f"layer{at}") for at in range(1, 5)]
    basic = not hasattr(stages[0][0], "conv3")
    config = ResNetConfig(
        hidden_sizes=[stage[-1].bn2.num_features if basic else stage[-1].bn3.num_features for stage in stages],
        depths=[len(stage) for stage in stages],
        layer_type="basic" if basic else "bottleneck",
        num_labels=network.fc.out_features,
    )

    def names() -> Named:
        yield from _pair("resnet.embedder.embedder", "conv1", "bn1")
        for at, stage in enumerate(stages):
            for number, block in enumerate(stage):
                there, here = f"resnet.encoder.stages.{at}.layers.{number}", f"layer{at + 1}.{number}"
                if block.downsample is not None:
                    yield from _pair(f"{there}.shortcut", f"{here}.downsample.0", f"{here}.downsample.1")
                for part in range(2 if basic else 3):
                    yield from _pair(f"{there}.layer.{part}", f"{here}.conv{part + 1}", f"{here}.bn{part + 1}")
        yield "classifier.1", "fc"

    return _filled(ResNetForImageClassification(config), tensors, names()), 96


def _pair(there: str, convolution: str, norm: str) -> Named:
    yield f"{there}.convolution", convolution
    yield f"{there}.normalization", norm


def _siglip(network: VisionTransformer, tensors: Mapping[str, Tensor]) -> tuple[Any, int]:
    """Ours has no token for the class and takes the mean of all, as SigLIP's classifier does."""
    from transformers import SiglipConfig, SiglipForImageClassification

    width, patch = network.embed.out_channels, network.embed.kernel_size[0]
    size = patch * round(network.position.shape[1] ** 0.5)
    vision = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": len(network.blocks),
        "num_attention_heads": network.heads,
        "image_size": size,
        "patch_size": patch,
        "hidden_act": "gelu",
        "layer_norm_eps": network.norm.eps,
        "vision_use_head": False,
    }
    no_text = {"bos_token_id": None, "eos_token_id": None}  # else it speaks of tokens that nobody has
    config = SiglipConfig(text_config=no_text, vision_config=vision, num_labels=network.head.out_features)
    # our rows: head 0's q, k, v; head 1's q, k, v; …
    more = {"vision_model.embeddings.position_embedding.weight": tensors["position"][0]}
    for at in range(len(network.blocks)):
        for kind in ("weight", "bias"):
            packed = tensors[f"blocks.{at}.attention.qkv.{kind}"]
            parts = packed.unflatten(0, (network.heads, 3, -1)).unbind(1)  # (heads, head, …) each
            for name, part in zip("qkv", parts, strict=True):
                more[f"vision_model.encoder.layers.{at}.self_attn.{name}_proj.{kind}"] = part.flatten(0, 1)

    def names() -> Named:
        yield "vision_model.embeddings.patch_embedding", "embed"
        for at in range(len(network.blocks)):
            there, here = f"vision_model.encoder.layers.{at}", f"blocks.{at}"
            yield f"{there}.layer_norm1", f"{here}.attention_norm"
            yield f"{there}.layer_norm2", f"{here}.mlp_norm"
            yield f"{there}.self_attn.out_proj", f"{here}.attention.out"
            yield f"{there}.mlp.fc1", f"{here}.mlp.up"
            yield f"{there}.mlp.fc2", f"{here}.mlp.down"
        yield "vision_model.post_layernorm", "norm"
        yield "classifier", "head"

    return _filled(SiglipForImageClassification(config), tensors, names(), more), size


def _vit(network: Any, tensors: Mapping[str, Tensor]) -> tuple[Any, int]:
    from transformers import ViTConfig, ViTForImageClassification

    layers = network.encoder.layers
    config = ViTConfig(
        hidden_size=network.hidden_dim,
        num_hidden_layers=len(layers),
        num_attention_heads=layers[0].num_heads,
        intermediate_size=network.mlp_dim,
        image_size=network.image_size,
        patch_size=network.patch_size,
        layer_norm_eps=network.encoder.ln.eps,
        num_labels=network.heads.head.out_features,
    )
    theirs = ViTForImageClassification(config)
    mlp = [name for name, _ in theirs.vit.layers[0].mlp.named_children() if name.startswith("fc")]
    more = {
        "vit.embeddings.cls_token": tensors["class_token"],
        "vit.embeddings.position_embeddings": tensors["encoder.pos_embedding"],
    }
    for at in range(len(layers)):
        for kind in ("weight", "bias"):
            parts = tensors[f"encoder.layers.encoder_layer_{at}.self_attention.in_proj_{kind}"].chunk(3)
            for name, part in zip("qkv", parts, strict=True):
                more[f"vit.layers.{at}.attention.{name}_proj.{kind}"] = part.clone()

    def names() -> Named:
        yield "vit.embeddings.patch_embeddings.projection", "conv_proj"
        for at in range(len(layers)):
            there, here = f"vit.layers.{at}", f"encoder.layers.encoder_layer_{at}"
            yield f"{there}.layernorm_before", f"{here}.ln_1"
            yield f"{there}.layernorm_after", f"{here}.ln_2"
            yield f"{there}.attention.o_proj", f"{here}.self_attention.out_proj"
            yield f"{there}.mlp.{mlp[0]}", f"{here}.mlp.0"
            yield f"{there}.mlp.{mlp[1]}", f"{here}.mlp.3"
        yield "vit.layernorm", "encoder.ln"
        yield "classifier", "heads.head"

    return _filled(theirs, tensors, names(), more), network.image_size


def _timm(network: Any, tensors: Mapping[str, Tensor]) -> tuple[Any, int]:
    """timm's networks run inside of a wrapper that transformers has for them."""
    from transformers import TimmWrapperConfig, TimmWrapperForImageClassification

    facts = vars(network)["pretrained_cfg"]
    arguments = dict(getattr(network, "arguments", {}))
    config = TimmWrapperConfig(architecture=facts["architecture"], model_args=arguments, num_labels=network.num_classes)
    theirs = TimmWrapperForImageClassification(config)
    theirs.timm_model.load_state_dict(tensors)
    return theirs, arguments.get("img_size") or facts["input_size"][-1]


def _strange(network: nn.Module) -> str:
    return f"job.format=huggingface: transformers has no network that computes what {type(network).__name__} does"


_OTHERS = (
    "it works for torchvision's ResNets and vit_*, vit_tiny, vit_small, and for model=timm; for any network"
    " job.format=pt2 job.prepared=true writes a program that needs torch alone"
)
