"""Random numbers that belong to samples: what a forward draws does not depend on which samples run beside it."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Beta, Binomial, Categorical, Gamma, Normal
from torch.utils.checkpoint import checkpoint

from tests.options import options
from tests.run import Finished, run
from trainer import Data, Task
from trainer.data.rng import Random

BATCH, WIDTH = 6, 8
SEEN: list[dict[str, Tensor]] = []  # what the networks of a run here gave, forward after forward
LAST: list[Finished] = []  # the last of these runs


class Samples(Data):
    """The same samples in each step, in their order: x is (B, 5, WIDTH)."""

    def train(self) -> Any:
        x = torch.randn(BATCH, 5, WIDTH, generator=torch.Generator().manual_seed(0))
        return torch.utils.data.TensorDataset(x, torch.zeros(BATCH))

    def order(self, epoch: int, generator: torch.Generator) -> Tensor:
        return torch.arange(BATCH)

    def evaluation(self) -> Any:
        return None


class Noted(Task):
    """Keeps what a network gives: a tensor for each of its ways, with the samples in front."""

    def loss(self, output: dict[str, Tensor], targets: Any) -> Tensor:
        SEEN.append({name: one.detach().double() for name, one in output.items()})
        return torch.stack([one.double().square().mean() for one in output.values()]).sum()


class Chancy(Noted):
    """A loss that draws."""

    def loss(self, output: dict[str, Tensor], targets: Any) -> Tensor:
        return super().loss({"noise": torch.rand_like(output["x"])}, targets) + 0 * output["x"].sum()


def drawn(place: Path, network: type[nn.Module], *words: str, task: type[Task] = Noted) -> list[dict[str, Tensor]]:
    """What a network of constant weights gives in the last steps; micro-batches are put together again."""
    own = [f"model={network.__name__.lower()}", f"task={task.__name__.lower()}", "data=samples", "precision=fp64"]
    own += ["strategy=single", "optimizer=sgd", "optimizer.lr=0", "optimizer.weight_decay=0", "loop.steps=4"]
    own += [f"loop.global_batch={BATCH}", "loop.save_every=null", "loop.eval_every=null", f"run.dir=run-{len(words)}"]
    SEEN.clear()
    LAST[:] = [run([*options(place, network, task, Samples), *own, "run.resume=fresh", *words], place=place)]
    parts = next((int(word.rpartition("=")[2]) for word in words if word.startswith("loop.micro_batches=")), 1)
    steps = [SEEN[at : at + parts] for at in range(len(SEEN) - 3 * parts, len(SEEN), parts)]
    return [{name: torch.cat([part[name] for part in step]) for name in step[0]} for step in steps]


class Itself(nn.Module):
    """Attention of x to itself."""

    def __init__(self, **words: Any) -> None:
        super().__init__()
        self.attention, self.words = nn.MultiheadAttention(WIDTH, 2, dropout=0.5, batch_first=True), words

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, **self.words)[0]


class TimeFirst(nn.Module):
    """What a module makes of (time, B, WIDTH), which is how most examples of torch's have it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        output = self.inner(x.transpose(0, 1))
        return (output[0] if isinstance(output, tuple) else output).transpose(0, 1)


def layer(**words: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.5, **words)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5, inplace=True)),
    "feature dropout": lambda: nn.Sequential(nn.Dropout1d(0.5), nn.FeatureAlphaDropout(0.5), nn.AlphaDropout(0.5)),
    "multi-head attention": Itself,
    "its fast path": lambda: Itself(need_weights=False),
    "encoder": lambda: nn.TransformerEncoder(layer(batch_first=True), 2),
    "encoder, time first": lambda: TimeFirst(nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False)),
    "lstm": lambda: nn.LSTM(WIDTH, WIDTH, 3, dropout=0.5, batch_first=True),
    "gru, time first": lambda: TimeFirst(nn.GRU(WIDTH, WIDTH, 2, dropout=0.5)),
}


