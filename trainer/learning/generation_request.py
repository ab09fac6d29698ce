"""How a language model continues a text: the request, which data and networks can do it, and the text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainer.data.data import Data
from trainer.data.rng import seed_all, seed_torch
from trainer.messages import Refusal


@dataclass(frozen=True)
class GenerationRequest:
    """A text, and how many tokens are to be added to it in which way.

    The network says how it goes on, `generate(tokens, max_new_tokens=…)`, as those of transformers do; the data makes
    tokens of a text and a text of tokens, `encode(text)` and `decode(tokens)`.
    """

    prompt: str
    tokens: int  # to add
    temperature: float = 1.0  # above 1 bolder, below 1 safer, 0 always the likeliest token
    top_k: int | None = None  # drawn from so many likeliest tokens; None: from all
    seed: int = 0

    def refuse_data(self, word: str, data: Data) -> None:
        """Refuse data that cannot make tokens of a text. word: the argument of the command line, for the message."""
        if not all(callable(getattr(data, verb, None)) for verb in ("encode", "decode")):
            raise Refusal(
                f"{word}: {type(data).__name__} makes no tokens of a text; a Data can, with the methods"
                " encode(text) -> Tensor and decode(tokens) -> str"
            )

    def refuse_network(self, word: str, network: nn.Module) -> None:
        """Refuse a network that does not continue texts."""
        if not callable(getattr(network, "generate", None)):
            raise Refusal(
                f"{word}: {type(network).__name__} has no method generate(tokens, max_new_tokens, do_sample,"
                " temperature, top_k), as the decoders of recipes.language and transformers have one"
            )

    def generate(self, network: Any, data: Any, device: torch.device) -> str:
        """The prompt and what follows it; seeds all generators."""
        seed_all(self.seed)
        seed_torch(self.seed, device)  # the device's generator, from which `generate` samples
        sampling = {"do_sample": True, "temperature": self.temperature} if self.temperature else {"do_sample": False}
        prompt = data.encode(self.prompt)[None].to(device)  # (1, T)
        with torch.no_grad():
            tokens = network.generate(prompt, max_new_tokens=self.tokens, top_k=self.top_k or 0, **sampling)
        return data.decode(tokens[0].cpu())  # (T + new tokens,)
