"""A classifier as a folder that transformers loads: AutoModelForSequenceClassification."""

from __future__ import annotations

from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recipes.text.tokenizer import loaded
from trainer.messages import Refusal, first_line

CLOSE = 1e-3  # of scores, relative and absolute: rounding, and nothing else


@torch.no_grad()
def save(network: Any, folder: Path) -> None:
    """Write the folder, with the tokenizer that lies beside the network's own weights, if there is one.

    Whether transformers pools, and ends, as the network does is tried: Refusal where its scores are others.
    """
    from transformers import AutoModelForSequenceClassification

    config = deepcopy(network.body.config)
    config.num_labels, config.dtype = network.head.out_features, network.head.weight.dtype
    inner, tokenizer = config.get_text_config(), None
    with suppress(Refusal):  # there need be none
        tokenizer = loaded(network.path)
    # where a text ends transformers sees by the padding that follows
    padding = inner.pad_token_id if tokenizer is None else tokenizer.pad_token_id
    inner.pad_token_id = inner.eos_token_id if padding is None else padding
    try:
        with torch.device("meta"):  # for its form alone
            theirs = AutoModelForSequenceClassification.from_config(config)
    except ValueError as error:
        raise Refusal(f"job.format=huggingface: {first_line(error)[:200]}; {_OTHERS}") from error
    _put_in(network, theirs)
    _compare(network, theirs.eval(), inner)
    theirs.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _put_in(network: Any, theirs: Any) -> None:
    """Our body and our head in the places of theirs. Refusal where these are of another form."""
    prefix = theirs.base_model_prefix
    body = getattr(theirs, prefix, nn.Module())
    own = {name: child for name, child in theirs.named_children() if name != prefix and [*child.parameters()]}
    alike = body.state_dict().keys() == network.body.state_dict().keys() and len(own) == 1
    for name, head in own.items():
        shapes = {key: value.shape for key, value in head.state_dict().items()}
        alike = alike and shapes == {key: value.shape for key, value in network.head.state_dict().items()}
        setattr(theirs, name, network.head)
    if not alike:
        raise Refusal(f"job.format=huggingface: {_strange(network, theirs)}; {_OTHERS}")
    setattr(theirs, prefix, network.body)


def _compare(network: Any, theirs: Any, inner: Any) -> None:
    """Refusal where the scores of two texts, one of them filled up, are not the same."""
    tokens = torch.randint(inner.vocab_size, (2, 6))
    tokens[tokens == inner.pad_token_id] = 0 if inner.pad_token_id else 1  # any other one
    mask = torch.ones_like(tokens)
    mask[1, 4:] = 0
    tokens[1, 4:] = inner.pad_token_id or 0
    inputs = {"input_ids": tokens, "attention_mask": mask}
    if not torch.allclose(network(inputs), theirs(**inputs).logits, CLOSE, CLOSE):
        raise Refusal(f"job.format=huggingface: {_strange(network, theirs)}; {_OTHERS}")


def _strange(network: Any, theirs: Any) -> str:
    return f"transformers' {type(theirs).__name__} is no linear layer on model.pool={network.pool} of {network.path}"


_OTHERS = "job.format=safetensors, pt and pt2 write any classifier; decoders with model.pool=last and BERT with cls fit"
