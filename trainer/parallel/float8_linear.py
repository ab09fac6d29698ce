"""Linear layers that multiply in float8, by torchao: weights stay what they are, names too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Literal

from torch import nn

from trainer.launch.devices import compute_capability
from trainer.learning.parallel_plan import Plan
from trainer.messages import Refusal
from trainer.parallel.module_units import SEALED, ancestors, find_units

Float8 = Literal[False, "tensorwise", "rowwise"]  # how many numbers share a scale
MULTIPLE = 16  # of which both sizes of a matrix must be one, for the kernels
CAPABILITY = (8, 9)  # of NVIDIA's GPUs that have them, and of those after it


def refuse_float8(recipe: str, kind: str, precision: str) -> None:
    """Refuse float8 where the device, the precision or the packages do not have it."""
    key, instead = f"float8={recipe}", "float8=false computes in bf16"
    if kind != "cuda":
        raise Refusal(f"{key}: {kind} multiplies no float8, CUDA GPUs of compute capability 8.9 do; {instead}")
    capability = compute_capability(kind)
    if capability < CAPABILITY:
        has, needs = (".".join(map(str, version)) for version in (capability, CAPABILITY))
        raise Refusal(f"{key}: this GPU has compute capability {has}, float8 needs {needs} or more; {instead}")
    if precision != "bf16":
        raise Refusal(
            f"{key}: what is not multiplied in float8 is computed in bf16; use precision=bf16, or float8=false"
        )
    if find_spec("torchao") is None:
        raise Refusal(f"{key} needs the package torchao: pip install 'one-curve-trainer[float8]'; or float8=false")


def float8_layers(network: nn.Module, plan: Plan) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers inside units whose sizes both divide by 16, by name; not heads, which lie in no unit."""
    for unit in find_units(network, plan):
        for name, layer in network.get_submodule(unit).named_modules(prefix=unit):
            # a class derived from Linear may do more; a sealed module uses its layers' weights without calling them
            is_called = not any(isinstance(network.get_submodule(above), SEALED) for above in ancestors(name) if above)
            if type(layer) is not nn.Linear or name == unit or not is_called:
                continue
            if layer.in_features % MULTIPLE == layer.out_features % MULTIPLE == 0:
                yield name, layer


def refuse_no_float8_layers(recipe: str, network: nn.Module, plan: Plan, tensor_ranks: int = 1) -> None:
    """Refuse a network of which nothing would be multiplied in float8, or tensor ranks whose parts do not divide."""
    layers = dict(float8_layers(network, plan))
    if not layers:
        raise Refusal(
            f"float8={recipe}: no linear layer inside a unit has two sizes that are multiples of {MULTIPLE}; use"
            " float8=false, or name units in the network's plan, Plan(shard=(…))"
        )
    for name, layer in layers.items() if tensor_ranks > 1 else ():
        sizes = layer.out_features, layer.in_features
        if any(size % (MULTIPLE * tensor_ranks) for size in sizes):
            raise Refusal(
                f"float8={recipe}: of {name}, {sizes[0]} × {sizes[1]}, each of {tensor_ranks} tensor ranks needs a part"
                f" that is a multiple of {MULTIPLE}; use fewer tensor ranks, or float8=false"
            )


def convert_to_float8(network: nn.Module, plan: Plan, recipe: str) -> None:
    """Let the layers of `float8_layers` multiply in float8, forward and backward, in place. After torchao."""
    from torchao.float8 import convert_to_float8_training  # here, because the import takes seconds

    names = {name for name, _ in float8_layers(network, plan)}
    convert_to_float8_training(network, config=_config(recipe), module_filter_fn=lambda _, name: name in names)


def _config(recipe: str) -> Any:
    from torchao.float8 import Float8LinearConfig

    # the samples of a micro-batch are a size too, in the gradient of a weight: filled up where they do not divide
    return replace(Float8LinearConfig.from_recipe_name(recipe), pad_inner_dim=True)
