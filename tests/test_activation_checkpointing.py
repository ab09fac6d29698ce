"""Recomputing changes what is kept and nothing else: losses, gradients, buffers and names are those without it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils._python_dispatch import TorchDispatchMode

from recipes.vision.vit import VisionTransformer
from trainer.parallel.activation_checkpointing import apply_activation_checkpointing

modes = pytest.mark.parametrize("mode", ["units", "operators"])


def convolutions() -> nn.Module:
    """Everything that a second run could spoil: running statistics, dropout, what is done in place."""
    return nn.Sequential(
        *(
            nn.Sequential(
                nn.Conv2d(3, 3, 3, padding=1),
                nn.ReLU(inplace=True),
                nn.BatchNorm2d(3, momentum=momentum),
                nn.Dropout(0.2),
                nn.InstanceNorm2d(3, track_running_stats=True),
            )
            for momentum in (0.1, None)  # None: a cumulative mean
        ),
        nn.Flatten(),
        nn.Linear(3 * 6 * 6, 5),
    )


def spectral() -> nn.Module:
    """Its weights follow from buffers that every forward moves on."""
    return nn.Sequential(
        *(nn.Sequential(nn.Flatten(), spectral_norm(nn.Linear(108, 108)), nn.GELU()) for _ in range(2))
    )


def attention() -> nn.Module:
    return VisionTransformer(5, 3, 6, patch_size=2, width=12, depth=2, heads=2, dropout=0.2)


# each with what is recomputed as one
NETWORKS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "convolutions": (convolutions, ["0", "1"]),
    "spectral": (spectral, ["0", "1"]),
    "attention": (attention, ["blocks.0", "blocks.1"]),
}


def built(name: str, mode: str, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(1)
    make, units = NETWORKS[name]
    network = make().to(dtype)
    if mode != "none":
        apply_activation_checkpointing(network, units, mode)  # type: ignore[arg-type]  # a name out of a table
    return network


def train(network: nn.Module, steps: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and everything a network holds after some steps; of the two forwards in one the later comes back first."""
    optimizer, losses = torch.optim.SGD(network.parameters(), lr=0.1), []
    for step in range(steps):
        torch.manual_seed(step)
        x = torch.randn(4, 3, 6, 6, dtype=torch.float64)
        first, second = network(x).square().mean(), network(2 * x).square().mean()
        if step:
            second.backward()
            first.backward()
        else:
            (first + second).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses += [first.item(), second.item()]
    return losses, network.state_dict()


@modes
@pytest.mark.parametrize("name", NETWORKS)
def test_losses_weights_buffers_and_names_are_the_same(name: str, mode: str) -> None:
    plain, network = built(name, "none"), built(name, mode)
    assert [name for name, _ in network.named_modules()] == [name for name, _ in plain.named_modules()]
    assert [type(one).__qualname__ for one in network.modules()] == [type(one).__qualname__ for one in plain.modules()]
    losses, state = train(plain)
    again, same = train(network)
    assert again == losses
    assert list(same) == list(state)
    for key, value in state.items():
        assert torch.equal(same[key], value), key


@modes
def test_reduced_precision_is_that_of_the_forward(mode: str) -> None:
    gradients = []
    for kept in ("none", mode):
        network = built("attention", kept, torch.float32)
        torch.manual_seed(2)
        with torch.autocast("cpu", torch.bfloat16):
            loss = network(torch.randn(4, 3, 6, 6)).float().square().mean()
        loss.backward()  # outside, as a step does it
        gradients.append([parameter.grad for parameter in network.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


# What is kept and what is computed.


class Count(TorchDispatchMode):
    """How often each operator runs, and the storages that came of them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self._made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls[str(func).removeprefix("aten.").removesuffix(".default")] += 1
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._made[StorageWeakRef(storage)] = storage.nbytes()
        return out

    def alive(self) -> int:
        """Bytes of what the operators made and somebody still holds."""
        return sum(size for storage, size in self._made.items() if not storage.expired())


class Deep(nn.Module):
    """Blocks of what is dear to compute, each by one operator, and of what is cheap."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.units = nn.ModuleList(Unit(drop) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        return x


class Unit(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.convolution, self.linear, self.drop = nn.Conv1d(8, 8, 3, padding=1), nn.Linear(8, 8), drop

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8, T)."""
        y = functional.gelu(self.convolution(x)).unflatten(1, (2, 4)).transpose(2, 3).contiguous()  # (B, 2, T, 4)
        y = functional.scaled_dot_product_attention(y, y, y, dropout_p=self.drop).transpose(2, 3).flatten(1, 2)
        rows = self.linear(y.transpose(1, 2).reshape(-1, 8))
        return x + torch.sin(rows).unflatten(0, (len(x), -1)).transpose(1, 2)


def deep(mode: str, drop: float = 0.0) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    network = Deep(drop).double()
    if mode != "none":
        apply_activation_checkpointing(network, [f"units.{n}" for n in range(4)], mode)  # type: ignore[arg-type]
    return network, torch.randn(16, 8, 64, dtype=torch.float64)


DEAR = ("addmm", "convolution", "_scaled_dot_product_flash_attention_for_cpu")


def test_units_run_again_in_the_backward_and_dear_operators_only_once_where_that_is_asked() -> None:
    held, backward = {}, {}
    for mode in ("none", "units", "operators"):
        network, x = deep(mode)
        with Count() as count:
            loss = network(x).sum()
        held[mode] = count.alive()
        assert [count.calls[name] for name in (*DEAR, "gelu")] == [4] * 4
        with Count() as count:
            loss.backward()
        backward[mode] = count.calls
        with Count() as count, torch.no_grad():  # nothing runs twice in an evaluation
            network.eval()(x)
        assert [count.calls[name] for name in (*DEAR, "gelu")] == [4] * 4
    for name in DEAR:
        assert (backward["none"][name], backward["units"][name], backward["operators"][name]) == (0, 4, 0), name
    assert (backward["none"]["gelu"], backward["units"]["gelu"], backward["operators"]["gelu"]) == (0, 4, 4)
    # so much less lies between forward and backward: a unit's input is 1 of some 10 tensors of its size
    assert held["units"] < 0.3 * held["none"]
    assert held["units"] < held["operators"] < 0.95 * held["none"]


class Cache:
    """Keys of the tokens so far, as transformers keeps them."""

    def __init__(self) -> None:
        self.keys = torch.zeros(0, 4)

    def get_seq_length(self) -> int:
        return len(self.keys)


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(4, 4)

    def forward(self, x: Tensor, past: Cache) -> Tensor:
        past.keys = torch.cat([past.keys, self.key(x)])
        return x @ past.keys.T @ past.keys


@modes
def test_a_cache_of_keys_and_values_is_refused_with_what_to_set(mode: Any) -> None:
    network = nn.Sequential(Cached())
    apply_activation_checkpointing(network, ["0"], mode)
    with pytest.raises(ValueError, match="use_cache=False"):
        network[0](torch.ones(3, 4), past=Cache())
    with torch.no_grad():  # nothing is repeated
        network[0](torch.ones(3, 4), past=Cache())
