"""Mixtures of experts as transformers has them: Mixtral, and GLM-4-MoE, whose mixture is that of DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from recipes.language.experts import Mixture
from recipes.language.pairs import Pair, same
from trainer.messages import Refusal

# our weights of an expert, and what they are called there
_MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}
_GLM = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def pairs(mixture: Mixture, layer: str, inner: str, kind: str) -> Iterator[Pair]:
    """What holds one tensor of a mixture, the layout that is written last; layer: `model.layers.3.`."""
    glm = mixture.router.routing.scores == "sigmoid"
    here = f"{layer}{'mlp' if glm else 'block_sparse_moe'}."
    if inner.startswith("mlp.shared."):
        yield same(f"{here}shared_experts.{_GLM[inner.removeprefix('mlp.shared.')]}.{kind}")
    elif inner == "mlp.router":
        name = "e_score_correction_bias" if kind == "bias" else kind
        yield from (same(f"{where}gate.{name}") for where in (f"{layer}mlp.", here))
    else:
        # all experts as one tensor, gates before what they open; or one after the other, which every version reads
        stacked = f"{layer}mlp.experts.{'down_proj' if kind == 'down' else 'gate_up_proj'}"
        part: Callable[[Tensor], Tensor] = {
            "gate": lambda x: x.chunk(2, 1)[0],
            "up": lambda x: x.chunk(2, 1)[1],
            "down": lambda x: x,
        }[kind]
        yield Pair((stacked,), part, partial(_refuse_stacked, stacked))
        name = (_GLM if glm else _MIXTRAL)[kind]
        theirs = tuple(f"{here}experts.{number}.{name}.weight" for number in range(mixture.router.routing.experts))
        yield Pair(theirs, lambda *experts: torch.stack(experts), lambda own: tuple(x.contiguous() for x in own))


def _refuse_stacked(name: str, _: Tensor) -> tuple[Tensor, ...]:
    raise AssertionError(f"{name} is read, and never written")


def configuration(network: Any, mixture: Mixture, rope: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json says of the mixture, and of the family. Refusal where neither of the two is so.

    rope: what it says of rotary positions.
    """
    routing, dense = mixture.router.routing, network.blocks[0].mlp
    inner = mixture.experts.gate.shape[1]
    count = {"num_experts_per_tok": routing.active, "num_local_experts": routing.experts}
    plain = mixture.shared is None and isinstance(dense, Mixture) and mixture.router.bias is None
    if routing.scores == "softmax" and plain and routing.normalised and routing.scaling == 1:
        return {
            "model_type": "mixtral",
            "architectures": ["MixtralForCausalLM"],
            **count,
            "intermediate_size": inner,
            "sliding_window": network.attention.window,
        }
    if routing.scores != "sigmoid" or mixture.router.bias is None or mixture.shared is None or network.attention.window:
        raise Refusal(
            "a mixture of experts with these settings is neither Mixtral's (scores softmax, normalised, scaling 1, no"
            " bias_rate, shared 0, dense_first 0) nor GLM-4-MoE's (scores sigmoid, a bias_rate, shared 1 or more, no"
            " window)"
        )
    del count["num_local_experts"]
    first = sum(not isinstance(block.mlp, Mixture) for block in network.blocks)
    return {
        "model_type": "glm4_moe",
        "architectures": ["Glm4MoeForCausalLM"],
        **count,
        "n_routed_experts": routing.experts,
        "n_shared_experts": mixture.shared.up.out_features // inner,  # type: ignore[union-attr,operator]
        "intermediate_size": dense.up.out_features if first else inner,
        "moe_intermediate_size": inner,
        "first_k_dense_replace": first,
        "norm_topk_prob": routing.normalised,
        "routed_scaling_factor": routing.scaling,
        "n_group": 1,
        "topk_group": 1,
        "use_qk_norm": False,
        "rope_parameters": {**rope, "partial_rotary_factor": 1.0},
    }
