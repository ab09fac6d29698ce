"""Networks built on the meta device get bit for bit the values of the ordinary construction, a few at a time."""

import copy
import gc
import io
import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import Parameter, functional
from torch.nn.utils import parametrizations
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.swin_transformer import SwinTransformer, SwinTransformerBlockV2

from recipes.vision.cnn import CNN
from recipes.vision.mlp import MLP
from recipes.vision.resnet import resnet18
from recipes.vision.vit import VisionTransformer
from trainer.deferral import replay
from trainer.deferred import NotDeferrable, deferred, is_deferred, materialise, ties
from trainer.refusal import Refusal
from trainer.seeds import seed_all


class Odd(nn.Module):
    """A network whose constructor does what a function says."""

    def __init__(self, build: Callable[[Any], Any]) -> None:
        super().__init__()
        build(self)


def values(network: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under their first names."""
    return {**dict(network.named_parameters()), **dict(network.named_buffers())}


def taken(network: nn.Module) -> dict[str, Tensor]:
    """What materialise hands over; each name once."""
    found: dict[str, Tensor] = {}

    def take(name: str, tensor: Tensor) -> None:
        assert name not in found
        found[name] = tensor

    materialise(network, take)
    return found


def assert_same(make: Callable[[], nn.Module], seed: int = 3) -> nn.Module:
    """The values of `deferred` are those of the ordinary construction; returns the network of `deferred`."""
    seed_all(seed)
    ordinary = values(make())
    seed_all(seed)
    network = deferred(make)
    meta = values(network)
    assert is_deferred(network)
    assert all(tensor.is_meta for tensor in meta.values())
    found = taken(network)
    assert list(meta) == list(ordinary)
    assert found.keys() == ordinary.keys()
    for name, tensor in found.items():
        assert tensor.dtype == meta[name].dtype == ordinary[name].dtype, name
        assert meta[name].requires_grad == ordinary[name].requires_grad, name
        assert not tensor.requires_grad
        assert torch.equal(tensor, ordinary[name]), name
    return network


SWIN: dict[str, Any] = {
    "patch_size": [4, 4],
    "embed_dim": 16,
    "depths": [1, 2],
    "num_heads": [2, 2],
    "window_size": [2, 2],
}
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "cnn": partial(CNN, 10, 1, 28),
    "mlp": partial(MLP, 10, 1, 28, width=64),
    "vit": partial(VisionTransformer, 10, 3, 16, depth=2),
    "resnet18": partial(resnet18, 10, 1, 28),
    "mobilenet_v3_small": partial(torchvision.models.mobilenet_v3_small, num_classes=3),
    "torchvision vit": partial(torchvision.models.VisionTransformer, 32, 8, 2, 2, 32, 64, num_classes=5),
    "convnext": partial(ConvNeXt, [CNBlockConfig(16, 32, 2), CNBlockConfig(32, None, 2)], stochastic_depth_prob=0.1),
    "swin": partial(SwinTransformer, **SWIN),
    "swin v2": partial(SwinTransformer, **SWIN, block=SwinTransformerBlockV2),
    "transformer encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3),
    "transformer": partial(nn.Transformer, 16, 2, 1, 1, 32, batch_first=True),
    "lstm": partial(nn.LSTM, 8, 8, 2),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name: str) -> None:
    assert_same(NETWORKS[name])


# Constructors of all kinds.


def initialisers(network: Any) -> None:
    init = nn.init
    kinds = [init.uniform_, init.normal_, init.ones_, init.zeros_, init.eye_, init.xavier_uniform_, init.xavier_normal_]
    kinds += [init.kaiming_uniform_, init.kaiming_normal_, init.orthogonal_, init.trunc_normal_]
    kinds += [partial(init.sparse_, sparsity=0.3), partial(init.constant_, val=2.0)]
    kinds += [partial(init.trunc_normal_, std=std, a=-1, b=1) for std in (0.1, 0.5, 3.0)]  # few and many drawn again
    for index, kind in enumerate(kinds):
        for shape in ((13, 7), (5, 40)):
            weight = Parameter(torch.empty(shape))
            kind(weight)
            setattr(network, f"weight{index}_{shape[0]}", weight)
    network.convolution = nn.Conv2d(4, 8, 3)
    init.dirac_(network.convolution.weight, 2)
    init.trunc_normal_(network.convolution.bias[2:5])


BUFFERS: dict[str, Callable[[], Tensor]] = {
    "normal": lambda: torch.randn(3, 4),
    "uniform": lambda: torch.rand(20).double() + torch.rand_like(torch.empty(20)),
    "permutation": lambda: torch.randn(4)[torch.randperm(4)],
    "integers": lambda: torch.randint(0, 9, (4,)),
    "bernoulli": lambda: torch.bernoulli(torch.full((30,), 0.3)),
    "multinomial": lambda: torch.multinomial(torch.rand(8), 3),
    "poisson": lambda: torch.poisson(torch.rand(20) * 5),
    "exponential": lambda: torch.empty(20).exponential_(),
    "dropout": lambda: functional.dropout(torch.ones(30), 0.5),
    "ranges": lambda: torch.linspace(0, 1, 5) + torch.arange(5) * 2.5,
    "full": lambda: torch.full((3,), 7),
    "triangle": lambda: torch.tril(torch.ones(3, 3)).bool(),
    "grid": lambda: torch.stack(torch.meshgrid(torch.arange(3), torch.arange(4), indexing="ij")),
    "complex": lambda: torch.polar(torch.ones(3), torch.rand(3)) * torch.randn(3, dtype=torch.cfloat),
    "literal": lambda: torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
    "as_tensor": lambda: torch.as_tensor([1, 2]),
    "legacy": lambda: torch.FloatTensor([1.5]) * torch.Tensor(3, 2).normal_()[:, :1],
    "numpy": lambda: torch.from_numpy(np.random.rand(4)),
    "of numpy": lambda: torch.tensor(np.arange(4.0)),
    "python": lambda: torch.tensor([random.random()]),
    "mixed": lambda: torch.randn(3) * torch.tensor([1.0, 2.0, 3.0]) + torch.from_numpy(np.ones(3)),
    "nonzero": lambda: torch.nonzero(torch.tensor([1, 0, 1])),
    "masked": lambda: (lambda x: x[x > 0])(torch.randn(20)),
    "unique": lambda: torch.unique(torch.randint(0, 5, (9,))),
    "svd": lambda: torch.linalg.svd(torch.randn(5, 4))[0],
    "out": lambda: torch.linspace(0, 1, 3, out=torch.empty(0)),
    "resized": lambda: torch.zeros(2).resize_(4).fill_(3),
    "expanded": lambda: torch.rand(1, 3).expand(4, 3),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_buffers(name: str) -> None:
    def build(network: Any) -> None:
        network.before = nn.Linear(2, 2)
        network.register_buffer("buffer", BUFFERS[name](), persistent=False)
        network.after = nn.Linear(2, 2)

    assert_same(lambda: Odd(build))


def views(network: Any) -> None:
    network.weight = weight = Parameter(torch.zeros(6, 8))
    with torch.no_grad():
        weight[0].fill_(2)
        weight[1:3].normal_()
        weight.t()[2].uniform_()
        weight.chunk(2, 1)[1][3:].mul_(0).add_(4)
        weight[:, -1] = torch.arange(6.0)
        weight[weight > 1.5] = 9
        weight.view(-1)[::7].zero_()
        weight[torch.randperm(6)[:2]] = 0.25
        weight.select(1, 3).copy_(torch.randn(6))
        weight.copy_(weight.flip(0))
        weight.data.clamp_(min=-1)
    swapped = torch.zeros(2, 3)
    swapped.t_().fill_(1)
    swapped.unsqueeze_(0)
    network.register_buffer("swapped", swapped)
    torch._foreach_add_([swapped, weight.data], 1.0)
    flat = torch.randn(20)
    network.first, network.second = Parameter(flat[:10].view(2, 5)), Parameter(flat[10:])


def types(network: Any) -> None:
    network.half_layer, network.norm = nn.Linear(5, 6), nn.BatchNorm1d(4)
    network.half()
    network.brain = nn.Linear(3, 3).to(torch.bfloat16).requires_grad_(False)
    network.double_layer = nn.Linear(3, 3, dtype=torch.float64, device="cpu")
    network.to("cpu").cpu()
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    network.layer = nn.Linear(3, 3)
    network.register_buffer("scale", torch.arange(3) * 0.5)
    torch.set_default_dtype(usual)


def asks_for_values(network: Any) -> None:
    network.rates = [x.item() for x in torch.linspace(0, 0.3, 4)]
    assert torch.linspace(0, 1, 3).tolist() == [0, 0.5, 1]
    assert f"{torch.ones(3).sum():.1f} {torch.ones(2)}" == "3.0 tensor([1., 1.])"
    network.layer = layer = nn.Linear(4, int(torch.randperm(5)[0]) + 1)
    if layer.weight.sum() > 0:
        network.sometimes = nn.Linear(2, 2)
    while True:
        draw = torch.randn(4)
        if draw.abs().max() < 1:
            break
    network.register_buffer("draw", draw)
    network.register_buffer("copied", torch.from_numpy(layer.weight.detach().numpy().copy()) * 2)
    network.register_buffer("stacked", torch.tensor([x for x in torch.linspace(0, 1, 3)]))  # noqa: C416  # of tensors
    network.register_buffer("new", layer.weight.new_tensor([1.0, 2.0]))
    network.register_buffer("there", torch.arange(3, device=layer.weight.device))
    assert layer.weight.device.type == "cpu"
    assert not layer.weight.is_meta


def own_generators(network: Any) -> None:
    generator = torch.Generator().manual_seed(5)
    network.first = Parameter(torch.randn(30, generator=generator))
    network.layer = nn.Linear(3, 3)
    nn.init.normal_(network.layer.weight, generator=generator)
    state = generator.get_state()
    network.second = Parameter(torch.rand(3, generator=generator))
    generator.set_state(state)
    network.third = Parameter(torch.empty(9))
    nn.init.trunc_normal_(network.third, std=1, a=-1, b=1, generator=generator)
    network.fourth = Parameter(torch.rand(3, generator=torch.default_generator))
    generator.set_state(torch.get_rng_state())
    network.fifth = Parameter(torch.bernoulli(torch.rand(20), generator=generator))


def seeds(network: Any) -> None:
    network.a = nn.Linear(9, 9)
    torch.manual_seed(1)
    network.b = nn.Linear(9, 9)
    with torch.random.fork_rng():
        network.c = nn.Linear(3, 3)
        torch.manual_seed(7)
        network.d = nn.Linear(3, 3)
    state = torch.get_rng_state()
    with torch.random.fork_rng():
        network.e = nn.Linear(3, 3)
    network.f = nn.Linear(3, 3)
    torch.set_rng_state(state)
    network.g = nn.Linear(int(random.random() * 9) + 1, int(np.random.rand() * 9) + 1)


def parametrized(network: Any) -> None:
    network.weight = parametrizations.weight_norm(nn.Linear(4, 5))
    network.spectral = parametrizations.spectral_norm(nn.Linear(4, 5))
    network.orthogonal = parametrizations.orthogonal(nn.Linear(4, 4))


def skips_initialisation(network: Any) -> None:
    network.a = nn.utils.skip_init(nn.Linear, 4, 4)
    network.b = nn.Linear(3, 3)
    with torch.device("meta"):
        network.c = nn.Linear(3, 3)
    network.c.to_empty(device="cpu")
    for parameter in [*network.a.parameters(), *network.c.parameters()]:
        nn.init.ones_(parameter)


def runs_a_forward(network: Any) -> None:
    network.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten())
    network.head = nn.Linear(network.body(torch.randn(2, 3, 8, 8)).shape[1], 2)


def copies(network: Any) -> None:
    layer = nn.Linear(4, 4)
    network.a = nn.ModuleList(copy.deepcopy(layer) for _ in range(3))
    network.b = copy.deepcopy(network.a)
    network.b.load_state_dict({name: torch.full_like(value, 2.0) for name, value in network.a.state_dict().items()})
    list(network.b)[1].load_state_dict(OUTSIDE)
    network.c = nn.ModuleDict({"x": layer})
    network.attention, network.gru = nn.MultiheadAttention(8, 2), nn.GRU(4, 4, bidirectional=True)
    for parameter in network.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
    network.b[0].weight.data = torch.randn(4, 4)
    for parameter in network.a.parameters():
        parameter.data.mul_(0.5)
        parameter.data = parameter.data.clone()


OUTSIDE = {"weight": torch.eye(4), "bias": torch.ones(4)}
FILE = io.BytesIO()
torch.save(OUTSIDE, FILE)


def numpy_memory(network: Any) -> None:
    array = np.zeros((4, 4))
    around = torch.from_numpy(array)
    around[0] = torch.arange(4.0)
    array[1] = 5
    network.register_buffer("around", around)
    array[2] = 7
    network.drawn = Parameter(torch.from_numpy(np.random.randn(3)).float())
    network.scalar = Parameter(torch.tensor(0.0))
    nn.init.normal_(network.scalar)


def loads_a_file(network: Any) -> None:
    network.layer = nn.Linear(4, 4)
    network.layer.load_state_dict(torch.load(io.BytesIO(FILE.getvalue())))
    nn.init.normal_(network.layer.bias)


def positions(network: Any) -> None:
    table, place = torch.zeros(10, 8), torch.arange(10).unsqueeze(1)
    scale = torch.exp(torch.arange(0, 8, 2) * (-math.log(1e4) / 8))
    table[:, 0::2], table[:, 1::2] = torch.sin(place * scale), torch.cos(place * scale)
    network.register_buffer("table", table[None].transpose(0, 1))


CONSTRUCTORS = [initialisers, views, types, asks_for_values, own_generators, seeds, parametrized, skips_initialisation]
CONSTRUCTORS += [runs_a_forward, copies, numpy_memory, loads_a_file, positions]


@pytest.mark.parametrize("build", CONSTRUCTORS)
def test_constructors(build: Callable[[Any], None]) -> None:
    for seed in (1, 2):
        assert_same(lambda: Odd(build), seed)


def test_tied_names_are_handed_over_once() -> None:
    def build(network: Any) -> None:
        network.embedding = nn.Embedding(11, 6, padding_idx=2)
        network.head = nn.Linear(6, 11, bias=False)
        network.head.weight = network.embedding.weight
        network.other = nn.Embedding(4, 3, padding_idx=-1)

    network: Any = assert_same(lambda: Odd(build))
    assert ties(network) == {"head.weight": "embedding.weight"}
    assert network.head.weight is network.embedding.weight


def test_plain_attributes_have_their_values_at_once() -> None:
    def build(network: Any) -> None:
        network.table = torch.arange(4) * 2
        network.nested = [torch.randn(3), {"a": torch.ones(2)}, partial(print, torch.rand(2))]
        network.hidden = [nn.Linear(2, 2)]

    seed_all(1)
    ordinary: Any = Odd(build)
    seed_all(1)
    network: Any = deferred(lambda: Odd(build))
    assert torch.equal(network.table, ordinary.table)
    assert torch.equal(network.nested[0], ordinary.nested[0])
    assert torch.equal(network.nested[2].args[0], ordinary.nested[2].args[0])
    assert torch.equal(network.hidden[0].weight, ordinary.hidden[0].weight)
    assert isinstance(network.hidden[0].weight, Parameter)


def test_what_nobody_initialises_is_zero() -> None:
    network = deferred(lambda: Odd(lambda net: setattr(net, "weight", Parameter(torch.empty(1000)))))
    assert not taken(network)["weight"].any()


def test_a_network_that_was_edited_in_the_meantime() -> None:
    seed_all(1)
    ordinary = values(MLP(10, 1, 8, 16))
    seed_all(1)
    network: Any = deferred(partial(MLP, 10, 1, 8, 16))
    network[1] = nn.Sequential(network[1])
    del network[3]
    network[0].weight = None
    assert {name: tensor.tolist() for name, tensor in taken(network).items()} == {
        name: tensor.tolist() for name, tensor in ordinary.items()
    }


# Generators, and what cannot be deferred.


def generator_states() -> list[Any]:
    numbers: Any = np.random.get_state()
    return [torch.get_rng_state().tolist(), random.getstate(), numbers[1].tolist(), numbers[2]]


def test_torch_generator_is_left_as_it_was() -> None:
    torch.manual_seed(4)
    before = torch.get_rng_state()
    network = deferred(lambda: Odd(asks_for_values))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)  # the values were decided when the network was built
    after = torch.get_rng_state()
    found = taken(network)
    assert torch.equal(torch.get_rng_state(), after)
    torch.set_rng_state(before)
    assert torch.equal(found["layer.weight"], values(Odd(asks_for_values))["layer.weight"])


def shares_memory(network: Any) -> None:
    network.layer = nn.Linear(2, 2)
    network.transposed = network.layer.weight.data.t()


def swallows(network: Any) -> None:
    try:
        network.layer = nn.Linear(2, 2)
        network.layer.weight.data_ptr()
    except NotDeferrable:
        pass


REFUSED = {
    "cuda": (lambda net: setattr(net, "a", nn.Linear(2, 2, device="cuda")), "Linear cannot be built without memory"),
    "sparse": (lambda net: net.register_buffer("a", torch.eye(3).to_sparse()), "Sparse"),
    "conjugate": (lambda net: net.register_buffer("a", torch.randn(3, dtype=torch.cfloat).conj()), "not a plain array"),
    "lazy": (lambda net: setattr(net, "a", nn.LazyLinear(3)), "a.weight gets its shape in the first forward"),
    "meta": (lambda net: setattr(net, "a", nn.Linear(2, 2, device="meta")), "leaves a.weight on the meta device"),
    "shared": (shares_memory, "Odd.transposed is neither parameter nor buffer"),
    "numpy": (lambda net: torch.from_numpy(np.zeros(3)).normal_(), "memory is not torch's own"),
    "address": (lambda net: torch.ones(3).data_ptr(), "address"),
    "swallowed": (swallows, "address"),
    "error": (lambda net: net.nothing, "AttributeError.*nothing"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_not_deferrable(name: str) -> None:
    build, words = REFUSED[name]

    def make() -> nn.Module:
        nn.Linear(int(random.random() + np.random.rand()) + 1, 2)
        return Odd(build)

    seed_all(2)
    before = generator_states()
    with pytest.raises(NotDeferrable, match=words):
        deferred(make)
    assert generator_states() == before


def test_a_refusal_stays_one() -> None:
    with pytest.raises(Refusal, match="patches"):
        deferred(partial(VisionTransformer, 10, 1, 29, patch_size=2))


def test_values_come_once() -> None:
    network = deferred(partial(nn.Linear, 2, 2))

    def fails(name: str, tensor: Tensor) -> None:
        raise OSError

    with pytest.raises(OSError):
        materialise(network, fails)
    assert is_deferred(network)
    taken(network)
    assert not is_deferred(network)
    with pytest.raises(ValueError, match="has its values already"):
        materialise(network, fails)
    with pytest.raises(ValueError, match="not built by deferred"):
        materialise(nn.Linear(2, 2), fails)


# Memory.


def draw_again(network: Any) -> None:
    for layer in network:
        nn.init.trunc_normal_(layer.weight, std=0.02)
        nn.init.zeros_(layer.bias)


def scale(network: Any) -> None:
    for layer in network:
        layer.weight.data.mul_(0.5)


def normalise(network: Any) -> None:
    for parameter in network.parameters():
        parameter.data = parameter.data / (parameter.data.norm() + 1)


def everything(network: Any) -> None:
    draw_again(network)
    scale(network)
    network.half()
    scale(network)


ENDINGS: dict[str, Callable[[Any], Any]] = {
    "nothing": (lambda network: None),
    "drawn again": draw_again,
    "scaled": scale,
    "halved": (lambda network: network.to(torch.bfloat16)),
    "normalised": normalise,
    "all": everything,
}


@pytest.mark.parametrize("name", ENDINGS)
def test_few_values_are_held_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a constructor does to all its layers in the end."""
    held = []
    carry_out = replay._carry_out

    def measured(step: Any, storages: dict[int, torch.UntypedStorage]) -> None:
        carry_out(step, storages)
        held.append(sum(storage.nbytes() for storage in storages.values()))

    def make() -> nn.Module:
        network = nn.Sequential(*(nn.Linear(64, 64) for _ in range(40)))
        ENDINGS[name](network)
        return network

    assert_same(make)
    monkeypatch.setattr(replay, "_carry_out", measured)
    network = deferred(make)
    assert not held
    materialise(network, lambda name, tensor: None)
    assert max(held) <= 2.1 * 64 * 64 * 4


def test_the_record_goes_with_its_network() -> None:
    network = deferred(partial(nn.Linear, 2, 2))
    gc.collect()
    count = sum(type(one) is replay.Operation for one in gc.get_objects())
    del network
    gc.collect()
    assert sum(type(one) is replay.Operation for one in gc.get_objects()) < count
