"""Whether the config.json of a folder of transformers describes the decoder that is here: its tensors do not tell."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipes.language.rotary_scaling import scaling_of, words_of
from trainer.messages import Refusal

# What may differ: it changes no score, or the shapes of tensors tell, which a start names.
_FREE = {"architectures", "vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id"}
# Where their key is one of ours in `model`.
_OURS = {
    **dict.fromkeys(("n_embd", "hidden_size"), "width"),
    **dict.fromkeys(("n_layer", "num_hidden_layers"), "depth"),
    **dict.fromkeys(("n_head", "num_attention_heads"), "heads"),
    **dict.fromkeys(("n_inner", "intermediate_size"), "inner"),
    **dict.fromkeys(("layer_norm_epsilon", "rms_norm_eps"), "eps"),
    "n_positions": "context",
    "num_key_value_heads": "groups",
    "rope_theta": "rotary",
    "rope_scaling": "rotary_scaling",
    "tie_word_embeddings": "tied",
    **{name: name for name in ("window", "window_from")},  # as `_plain` has them
}
_ACTIVATIONS = {"gelu_new": "model.mlp=gelu_tanh", "gelu": "model.mlp=gelu"}
_FAMILIES = {
    "qwen2": "model=llama model.qkv_bias=true",
    "llama": "model=llama",
    "gpt2": "model=gpt2",
    "mistral": "model=llama",
}
_ROTARY = {"rope_theta", "rope_scaling", "rope_parameters"}
_WINDOWS = {"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"}


def refuse_others(theirs: Mapping[str, Any], own: Mapping[str, Any], head: bool) -> None:
    """Refuse settings of theirs that are not `own`, both as a config.json has them; a key that is not there is no word.

    head: do the weights hold one of their own? If not, the embedding stands in for it, tied or not.
    """
    if "quantization_config" in theirs:
        raise Refusal(
            "its config.json has a quantization_config: its weights are numbers that need their scales; take a folder"
            " in bf16"
        )
    theirs, free = _plain(theirs), _FREE if head and own["tie_word_embeddings"] else {*_FREE, "tie_word_embeddings"}
    own = _plain(own)
    other = [key for key in own if key in theirs and key not in free and theirs[key] != own[key]]
    if other:
        said = "; ".join(f"{key} {theirs[key]}, here {own[key]}{_remedy(key, theirs[key])}" for key in other)
        raise Refusal(
            f"its config.json describes another network: {said}. The name of a file in the folder, in place of the"
            " folder's, loads its tensors all the same"
        )


def settings_of(folder: Path, vocab_size: int | None) -> dict[str, Any]:
    """The keys of `model` that say what the config.json of a folder says. Refusal where it is none of the families.

    vocab_size: tokens that the data knows.
    """
    file = folder / "config.json"
    try:
        theirs = json.loads(file.read_bytes())
        family = theirs.get("model_type")
    except (OSError, ValueError, RecursionError, AttributeError) as error:
        raise Refusal(f"model.settings={folder}: {file} cannot be read ({error})") from error
    if family not in _FAMILIES:
        raise Refusal(
            f"model.settings={folder}: it describes a {family}; there are {', '.join(_FAMILIES)};"
            f" model=hf_decoder model.path={folder} trains others"
        )
    if vocab_size is not None and theirs.get("vocab_size", vocab_size) < vocab_size:
        raise Refusal(
            f"model.settings={folder}: its network knows {theirs['vocab_size']:,} tokens, the data {vocab_size:,}; take"
            " the tokenizer that lies beside the network"
        )
    learned, plain = family == "gpt2", _plain(theirs)
    form: dict[str, Any] = {
        "norm": "layer" if learned else "rms",
        "mlp": {"gelu_new": "gelu_tanh", "gelu": "gelu"}.get(plain.get("activation_function", "gelu_new"), "gelu_tanh"),
        "rotary": None,
        "rotary_scaling": None,
        "bias": learned,
        "qkv_bias": True if family == "qwen2" else None,
        "tied": learned,  # where it does not say so
        "groups": None,
        "inner": None,
        "window": None,
        "window_from": 0,
    }
    if not learned:
        form["mlp"] = "swiglu"
    free = {"max_position_embeddings"}  # of rotary positions there are as many as a sample has tokens
    said = {
        ours: plain[key] for key, ours in {**_OURS, "vocab_size": "vocab_size"}.items() if key in plain.keys() - free
    }
    return form | said


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that say something; those of rotary positions, which versions of transformers keep apart, alike."""
    rope = config.get("rope_parameters") or {}
    scaled = {**(config.get("rope_scaling") or rope), "partial_rotary_factor": None}  # which none of these families has
    if scaled.get("rope_type", scaled.get("type")) == "llama3" and "max_position_embeddings" in config:
        scaled.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    rotary = {
        "rope_theta": rope.get("rope_theta", config.get("rope_theta", 10000.0)),
        "rope_scaling": words_of(scaling_of(scaled, "config.json")),
    }
    plain = {key: value for key, value in config.items() if value is not None and key not in _ROTARY | _WINDOWS}
    return plain | (rotary | _windows(config) if config.get("model_type") != "gpt2" else {})


def _windows(config: Mapping[str, Any]) -> dict[str, Any]:
    """How many tokens a token sees, None: all; and the first layer in which it is so. Mistral is a Llama with these."""
    family, depth = config.get("model_type"), config.get("num_hidden_layers", 0)
    used = {"mistral": True, "qwen2": config.get("use_sliding_window")}.get(str(family), False)
    window = config.get("sliding_window", 4096) if used else None  # what they take where the key is missing
    first = config.get("max_window_layers", 28) if window and family == "qwen2" else 0
    kinds = ["sliding_attention" if window and number >= first else "full_attention" for number in range(depth)]
    if config.get("layer_types") not in (None, kinds):
        raise Refusal(
            "its config.json has windows in other layers than from one layer on (layer_types); model.window and"
            " model.window_from cannot say so"
        )
    return {"window": window, "window_from": first, **({"model_type": "llama"} if family == "mistral" else {})}


def _remedy(key: str, value: Any) -> str:
    """The word of the command line that makes it the same, where there is one."""
    if key in _OURS:
        return f" (model.{_OURS[key]}={_word(value)})"
    found = {"activation_function": _ACTIVATIONS, "model_type": _FAMILIES}.get(key, {}).get(value)
    return f" ({found})" if found else ""


def _word(value: Any) -> str:
    """A value as the command line takes it."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_word(each)}" for key, each in value.items()) + "}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
