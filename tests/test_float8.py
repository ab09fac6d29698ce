"""float8: what is refused, what is converted, and that a converted network trains: no CPU multiplies it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from recipes.vision.vit import VisionTransformer
from tests.run import SMALL, run
from trainer import Plan, Refusal
from trainer.parallel.float8_linear import convert_to_float8, float8_layers, refuse_float8, refuse_no_float8_layers

BLOCKS = Plan(shard=("blocks.*",))


def vit(width: int = 32) -> nn.Module:
    return VisionTransformer(10, 3, 8, patch_size=4, width=width, depth=4, heads=2)


def test_layers_of_blocks_are_converted_whose_sizes_divide() -> None:
    names = {name for name, _ in float8_layers(vit(), BLOCKS)}
    assert all(name.startswith("blocks.") for name in names)
    assert len(names) == 4 * 4  # attention and mlp have two each
    with pytest.raises(Refusal, match="no linear layer inside a unit has two sizes that are multiples of 16"):
        refuse_no_float8_layers("rowwise", vit(24), BLOCKS)
    with pytest.raises(Refusal, match="each of 4 tensor ranks needs a part that is a multiple of 16"):
        refuse_no_float8_layers("rowwise", vit(), BLOCKS, 4)


@pytest.mark.parametrize(
    ("kind", "capability", "precision", "package", "said"),
    [
        ("xpu", (9, 0), "bf16", True, "xpu multiplies no float8"),
        ("cuda", (8, 0), "bf16", True, "this GPU has compute capability 8.0, float8 needs 8.9 or more"),
        ("cuda", (9, 0), "fp32", True, "use precision=bf16"),
        ("cuda", (9, 0), "bf16", False, r"pip install 'one-curve-trainer\[float8\]'"),
    ],
)
def test_where_nothing_multiplies_it_that_is_said(
    monkeypatch: pytest.MonkeyPatch, kind: str, capability: Any, precision: str, package: bool, said: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setitem(sys.modules, "torchao", json if package else None)  # something that is there
    with pytest.raises(Refusal, match=said):
        refuse_float8("rowwise", kind, precision)


def test_on_a_cpu_a_run_says_what_works(tmp_path: Path) -> None:
    said = run([*SMALL, "float8=tensorwise"], place=tmp_path, code=2).out
    assert "float8=tensorwise: cpu multiplies no float8" in said
    assert "; float8=false computes in bf16" in said


def test_weights_and_names_are_those_of_the_network() -> None:
    pytest.importorskip("torchao", reason="the extra float8")
    network = vit()
    before = dict(network.state_dict())
    convert_to_float8(network, BLOCKS, "rowwise")
    kinds = {type(module).__name__ for name, module in network.named_modules() if name.endswith("mlp.up")}
    assert kinds == {"Float8Linear"}
    after = network.state_dict()
    assert list(before) == list(after)
    assert all(before[name].data_ptr() == after[name].data_ptr() for name in before)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:torch.get_autocast_gpu_dtype:DeprecationWarning")  # torchao calls it
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_on_a_gpu_it_trains(tmp_path: Path, recipe: str) -> None:
    pytest.importorskip("torchao", reason="the extra float8")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no float8")
    words = ["model=gpt_nano", "data=synthetic_tokens", "data.length=64", "loop.steps=5", "loop.global_batch=6"]
    run([*words, f"float8={recipe}", "precision=bf16", "device=cuda", "run.dir=run"], place=tmp_path)