def path(h: Tensor) -> Tensor:
    """Stochastic depth as timm writes it."""
    return h * h.new_empty((h.shape[0],) + (1,) * (h.ndim - 1)).bernoulli_(0.5)


def views(h: Tensor) -> Tensor:
    """As SimCLR and DPO: (2 · B, …), one view after the other."""
    return torch.stack(F.dropout(torch.cat([h[:, 0], h[:, 1]]), 0.5).chunk(2), 1)


def rows(draw: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Patches and their like: (B · 5, …), sample after sample."""
    return lambda h: draw(h.flatten(0, 1)).unflatten(0, (-1, 5))


def diffused(h: Tensor) -> Tensor:
    """Noise by a schedule, for a time of each sample."""
    kept = torch.linspace(0.9, 0.1, 10)[torch.randint(0, 10, (len(h),))][:, None, None]
    return kept.sqrt() * h + (1 - kept).sqrt() * torch.randn_like(h)


def attended(h: Tensor) -> Tensor:
    q = h.view(len(h), 2, 2, -1)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5).reshape(h.shape)


def masked(h: Tensor) -> Tensor:
    """By NumPy and Python, as augmentation inside of a network is often written."""
    start = int(numpy.random.uniform(0, 4)) + random.randint(0, 2)
    return h.index_fill(-1, torch.arange(start, start + 2), 0.0)


# h is (B, 5, WIDTH); what is given has the samples in front, whatever stood there when it was drawn
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "functional": lambda h: F.dropout(F.dropout(h, 0.5), 0.5),
    "attention": lambda h: F.scaled_dot_product_attention(h, h, h, dropout_p=0.5, is_causal=True),
    "stochastic depth": path,
    "noise": lambda h: h + torch.rand(len(h), 1, 1) + torch.rand_like(h) + torch.randn_like(h),
    "more noise": lambda h: (
        h + torch.randn(h.shape) + torch.empty_like(h).uniform_(-1, 1) + torch.randint(9, (len(h), 1, 1))
    ),
    "normal": lambda h: torch.normal(h, 1.0) + torch.normal(0.0, h.abs()) + torch.normal(h, h.abs()),
    "normal, of a distribution": lambda h: Normal(h, 1.0).rsample(),
    "chosen by weights": lambda h: h * torch.bernoulli(torch.sigmoid(h)),
    "gumbel": lambda h: F.gumbel_softmax(h),
    "rrelu": lambda h: F.rrelu(h, training=True),
    "in bf16": lambda h: F.dropout(h.bfloat16(), 0.5),
    "categorical": lambda h: h[:, 0] * Categorical(logits=h[:, 0]).sample()[:, None],
    "several categories": lambda h: h[:, 0, :4] * torch.multinomial(h[:, 0].softmax(-1), 4, True),
    "poisson": lambda h: torch.poisson(h.exp()) + Gamma(h.exp(), 1.0).sample(),
    "indices": lambda h: h[torch.arange(len(h)), torch.randint(0, 5, (len(h),), dtype=torch.long)],
    "random masking": lambda h: h.gather(1, torch.rand(len(h), 5).argsort(1)[:, :2, None].expand(-1, -1, WIDTH)),
    "where it begins": lambda h: h.masked_fill(
        (torch.arange(5) >= (torch.rand(len(h)) * 5).long()[:, None])[..., None], 0.0
    ),
    "diffusion": diffused,
    "attention by hand": lambda h: F.dropout((h @ h.mT).softmax(-1), 0.5) @ h,
    "as wide as a micro-batch": lambda h: F.dropout(h[:, 0, :3], 0.5),
    "views": views,
    "rows of views": lambda h: F.dropout(views(h).flatten(0, 1), 0.5).unflatten(0, (-1, 2)),
    "time after time": lambda h: F.dropout(h.transpose(0, 1).flatten(0, 1), 0.5).unflatten(0, (5, -1)).transpose(0, 1),
    "rows": rows(lambda h: F.dropout(h, 0.5)),
    "rows, channels": rows(lambda h: F.dropout1d(h[:, :, None], 0.5)[:, :, 0]),
    "rows, 2d": rows(lambda h: F.dropout2d(h[:, :, None, None], 0.5)[:, :, 0, 0]),
    "rows, rand": rows(lambda h: h * torch.rand(len(h), 1) + torch.randn(h.shape) + torch.rand_like(h)),
    "rows, bernoulli_": rows(lambda h: h * h.new_empty(len(h), 1).bernoulli_(0.5)),
    "rows, attention": rows(attended),
    "NumPy and Python": masked,
    "no batch": lambda h: h * torch.rand(WIDTH, 1, 1)[0] + F.dropout(nn.Parameter(torch.ones(12, WIDTH)), 0.5)[7],
    "no batch, a permutation": lambda h: h[..., torch.randperm(WIDTH)] * torch.poisson(torch.ones(WIDTH)),
    "no batch, of distributions": lambda h: (
        h * Beta(2.0, 3.0).sample() + Gamma(2.0, 3.0).sample() + Binomial(9, torch.ones(WIDTH) / 3).sample()
    ),
}


class Ways(nn.Module):
    """Every way to draw, of what one layer gives; two modules, of which one is called twice; what is padded."""

    def __init__(self, wide: bool = False) -> None:
        super().__init__()
        self.layer, self.wide, self.token = nn.Linear(WIDTH, WIDTH), wide, nn.Parameter(torch.ones(1, 1, WIDTH))
        self.modules_that_draw = nn.ModuleDict({name: make() for name, make in MODULES.items()})
        self.one, self.other, self.weight = nn.Dropout(0.5), nn.Dropout(0.5), nn.Parameter(torch.ones(6, 3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.layer(x)
        output = {name: way(h + 0) for name, way in self.modules_that_draw.items()}
        output |= {name: way(h) for name, way in FUNCTIONS.items()}
        output["guidance"] = torch.where(torch.rand(len(h), 1, 1) < 0.3, self.token, h)
        output["a token"] = torch.cat([F.dropout(self.token.expand(len(h), -1, -1), 0.5), h], 1)
        output["of a weight"] = h[..., :3] * F.dropout(self.weight * 1, 0.5).sum(0)
        ones = torch.ones(len(h), 5, 8)
        output |= {"call 1": self.one(ones), "call 2": self.other(ones), "call 3": self.one(ones)}
        output["call 4"] = F.dropout(ones, 0.5)
        # weights of attention (B, heads, T, T) among them, of which each row stands elsewhere in a wider tensor
        for shape in ((40,), (40, 9 if self.wide else 6), (40, 9 if self.wide else 6, 8 if self.wide else 5)):
            half = torch.full((len(h), *shape), 0.5)
            output[f"padded dropout {len(shape)}"] = F.dropout(half, 0.5)
            output[f"padded rand_like {len(shape)}"] = torch.rand_like(half)
            output[f"padded bernoulli_ {len(shape)}"] = half.clone().bernoulli_(0.5)
        return {name: one[0] if isinstance(one, tuple) else one for name, one in output.items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    """Three steps of six samples that run side by side."""
    return drawn(tmp_path_factory.mktemp("whole"), Ways)


@pytest.mark.parametrize("parts", [2, 3])
def test_a_sample_draws_the_same_whatever_runs_beside_it(
    whole: list[dict[str, Tensor]], tmp_path: Path, parts: int
) -> None:
    again = drawn(tmp_path, Ways, f"loop.micro_batches={parts}")
    for step, (one, other) in enumerate(zip(whole, again, strict=True)):
        for name, value in one.items():
            torch.testing.assert_close(other[name], value, rtol=0, atol=1e-6, msg=f"{name}, {step}")


def test_every_step_sample_module_and_call_draws_its_own(whole: list[dict[str, Tensor]]) -> None:
    for name in whole[0]:
        assert not all(torch.equal(whole[0][name], step[name]) for step in whole[1:]), name
    masks = [whole[0][f"call {call}"] for call in range(1, 5)]
    assert [[torch.equal(one, other) for other in masks] for one in masks] == torch.eye(4).bool().tolist()
    for name in (*(f"call {call}" for call in range(1, 5)), *(name for name in whole[0] if name.startswith("padded"))):
        assert len(whole[0][name].flatten(1).unique(dim=0)) == BATCH, name


def test_a_sample_that_is_padded_draws_what_it_draws_without(whole: list[dict[str, Tensor]], tmp_path: Path) -> None:
    wide = drawn(tmp_path, Ways, "model.wide=true")
    for name in (name for name in whole[0] if name.startswith("padded")):
        narrow = whole[0][name]
        assert torch.equal(wide[0][name][tuple(slice(0, size) for size in narrow.shape)], narrow), name


class Quiet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": self.layer(x)}


def test_a_loss_draws_for_its_samples_beside_a_network_that_draws_nothing(tmp_path: Path) -> None:
    one, other = (drawn(tmp_path, Quiet, f"loop.micro_batches={parts}", task=Chancy) for parts in (1, 2))
    assert all(torch.equal(first["noise"], second["noise"]) for first, second in zip(one, other, strict=True))
    assert one[0]["noise"].unique().numel() == one[0]["noise"].numel()


class Again(nn.Module):
    """A part that is computed again where that is asked; it drops in some steps only."""

    def __init__(self, again: str = "") -> None:
        super().__init__()
        self.again, self.calls = again, 0
        self.first, self.inner = (
            nn.Linear(WIDTH, WIDTH),
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Tanh()),
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if self.training:
            self.calls += 1
            self.inner.train(self.calls in (3, 4, 7, 8, 9, 10))  # two micro-batches a step
        h = self.first(x)
        if self.again:
            return {"x": checkpoint(self.inner, h, use_reentrant=self.again == "reentrant")}
        return {"x": self.inner(h)}


def test_what_is_computed_again_draws_the_same_also_where_it_begins_to_draw_late(tmp_path: Path) -> None:
    norms = []
    for again in ("''", "reentrant", "not"):
        words = [
            "loop.steps=5",
            "loop.micro_batches=2",
            "loop.log_every=1",
            f"model.again={again}",
            "optimizer.lr=1e-9",
        ]
        drawn(tmp_path, Again, *words)
        norms.append(LAST[0].curve("grad_norm"))
    assert norms[0] == norms[1] == norms[2]
    assert len({round(norm, 6) for norm in norms[0]}) == 4  # of two steps that drop nothing, and three that do


class Compiles(nn.Module):
    """It compiles a part of itself when it is called first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        part = torch.compile(lambda h: F.dropout(h.sin(), 0.5) * torch.rand(len(h), 1, 1))
        return {"x": part(self.layer(x))}


# torch silences it by replacing the function that shows warnings, which an error passes by
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.long  # imports the compiler
def test_what_a_network_compiles_by_itself_draws_for_its_samples_too(tmp_path: Path) -> None:
    one, other = (drawn(tmp_path, Compiles, f"loop.micro_batches={parts}") for parts in (1, 2))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    assert len(one[0]["x"].flatten(1).unique(dim=0)) == BATCH
    torch.compiler.reset()


# what nobody can give to samples, each in a network of its own: it is said, with what to write instead
SAID: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "mixed": (lambda h: F.dropout(h - h.mean(0), 0.5), "samples are mixed before"),
    "rows that data choose": (
        lambda h: torch.cat([F.dropout(h.flatten(0, 1)[[0, 6]], 0.5), h.flatten(0, 1)]),
        "parts of samples",
    ),
    "a permutation of the batch": (lambda h: h + h[torch.randperm(len(h))], "the order of a batch"),
    "NumPy, for each sample": (
        lambda h: torch.stack([row * float(numpy.random.rand()) for row in h]),
        r"NumPy's generator.*torch\.rand\(len\(x\)\)",
    ),
    "torch, for each sample": (
        lambda h: torch.stack([row * torch.rand(1).item() for row in h]),
        "as often as there are samples",
    ),
    "nothing: views, as data flow": (views, ""),
    "nothing: attention by hand": (FUNCTIONS["attention by hand"], ""),
    "a generator": (lambda h: h * torch.rand(h.shape, generator=torch.Generator()), "generator= out"),
}


