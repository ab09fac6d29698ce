"""Documents packed into samples: what a token sees, what counts, and that each document learns as it would alone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from recipes.language import masks
from recipes.language.decoder import Decoder
from recipes.language.masks import Masks, block_mask
from recipes.language.next_token import NextToken
from recipes.language.synthetic import SyntheticTokens
from recipes.language.tokens import Tokens
from tests.ranks import Processes
from tests.recipes.test_language import FAMILIES, SIZES, filled
from tests.run import ROOT, curve, run
from trainer import Refusal

PREPARE = (sys.executable, str(ROOT / "scripts" / "prepare_tokens.py"))
TEXTS = [f"{number}" * length for number, length in enumerate((3, 1, 40, 9, 20, 7, 2, 25, 1, 1, 30, 5) * 3)]
SMALL = ["task=language", "model=llama", "model.width=16", "model.depth=2", "model.heads=4", "model.groups=2"]
SMALL += ["model.inner=24", "model.tied=false", "model.dropout=0.1", "precision=fp64", "schedule=constant"]
PACKED = ["data=tokens", "data.folder=corpus", "data.pack=true", "data.length=16", *SMALL, "loop.global_batch=4"]
PACKED += ["loop.log_every=1"]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Documents as bytes, in files of about 100 tokens."""
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    words = [*PREPARE, "corpus", "texts.jsonl", "--held", "0.1", "--shard", "100"]
    subprocess.run(words, cwd=tmp_path, check=True, capture_output=True)
    return tmp_path / "corpus"


def test_every_token_of_every_document_is_in_one_sample_and_knows_where_its_document_begins(corpus: Path) -> None:
    length = 16
    data = Tokens(str(corpus), length, pack=True)
    assert data.ignored == -100
    (inputs, begins), targets = data.train().batch(torch.arange(len(data.train())))
    seen: list[int] = []
    for row, first, target in zip(inputs.tolist(), begins.tolist(), targets.tolist(), strict=True):
        for place in range(length):
            ends = row[place] == 256  # the token behind each document; what follows is another one, or padding
            if place and row[place - 1] == 256:
                assert first[place] == place
            elif place:
                assert first[place] in (first[place - 1], place)  # a file may end within a sample: then it is padding
            else:
                assert first[place] == 0  # what an earlier sample cut off begins here
            assert target[place] == -100 or (not ends and target[place] >= 0)
            if target[place] >= 0 and place + 1 < length:
                assert row[place + 1] == target[place] or target[place] == 256
        seen += [token for token in target if token >= 0]
    # each token is predicted once, but for those that begin a document
    expected = [byte for number, text in enumerate(TEXTS, 1) if number % 10 for byte in [*text.encode()[1:], 256]]
    assert seen == expected
    one = data.train()[3]
    assert torch.equal(one[0][1], begins[3])
    assert torch.equal(one[1], targets[3])


def documents(begins: Tensor) -> list[tuple[int, int, int]]:
    """(sample, first place, last place + 1) of every document in these samples."""
    found = []
    for row, first in enumerate(begins.tolist()):
        starts = sorted(set(first))
        found += [(row, a, b) for a, b in zip(starts, [*starts[1:], len(first)], strict=True)]
    return found


