"""A decoder's weights and settings as transformers has them: GPT-2, Llama, Mistral, Qwen2; read and written.

`network` is a recipes.language.decoder.Decoder, which calls this.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes.language.experts import Mixture
from recipes.language.rotary_scaling import words_of
from recipes.language.settings import refuse_others
from recipes.lora import OWN
from trainer.messages import Refusal

# What Llama and GPT-2 call the layers of a block, of which one of ours is one of theirs.
_LLAMA = {
    "attention.out": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_GPT2 = {
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "attention_norm": "ln_1",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_APART = tuple(f"self_attn.{which}_proj" for which in "qkv")
_PREFIXES = ("transformer.", "model.")  # left out in files of the network without its head


@dataclass(frozen=True)
class Pair:
    """One of our tensors, and those of theirs that hold the same numbers."""

    theirs: tuple[str, ...]
    join: Callable[..., Tensor]  # theirs → ours
    part: Callable[[Tensor], tuple[Tensor, ...]]  # ours → theirs


def translated(network: Any, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Mapping[str, Tensor] | None:
    """The tensors of a file of transformers under our names, read when they are asked for; None: it is no such file.

    settings: what the config.json beside it says. Refusal where it describes another network.
    """
    there = {_plain(name): name for name in tensors}
    known = {own: pair for own, pair in pairs(network) if all(_plain(name) in there for name in pair.theirs)}
    if "embed.weight" not in known:
        return None
    if settings:
        refuse_others(settings, configuration(network), head="head.weight" in known)
    if settings.get("tie_word_embeddings", True):
        known.setdefault("head.weight", known["embed.weight"])  # what is tied there need not be here
    return _Translated(tensors, there, known)


class _Translated(Mapping[str, Tensor]):
    """Their tensors by our names, joined one at a time: never is a whole copy made."""

    def __init__(self, tensors: Mapping[str, Tensor], there: Mapping[str, str], known: Mapping[str, Pair]) -> None:
        self._tensors, self._there, self._known = tensors, there, known

    def __getitem__(self, name: str) -> Tensor:
        pair = self._known[name]
        return pair.join(*(self._tensors[self._there[_plain(theirs)]] for theirs in pair.theirs))

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


def save(network: Any, folder: Path) -> None:
    """Write config.json and model.safetensors, of large networks in files of 5 GB; transformers reads the folder."""
    from trainer.records.weight_files import write_weight_files

    own, described = network.state_dict(), configuration(network)  # which may refuse: before anything is written
    written: dict[str, Tensor] = {}
    for name, pair in pairs(network):
        if name != "head.weight" or own[name].data_ptr() != own["embed.weight"].data_ptr():  # tied: once
            written |= dict(zip(pair.theirs, pair.part(own[name]), strict=True))
    folder.mkdir(parents=True, exist_ok=True)
    write_weight_files(folder, "model", written, written.__getitem__)
    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def pairs(network: Any) -> Iterator[tuple[str, Pair]]:
    """Every tensor of the network but those of mixtures, and what holds it in transformers."""
    llama = network.position is None
    outer = {"embed": "model.embed_tokens", "norm": "model.norm"} if llama else _OUTER_GPT2
    for name in network.state_dict(keep_vars=True):
        layer, _, kind = name.rpartition(".")
        if kind in OWN:
            continue  # an adapter, which is merged before it is written
        if layer == "head":
            yield name, _same("lm_head.weight")
        elif not layer.startswith("blocks."):
            yield name, _same(f"{outer[layer]}.{kind}")
        else:
            _, number, inner = layer.split(".", 2)
            if isinstance(network.blocks[int(number)].mlp, Mixture) and inner.startswith("mlp."):
                continue
            if llama:
                yield name, _of_llama(network, f"model.layers.{number}.", inner, kind)
            else:
                yield name, _of_gpt2(network, f"transformer.h.{number}.", inner, kind)


_OUTER_GPT2 = {"embed": "transformer.wte", "position": "transformer.wpe", "norm": "transformer.ln_f"}


def _same(name: str) -> Pair:
    return Pair((name,), lambda x: x, lambda x: (x,))


def _of_llama(network: Any, block: str, inner: str, kind: str) -> Pair:
    if inner != "attention.qkv":
        return _same(f"{block}{_LLAMA[inner]}.{kind}")
    return Pair(tuple(f"{block}{which}.{kind}" for which in _APART), _packed(network), _unpacked(network))


def _of_gpt2(network: Any, block: str, inner: str, kind: str) -> Pair:
    """GPT-2 keeps the weights of its layers the other way round, (in, out), and queries before keys before values."""
    name = f"{block}{_GPT2[inner]}.{kind}"
    turn: Callable[[Tensor], Tensor] = (lambda x: x.T) if kind == "weight" and "norm" not in inner else (lambda x: x)
    if inner != "attention.qkv":
        return Pair((name,), turn, lambda own: (turn(own),))
    packed, unpacked = _packed(network), _unpacked(network)
    return Pair((name,), lambda x: packed(*turn(x).chunk(3)), lambda own: (turn(torch.cat(unpacked(own))),))


def _packed(network: Any) -> Callable[..., Tensor]:
    """(heads · head, …), (groups · head, …) twice, to (groups · (heads a group + 2) · head, …)."""

    def join(*parts: Tensor) -> Tensor:
        return torch.cat([part.unflatten(0, (network.attention.groups, -1)) for part in parts], dim=1).flatten(0, 1)

    return join


def _unpacked(network: Any) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """The way back."""
    each = network.attention.heads // network.attention.groups

    def part(own: Tensor) -> tuple[Tensor, ...]:
        rows = own.unflatten(0, (network.attention.groups, each + 2, -1))  # (groups, heads a group + 2, head, …)
        return tuple(x.flatten(0, 2) for x in rows.split((each, 1, 1), dim=1))

    return part


def _plain(name: str) -> str:
    """A name of theirs without the word for the network inside of the one with a head."""
    return next((name.removeprefix(prefix) for prefix in _PREFIXES if name.startswith(prefix)), name)


def configuration(network: Any) -> dict[str, Any]:
    """The network's settings as transformers' config.json. Refusal where none of the families has them."""
    block: Any = network.blocks[0]
    if isinstance(network.blocks[-1].mlp, Mixture):
        raise Refusal(
            "a mixture of experts is none of the networks of transformers that are read and written here;"
            " model=hf_decoder trains those of transformers, and job.format=safetensors exports this one"
        )
    vocabulary, width = network.embed.weight.shape
    common = {
        "vocab_size": vocabulary,
        "tie_word_embeddings": network.head.weight is network.embed.weight,
        **dict.fromkeys(("bos_token_id", "eos_token_id")),  # null: theirs would be tokens of another vocabulary
    }
    form = (type(network.norm).__name__, type(block.mlp).__name__, block.attention.out.bias is not None)
    if network.position is not None:
        return common | _gpt2(network, form)
    attention = network.attention
    family = "Qwen2" if attention.qkv_bias else "Llama" if attention.window is None else "Mistral"
    if form != ("RMSNorm", "SwiGLU", False) or (attention.window_from and family == "Mistral"):
        raise Refusal(_STRANGE)
    base, scaling = block.attention.positions.base, words_of(block.attention.positions.scaling)
    return {
        "model_type": family.lower(),
        "architectures": [f"{family}ForCausalLM"],
        **common,
        "hidden_size": width,
        "num_hidden_layers": len(network.blocks),
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.groups,
        "head_dim": width // attention.heads,
        "max_position_embeddings": network.context,
        "rms_norm_eps": network.norm.eps,
        "hidden_act": "silu",
        **_windows(network, family),
        # both forms: transformers 5 reads the second
        "rope_theta": base,
        **({"rope_scaling": scaling} if scaling else {}),
        "rope_parameters": {"rope_type": "default", "rope_theta": base, **(scaling or {})},
        "intermediate_size": block.mlp.up.out_features,
    }


def _gpt2(network: Any, form: tuple[str, str, bool]) -> dict[str, Any]:
    """What only GPT-2 says. form: kinds of norm and MLP, and whether layers have biases."""
    known = form in (("LayerNorm", "MLP", True), ("LayerNorm", "TanhMLP", True)) and network.attention.window is None
    if not known or network.attention.groups != network.attention.heads:
        raise Refusal(_STRANGE)
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_positions": network.context,
        "n_embd": network.embed.weight.shape[1],
        "n_layer": len(network.blocks),
        "n_head": network.attention.heads,
        "n_inner": network.blocks[0].mlp.up.out_features,
        "activation_function": "gelu_new" if form[1] == "TanhMLP" else "gelu",
        "layer_norm_epsilon": network.norm.eps,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    }


def _windows(network: Any, family: str) -> dict[str, Any]:
    """What only this family says of windows and biases."""
    if family == "Llama":
        return {"attention_bias": False, "mlp_bias": False}
    if family == "Mistral":
        return {"sliding_window": network.attention.window}
    used = network.attention.window is not None
    return {
        "use_sliding_window": used,
        **(
            {"sliding_window": network.attention.window, "max_window_layers": network.attention.window_from}
            if used
            else {}
        ),
    }


_STRANGE = (
    "a decoder with these settings is neither GPT-2 (norm layer, mlp gelu or gelu_tanh, bias true, groups as heads, no"
    " window) nor Llama, Mistral (window, window_from 0) or Qwen2 (rotary, norm rms, mlp swiglu, bias false)"
)
