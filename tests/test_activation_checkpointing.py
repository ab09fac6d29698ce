"""Recomputing changes what is kept and nothing else: losses, gradients, buffers and names are those without it."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils._python_dispatch import TorchDispatchMode

from recipes.vision.vit import VisionTransformer
from trainer import Plan
from trainer.messages import Refusal
from trainer.parallel.activation_checkpointing import (
    EXPENSIVE,
    _expensive_operators,
    _policy,
    apply_activation_checkpointing,
)
from trainer.parallel.module_units import find_units

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


def transformer() -> nn.Module:
    layers = (nn.TransformerEncoderLayer(36, 2, 24, batch_first=True) for _ in range(2))
    return nn.Sequential(nn.Flatten(2), *layers)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "convolutions": convolutions,
    "spectral": spectral,
    "attention": attention,
    "transformer": transformer,
}


def train(make: Callable[[], nn.Module], mode: str, steps: int = 4) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and everything the network holds after some steps of two forwards and one backward each."""
    torch.manual_seed(1)
    network = built(make, mode)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        x = torch.randn(4, 3, 6, 6, dtype=torch.float64)
        loss = network(x).square().mean() + network(2 * x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, network.state_dict()


def built(make: Callable[[], nn.Module], mode: str, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(1)
    network = make().to(dtype)
    if mode != "none":
        apply_activation_checkpointing(network, find_units(network, Plan()), mode)  # type: ignore[arg-type]  # a name out of a table
    return network


@modes
@pytest.mark.parametrize("name", NETWORKS)
def test_losses_weights_and_buffers_are_the_same(name: str, mode: str) -> None:
    losses, state = train(NETWORKS[name], "none")
    again, same = train(NETWORKS[name], mode)
    assert again == losses
    assert list(same) == list(state)
    for key, value in state.items():
        assert torch.equal(same[key], value), key


@modes
def test_a_layer_that_is_frozen_or_thawed_later_keeps_its_statistics_right(mode: str) -> None:
    after = []
    for kept in ("none", mode):
        network = built(convolutions, kept)
        for frozen in (True, False):
            network.train()
            network[0][2].train(not frozen)
            network(torch.ones(2, 3, 6, 6, dtype=torch.float64)).sum().backward()
        after.append(network.state_dict())
    assert all(torch.equal(after[1][key], value) for key, value in after[0].items())


@modes
def test_reduced_precision_is_that_of_the_forward(mode: str) -> None:
    gradients = []
    for kept in ("none", mode):
        network = built(attention, kept, torch.float32)
        torch.manual_seed(2)
        with torch.autocast("cpu", torch.bfloat16):
            loss = network(torch.randn(4, 3, 6, 6)).float().square().mean()
        loss.backward()  # outside, as a step does it
        gradients.append([parameter.grad for parameter in network.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@modes
def test_names_and_classes_stay_and_a_copy_is_a_network_of_its_own(mode: str) -> None:
    network, plain = built(attention, mode), built(attention, "none")
    assert [name for name, _ in network.named_modules()] == [name for name, _ in plain.named_modules()]
    assert list(network.state_dict()) == list(plain.state_dict())
    assert repr(network) == repr(plain)
    assert isinstance(network.blocks[0], type(plain.blocks[0]))
    other = copy.deepcopy(network)
    other(torch.ones(1, 3, 6, 6, dtype=torch.float64)).sum().backward()
    assert all(parameter.grad is None for parameter in network.parameters())
    assert all(parameter.grad is not None for parameter in other.parameters())


def test_a_part_of_a_recomputed_sequence_can_be_called() -> None:
    network = built(convolutions, "units")
    network[0][:2](torch.ones(1, 3, 6, 6, dtype=torch.float64)).sum().backward()


def test_inputs_by_name_and_outputs_in_a_tuple() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, *, scale: Tensor) -> tuple[Tensor, Tensor]:
            return x.exp() * scale, scale

    network = nn.Sequential(Two())
    apply_activation_checkpointing(network, ["0"], "units")
    scale = torch.ones(3, requires_grad=True)
    network[0](torch.ones(2, 3), scale=scale)[0].sum().backward()
    assert scale.grad is not None


def test_a_forward_that_was_replaced_is_refused() -> None:
    network = nn.Sequential(nn.Linear(2, 2))
    network[0].forward = functional.gelu
    with pytest.raises(Refusal, match="0 cannot be recomputed: its forward was replaced"):
        apply_activation_checkpointing(network, ["0"], "units")


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


def deep() -> nn.Module:
    return VisionTransformer(5, 3, 6, patch_size=2, width=12, depth=4, heads=2)


def kept(mode: str) -> int:
    """Bytes that lie between forward and backward."""
    network, x = built(deep, mode), torch.randn(16, 3, 6, 6, dtype=torch.float64)
    network(x).sum().backward()  # buffers have been looked at
    with Count() as count:
        loss = network(x).sum()
    held = count.alive()
    del loss
    return held


def test_memory_falls() -> None:
    everything, operators, inputs = kept("none"), kept("operators"), kept("units")
    assert inputs < 0.25 * everything  # a block's inputs are 1 of some 20 tensors of their size
    assert inputs < operators < 0.75 * everything


@contextmanager
def counted(mode: str) -> Iterator[tuple[Counter[str], Counter[str]]]:
    network = built(deep, mode)
    with Count() as forward:
        loss = network(torch.ones(2, 3, 6, 6, dtype=torch.float64)).sum()
    with Count() as backward:
        loss.backward()
    yield forward.calls, backward.calls


DEAR_HERE = ("addmm", "_scaled_dot_product_flash_attention_for_cpu")


def test_units_run_again_in_the_backward_and_dear_operators_only_once_where_that_is_asked() -> None:
    with counted("none") as (plain, backward), counted("units") as (_, again), counted("operators") as (_, cheap):
        for name in DEAR_HERE:
            assert plain[name] >= 4
            assert backward[name] == cheap[name] == 0
            assert again[name] >= 4
        assert backward["gelu"] == 0
        assert again["gelu"] == cheap["gelu"] == 4


@pytest.mark.parametrize("mode", ["none", "units", "operators"])
def test_nothing_runs_twice_in_evaluation(mode: str) -> None:
    network = built(deep, mode).eval()
    with Count() as count, torch.no_grad():
        network(torch.ones(2, 3, 6, 6, dtype=torch.float64))
    assert count.calls["gelu"] == 4
    assert count.calls["clone"] == built_calls("clone")


def built_calls(name: str) -> int:
    network = built(deep, "none").eval()
    with Count() as count, torch.no_grad():
        network(torch.ones(2, 3, 6, 6, dtype=torch.float64))
    return count.calls[name]


def test_the_operators_that_are_kept_exist() -> None:
    """Of those that every build has; a name that torch dropped would silently be recomputed."""
    names = {str(operator) for operator in _expensive_operators()}
    for name in ("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product_flash_attention_for_cpu"):
        assert f"aten.{name}.default" in names
    assert {f"_c10d_functional.{name}.default" for name in EXPENSIVE["_c10d_functional"]} <= names
    for operator in _expensive_operators():
        if "attention" in str(
            operator
        ):  # `_keep` tells the rate of dropout by being the only float among the arguments
            floats = [a.name for a in operator._schema.arguments if str(a.type) == "float" and not a.kwarg_only]
            assert floats == ["dropout_p"], operator


def test_attention_with_dropout_runs_again_so_that_later_random_numbers_stay_in_step() -> None:
    operator = torch.ops.aten._scaled_dot_product_flash_attention.default
    q = torch.zeros(1)
    assert "SAVE" in _policy(None, operator, q, q, q).name
    assert "SAVE" in _policy(None, operator, q, q, q, 0.0, True).name
    assert "RECOMPUTE" in _policy(None, operator, q, q, q, 0.1, True).name
    assert "RECOMPUTE" in _policy(None, operator, q, q, q, dropout_p=0.1).name
    assert "SAVE" in _policy(None, torch.ops.aten.addmm.default, q, q, q, beta=1.0).name


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


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Cached()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, past=Cache())


@modes
def test_a_cache_of_keys_and_values_is_refused_with_what_to_set(mode):
    network = Decoder()
    apply_activation_checkpointing(network, ["layer"], mode)
    with pytest.raises(ValueError, match="use_cache=False"):
        network(torch.ones(3, 4))
    with torch.no_grad():  # nothing is repeated
        network(torch.ones(3, 4))