class Unowned(Quiet):
    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": SAID[self.kind][0](self.layer(x))}


@pytest.mark.parametrize("kind", SAID)
def test_what_belongs_to_no_sample_is_said_once(kind: str, tmp_path: Path) -> None:
    drawn(tmp_path, Unowned, f"model.kind='{kind}'", "log=[console]")
    log = (LAST[0].folder / "logs" / "rank-0.log").read_text()
    if SAID[kind][1]:
        assert len(re.findall(SAID[kind][1], log)) == 1, log
    else:
        assert "loop.dropout=sample" not in log, log


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_a_cuda_graph_that_would_repeat_masks_is_refused(tmp_path: Path, mode: str) -> None:
    words = ["model=vit_tiny", "model.dropout=0.1", "loop.steps=1", f"compile.mode={mode}"]
    said = run(words, place=tmp_path, code=2).out
    assert re.search(r"repeats those .*; use loop\.dropout=native, or under tensor ranks", said), said


# The numbers themselves.


@pytest.mark.parametrize(("other", "shape"), [(False, (16, 64, 128)), (True, (16, 64, 128)), (True, (16, 8, 8, 128))])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_masks_are_as_if_drawn_by_lot(p: float, other: bool, shape: tuple[int, ...]) -> None:
    numbers = Random(1, 2, torch.arange(16))
    kept = (numbers.of(7) if other else numbers).bernoulli(p, *shape).double().view(16, 64, 128)
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
        for distance in (1, 2, 8):
            product = centred * centred.roll(distance, dim)
            assert abs(float(product.mean())) * product.numel() ** 0.5 < 5
    assert Random(1, 2, torch.arange(4)).bernoulli(0.0, 4, 9).sum() == 0
    assert Random(1, 2, torch.arange(4)).bernoulli(1.0, 4, 9).all()


