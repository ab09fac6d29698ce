"""A decoder: the network of GPT-2, Llama, Mistral and Qwen2, which differ in a few settings of one code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from recipes.language.block import MLPS, NORMS, Attention, BalancedBlock, Block, SwiGLU
from recipes.language.causal import Causal
from recipes.language.experts import BalancedMixture, Experts, Mixture, Router, Routing
from recipes.language.generation import continued
from recipes.language.masks import Masks
from recipes.language.past import NoPast
from recipes.language.rotary import NoRotary, Rotary
from recipes.language.rotary_scaling import scaling_of
from recipes.language.token_losses import Head
from recipes.lora import adapt, merge
from trainer.learning.parallel_plan import Plan
from trainer.messages import Refusal, did_you_mean


class Decoder(nn.Module):
    """Token numbers to a score for every token that may come next.

    experts: so many MLPs stand in the place of one, in all blocks behind the first `dense_first`; they are gated, as
    swiglu. shared: experts of every token. expert_inner: the width inside of one; None: `inner`. The words
    from `active` on are those of `Routing`.

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
        capacity: float | None = None,
        bias_rate: float | None = None,
        auxiliary: float = 0.0,
        window: int | None = None,
        window_from: int = 0,
        lora: int | None = None,
        lora_alpha: float = 16.0,
        lora_layers: Sequence[str] = (),
    ) -> None:
        super().__init__()
        groups = heads if groups is None else groups
        _refuse(width, heads, groups, norm, mlp, context, length)
        _refuse_window(window, window_from)
        routing = Routing(experts or 0, active, scores, normalised, scaling, capacity, bias_rate, auxiliary)
        if experts is not None:
            routing.refuse()
            _refuse_dense(dense_first, depth)
        if tied and loss_parallel:
            raise Refusal(
                "model.loss_parallel=true splits the head, which a tied embedding keeps whole: model.tied=false"
            )
        self.heads, self.groups, self.context = heads, groups, context
        self.window, self.window_from = window, window_from
        self._sequence, self._loss_parallel = sequence, loss_parallel
        self.embed = nn.Embedding(vocab_size, width)
        self.position = nn.Embedding(context, width) if rotary is None else None
        self.dropout = nn.Dropout(dropout)
        qkv_bias, masks = bias if qkv_bias is None else qkv_bias, Masks()
        inner = inner or 4 * width
        turn = partial(_positions, width // heads, context, rotary, rotary_scaling)
        inside = window if window is not None and window < context else None  # one that holds the whole context is none
        cores = [Causal(heads > groups, inside if number >= window_from else None, masks) for number in range(depth)]

        def make_mlp(number: int) -> nn.Module:
            if experts is None or number < dense_first:
                return MLPS[mlp](width, inner, bias)
            common = SwiGLU(width, shared * (expert_inner or inner), bias=False) if shared else None
            kind = BalancedMixture if auxiliary else Mixture
            return kind(width, expert_inner or inner, routing, common)

        def make_block(number: int) -> Block:
            kind = BalancedBlock if auxiliary and experts is not None and number >= dense_first else Block
            return kind(
                (NORMS[norm](width, eps=eps), NORMS[norm](width, eps=eps)),
                Attention(width, heads, groups, bias, qkv_bias, turn(), cores[number]),
                make_mlp(number),
                dropout,
            )

        self.blocks = nn.ModuleList(make_block(number) for number in range(depth))
        self.norm: nn.LayerNorm | nn.RMSNorm = NORMS[norm](width, eps=eps)
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
                x, own = block(x, **seen)
                balance = own if balance is None else balance + own
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

        divisible = {"groups": self.groups, **({"context": self.context} if self._sequence else {})}
        for module in self.modules():
            if isinstance(module, Experts):
                divisible["numbers inside an expert"] = module.down.shape[-1]
        learned, tied = self.position is not None, self.head.weight is self.embed.weight
        mlps: list[Any] = [block.mlp for block in self.blocks]
        return Plan(
            with_adapters(tensor_plan(mlps, tied, learned, self._sequence, self._loss_parallel)),
            divisible,
            ("blocks.*",),
            cuts=(f"blocks.{len(self.blocks) // 2}",),
            context=context_plan(learned, self.window is not None, mlps),
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


def _positions(head_width: int, context: int, base: float | None, scaling: Mapping[str, Any] | None) -> nn.Module:
    """What tells queries and keys where they are; every block has its own, since a pipeline may part them."""
    if base is None and scaling is not None:
        raise Refusal(
            "model.rotary_scaling scales rotary positions, and model.rotary=null has none: model.rotary=500000"
        )
    return NoRotary() if base is None else Rotary(head_width, context, base, scaling_of(scaling))


def _refuse_window(window: int | None, window_from: int) -> None:
    if (window is not None and window < 1) or window_from < 0:
        raise Refusal(
            f"model.window={window}, model.window_from={window_from}: tokens that a token sees, itself among them, 1 or"
            " more (null: all before it); and the first block in which it is so, 0 or more"
        )


def _refuse_dense(dense_first: int, depth: int) -> None:
    if not 0 <= dense_first < depth:
        raise Refusal(
            f"model.dense_first={dense_first} of model.depth {depth} blocks leaves none for experts; at most"
            f" {depth - 1}, or model.experts=null"
        )


def _refuse(width: int, heads: int, groups: int, norm: str, mlp: str, context: int, length: int | None) -> None:
    """Refuse settings of which no network can be made, and samples that are too long for it."""
    if length is not None and length > context:
        raise Refusal(
            f"data.length {length} is more than model.context {context}: the last tokens of a sample have no position;"
            f" data.length={context} works, or model.context={length}, which weights of others may not fit"
        )
    if heads < 1 or width % heads:
        near = max(heads, 1) * -(-width // max(heads, 1))
        raise Refusal(f"model.width {width} ÷ model.heads {heads} is not whole; model.width={near} would work")
    if groups < 1 or heads % groups:
        fit = ", ".join(str(count) for count in range(1, heads + 1) if heads % count == 0)
        raise Refusal(f"model.heads {heads} ÷ model.groups {groups} is not whole; groups that work: {fit}")
    for key, word, known in (("norm", norm, NORMS), ("mlp", mlp, MLPS)):
        if word not in known:
            raise Refusal(f"model.{key}={word}: there are {', '.join(known)}{did_you_mean(word, known)}")
