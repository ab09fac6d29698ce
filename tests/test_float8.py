"""float8: what is refused, what is converted, and that a converted network trains. Emulated: no CPU multiplies it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from recipes.language.decoder import Decoder
from recipes.vision.vit import VisionTransformer
from tests.commands import SMALL
from tests.inside import here
from tests.processes import Processes
from tests.quick import quickly
from tests.strategies.toys import Case, run
from trainer import Plan
from trainer.launch.rendezvous import Launch
from trainer.messages import Refusal
from trainer.parallel import float8_linear
from trainer.parallel.float8_linear import convert_to_float8, float8_layers, refuse_no_float8_layers
from trainer.strategies.machine import Machine


def vit(width: int = 32) -> nn.Module:
    return VisionTransformer(10, 3, 8, patch_size=4, width=width, depth=4, heads=2)


def test_layers_of_blocks_are_converted_whose_sizes_divide() -> None:
    names = {name for name, _ in float8_layers(vit(), Plan(shard=("blocks.*",)))}
    assert all(name.startswith("blocks.") for name in names)
    assert len(names) == 4 * 4  # attention and mlp have two each
    with pytest.raises(Refusal, match="no linear layer inside a unit has two sizes that are multiples of 16"):
        refuse_no_float8_layers("rowwise", vit(24), Plan(shard=("blocks.*",)))
    with pytest.raises(Refusal, match="each of 4 tensor ranks needs a part that is a multiple of 16"):
        refuse_no_float8_layers("rowwise", vit(), Plan(shard=("blocks.*",)), 4)


@pytest.mark.parametrize(
    ("kind", "capability", "precision", "package", "said"),
    [
        ("xpu", (9, 0), "bf16", True, "xpu multiplies no float8"),
        ("cuda", (8, 0), "bf16", True, "this GPU has compute capability 8.0, float8 needs 8.9 or more"),
        ("cuda", (9, 0), "fp32", True, "use precision=bf16"),
        ("cuda", (9, 0), "bf16", False, r"pip install 'one-curve-trainer\[float8\]'"),
    ],
)
def test_it_is_refused_before_the_process_group(
    kind: str, capability: tuple[int, int], precision: str, package: bool, said: str
) -> None:
    with (
        patch("trainer.strategies.machine.accelerator_type", lambda: kind),
        patch("trainer.strategies.machine.is_bf16_supported", lambda *_, **__: True),
        patch("torch.cuda.get_device_capability", lambda: capability),
        patch("trainer.parallel.float8_linear.find_spec", lambda _: object() if package else None),
        pytest.raises(Refusal, match=said),
    ):
        Machine(precision=precision, float8="rowwise").check()


def test_on_a_cpu_a_run_says_what_works(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refusal, match=r"float8=tensorwise: cpu multiplies no float8.*; float8=false computes in bf16"):
        here(*SMALL, "float8=tensorwise", "device=cpu")


def trained(launch: Launch, case: Case, recipe: Any) -> dict[str, Any]:
    """A run of a toy that is wide enough for two tensor ranks, in float8 as torchao emulates it, or without."""
    wide = patch("tests.strategies.sequences.Decoder", lambda *args, **sizes: Decoder(*args, **{**sizes, "width": 32}))
    if not recipe:
        with wide:
            return run(launch, case)
    config = replace(float8_linear._config(recipe), emulate=True)
    with (
        wide,
        patch("trainer.parallel.float8_linear._config", lambda recipe: config),
        patch("tests.strategies.toys.Machine", partial(Machine, float8=recipe)),
    ):
        return run(launch, case)


SPREAD = {"alone": (1, Case()), "ddp": (2, Case("ddp")), "fsdp": (2, Case("fsdp")), "tp": (2, Case("tp"))}
SPREAD |= {"pp": (2, Case("pp", micro_batches=2)), "zero1": (2, Case("zero1", {"activation_checkpointing": "units"}))}


@pytest.mark.parametrize("where", quickly(SPREAD, "fsdp", "tp"))
@pytest.mark.parametrize("recipe", quickly(["tensorwise", "rowwise"], "tensorwise"))
def test_a_converted_network_trains_nearly_as_it_is(processes: Processes, where: str, recipe: str) -> None:
    pytest.importorskip("torchao", reason="the extra float8")
    size, case = SPREAD[where]
    case = case.but(network="gpt", task="next", precision="bf16", steps=6)
    plain, ranks = (processes.run(size, trained, case, asked) for asked in (False, recipe))
    for one, other in zip(plain, ranks, strict=True):
        assert one["losses"] != other["losses"]
        assert other["losses"] == pytest.approx(one["losses"], rel=0.05)
        assert one["names"] == other["names"]
        assert one["initial"] == other["initial"]  # the values of a network that is not converted


def test_weights_and_names_are_those_of_the_network() -> None:
    pytest.importorskip("torchao", reason="the extra float8")
    network = vit()
    before = dict(network.state_dict())
    convert_to_float8(network, Plan(shard=("blocks.*",)), "rowwise")
    assert {
        type(network.get_submodule(name)).__name__ for name, _ in vit().named_modules() if name.endswith("mlp.up")
    } == {"Float8Linear"}
    after = network.state_dict()
    assert list(before) == list(after)
    assert all(before[name].data_ptr() == after[name].data_ptr() for name in before)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:torch.get_autocast_gpu_dtype:DeprecationWarning")  # torchao calls it
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_on_a_gpu_it_trains(tmp_path: Path, monkeypatch: Any, recipe: str) -> None:
    pytest.importorskip("torchao", reason="the extra float8")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no float8")
    monkeypatch.chdir(tmp_path)
    network = ("model=gpt_nano", "data=synthetic_tokens", "data.length=64", "loop.steps=5", "loop.log_every=1")
    words = (f"float8={recipe}", "precision=bf16", "device=cuda", "run.dir=run", "loop.global_batch=6")
    assert here(*network, *words) == 0
