"""A decoder of transformers that predicts the next token, as it is: from token numbers to scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from recipes.lora import adapt, merge, refuse_numbers
from recipes.lora_splits import with_adapters
from recipes.text.classifier import configuration, published, refuse_texts, stop_dropout
from recipes.text.tokenizer import loaded
from trainer.learning.parallel_plan import Plan
from trainer.messages import Refusal, first_line

# Which decoders of transformers make a mask of the places that they are given, so that no token sees another document.
# Tried on each (tests/recipes/test_documents.py). Of the others some take the places and leave the mask: gpt_oss, opt.
KEEP_APART = {
    "codegen", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4",
    "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "granite", "granitemoe", "helium",
    "hunyuan_v1_dense", "llama", "ministral", "mistral", "mixtral", "nemotron", "olmo", "olmo2", "olmo3", "olmoe",
    "persimmon", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm",
    "starcoder2",
}  # fmt: skip

_STYLES: dict[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}


class HFDecoder(nn.Module):
    """Token numbers (B, T) to scores (B, T, vocabulary): AutoModelForCausalLM of a folder, or of a name on the hub.

    Its configuration makes the network, its weights come with init_from=pretrained. With adapters nothing else learns.
    Every token counts as one of the text: nothing is filled up.
    """

    def __init__(
        self,
        path: str,
        lora: int | None = None,
        lora_alpha: float = 16.0,
        lora_layers: Sequence[str] = (),
        dropout: bool = False,
        length: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        super().__init__()
        refuse_numbers(lora, lora_alpha, lora_layers)
        config = configuration(path, "hf_decoder")
        refuse_texts(config, length, vocab_size)
        from transformers import AutoModelForCausalLM

        self.path = path
        config.use_cache = False  # of the keys and values of tokens, which only generation reads again
        try:
            self.body = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
        except ValueError as error:
            raise Refusal(f"model.path={path} predicts no next token: {first_line(error)[:200]}") from error
        if lora is not None:
            self.requires_grad_(False)
            adapt(self.body.base_model, lora, lora_alpha, lora_layers)
        if not dropout:
            stop_dropout(self.body)

    @property
    def mixes_documents(self) -> str:
        """Why it cannot keep the documents of a sample apart; empty: it does."""
        kind = self.body.config.get_text_config().model_type
        return "" if kind in KEEP_APART else f"the code of transformers for {kind} makes no mask of where they begin"

    def forward(self, tokens: Tensor, begins: Tensor | None = None) -> Tensor:
        """Token numbers (B, T) to scores (B, T, vocabulary). begins (B, T): where the document of each token begins."""
        if begins is None:
            return self.body(input_ids=tokens).logits
        # where places begin again transformers sees another document, in the mask too: so networks of KEEP_APART do it
        places = torch.arange(tokens.shape[1], device=tokens.device) - begins  # (B, T)
        return self.body(input_ids=tokens, position_ids=places).logits

    def generate(self, tokens: Tensor, max_new_tokens: int, **how: Any) -> Tensor:
        """A text (B, T) and its continuation (B, T + max_new_tokens); the arguments are those of transformers."""
        self.eval()
        how = {name: value for name, value in how.items() if how.get("do_sample", True) or name == "do_sample"}
        return self.body.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=max_new_tokens, pad_token_id=0, **how
        )

    def plan(self) -> Plan:
        """Tensor shards where the network's own configuration says them; each block is a shard unit."""
        config = self.body.config.get_text_config()
        prefix, known = f"body.{self.body.base_model_prefix}", getattr(config, "base_model_tp_plan", None) or {}
        tensor = {f"{prefix}.{name}": _STYLES[word]() for name, word in known.items() if word in _STYLES}
        if len(tensor) < len(known):  # a part of it would be split and another one not
            tensor = {}
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        blocks = next(
            (name for name, module in self.named_modules() if isinstance(module, nn.ModuleList) and len(module) > 1),
            None,
        )
        return Plan(with_adapters(tensor), {"heads of keys and values": heads}, (f"{blocks}.*",) if blocks else ())

    def pretrained(self) -> Path:
        """The folder with the weights; of a name on the hub a download, or what the cache has of it."""
        return published(self.path)

    def translated(self, tensors: Mapping[str, Tensor], settings: Mapping[str, object]) -> Mapping[str, Tensor] | None:
        """Tensors of transformers under the names here; None: they are others."""
        own, prefix = self.state_dict().keys(), self.body.base_model_prefix
        names = {name: (f"body.{name}", f"body.{prefix}.{name}") for name in tensors}
        found = {ours: tensors[name] for name, both in names.items() for ours in both if ours in own}
        return found or None

    def merged(self) -> Self:
        """The same function without adapters, in place: what is exported."""
        merge(self.body)
        return self

    def save_pretrained(self, folder: Path) -> None:
        """Write a folder from which transformers makes the same network, with the tokenizer that lay beside it."""
        self.body.save_pretrained(folder)
        with suppress(Refusal):  # there need be none
            loaded(self.path).save_pretrained(folder)
