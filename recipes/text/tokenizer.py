"""A tokenizer of transformers: a folder, or a name on the hub."""

from __future__ import annotations

from typing import Any

from recipes.hub import located, own_code
from trainer.messages import Refusal, first_line


def loaded(name: str, whose: str = "data.tokenizer=") -> Any:
    """The tokenizer of this name, which fills up behind a text. Refusal where there is none; whose: what names it."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise Refusal(f"{whose}{name} needs the package transformers: pip install -e '.[hf]'") from error
    where = located(name, whose)
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, padding_side="right", trust_remote_code=False)
    except Exception as error:  # of a hub, a network, a format: all of them say that there is none of this name
        raise Refusal(f"{whose}{name} cannot be loaded: {own_code(error) or first_line(error)}") from error
    # some know no padding, as their networks never saw any: behind the text any token will do, the mask hides it
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer
