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
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
LINEAR: dict[str, Any] = {"rope_type": "linear", "factor": 2.5}


def test_windows_in_every_other_layer_are_refused(tmp_path: Path) -> None:
    Decoder(**QWEN2, window=5, window_from=1).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    assert Decoder.settings_of(tmp_path, None)["window"] == 5
    assert Decoder.settings_of(tmp_path, None)["window_from"] == 1
    file.write_text(json.dumps(config | {"layer_types": ["sliding_attention", "full_attention"]}))
    with pytest.raises(Refusal, match=r"windows in other layers than from one layer on \(layer_types\)"):
        Decoder.settings_of(tmp_path, None)
    with pytest.raises(Refusal, match=r"model\.window=0, model\.window_from=0: tokens that a token sees"):
        Decoder(**QWEN2, window=0)


def begun(network: Decoder, folder: Path) -> list[str]:
    initial = InitialWeights(str(folder), "-loss")
    initial.find(network)
    initial.load_into(network)
    return initial.lines


OTHERS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
    (LLAMA, {}, {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}, r"\(model\.rotary=77\.0\)"),
    (LLAMA, {}, {"rope_parameters": None, "rope_theta": 77.0}, r"\(model\.rotary=77\.0\)"),
    (
        LLAMA,
        {},
        {"rope_parameters": {**LLAMA3, "rope_theta": 1e4}},
        r"rope_scaling .*, here None \(model\.rotary_scaling=\{rope_type:llama3,factor:8\.0,low_freq_factor:1\.0,",
    ),
    (LLAMA, {}, {"rope_scaling": {"type": "linear", "factor": 2.0}}, r"\(model\.rotary_scaling=\{rope_type:linear,fac"),
    (
        LLAMA | {"rotary_scaling": LLAMA3},
        {"rotary_scaling": None},
        {},
        r"here None \(model\.rotary_scaling=\{rope_type:llama3,",
    ),
    (LLAMA, {"eps": 1e-6}, {}, r"rms_norm_eps 1e-05, here 1e-06 \(model\.eps=1e-05\)"),
    (LLAMA, {"tied": False}, {"tie_word_embeddings": True, "attention_bias": True}, "attention_bias True, here False"),
    (QWEN2, {"qkv_bias": None}, {}, r"model_type qwen2, here llama \(model=llama model\.qkv_bias=true\)"),
    (QWEN2, {}, {"use_sliding_window": True}, r"window 4096, here None \(model\.window=4096\); window_from 28, here 0"),
    (LLAMA, {}, {"model_type": "mistral", "sliding_window": 7}, r"window 7, here None \(model\.window=7\)"),
    (LLAMA, {"window": 5}, {}, r"window None, here 5 \(model\.window=null\)"),
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


def test_folders_that_are_not_read_are_refused(tmp_path: Path) -> None:
    Decoder(**LLAMA).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(written | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(Refusal, match=r"has a quantization_config: .* need their scales"):
        begun(Decoder(**LLAMA), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(written | {"model_type": "mixtral"}))
    with pytest.raises(Refusal, match=r"it describes a mixtral; there are .*; model=hf_decoder model\.path=.* trains"):
        Decoder.settings_of(tmp_path, None)
    with pytest.raises(Refusal, match=r"model_type mixtral, here llama"):
        begun(Decoder(**LLAMA), tmp_path)
    with pytest.raises(Refusal, match=r"a mixture of experts is none of the networks of transformers"):
        begun(Decoder(**LLAMA, experts=4), tmp_path)


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
@pytest.mark.parametrize(
    ("option", "family"), [("gpt2", GPT2), ("llama", LLAMA | {"rotary_scaling": LLAMA3}), ("llama", QWEN2)]
)
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


@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("scaling", [LLAMA3, LINEAR], ids=["llama3", "linear"])
def test_scaled_positions_are_those_of_transformers(tmp_path: Path, form: str, scaling: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra bench brings it")
    config = transformers.LlamaConfig(
        vocab_size=30,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        rope_parameters={"rope_theta": 1e4, **scaling},
        initializer_range=0.5,
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "config.json"
    written = json.loads(file.read_text())
    if form == "rope_scaling":  # as version 4 writes it
        del written["rope_parameters"]
        written |= {"rope_theta": 1e4, "rope_scaling": {**scaling, "type": scaling["rope_type"]}}
        file.write_text(json.dumps(written))
    settings = Decoder.settings_of(tmp_path / "theirs", 30)
    own = Decoder(**{key: value for key, value in settings.items() if key != "context"}, context=32).eval()
    begun(own, tmp_path / "theirs")
    tokens = torch.randint(30, (3, 32))  # four times as many as the original ones
    expected = theirs(tokens).logits
    torch.testing.assert_close(own(tokens), expected, rtol=1e-4, atol=1e-4)
    # it is no matter of rounding
    unscaled = Decoder(**{**settings, "rotary_scaling": None}, context=32).eval()
    begun(unscaled, tmp_path / "theirs" / "model.safetensors")
    assert float((unscaled(tokens) - expected).detach().abs().max()) > 0.1
    # token by token, with what is kept of those before
    text = own.generate(tokens[:, :12], max_new_tokens=20, do_sample=False)
    assert torch.equal(text[:, -1], own(text[:, :-1])[:, -1].argmax(-1))

    own.save_pretrained(tmp_path / "ours")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    torch.testing.assert_close(back(tokens).logits, expected, rtol=1e-4, atol=1e-4)
    assert back.config.rope_parameters.items() >= config.rope_parameters.items()


def test_a_scaling_that_is_not_there_is_refused() -> None:
    for scaling, said in (
        (
            {"rope_type": "dynamic", "factor": 2.0},
            r"dynamic is not there, only linear, llama3; its positions would",
        ),
        ({"rope_type": "llama", "factor": 2.0}, r"llama is not there, only linear, llama3; did you mean 'llama3'"),
        ({"rope_type": "linear"}, r"model\.rotary_scaling: rope_type linear needs 'factor'"),
        ({"rope_type": "linear", "factor": 0.5}, r"factor is 0\.5; it says how much longer"),
        ({**LLAMA3, "beta_fast": 1}, r"llama3 has no beta_fast; it has factor, high_freq"),
        ({**LLAMA3, "low_freq_factor": 4.0}, r"low_freq_factor 4\.0 is not below high_freq_factor 4\.0"),
        ({**LINEAR, "factor": "4"}, r"factor is '4'; it is a number above 0"),
    ):
        with pytest.raises(Refusal, match=said):
            Decoder(**LLAMA, rotary_scaling=scaling)
    with pytest.raises(Refusal, match=r"model\.rotary=null has none"):
        Decoder(**GPT2, rotary_scaling=LINEAR)
