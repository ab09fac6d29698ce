"""A folder of transformers is taken only where its config.json describes the decoder that is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from recipes.language.decoder import Decoder
from tests.run import run
from trainer import Refusal

SIZES: dict[str, Any] = {"vocab_size": 30, "context": 16, "width": 32, "depth": 2, "heads": 4}
GPT2: dict[str, Any] = {**SIZES, "mlp": "gelu_tanh"}
LLAMA: dict[str, Any] = dict(SIZES)
LLAMA |= {"norm": "rms", "mlp": "swiglu", "rotary": 1e4, "bias": False, "groups": 2, "inner": 48}
QWEN2 = {**LLAMA, "qkv_bias": True}
LLAMA3: dict[str, Any] = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8}
LINEAR: dict[str, Any] = {"rope_type": "linear", "factor": 2.5}


def begun(network: Decoder, folder: Path, settings: bool = True) -> list[str]:
    """Its weights become those of a folder, or of the file in it without its settings; the names that it lacks."""
    config = json.loads((folder / "config.json").read_text()) if settings else {}
    found = network.translated(load_file(folder / "model.safetensors"), config)
    assert found is not None
    return network.load_state_dict(found, strict=False).missing_keys


def change(folder: Path, **values: Any) -> None:
    """Other words in its config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


OTHERS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
    (LLAMA, {}, {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}, r"\(model\.rotary=77\.0\)"),
    (
        LLAMA,
        {},
        {"rope_parameters": {**LLAMA3, "rope_theta": 1e4}},
        r"rope_scaling .*, here None \(model\.rotary_scaling=\{rope_type:llama3,factor:8\.0,low_freq_factor:1\.0,",
    ),
    (LLAMA, {"eps": 1e-6}, {}, r"rms_norm_eps 1e-05, here 1e-06 \(model\.eps=1e-05\)"),
    (LLAMA, {"tied": False}, {"tie_word_embeddings": True, "attention_bias": True}, "attention_bias True, here False"),
    (QWEN2, {"qkv_bias": None}, {}, r"model_type qwen2, here llama \(model=llama model\.qkv_bias=true\)"),
    (GPT2, {"mlp": "gelu"}, {}, r"activation_function gelu_new, here gelu \(model\.mlp=gelu_tanh\)"),
    (LLAMA, {}, {"model_type": "mixtral"}, r"model_type mixtral, here llama"),
]


@pytest.mark.parametrize(("there", "here", "config", "said"), OTHERS)
def test_another_network_is_refused_in_words(
    tmp_path: Path, there: dict[str, Any], here: dict[str, Any], config: dict[str, Any], said: str
) -> None:
    Decoder(**there).save_pretrained(tmp_path)
    change(tmp_path, **config)
    with pytest.raises(Refusal, match=f"describes another network: .*{said}"):
        begun(Decoder(**there | here), tmp_path)
    # who knows better names the file
    begun(Decoder(**there | here), tmp_path, settings=False)


def test_what_a_decoder_cannot_be_is_refused(tmp_path: Path) -> None:
    Decoder(**LLAMA).save_pretrained(tmp_path)
    with pytest.raises(Refusal, match=r"a mixture of experts is none of the networks of transformers"):
        begun(Decoder(**LLAMA, experts=4), tmp_path)
    change(tmp_path, model_type="mixtral")
    with pytest.raises(Refusal, match=r"it describes a mixtral; there are .*; model=hf_decoder model\.path=.* trains"):
        Decoder.settings_of(tmp_path, None)
    change(tmp_path, model_type="llama", quantization_config={"quant_method": "fp8"})
    with pytest.raises(Refusal, match=r"has a quantization_config: .* need their scales"):
        begun(Decoder(**LLAMA), tmp_path)
    for words, wrong in (
        ({"rotary_scaling": {"rope_type": "llama", "factor": 2.0}}, r"only linear, llama3; did you mean 'llama3'"),
        ({"rotary_scaling": {"rope_type": "linear"}}, r"model\.rotary_scaling: rope_type linear needs 'factor'"),
        ({"window": 0}, r"model\.window=0, model\.window_from=0: tokens that a token sees"),
    ):
        with pytest.raises(Refusal, match=wrong):
            Decoder(**LLAMA | words)


@pytest.mark.parametrize("family", [GPT2, LLAMA])
def test_a_head_that_is_tied_there_may_stand_alone_here(tmp_path: Path, family: dict[str, Any]) -> None:
    there, here = Decoder(**family), Decoder(**family, tied=False)
    there.save_pretrained(tmp_path)
    assert begun(here, tmp_path) == []
    tokens = torch.randint(30, (2, 16))
    torch.testing.assert_close(here(tokens), there(tokens), rtol=0, atol=0)

    # the other way would lose one of them
    here.save_pretrained(tmp_path)
    with pytest.raises(Refusal, match=r"tie_word_embeddings False, here True \(model\.tied=false\)"):
        begun(there, tmp_path)


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
    run([*words, "loop.steps=1"])
    stored = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["model"]
    assert (stored["width"], stored["depth"], stored["vocab_size"], stored["settings"]) == (32, 2, 300, None)
    assert "not loaded" not in (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    # the run goes on where the folder is gone
    (tmp_path / "theirs").rename(tmp_path / "gone")
    run([*words, "loop.steps=2", "run.accept_changes=true"])
    run(["run.dir=run", "job=evaluate"])


def test_a_context_that_is_not_the_folders_is_refused(tmp_path: Path) -> None:
    Decoder(**GPT2 | {"vocab_size": 300}).save_pretrained(tmp_path / "theirs")
    words = ["model=gpt2", "model.settings=theirs", "init_from=theirs", "data.length=4", "run.dir=run"]
    ended = run([*words, "model.context=8"], place=tmp_path, code=2)
    assert "n_positions 16, here 8 (model.context=16)" in ended.out
    ended = run(["model=cnn", "model.settings=theirs"], place=tmp_path, code=2)
    assert "CNN reads no config.json" in ended.out


@pytest.mark.parametrize(("form", "scaling"), [("rope_parameters", LLAMA3), ("rope_scaling", LINEAR)])
def test_scaled_positions_are_those_of_transformers(tmp_path: Path, form: str, scaling: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra bench brings it")
    sizes = {"vocab_size": 30, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    rope = {"rope_theta": 1e4, **scaling}
    config = transformers.LlamaConfig(**sizes, rope_parameters=rope, initializer_range=0.5)
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    if form == "rope_scaling":  # as version 4 writes it
        old = {"rope_theta": 1e4, "rope_scaling": {**scaling, "type": scaling["rope_type"]}}
        change(tmp_path / "theirs", rope_parameters=None, **old)
    settings = Decoder.settings_of(tmp_path / "theirs", 30)
    own = Decoder(**{key: value for key, value in settings.items() if key != "context"}, context=32).eval()
    begun(own, tmp_path / "theirs")
    tokens = torch.randint(30, (3, 32))  # four times as many as the original ones
    expected = theirs(tokens).logits
    torch.testing.assert_close(own(tokens), expected, rtol=1e-4, atol=1e-4)
    # token by token, with what is kept of those before
    text = own.generate(tokens[:, :12], max_new_tokens=20, do_sample=False)
    assert torch.equal(text[:, -1], own(text[:, :-1])[:, -1].argmax(-1))

    own.save_pretrained(tmp_path / "ours")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    torch.testing.assert_close(back(tokens).logits, expected, rtol=1e-4, atol=1e-4)
    assert back.config.rope_parameters.items() >= config.rope_parameters.items()
