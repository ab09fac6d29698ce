"""Random numbers that belong to samples: what a forward draws does not depend on which samples run beside it."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Beta, Binomial, Categorical, Gamma, Normal
from torch.utils.checkpoint import checkpoint

from tests.inside import product
from trainer import Plan, Task
from trainer.data.rng import Random, TensorPart
from trainer.launch.rendezvous import Launch
from trainer.messages import Refusal
from trainer.parallel.rng.kernels import install_kernels, uninstall_kernels
from trainer.parallel.rng.row_owners import find_draw_sites
from trainer.parallel.rng.sample_rng import SampleRNG

BATCH, WIDTH = 6, 8


class Calls(nn.Module):
    """A function of x, as a network."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class TimeFirst(nn.Module):
    """What a module makes of (time, B, WIDTH), which is how most examples of torch's have it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        output = self.inner(x.transpose(0, 1))
        return (output[0] if isinstance(output, tuple) else output).transpose(0, 1)


class First(nn.Module):
    """The first thing that a module gives."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


class Itself(nn.Module):
    """Attention of x to itself."""

    def __init__(self, **words: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.5, batch_first=True)
        self.words = words

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, **self.words)[0]


def path(x: Tensor) -> Tensor:
    """Stochastic depth as timm writes it."""
    return x * x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(0.5)


def layer(**words: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.5, **words)


# what draws, and not of which samples: x is (B, 5, WIDTH)
DRAWING: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5, inplace=True)),
    "feature dropout": lambda: nn.Sequential(nn.Dropout1d(0.5), nn.FeatureAlphaDropout(0.5), nn.AlphaDropout(0.5)),
    "functional": lambda: Calls(lambda x: F.dropout(F.dropout(x, 0.5), 0.5)),
    "operator": lambda: Calls(lambda x: torch.dropout(x, 0.5, True)),
    "flat": lambda: Calls(lambda x: F.dropout(x.flatten(0, 1), 0.5).view_as(x)),
    "attention": lambda: Calls(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5, is_causal=True)),
    "stochastic depth": lambda: Calls(path),
    "multi-head attention": Itself,
    "its fast path": lambda: Itself(need_weights=False),
    "encoder": lambda: nn.TransformerEncoder(layer(batch_first=True), 2),
    "encoder, time first": lambda: TimeFirst(nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False)),
    "lstm": lambda: First(nn.LSTM(WIDTH, WIDTH, 3, dropout=0.5, batch_first=True)),
    "gru, time first": lambda: TimeFirst(nn.GRU(WIDTH, WIDTH, 2, dropout=0.5)),
    "noise": lambda: Calls(lambda x: x + torch.rand(len(x), 1, 1) + torch.rand_like(x) + torch.randn_like(x)),
    "more noise": lambda: Calls(
        lambda x: x + torch.randn(x.shape) + torch.empty_like(x).uniform_(-1, 1) + torch.randint(9, (len(x), 1, 1))
    ),
    "normal": lambda: Calls(lambda x: torch.normal(x, 1.0) + torch.normal(0.0, x.abs()) + torch.normal(x, x.abs())),
    "normal, of a size": lambda: Calls(lambda x: x + torch.normal(1.0, 2.0, (len(x), 5, 1))),
    "chosen by weights": lambda: Calls(lambda x: x * torch.bernoulli(torch.sigmoid(x))),
    "gumbel": lambda: Calls(lambda x: F.gumbel_softmax(x)),
    "no batch": lambda: Calls(
        lambda x: x * torch.rand(WIDTH, 1, 1)[0] + F.dropout(nn.Parameter(torch.ones(12, WIDTH)), 0.5)[7]
    ),
    "no batch, unknown here": lambda: Calls(lambda x: x[..., torch.randperm(WIDTH)] * torch.poisson(torch.ones(WIDTH))),
    "no batch, of distributions": lambda: Calls(
        lambda x: x * Beta(2.0, 3.0).sample() + Gamma(2.0, 3.0).sample() + Binomial(9, torch.ones(WIDTH) / 3).sample()
    ),
}


def drawn(chance: SampleRNG, network: nn.Module, x: Tensor, at: slice, step: int = 0) -> Tensor:
    """What a network makes of these samples."""
    chance.begin_forward(torch.arange(100, 100 + BATCH)[at], step, at.start)
    with chance:
        return network(x[at])


class Sum(Task):
    def loss(self, output: Any, targets: Any) -> Tensor:
        return output.sum()


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    install_kernels(torch.device("cpu"), "sample")
    yield
    uninstall_kernels("sample")


