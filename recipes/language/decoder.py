"""A decoder: the network of GPT-2, Llama, Mistral and Qwen2, or a mixture of experts: settings of one code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from recipes.language.attention import AttentionSettings
from recipes.language.block import BalancedBlock, make_block
from recipes.language.experts import Experts, Router, Routing
from recipes.language.generation import continued
from recipes.language.masks import Masks
from recipes.language.mlp import MLPSettings
from recipes.language.past import NoPast
from recipes.language.rotary_scaling import scaling_of
from recipes.language.token_losses import Head
from recipes.lora import adapt, merge, refuse_numbers
from trainer.learning.parallel_plan import Plan
from trainer.messages import Refusal, did_you_mean

NORMS = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}


class Decoder(nn.Module):
    """Token numbers to a score for every token that may come next.

    experts: so many MLPs stand in the place of one, in all blocks behind the first `dense_first`; they are gated, as
    swiglu. shared: experts of every token. expert_inner: the width inside of one; None: `inner`. The words from
    `active` to `auxiliary` are those of `Routing`.

    Under tensor parallelism the degree must divide `groups` (and `context`, where the stream is split by `sequence`).
    length: tokens of a sample; Refusal where they are more than `context`. window: a token sees so many, itself and
    those before it, in all blocks from number `window_from` on; None: all.
    """

    def __init__(
        self,
        vocab_size: int,
        context: int,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
        groups: int | None = None,
        inner: int | None = None,
        norm: str = "layer",
        eps: float = 1e-5,
        mlp: str = "gelu",
        rotary: float | None = None,
        rotary_scaling: Mapping[str, Any] | None = None,
        bias: bool = True,
        qkv_bias: bool | None = None,
        tied: bool = True,
        dropout: float = 0.0,
        sequence: bool = False,
        loss_parallel: bool = False,
        length: int | None = None,
        experts: int | None = None,
        shared: int = 0,
        expert_inner: int | None = None,
        dense_first: int = 0,
        active: int = 2,
        scores: str = "softmax",
        normalised: bool = True,
        scaling: float = 1.0,
        bias_rate: float | None = None,
        auxiliary: float = 0.0,
        window: int | None = None,
        window_from: int = 0,
        lora: int | None = None,
        lora_alpha: float = 16.0,
        lora_layers: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.context, self._sequence, self._loss_parallel = context, sequence, loss_parallel
        self.attention = AttentionSettings(
            width=width,
            context=context,
            heads=heads,
            groups=heads if groups is None else groups,
            bias=bias,
            qkv_bias=bias if qkv_bias is None else qkv_bias,
            rotary=rotary,
            scaling=scaling_of(rotary_scaling),
            window=window,
            window_from=window_from,
        )
        words = (active, scores, normalised, scaling, bias_rate, auxiliary)
        routing = None if experts is None else Routing(experts, *words)
        inner = inner or 4 * width
        expert_inner = inner if expert_inner is None else expert_inner
        mlps = MLPSettings(width, depth, mlp, inner, bias, routing, shared, expert_inner, dense_first)
        self.attention.refuse()
        mlps.refuse()
        refuse_numbers(lora, lora_alpha, lora_layers)
        _refuse(norm, context, length, tied and loss_parallel)
        make_norm, masks = partial(NORMS[norm], width, eps=eps), Masks()
        self.embed = nn.Embedding(vocab_size, width)
        self.position = nn.Embedding(context, width) if rotary is None else None
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            make_block((make_norm(), make_norm()), self.attention.make(number, masks), mlps.make(number), dropout)
            for number in range(depth)
        )
        self.norm: nn.LayerNorm | nn.RMSNorm = make_norm()
        self.head = Head(width, vocab_size, bias=False)
        self._initialise()
        if tied:
            self.head.weight = self.embed.weight
        if lora is not None:
            self.requires_grad_(False)
            adapt(self.blocks, lora, lora_alpha, lora_layers)

    def forward(self, tokens: Tensor, begins: Tensor | None = None) -> Any:
        """Token numbers (B, T) to scores (B, T, vocab_size); with a loss that balances experts, see `_output`.

        begins (B, T): the place in its sample at which each token's document begins; None: a sample is one document.
        """
        x, balance = self._hidden(tokens, begins)
        return _output(self.head(x), balance)

    def losses(self, tokens: Tensor, targets: Tensor, ignored: int, chunk: int, begins: Tensor | None = None) -> Any:
        """The loss of each token (B, T), with scores of `chunk` tokens at once; 0 where the target is `ignored`."""
        x, balance = self._hidden(tokens, begins)
        return _output(self.head(x, targets=targets, ignored=ignored, chunk=chunk), balance)

    def scores(self, tokens: Tensor, pasts: Sequence[NoPast]) -> Tensor:
        """The same for tokens (B, T) behind others: of those each block has its own past."""
        start = pasts[0].tokens
        x = self._embedded(tokens, torch.arange(start, start + tokens.shape[1], device=tokens.device))
        for block, past, seen in zip(self.blocks, pasts, self._seen(tokens, None), strict=True):
            x = block(x, past, **seen)
            x = x[0] if isinstance(block, BalancedBlock) else x
        return self.head(self.norm(x))

    def generate(
        self, tokens: Tensor, max_new_tokens: int, do_sample: bool = True, temperature: float = 1.0, top_k: int = 0
    ) -> Tensor:
        """A text (B, T) and its continuation (B, T + max_new_tokens); called like transformers' generate."""
        self.eval()
        bold = temperature if do_sample else 0.0
        return continued(self.scores, len(self.blocks), self.context, tokens, max_new_tokens, bold, top_k or None)

    def _hidden(self, tokens: Tensor, begins: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(B, T) to what the head is given (B, T, width), and the sum of the mixtures' losses (B,)."""
        places = torch.arange(0, tokens.shape[1], device=tokens.device)
        if begins is not None:
            places = places - begins  # (B, T); context ranks add where their pieces lie
        x, balance = self._embedded(tokens, places), None
        for block, seen in zip(self.blocks, self._seen(tokens, begins), strict=True):
            if isinstance(block, BalancedBlock):
                # from block to block: what passes a block by would not reach the next stage of a pipeline
                x, balance = block(x, balance=balance, **seen)
            else:
                x = block(x, **seen)
        return self.norm(x), balance

    def _seen(self, tokens: Tensor, begins: Tensor | None) -> list[dict[str, Tensor]]:
        """For each block what its attention must know of documents, (B, T): nothing where it sees all before it."""
        if begins is not None:
            places = torch.arange(0, tokens.shape[1], device=tokens.device) - begins
            return [{"places": places, "begins": begins[:, None, :, None].int()}] * len(self.blocks)
        blocks: Sequence[Any] = list(self.blocks)
        windows = [block.attention.core.window is not None for block in blocks]
        if not any(windows):
            return [{}] * len(self.blocks)
        whole = {"begins": torch.zeros((1, 1, tokens.shape[1], 1), dtype=torch.int32, device=tokens.device)}
        return [whole if window else {} for window in windows]

    def _embedded(self, tokens: Tensor, places: Tensor) -> Tensor:
        """(B, T) to the stream (B, T, width); places: of the tokens, (T,) or (B, T)."""
        x = self.embed(tokens)
        if self.position is not None:
            x = x + self.position(places)
        return self.dropout(x)

    def _initialise(self) -> None:
        """GPT-2's: normal weights of 0.02, and what is added to the stream smaller the deeper the network is."""
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                added = name.endswith(("attention.out", "mlp.down", "shared.down"))
                nn.init.normal_(module.weight, std=0.02 / ((2 * len(self.blocks)) ** 0.5 if added else 1.0))
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
            if isinstance(module, (Router, Experts)):
                for key, parameter in module.named_parameters(recurse=False):
                    nn.init.normal_(parameter, std=0.02 / ((2 * len(self.blocks)) ** 0.5 if key == "down" else 1.0))

    def plan(self) -> Plan:
        """Whole groups and parts of the MLPs on each tensor rank; blocks as shard units; two equal pipeline stages.

        Context ranks gather keys and values, and know where their tokens are.
        """
        from recipes.language.splits import context_plan, tensor_plan
        from recipes.lora_splits import with_adapters

        divisible = {"groups": self.attention.groups, **({"context": self.context} if self._sequence else {})}
        for module in self.modules():
            if isinstance(module, Experts):
                divisible["numbers inside an expert"] = module.down.shape[-1]
        learned, tied = self.position is not None, self.head.weight is self.embed.weight
        mlps: list[Any] = [block.mlp for block in self.blocks]
        tensor = tensor_plan(mlps, tied, learned, self._sequence, self._loss_parallel)
        return Plan(
            with_adapters(tensor),
            divisible,
            ("blocks.*",),
            cuts=(f"blocks.{len(self.blocks) // 2}",),
            context=context_plan(learned, mlps),
            experts=tuple(name for name, module in self.named_modules() if isinstance(module, Experts)),
            counters=tuple(f"{name}.counts" for name, module in self.named_modules() if isinstance(module, Router)),
        )

    def translated(self, tensors: Mapping[str, Tensor], settings: Mapping[str, object]) -> Mapping[str, Tensor] | None:
        """Weights of these four families as transformers names them, under the names here; None: they are others."""
        from recipes.language.huggingface import translated

        return translated(self, tensors, settings)

    @staticmethod
    def settings_of(folder: Path, vocab_size: int | None) -> dict[str, Any]:
        """What `model.settings=FOLDER` means: the keys of `model` as the folder's config.json has them."""
        from recipes.language.settings import settings_of

        return settings_of(folder, vocab_size)

    def merged(self) -> Self:
        """The same function without adapters, in place: what is exported."""
        merge(self)
        return self

    def save_pretrained(self, folder: Path) -> None:
        """Write the network as a folder that transformers reads."""
        from recipes.language.huggingface import save

        save(self, folder)


def _output(scores: Tensor, balance: Tensor | None) -> Any:
    """What the task is given: scores or losses; with the loss of each sample (B,) that balances experts, if any."""
    return scores if balance is None else {"tokens": scores, "balance": balance}


def _refuse(norm: str, context: int, length: int | None, split_tied: bool) -> None:
    """Refuse settings of which no network can be made, and samples that are too long for it."""
    if length is not None and length > context:
        raise Refusal(
            f"data.length {length} is more than model.context {context}: the last tokens of a sample have no position;"
            f" data.length={context} works, or model.context={length}, which weights of others may not fit"
        )
    if norm not in NORMS:
        raise Refusal(f"model.norm={norm}: there are {', '.join(NORMS)}{did_you_mean(norm, NORMS)}")
    if split_tied:
        raise Refusal("model.loss_parallel=true splits the head, which a tied embedding keeps whole: model.tied=false")
