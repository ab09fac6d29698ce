"""A classifier of texts: any encoder or decoder of transformers under one linear layer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from recipes.hub import located, own_code
from recipes.lora import OWN, adapt, merge, refuse_numbers
from recipes.text.pooling import POOLS, usual
from trainer.messages import Refusal, did_you_mean, first_line

HEADS = ("score", "classifier")  # what transformers calls the last layer


class HFClassifier(nn.Module):
    """Token numbers {"input_ids", "attention_mask", …}, (B, T) each, to scores (B, classes).

    path: a folder of Hugging Face, or a name on the hub; its configuration makes the network, its weights come with
    init_from=pretrained. The body never drops anything out, unless `dropout` says so; so a frozen body gives the same
    features in every step.
    """

    def __init__(
        self,
        path: str,
        num_classes: int,
        pool: str | None = None,
        lora: int | None = None,
        lora_alpha: float = 16.0,
        lora_layers: Sequence[str] = (),
        dropout: bool = False,
        length: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        super().__init__()
        refuse_numbers(lora, lora_alpha, lora_layers)
        config = configuration(path)
        refuse_texts(config, length, vocab_size)
        from transformers import AutoModel

        self.path, self.pool, self.dropout = path, usual(config) if pool is None else pool, dropout
        if self.pool not in POOLS:
            raise Refusal(f"model.pool={pool}: there are {', '.join(POOLS)}{did_you_mean(self.pool, POOLS)}")
        config.use_cache = False  # of the keys and values of tokens, which only generation reads again
        self.body = AutoModel.from_config(config, dtype=torch.float32, trust_remote_code=False)
        if self.pool != "cls" and getattr(self.body, "pooler", None) is not None:
            self.body.pooler = None  # nobody would call it
        if lora is not None:
            adapt(self.body, lora, lora_alpha, lora_layers)
        # as transformers has it: decoders' scores have no bias
        self.head = nn.Linear(config.get_text_config().hidden_size, num_classes, bias=self.pool != "last")
        if not dropout:
            stop_dropout(self.body)
        self.train()

    @property
    def backbone(self) -> tuple[str, ...]:
        """What `model.freeze=[backbone]` means: of the body all but the adapters."""
        names = (name.split(".") for name, _ in self.body.named_parameters())
        # by depth and last word, for there may be hundreds
        patterns = (".".join(["body", *"*" * (len(name) - 1), name[-1]]) for name in names if name[-1] not in OWN)
        return tuple(dict.fromkeys(patterns))

    def train(self, mode: bool = True) -> Self:
        """The same as ever, but the body stays in evaluation mode where nothing is to be dropped out."""
        super().train(mode)
        self.body.train(mode and self.dropout)
        return self

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Scores (B, classes)."""
        output = self.body(**inputs)
        return self.head(POOLS[self.pool](output, inputs["attention_mask"]))

    def pretrained(self) -> Path:
        """The folder with the weights; of a name on the hub a download, or what the cache has of it."""
        return published(self.path)

    def translated(self, tensors: Mapping[str, Tensor], settings: Mapping[str, object]) -> Mapping[str, Tensor] | None:
        """Tensors of transformers under the names here; None: they are others."""
        own, found = self.state_dict().keys(), {}
        for name, tensor in tensors.items():
            inner = name.removeprefix(f"{self.body.base_model_prefix}.")
            # as the first files of BERT call it
            inner = re.sub(r"LayerNorm\.(gamma|beta)$", lambda m: f"LayerNorm.{_NORM[m[1]]}", inner)
            top, _, last = inner.rpartition(".")
            for ours in (f"body.{inner}", *([f"head.{last}"] if top in HEADS else [])):
                if ours in own:
                    found[ours] = tensor
        return found or None

    def merged(self) -> Self:
        """The same function without adapters, in place: what is exported."""
        merge(self.body)
        return self


def stop_dropout(network: nn.Module) -> None:
    """Let a network of transformers drop nothing out, in place."""
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "attention_dropout", None), float):
            vars(module)["attention_dropout"] = 0.0


_NORM = {"gamma": "weight", "beta": "bias"}


def published(name: str) -> Path:
    """The folder with the weights of a network; of a name on the hub a download, or what the cache has of it."""
    if (path := Path(located(name, "model.path="))).is_dir():
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:  # whatever a download that failed raises, of which there is no one base
        raise Refusal(f"the weights of {name} cannot be downloaded: {first_line(error)}") from error


def configuration(path: str, option: str = "hf_classifier") -> Any:
    """The configuration of a folder, or of a name on the hub. Refusal where there is none."""
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise Refusal(f"model={option} needs the package transformers: pip install -e '.[hf]'") from error
    where = located(path, "model.path=")
    try:
        return AutoConfig.from_pretrained(where, trust_remote_code=False)
    except Exception as error:  # of a hub, a network, a format: all of them say that there is none of this name
        why = own_code(error) or first_line(error)
        raise Refusal(f"model.path={path} holds no network of Hugging Face: {why}") from error


def refuse_texts(config: Any, length: int | None, vocab_size: int | None) -> None:
    """Refuse a network that has no place for the texts."""
    if config.is_encoder_decoder:
        raise Refusal(
            f"model.path: {config.model_type} is an encoder with a decoder; take one that is only one of them"
        )
    inner = config.get_text_config()
    most = getattr(inner, "max_position_embeddings", None)
    if length is not None and most is not None and length > most:
        raise Refusal(f"data.length is {length:,} tokens, the network of model.path takes {most:,}: data.length={most}")
    if vocab_size is not None and vocab_size > inner.vocab_size:
        raise Refusal(
            f"data.tokenizer knows {vocab_size:,} tokens, the network of model.path {inner.vocab_size:,}; take the"
            " tokenizer that lies beside the network: data.tokenizer='${model.path}'"
        )