def test_masks_are_the_same_bits_on_every_machine() -> None:
    kept = Random(1, 2, torch.tensor([5, 2**40])).bernoulli(0.5, 2, 2, 8)
    assert ["".join(map(str, sample)) for sample in kept.int().flatten(1).tolist()] == [
        "0010110100000111",
        "1001011110011111",
    ]


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MOMENTS: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "uniform": (lambda x: x.uniform_(2, 3), 2.5, 12**-0.5),
    "exponential": (lambda x: x.exponential_(2.0), 0.5, 0.5),
    "normal": (lambda x: x.normal_(1.0, 3.0), 1.0, 3.0),
}


class Numbers(Quiet):
    """So many numbers of each type, drawn in every way."""

    def __init__(self, count: int = 15000) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        output = {"x": self.layer(x)}
        for dtype in DTYPES:
            empty = torch.empty(len(x), self.count, dtype=dtype)
            for kind, (draw, *_) in MOMENTS.items():
                output[f"{kind}, {dtype}"] = draw(empty.clone())
        return output


def test_numbers_of_each_type_have_torchs_mean_and_deviation(tmp_path: Path) -> None:
    seen = drawn(tmp_path, Numbers)[0]
    for dtype in DTYPES:
        for kind, (_, mean, deviation) in MOMENTS.items():
            found = seen[f"{kind}, {dtype}"]
            # of 90,000 numbers; below 3 a uniform one of bf16 is a multiple of 1/64, rounded to the nearest
            assert float(found.mean()) == pytest.approx(mean, abs=0.03), (kind, dtype)
            assert float(found.std()) == pytest.approx(deviation, rel=0.03), (kind, dtype)