def chanced(network: nn.Module, x: Tensor | None = None) -> tuple[SampleRNG, nn.Module]:
    """The random numbers of a network whose draws were looked at, with samples like these."""
    chance, device = SampleRNG(3, torch.device("cpu")), torch.device("cpu")
    dtype = next((p.dtype for p in network.parameters()), torch.float32)
    samples = torch.randn(3, 5, WIDTH, dtype=dtype) if x is None else x
    sites = find_draw_sites(Sum(), network, lambda count: (samples[:count], samples[:count]), device)
    assert sites.failure == ""
    chance.watch(network, Plan())
    chance.learn(sites)
    return chance, network


def test_a_loss_draws_for_its_samples_beside_a_network_that_draws_nothing() -> None:
    """In which torch's functions are not looked at."""
    chance, network = chanced(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()))
    x = torch.randn(BATCH, WIDTH)

    def loss(at: slice) -> Tensor:
        with torch.inference_mode():
            output = drawn(chance, network, x, at)
            return chance.call_outside(lambda scores: torch.rand_like(scores), output)

    whole = loss(slice(0, BATCH))
    torch.testing.assert_close(torch.cat([loss(slice(0, 2)), loss(slice(2, BATCH))]), whole, rtol=0, atol=0)
    assert whole.unique().numel() == whole.numel()


@pytest.mark.parametrize("kind", DRAWING)
def test_a_sample_draws_the_same_whatever_runs_beside_it(kind: str) -> None:
    torch.manual_seed(0)
    chance, network = chanced(DRAWING[kind]().double())
    x = torch.randn(BATCH, 5, WIDTH, dtype=torch.float64)
    whole = drawn(chance, network, x, slice(0, 6))
    parts = torch.cat([drawn(chance, network, x, at) for at in (slice(2, 6), slice(0, 2))]).roll(2, 0)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-12)
    # in another step, and without these numbers, it is another forward
    assert not torch.allclose(drawn(chance, network, x, slice(0, 6), step=1), whole, atol=1e-3)
    assert not torch.allclose(network(x), whole, atol=1e-3)


class Twice(nn.Module):
    """Two modules that draw, one of them twice, and a draw of its own: their masks of ones, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        ones = torch.ones_like(x)
        return torch.stack([self.one(ones), self.other(ones), self.one(ones), F.dropout(ones, 0.5)])


def test_every_module_and_every_call_of_it_draws_its_own() -> None:
    masks = drawn(*chanced(Twice()), torch.ones(BATCH, 5, WIDTH), slice(0, BATCH))
    for at, mask in enumerate(masks):
        assert [torch.equal(mask, other) for other in masks] == [at == other for other in range(4)]
        assert len(mask.unique(dim=0)) == BATCH


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_computed_again_draws_the_same(reentrant: bool) -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), Calls(lambda x: F.dropout(x, 0.5)), nn.Tanh()
    ).double()
    gradients = []
    for again in (False, True):
        # of two forwards the first one's backward comes last, as in a pipeline
        network = Calls(partial(checkpoint, inner.forward, use_reentrant=reentrant) if again else inner.forward)
        network.add_module("inner", inner)
        chance, _ = chanced(network)
        x = torch.randn(BATCH, WIDTH, dtype=torch.float64, requires_grad=True)
        with torch.no_grad():
            x.copy_(torch.linspace(-1, 1, x.numel()).view_as(x))
        losses = []
        with chance:
            for at in (slice(0, 3), slice(3, 6)):
                chance.begin_forward(torch.arange(BATCH)[at], 0, at.start)
                losses.append(network(x[at]).square().sum())
            for loss in reversed(losses):
                loss.backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_a_part_that_begins_to_draw_late_is_computed_again_with_the_same_draws() -> None:
    """After a step without a draw a backward is not looked at any more, until a forward draws again."""
    linear = nn.Linear(WIDTH, WIDTH)
    inner = nn.Sequential(linear, nn.Dropout(0.5), nn.Tanh()).double()
    gradients = list[Tensor]()
    for again in (False, True):
        network = Calls(partial(checkpoint, inner.forward, use_reentrant=False) if again else inner.forward)
        network.add_module("inner", inner)
        chance, _ = chanced(network)
        for step, drawing in enumerate([False, False, True, False, True]):
            inner.train(drawing)
            inner.zero_grad()
            chance.begin_forward(torch.arange(BATCH), step, 0)
            with chance:
                network(torch.linspace(-1, 1, BATCH * WIDTH).double().view(BATCH, WIDTH)).square().sum().backward()
            assert linear.weight.grad is not None
            gradients.append(linear.weight.grad)
    assert [torch.equal(*pair) for pair in zip(gradients[:5], gradients[5:], strict=True)] == [True] * 5
    assert not torch.equal(gradients[2], gradients[4])


def test_noise_that_a_hook_adds_to_gradients_is_the_same_on_every_rank() -> None:
    """The forward draws nothing; a hook of a backward does, in every step."""
    inner, noise = nn.Linear(WIDTH, WIDTH), list[Tensor]()
    inner.weight.register_hook(lambda gradient: noise.append(torch.randn_like(gradient)))
    network = Calls(inner)
    for rows in (slice(0, 3), slice(3, 6)):  # of two ranks
        chance, _ = chanced(network)
        for step in range(3):
            chance.begin_forward(torch.arange(BATCH)[rows], step, rows.start)
            with chance:
                network(torch.ones(3, WIDTH)).sum().backward()
    assert [torch.equal(one, other) for one, other in zip(noise[:3], noise[3:], strict=True)] == [True] * 3
    assert not torch.equal(*noise[:2])


class Compiles(nn.Module):
    """It compiles a part of itself when it is called first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        part = torch.compile(lambda h: F.dropout(h.sin(), 0.5) * torch.rand(len(h), 1, 1))
        return part(self.layer(x))


