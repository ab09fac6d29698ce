"""A folder of transformers is taken only where its config.json describes the decoder that is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from recipes.language.decoder import Decoder
from tests.inside import here
from trainer.jobs.initial_weights import InitialWeights
from trainer.messages import Refusal

SIZES: dict[str, Any] = {"vocab_size": 30, "context": 16, "width": 32, "depth": 2, "heads": 4}
GPT2: dict[str, Any] = {**SIZES, "mlp": "gelu_tanh"}
LLAMA: dict[str, Any] = {
    **SIZES,
    "norm": "rms",
    "mlp": "swiglu",
    "rotary": 1e4,
    "bias": False,
    "groups": 2,
    "inner": 48,
}
QWEN2 = {**LLAMA, "qkv_bias": True}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}


def begun(network: Decoder, folder: Path) -> list[str]:
    initial = InitialWeights(str(folder), "-loss")
    initial.find(network)
    initial.load_into(network)
    return initial.lines


OTHERS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
    (LLAMA, {}, {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}, r"\(model\.rotary=77\.0\)"),
    (LLAMA, {}, {"rope_parameters": None, "rope_theta": 77.0}, r"\(model\.rotary=77\.0\)"),
    (LLAMA, {}, {"rope_parameters": LLAMA3}, "rope_type llama3, here default"),
    (LLAMA, {}, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type linear, here default"),
    (LLAMA, {"eps": 1e-6}, {}, r"rms_norm_eps 1e-05, here 1e-06 \(model\.eps=1e-05\)"),
    (LLAMA, {"tied": False}, {"tie_word_embeddings": True, "attention_bias": True}, "attention_bias True, here False"),
    (QWEN2, {"qkv_bias": None}, {}, r"model_type qwen2, here llama \(model=llama model\.qkv_bias=true\)"),
    (QWEN2, {}, {"use_sliding_window": True}, "use_sliding_window True"),
    (LLAMA, {}, {"model_type": "mistral"}, "model_type mistral, here llama"),
    (GPT2, {"depth": 1}, {}, r"n_layer 2, here 1 \(model\.depth=2\)"),
    (GPT2, {"heads": 2}, {}, r"\(model\.heads=4\)"),
    (GPT2, {"mlp": "gelu"}, {}, r"activation_function gelu_new, here gelu \(model\.mlp=gelu_tanh\)"),
    (GPT2, {}, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
]


@pytest.mark.parametrize(("there", "here", "config", "said"), OTHERS)
def test_another_network_is_refused_in_words(
    tmp_path: Path, there: dict[str, Any], here: dict[str, Any], config: dict[str, Any], said: str
) -> None:
    Decoder(**there).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(written | config))
    with pytest.raises(Refusal, match=f"describes another network: .*{said}"):
        begun(Decoder(**there | here), tmp_path)
    # who knows better names the file
    begun(Decoder(**there | here), tmp_path / "model.safetensors")


@pytest.mark.parametrize("family", [GPT2, LLAMA])
def test_a_head_that_is_tied_there_may_stand_alone_here(tmp_path: Path, family: dict[str, Any]) -> None:
    there, here = Decoder(**family), Decoder(**family, tied=False)
    there.save_pretrained(tmp_path)
    assert not any("not there" in line for line in begun(here, tmp_path))
    tokens = torch.randint(30, (2, 16))
    torch.testing.assert_close(here(tokens), there(tokens), rtol=0, atol=0)

    # the other way would lose one of them
    here.save_pretrained(tmp_path)
    with pytest.raises(Refusal, match=r"tie_word_embeddings False, here True \(model\.tied=false\)"):
        begun(there, tmp_path)


def test_context_and_vocabulary_may_be_others(tmp_path: Path) -> None:
    Decoder(**LLAMA).save_pretrained(tmp_path)
    lines = begun(Decoder(**LLAMA | {"context": 99, "vocab_size": 31}), tmp_path)
    assert any("of another shape, not loaded: embed.weight" in line for line in lines)


def test_no_token_of_a_foreign_vocabulary_ends_a_text(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra bench brings it")
    for family in (GPT2, LLAMA, QWEN2):
        Decoder(**family).save_pretrained(tmp_path)
        config = transformers.AutoConfig.from_pretrained(tmp_path)
        assert (config.bos_token_id, config.eos_token_id) == (None, None)


@pytest.mark.long
@pytest.mark.parametrize(("option", "family"), [("gpt2", GPT2), ("llama", LLAMA), ("llama", QWEN2)])
def test_the_sizes_come_from_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, family: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    Decoder(**family | {"vocab_size": 300, "eps": 1e-6}).save_pretrained(tmp_path / "theirs")
    words = [f"model={option}", "model.settings=theirs", "init_from=theirs", "data.length=8", "loop.global_batch=4"]
    words += ["loop.eval_every=null", "loop.eval_batch=64", "data.held=0.001", "run.dir=run"]
    assert here(*words, "loop.steps=1") == 0
    stored = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["model"]
    assert (stored["width"], stored["depth"], stored["vocab_size"], stored["settings"]) == (32, 2, 300, None)
    assert "not loaded" not in (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    # the run goes on where the folder is gone
    (tmp_path / "theirs").rename(tmp_path / "gone")
    assert here(*words, "loop.steps=2", "run.accept_changes=true") == 0
    assert here("run.dir=run", "job=evaluate") == 0


def test_a_context_that_is_not_the_folders_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Decoder(**GPT2 | {"vocab_size": 300}).save_pretrained(tmp_path / "theirs")
    words = ["model=gpt2", "model.settings=theirs", "init_from=theirs", "data.length=4", "run.dir=run"]
    with pytest.raises(Refusal, match=r"n_positions 16, here 8 \(model.context=16\)"):
        here(*words, "model.context=8")
    with pytest.raises(Refusal, match=r"CNN reads no config.json .* model=gpt2 and model=llama do"):
        here("model=cnn", "model.settings=theirs")
