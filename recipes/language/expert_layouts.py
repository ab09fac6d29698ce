"""Mixtures of experts as transformers has them: Mixtral, DeepSeek-V2 and V3, and GLM-4-MoE, whose mixture is V3's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from recipes.language import latent_layouts
from recipes.language.attention import AttentionSettings
from recipes.language.experts import Mixture, Routing
from recipes.language.pairs import Pair, same
from trainer.messages import Refusal

# our weights of an expert, and what they are called there
_MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}
_OTHERS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def is_mixtral(attention: AttentionSettings, mixture: Mixture) -> bool:
    """Is it written as Mixtral, not as one of the others?"""
    return attention.latent is None and mixture.router.routing.scores == "softmax"


def pairs(mixture: Mixture, mixtral: bool, layer: str, inner: str, kind: str) -> Iterator[Pair]:
    """What holds one tensor of a mixture, the layout that is written last; layer: `model.layers.3.`."""
    here = f"{layer}{'block_sparse_moe' if mixtral else 'mlp'}."
    if inner.startswith("mlp.shared."):
        yield same(f"{here}shared_experts.{_OTHERS[inner.removeprefix('mlp.shared.')]}.{kind}")
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
        name = (_MIXTRAL if mixtral else _OTHERS)[kind]
        theirs = tuple(f"{here}experts.{number}.{name}.weight" for number in range(mixture.router.routing.experts))
        yield Pair(theirs, lambda *experts: torch.stack(experts), lambda own: tuple(x.contiguous() for x in own))


def _refuse_stacked(name: str, _: Tensor) -> tuple[Tensor, ...]:
    raise AssertionError(f"{name} is read, and never written")


def configuration(network: Any, mixture: Mixture, rope: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json says of the mixture, and of the family. Refusal where none of them is so.

    rope: what it says of rotary positions.
    """
    routing, attention, dense = mixture.router.routing, network.attention, network.blocks[0].mlp
    inner = mixture.experts.gate.shape[1]
    first = sum(not isinstance(block.mlp, Mixture) for block in network.blocks)
    shared = 0 if mixture.shared is None else mixture.shared.up.out_features // inner  # type: ignore[union-attr,operator]
    if is_mixtral(attention, mixture):
        plain = routing.normalised and routing.scaling == 1 and routing.expert_groups == 1
        if shared or first or mixture.router.bias is not None or not plain:
            raise Refusal(_STRANGE)
        return {
            "model_type": "mixtral",
            "architectures": ["MixtralForCausalLM"],
            "num_experts_per_tok": routing.active,
            "num_local_experts": routing.experts,
            "intermediate_size": inner,
            "sliding_window": attention.window,
        }
    # V2 has no bias, and its weights never add up to one number
    usual = mixture.router.bias is None and not routing.normalised
    usual = usual if routing.scores == "softmax" else mixture.router.bias is not None
    if not shared or not usual or attention.window:
        raise Refusal(_STRANGE)
    return {
        **_family(attention, routing, rope),
        "num_experts_per_tok": routing.active,
        "n_routed_experts": routing.experts,
        "n_shared_experts": shared,
        "intermediate_size": dense.up.out_features if first else inner,
        "moe_intermediate_size": inner,
        "first_k_dense_replace": first,
        "norm_topk_prob": routing.normalised,
        "routed_scaling_factor": routing.scaling,
        "n_group": routing.expert_groups,
        "topk_group": routing.active_groups,
    }


def _family(attention: AttentionSettings, routing: Routing, rope: Mapping[str, Any]) -> dict[str, Any]:
    """Its name, and what only it says."""
    if attention.latent is None:
        return {
            "model_type": "glm4_moe",
            "architectures": ["Glm4MoeForCausalLM"],
            "use_qk_norm": False,
            "rope_parameters": {**rope, "partial_rotary_factor": 1.0},
        }
    third = routing.scores == "sigmoid"
    greedy = "greedy" if routing.expert_groups == 1 else "group_limited_greedy"
    return {
        "model_type": "deepseek_v3" if third else "deepseek_v2",
        "architectures": ["DeepseekV3ForCausalLM" if third else "DeepseekV2ForCausalLM"],
        "scoring_func": routing.scores,
        "topk_method": "noaux_tc" if third else greedy,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
        **latent_layouts.configuration(attention.latent),
    }


_STRANGE = (
    "a mixture of experts with these settings is none of those that are written. Mixtral: scores softmax, normalised,"
    " scaling 1, no bias_rate, shared 0, dense_first 0, expert_groups 1. GLM-4-MoE: scores sigmoid, a bias_rate, shared"
    " 1 or more, no window. DeepSeek-V3: the same with kv_rank. DeepSeek-V2: kv_rank, scores softmax, not normalised,"
    " no bias_rate, shared 1 or more, no window"
)