@pytest.mark.long  # imports the compiler
def test_what_a_network_compiles_by_itself_draws_for_its_samples_too() -> None:
    x = torch.randn(BATCH, 5, WIDTH)
    chance, network = chanced(Compiles(), x[:3])
    with torch.no_grad():
        whole, part = (drawn(chance, network, x, at) for at in (slice(0, 6), slice(3, 6)))
    torch.testing.assert_close(part, whole[3:], rtol=0, atol=1e-6)
    assert len(whole.flatten(1).unique(dim=0)) == BATCH
    torch.compiler.reset()


@pytest.mark.parametrize(("other", "shape"), [(False, (16, 64, 128)), (True, (16, 64, 128)), (True, (16, 8, 8, 128))])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_masks_are_as_if_drawn_by_lot(p: float, other: bool, shape: tuple[int, ...]) -> None:
    numbers = Random(1, 2, torch.arange(16))
    kept = (numbers.of(7) if other else numbers).bernoulli(p, *shape).double().view(16, 64, 128)
    shape = tuple(kept.shape)
    deviation = (p * (1 - p)) ** 0.5
    # how far means are from p, in their standard deviations: over everything, samples, rows, columns and places
    for axes in ((0, 1, 2), (1, 2), (2,), (0, 1), (0,)):
        mean = kept.mean(axes)
        count = kept.numel() / max(mean.numel(), 1)
        assert ((mean - p).abs().max() / deviation * count**0.5) < 5.5
        # and how these are spread: over hundreds of means the mean square is 1, to four of its standard deviations
        spread, apart = (mean - p).square().mean() / deviation**2 * count, 4 * (2 / mean.numel()) ** 0.5
        assert mean.numel() < 100 or spread == pytest.approx(1, abs=apart)
    # neighbours of every kind know nothing of each other
    centred = (kept - p) / deviation
    for dim in range(3):
        for distance in (1, 2, 8, 32):
            if distance < shape[dim]:
                product = centred * centred.roll(distance, dim)
                assert abs(float(product.mean())) * product.numel() ** 0.5 < 5
    assert Random(1, 2, torch.arange(4)).bernoulli(0.0, 4, 9).sum() == 0
    assert Random(1, 2, torch.arange(4)).bernoulli(1.0, 4, 9).all()


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_a_part_has_the_numbers_of_the_whole(dim: int) -> None:
    numbers = Random(1, 2, torch.arange(3))
    shape = [3, 4, 6, 8]
    # a quarter from the front and one from the back, as context ranks have them
    size = shape[dim]
    part, shape[dim] = TensorPart(dim, (range(size // 4), range(size - size // 4, size)), size), size // 4 * 2
    for draw in (lambda one, *own: one.bernoulli(0.5, *own), Random.uniform, Random.normal):
        whole = draw(numbers.of(7), 3, 4, 6, 8)
        whole = torch.cat([whole.narrow(dim, each.start, len(each)) for each in part.places], dim)
        assert torch.equal(draw(numbers.of(7, part), *shape), whole)


@pytest.mark.parametrize("draw", [F.dropout, lambda x, p: torch.rand_like(x), lambda x, p: x.bernoulli(p)])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_sample_that_is_padded_draws_what_it_draws_without(draw: Any, dims: int) -> None:
    """Weights of attention (B, heads, T, T) among them, of which each row stands elsewhere in a wider tensor."""
    chance, network = chanced(Calls(lambda x: draw(x, 0.5)))
    wide, narrow = torch.full((BATCH, 40, 9, 8)[: dims + 1], 0.5), torch.full((BATCH, 40, 6, 5)[: dims + 1], 0.5)
    both = [drawn(chance, network, x, slice(0, BATCH)) for x in (wide, narrow)]
    assert torch.equal(both[0][:, :, :6, :5] if dims == 3 else both[0][:, :, :6] if dims == 2 else both[0], both[1])
    assert len(both[0].flatten(1).unique(dim=0)) == BATCH


# how it is drawn, and from where to where; what is drawn is below the end and may be the beginning, as torch's
INTERVALS: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "rand_like": (torch.rand_like, 0.0, 1.0),
    "uniform_(2, 3)": (lambda x: torch.empty_like(x).uniform_(2, 3), 2.0, 3.0),
    "uniform_(-1, 1)": (lambda x: torch.empty_like(x).uniform_(-1, 1), -1.0, 1.0),
    "uniform_(0, 1e-3)": (lambda x: torch.empty_like(x).uniform_(0, 1e-3), 0.0, 1e-3),
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def refuse_outside(draw: Callable[[Tensor], Tensor], low: float, high: float) -> Callable[[Tensor], Tensor]:
    """The same; AssertionError where a number is not in [low, high)."""

    def checked(x: Tensor) -> Tensor:
        numbers = draw(x)
        assert low <= numbers.min(), numbers.min()
        assert numbers.max() < high, numbers.max()
        return x

    return checked


def refuse_not_positive(x: Tensor) -> Tensor:
    """The same for what gumbel_softmax takes the logarithm of: in (0, infinity)."""
    numbers = torch.empty_like(x).exponential_(20.0)
    assert numbers.min() > 0
    assert numbers.max() < math.inf
    return x


KINDS = {name: refuse_outside(*interval) for name, interval in INTERVALS.items()} | {
    "exponential_": refuse_not_positive
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_and_the_last_number_lie_in_the_interval(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = torch.tensor([0.0, 2.0**-24, 0.5, 1 - 2.0**-8, 1 - 2.0**-23, 1 - 2.0**-24])
    monkeypatch.setattr(Random, "uniform", lambda _, *shape: ends.repeat(math.prod(shape) // 6).view(shape))
    drawn(*chanced(Calls(KINDS[kind])), torch.ones(BATCH, 64, dtype=dtype), slice(0, BATCH))
    chosen = drawn(*chanced(Calls(F.gumbel_softmax)), torch.ones(BATCH, 64, dtype=dtype), slice(0, BATCH))
    assert chosen.isfinite().all()


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["uniform_(2, 3)", "exponential_"])
def test_a_hundred_million_numbers_lie_in_the_interval(kind: str, dtype: torch.dtype) -> None:
    chance, network = chanced(Calls(KINDS[kind]))
    for step in range(20):
        chance.begin_forward(torch.arange(BATCH) + step * BATCH, 0, 0)
        with chance:
            network(torch.ones(BATCH, 5_000_000 // BATCH, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_of_each_type_have_torchs_mean_and_deviation(dtype: torch.dtype) -> None:
    found = {}

    def all_kinds(x: Tensor) -> Tensor:
        found["uniform"] = torch.empty_like(x).uniform_(2, 3).double()
        found["exponential"] = torch.empty_like(x).exponential_(2.0).double()
        found["normal"] = torch.empty_like(x).normal_(1.0, 3.0).double()
        return x

    drawn(*chanced(Calls(all_kinds)), torch.ones(BATCH, 50_000, dtype=dtype), slice(0, BATCH))
    for kind, (mean, deviation) in {"uniform": (2.5, 12**-0.5), "exponential": (0.5, 0.5), "normal": (1, 3)}.items():
        # of 300,000 numbers; below 3 a uniform one of bf16 is a multiple of 1/64, rounded to the nearest
        assert float(found[kind].mean()) == pytest.approx(mean, abs=0.02), kind
        assert float(found[kind].std()) == pytest.approx(deviation, rel=0.02), kind


def test_masks_are_the_same_bits_on_every_machine() -> None:
    kept = Random(1, 2, torch.tensor([5, 2**40])).bernoulli(0.5, 2, 2, 8)
    assert ["".join(map(str, sample)) for sample in kept.int().flatten(1).tolist()] == [
        "0010110100000111",
        "1001011110011111",
    ]


class Sized(nn.Module):
    """A layer, and what is made of its output."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], width: int = WIDTH) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(WIDTH, width), function
        self.weight, self.token = nn.Parameter(torch.ones(6, 3)), nn.Parameter(torch.ones(1, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.layer(x))


def views(self: Sized, h: Tensor) -> Tensor:
    """As SimCLR and DPO: (2 · B, …), one view after the other."""
    a, b = F.dropout(torch.cat([h[:, 0], h[:, 1]]), 0.5).chunk(2)
    return torch.stack([a, b], 1)


def rows(self: Sized, h: Tensor, draw: Callable[[Tensor], Tensor]) -> Tensor:
    """Patches and their like: (B · 5, …), sample after sample."""
    return draw(h.flatten(0, 1)).unflatten(0, (-1, 5))


def by_hand(self: Sized, h: Tensor) -> Tensor:
    """Attention as many write it, with as many tokens as a head is wide."""
    weights = F.dropout((h @ h.mT).softmax(-1), 0.5)
    return weights @ h


def diffused(self: Sized, h: Tensor) -> Tensor:
    """Noise by a schedule, for a time of each sample."""
    times = torch.randint(0, 10, (len(h),))
    kept = torch.linspace(0.9, 0.1, 10)[times][:, None, None]
    return kept.sqrt() * h + (1 - kept).sqrt() * torch.randn_like(h)


def attended(h: Tensor) -> Tensor:
    q = h.view(len(h), 2, 2, -1)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5).reshape(h.shape)


# rows that belong to samples, though no size says so: (B, 5, WIDTH) to a tensor with the samples in front
OWNED: dict[str, Callable[[Sized, Tensor], Tensor]] = {
    "views": views,
    "rows": partial(rows, draw=lambda h: F.dropout(h, 0.5)),
    "rows, after other draws": lambda self, h: F.dropout(views(self, F.dropout(h, 0.5)).flatten(0, 1), 0.5).unflatten(
        0, (-1, 2)
    ),
    "time after time": lambda self, h: (
        F.dropout(h.transpose(0, 1).flatten(0, 1), 0.5).unflatten(0, (5, -1)).transpose(0, 1)
    ),
    "diffusion": diffused,
    "guidance": lambda self, h: torch.where(torch.rand(len(h), 1, 1) < 0.3, self.token, h),
    "several passes": lambda self, h: F.dropout(h.repeat(4, 1, 1), 0.5).unflatten(0, (4, -1)).transpose(0, 1),
    "rows, channels": partial(rows, draw=lambda h: F.dropout1d(h[:, :, None], 0.5)[:, :, 0]),
    "rows, 2d": partial(rows, draw=lambda h: F.dropout2d(h[:, :, None, None], 0.5)[:, :, 0, 0]),
    "rows, alpha": partial(rows, draw=lambda h: F.alpha_dropout(h, 0.5, True)),
    "rows, rand_like": partial(rows, draw=lambda h: h * torch.rand_like(h)),
    "rows, rand": partial(rows, draw=lambda h: h * torch.rand(len(h), 1)),
    "rows, randn": partial(rows, draw=lambda h: h + torch.randn(h.shape)),
    "rows, bernoulli_": partial(rows, draw=lambda h: h * h.new_empty(len(h), 1).bernoulli_(0.5)),
    "rows, attention": partial(rows, draw=attended),
    "rows, time first": lambda self, h: F.dropout(h.transpose(0, 1), 0.5).transpose(0, 1),
    "as wide as the batch": lambda self, h: F.dropout(h[:, 0, :3], 0.5),
    "attention by hand": by_hand,
    "categorical": lambda self, h: h[:, 0] * Categorical(logits=h[:, 0]).sample()[:, None],
    "several categories": lambda self, h: h[:, 0, :4] * torch.multinomial(h[:, 0].softmax(-1), 4, True),
    "normal": lambda self, h: Normal(h, 1.0).rsample(),
    "poisson": lambda self, h: torch.poisson(h.exp()) + torch.distributions.Gamma(h.exp(), 1.0).sample(),
    "indices": lambda self, h: h[torch.arange(len(h)), torch.randint(0, 5, (len(h),), dtype=torch.long)],
    "random masking": lambda self, h: h.gather(
        1, torch.rand(len(h), 5).argsort(1)[:, :2, None].expand(-1, -1, h.shape[-1])
    ),
    "where it begins": lambda self, h: h.masked_fill(
        (torch.arange(5) >= (torch.rand(len(h)) * 5).long()[:, None])[..., None], 0.0
    ),
    "a token of the network": lambda self, h: torch.cat([F.dropout(self.token.expand(len(h), -1, -1), 0.5), h], 1),
    "rrelu": lambda self, h: F.rrelu(h, training=True),
    "of a weight": lambda self, h: h[..., :3] * F.dropout(self.weight * 1, 0.5).sum(0),
    "in bf16": lambda self, h: F.dropout(h.bfloat16(), 0.5).float(),
}


@pytest.mark.parametrize("kind", OWNED)
def test_a_row_belongs_to_its_sample_whatever_its_place(kind: str) -> None:
    """As the data flow, not as sizes look: 3 and 6 samples, of which one layout's size is a multiple, too."""
    torch.manual_seed(0)
    x = torch.randn(BATCH, 5, WIDTH)
    chance, network = chanced(Sized(OWNED[kind]), x[:3])
    assert chance.sites is not None
    assert chance.sites.notes == []
    whole = drawn(chance, network, x, slice(0, 6))
    parts = torch.cat([drawn(chance, network, x, at) for at in (slice(3, 6), slice(0, 3))]).roll(3, 0)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-6)
    assert not torch.allclose(drawn(chance, network, x, slice(0, 6), step=1), whole, atol=1e-3)
    assert chance.pop_notes() == []


# what nobody can give to samples: it is said, with what to write instead
SAID: dict[str, tuple[Callable[[Sized, Tensor], Tensor], str]] = {
    "mixed": (lambda self, h: F.dropout(h - h.mean(0), 0.5), "samples are mixed before"),
    "rows that data choose": (
        lambda self, h: torch.cat([F.dropout(h.flatten(0, 1)[[0, 6]], 0.5), h.flatten(0, 1)]),
        "parts of samples",
    ),
    "a permutation of the batch": (lambda self, h: h + h[torch.randperm(len(h))], "the order of a batch"),
    "NumPy, for each sample": (
        lambda self, h: torch.stack([row * float(numpy.random.rand()) for row in h]),
        r"NumPy's generator.*torch\.rand\(len\(x\)\)",
    ),
    "torch, for each sample": (
        lambda self, h: torch.stack([row * torch.rand(1).item() for row in h]),
        "as often as there are samples",
    ),
    "a generator": (lambda self, h: h * torch.rand(h.shape, generator=torch.Generator()), "generator= out"),
}


@pytest.mark.parametrize("kind", SAID)
def test_what_belongs_to_no_sample_is_said(kind: str) -> None:
    torch.manual_seed(0)
    function, words = SAID[kind]
    chance, _ = chanced(Sized(function))
    (note,) = chance.pop_notes()
    assert re.search(words, note), note
    assert chance.pop_notes() == []


TORCHS = ["compile.mode=reduce-overhead", "compile.mode=max-autotune"]


@pytest.mark.parametrize("mode", TORCHS)
def test_a_cuda_graph_that_would_repeat_masks_is_refused(tmp_path: Path, mode: str) -> None:
    words = ["model=vit_tiny", "model.dropout=0.1", "device=cpu", "loop.steps=1", f"run.root={tmp_path}"]
    with pytest.raises(Refusal, match=r"repeats those .*; use loop\.dropout=native, or under tensor ranks"):
        product(Launch(), tmp_path, [*words, mode])


class ByNumpy(nn.Module):
    """A mask of the batch by NumPy and Python, as augmentation inside of a network is often written."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        start = int(numpy.random.uniform(0, 4)) + random.randint(0, 2)
        return self.layer(x.index_fill(-1, torch.arange(start, start + 2), 0.0))


def test_numpys_and_pythons_numbers_follow_from_the_step() -> None:
    chance, network = chanced(ByNumpy())
    x = torch.randn(BATCH, 5, WIDTH)
    whole = [drawn(chance, network, x, slice(0, 6), step) for step in range(8)]
    numpy.random.rand(3)  # whoever else draws meanwhile
    parts = [torch.cat([drawn(chance, network, x, at, step) for at in (slice(0, 2), slice(2, 6))]) for step in range(8)]
    assert all(torch.allclose(one, other) for one, other in zip(whole, parts, strict=True))
    assert len({str(each) for each in whole}) > 2
    assert chance.pop_notes() == []
