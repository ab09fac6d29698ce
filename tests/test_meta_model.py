"""Networks of which one rank builds the values, and the others hold an outline."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchvision.models.swin_transformer import SwinTransformer

from recipes.vision.resnet import resnet18
from recipes.vision.vit import VisionTransformer
from tests.commands import ROOT, finish, torchrun
from tests.processes import Processes
from tests.strategies.toys import STRATEGIES, WIDTH, Net, Plain, built
from trainer.data.rng import seed_all
from trainer.launch.rendezvous import Launch
from trainer.messages import Refusal
from trainer.parallel.meta_model import all_in_state_dict, build_meta_model, is_meta_model
from trainer.parallel.ranks import Ranks
from trainer.records.checkpoint.manager import CheckpointManager
from trainer.strategies.machine import Machine


class Odd(nn.Module):
    """A network whose constructor does what a function says."""

    def __init__(self, build: Callable[[Any], Any]) -> None:
        super().__init__()
        build(self)


def attribute(network: Any) -> None:
    network.table = torch.ones(3)


def inside(network: Any) -> None:
    network.weight = nn.Parameter(torch.randn(3))
    network.added = partial(torch.add, torch.ones(3))


def value(network: Any) -> None:
    network.linear = nn.Linear(3, 3)
    network.deviation = network.linear.weight.std().item()


def mixed(network: Any) -> None:
    network.register_buffer("table", torch.from_numpy(np.ones(3)) + torch.randn(3))


def old_norm(network: Any) -> None:
    with pytest.warns(FutureWarning, match="weight_norm"):
        network.linear = torch.nn.utils.weight_norm(nn.Linear(3, 4))


WHOLE: dict[Callable[[Any], None], str] = {
    attribute: "neither",
    inside: "neither",
    value: "item",
    mixed: "device",
}


@pytest.mark.parametrize("build", WHOLE)
def test_a_constructor_that_needs_values_gets_them_and_the_reason_is_said(build: Callable[[Any], None]) -> None:
    network, why = build_meta_model(partial(Odd, build))
    assert not is_meta_model(network)
    assert WHOLE[build] in why


def test_weights_that_a_hook_computes_before_each_forward_need_no_values() -> None:
    network, why = build_meta_model(partial(Odd, old_norm))
    assert is_meta_model(network)
    assert why == ""


SWIN: dict[str, Any] = {"patch_size": [4, 4], "embed_dim": 16, "depths": [2], "num_heads": [2], "window_size": [2, 2]}


@pytest.mark.parametrize(
    "make",
    [
        partial(resnet18, 10, 1, 28),
        pytest.param(partial(VisionTransformer, 10, 3, 16, depth=2), marks=pytest.mark.long),
        partial(SwinTransformer, **SWIN),  # its buffers are views, which keep what they are views of
        pytest.param(partial(nn.LSTM, 8, 8, 2), marks=pytest.mark.long),
        lambda: torch.nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)),
    ],
)
def test_others_have_an_outline(make: Callable[[], nn.Module]) -> None:
    network, why = build_meta_model(make)
    assert (is_meta_model(network), why) == (True, "")
    assert network.state_dict().keys() == make().state_dict().keys()


def test_a_refusal_stays_one() -> None:
    def refuses(network: Any) -> None:
        raise Refusal("no such width")

    with pytest.raises(Refusal, match="no such width"):
        build_meta_model(partial(Odd, refuses))


class Everything(Net):
    """Values of all kinds: drawn, computed, tied, frozen, and some that no checkpoint holds."""

    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self.head.weight.requires_grad_(False)
        self.again = nn.Linear(24, WIDTH)
        self.again.weight = self.down.weight
        self.register_buffer("order", torch.randperm(7))
        self.register_buffer("table", torch.linspace(0, 1, WIDTH) + torch.rand(WIDTH), persistent=False)
        self.convolution = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3))
        if reads:
            self.deviation = self.up.weight.std().item()

    def forward(self, x: Tensor) -> Tensor:
        y = self.convolution(x[:, :, None, None].expand(-1, -1, 3, 6).reshape(-1, 2, 3, 6 * WIDTH // 2)).mean((1, 2, 3))
        hidden = torch.tanh(self.up(x))
        return self.head(self.norm(x + self.down(hidden) + self.again(hidden) + self.table)) * self.scale + y[:, None]


def begun(launch: Launch, word: str, fields: dict[str, Any], precision: str, reads: bool) -> dict[str, Any]:
    """What a rank holds when the network stands: whole tensors by name; was it an outline; what must stay so."""
    with STRATEGIES[word](machine=Machine(launch=launch, device="cpu", precision=precision), **fields) as strategy:
        seed_all(5)
        network = built(strategy, partial(Everything, reads))
        outlined = is_meta_model(network)
        example = torch.randn(2, WIDTH), (torch.zeros(2, dtype=torch.int64), torch.ones(2))
        parallel_model = strategy.build(Plain(), network, example)
        own: Any = parallel_model.network
        tensors = dict([*own.named_parameters(), *own.named_buffers()])
        whole = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in tensors.items()}
        return {
            "outlined": outlined,
            "values": {name: (str(one.dtype), one.tolist()) for name, one in whole.items()},
            "frozen": {name for name, one in own.named_parameters() if not one.requires_grad},
            "training": own.training,
        }


@pytest.mark.long
@pytest.mark.parametrize(
    ("size", "word", "fields", "precision", "reads"),
    [
        (2, "ddp", {}, "fp32", False),
        (3, "fsdp", {"sync_bn": True}, "fp32", False),
        (2, "fsdp", {"cpu_offload": True}, "fp64", True),
        (4, "pp", {"pipe": 2, "replicate": 2}, "fp32", True),
        (4, "pp", {"pipe": 2, "shard": 2}, "fp64", False),
    ],
)
def test_each_rank_gets_its_part_of_every_value(
    processes: Processes, size: int, word: str, fields: dict[str, Any], precision: str, reads: bool
) -> None:
    (reference,) = processes.run(1, begun, "single", {}, precision, reads)
    ranks = processes.run(size, begun, word, fields, precision, reads)
    assert [rank["outlined"] for rank in ranks] == [word != "ddp" and not reads and rank > 0 for rank in range(size)]
    for rank in ranks:
        assert rank["values"] == {name: reference["values"][name] for name in rank["values"]}
        assert rank["frozen"] == reference["frozen"] & rank["values"].keys()
        assert rank["training"]
    assert {name for rank in ranks for name in rank["values"]} == reference["values"].keys()


def test_what_no_checkpoint_holds_must_be_built() -> None:
    assert not all_in_state_dict(build_meta_model(Everything)[0])
    assert all_in_state_dict(build_meta_model(Net)[0])


@pytest.mark.slow
@pytest.mark.long  # what each rank gets is asked of every strategy above
def test_the_command_line_builds_on_one_rank_and_sends(tmp_path: Path) -> None:
    words = "model=vit_small model.width=768 model.heads=12 model.depth=4 model.patch_size=8 data=synthetic_images"
    words += " data.size=64 data.evaluation_size=0 optimizer.lr=0 loop.global_batch=4 loop.steps=1 seed=5 device=cpu"
    words += f" strategy=fsdp task._target_=memory_runs.Watched trust=[memory_runs] run.dir={tmp_path / 'run'}"
    environment = {"MEMORY_FIGURES": str(tmp_path), "PYTHONPATH": f"{ROOT / 'scripts'}:{ROOT}"}
    finish(torchrun(2, *words.split()), tmp_path, environment=environment)

    seed_all(5)
    own = VisionTransformer(10, 3, 32, patch_size=8, width=768, heads=12, depth=4)
    checkpoints = CheckpointManager(tmp_path / "run/checkpoints", Ranks())
    found = checkpoints.newest()
    assert found is not None
    begun = {name: torch.empty_like(value) for name, value in own.state_dict().items()}
    checkpoints.read(found, begun)  # after a step of no length
    assert all(torch.equal(begun[name], value) for name, value in own.state_dict().items())

    # neither rank has ever held all of it beside its shard, not even the one that builds
    figures = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    whole = sum(parameter.nbytes for parameter in own.parameters())
    assert max(built - empty for empty, built, _ in figures) < whole, figures