@pytest.mark.parametrize(("family", "chunk"), [("gpt2", None), ("qwen2, windows", 5)])
def test_documents_of_a_sample_learn_as_each_of_them_alone(family: str, chunk: int | None) -> None:
    own = filled(Decoder(**SIZES, **FAMILIES[family])).double().train()
    data = SyntheticTokens(size=6, evaluation_size=0, length=16, vocab_size=256, pack=True)
    (tokens, begins), targets = data.train().batch(torch.arange(6))
    begins = torch.where(torch.arange(16) % 5 == 0, torch.arange(16), begins).cummax(1).values  # shorter ones
    task = NextToken(ignored=-100, loss_chunk=chunk, pack=True)
    loss: Any = task.loss(task.forward(own, (tokens, begins), targets), targets)
    loss.backward()
    packed = {name: parameter.grad.clone() for name, parameter in own.named_parameters()}

    alone: Any
    alone, sums = NextToken(ignored=-100), torch.zeros((), dtype=torch.float64)
    own.zero_grad()
    every = documents(begins)
    assert len(every) > 18
    for row, a, b in every:
        target = targets[row : row + 1, a:b]
        sums = sums + alone.loss(alone.forward(own, tokens[row : row + 1, a:b], target), target) * alone.weight(target)
    mean = sums / (targets != -100).sum()
    mean.backward()
    torch.testing.assert_close(loss, mean, rtol=1e-12, atol=0)
    for name, parameter in own.named_parameters():
        torch.testing.assert_close(packed[name], parameter.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(  # samples of which masks are made; 1: all are alike
    ("own", "seen", "samples", "window"),
    [(100, 700, 1, 40), (100, 700, 3, None), (300, 300, 3, 40), (128, 384, 1, None), (1, 50, 3, 200)],
)
def test_the_blocks_of_flex_attention_are_the_dense_mask(own: int, seen: int, samples: int, window: int | None) -> None:
    torch.manual_seed(own)
    new = torch.rand(samples, seen) < 1 / 60
    begins = torch.where(new, torch.arange(seen), 0).cummax(1).values[:, None, seen - own :, None].int()
    queries, (keys, values) = torch.randn(3, 4, own, 16), torch.randn(2, 3, 2, seen, 16)
    squares = block_mask(begins, seen, window)
    with torch.no_grad():
        blocks = flex_attention(queries, keys, values, block_mask=squares, enable_gqa=True)
    torch.testing.assert_close(blocks, Masks().attention(queries, keys, values, begins, window, grouped=True))
    if seen == 700:
        assert squares.sparsity() > 60  # percent of squares that nobody computes


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "own", "seen"), [(torch.float32, 300, 700), (torch.bfloat16, 512, 512)])
def test_flex_attention_of_a_gpu_is_that_of_the_dense_mask(dtype: torch.dtype, own: int, seen: int) -> None:
    begins = torch.where(torch.rand(3, seen) < 1 / 60, torch.arange(seen), 0).cummax(1).values
    begins = begins[:, None, seen - own :, None].int().cuda()
    given = [
        torch.randn(3, heads, count, 64, device="cuda", dtype=dtype) for heads, count in ((8, own), *[(2, seen)] * 2)
    ]
    results = []
    for flex in (True, False):
        queries, keys, values = (x.clone().requires_grad_() for x in given)
        assert masks.takes_flex(queries)
        with patch.object(masks, "takes_flex", lambda _, flex=flex: flex):
            out = Masks().attention(queries, keys, values, begins, 200, grouped=True)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), (queries, keys, values))])
    for one, other in zip(*results, strict=True):
        assert float((one - other).detach().norm() / other.detach().norm()) < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.long
def test_packed_documents_are_resumed_to_the_bit_under_any_strategy(processes: Processes, corpus: Path) -> None:
    place = corpus.parent
    alone = run([*PACKED, "strategy=single", "loop.steps=6", "run.dir=alone"], place=place).curve()
    for strategy in ("ddp", "cp"):
        for name, ends in (("through", (6,)), ("again", (3, 6))):
            words = [*PACKED, f"strategy={strategy}", f"run.dir={strategy}-{name}"]
            for steps in ends:
                run([*words, f"loop.steps={steps}"], 2, "group", place=place)
        assert curve(place / f"{strategy}-again", "loss_hex") == curve(place / f"{strategy}-through", "loss_hex")
        assert curve(place / f"{strategy}-through") == pytest.approx(alone, rel=1e-10)

    # what is made of such a run
    run(["run.dir=alone", "job=generate", "job.prompt=11", "job.tokens=3"], place=place)
    run(["run.dir=alone", "job=export", "job.format=pt2"], place=place)
    exported = torch.export.load(place / "alone" / "export" / "model.pt2").module()
    inputs, _ = Tokens(str(corpus), 16, pack=True).train().batch(torch.arange(3))
    assert exported(*inputs).shape == (3, 16, 257)


class Mixing(Decoder):
    """Every token sees all before it, whatever its document."""

    def forward(self, tokens: Tensor, begins: Tensor | None = None) -> Any:
        return super().forward(tokens, begins if begins is None else 0 * begins)


class Counting(Decoder):
    """Positions count from the beginning of the sample."""

    def _embedded(self, tokens: Tensor, places: Tensor) -> Tensor:
        return super()._embedded(tokens, torch.arange(tokens.shape[1]))


EXPERTS = {"experts": 4, "auxiliary": 0.1}


@pytest.mark.parametrize(
    ("network", "words"), [(Decoder, {}), (Decoder, EXPERTS), (Decoder, {"window": 3}), (Mixing, {}), (Counting, {})]
)
def test_a_network_that_mixes_documents_is_found_by_verify(network: type[Decoder], words: dict[str, Any]) -> None:
    own = filled(network(**SIZES, **words))
    inputs, targets = SyntheticTokens(6, 0, 16, 256, pack=True).train().batch(torch.arange(6))
    said = NextToken(ignored=-100, pack=True).examine(own, inputs, targets)
    assert bool(said) == (network is not Decoder)
    assert not said or re.match(
        rf"{network.__name__} mixes documents: that from token \d+ on of sample \d scores", said
    )


class Blind(nn.Module):
    """It does not know of documents."""

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens


def test_what_cannot_keep_documents_apart_is_refused(corpus: Path) -> None:
    with pytest.raises(Refusal, match=r"data\.pack=true: Blind would let tokens see other documents of their sample"):
        NextToken(pack=True).check(Blind())
    with pytest.raises(Refusal, match=r"data\.pack=true fills samples .* data\.boundaries=false"):
        Tokens(str(corpus), 16, boundaries=True, pack=True)
