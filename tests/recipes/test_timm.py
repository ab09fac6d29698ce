"""Networks of timm by name, where timm is installed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file

from tests.commands import curve
from tests.inside import here, product
from tests.processes import Processes
from tests.quick import quickly
from tests.test_initial_weights import IMAGES, saved
from trainer.configuration.allowed_targets import AllowedTargets
from trainer.configuration.instantiate import instantiate
from trainer.messages import Refusal

timm = pytest.importorskip("timm")

WORDS = (*IMAGES, "loop.global_batch=8", "loop.log_every=1", "schedule=constant", "loop.steps=2", "model=timm")
# networks with their sizes of images; one normalises by batches
MODELS = {"vit_tiny_patch16_224": 32, "convnext_atto.d2_in1k": 32, "resnet18": 32}


@pytest.mark.parametrize("name", quickly(MODELS))
def test_networks_of_timm_train(processes: Processes, tmp_path: Path, name: str) -> None:
    words = [
        *WORDS,
        f"model.name={name}",
        f"data.image_size={MODELS[name]}",
        "data.channels=1",
        "strategy.sync_bn=true",
    ]
    for strategy, size in (("single", 1), ("ddp", 2), ("fsdp", 2)):
        codes = processes.run(size, product, tmp_path, [*words, f"strategy={strategy}", f"run.dir={strategy}"])
        assert codes == [0] * size
        assert curve(tmp_path / strategy) == pytest.approx(curve(tmp_path / "single"), abs=1e-4)


def test_published_weights_come_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    place = tmp_path / "models--timm--resnet18.a1_in1k"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("0" * 40)
    (place / "snapshots" / ("0" * 40)).mkdir(parents=True)
    torch.manual_seed(7)
    own = timm.create_model("resnet18").state_dict()
    state = {name: x + 0.01 * torch.rand(x.shape) if x.is_floating_point() else x for name, x in own.items()}
    save_file(state, place / "snapshots" / ("0" * 40) / "model.safetensors")
    folder = tmp_path / "run"
    assert here(*WORDS, "init_from=pretrained", "model.freeze=[backbone]", f"run.dir={folder}") == 0
    begun = saved(folder)
    other = {name for name, value in state.items() if begun[name].shape != value.shape}
    assert other == {"fc.weight", "fc.bias"}
    assert all(torch.equal(begun[name], value) for name, value in state.items() if name.startswith("layer"))
    assert "5,130 are trained" in (folder / "logs/rank-0.log").read_text()


REFUSED = {
    "resnet1888": "timm has no network 'resnet1888'; did you mean 'resnet1",
    "resnet18.a1": r"timm has no such weights: .*did you mean 'resnet18\.a",
    "vit_tiny_patch16_224": r"cannot take images of 3 × 10 × 10",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_timm_does_not_have_is_said(name: str, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=REFUSED[name]):
        here(*WORDS, f"model.name={name}", "data.image_size=10", f"run.dir={tmp_path / 'run'}")


@pytest.mark.long
def test_any_argument_of_a_network_goes_on_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert here(*WORDS, "model.name=resnet18", "data.image_size=32", "+model.drop_path_rate=0.2", "run.dir=run") == 0
    with pytest.raises(Refusal, match=r"^model.drop_path_rat: timm's resnet18 takes no such key"):
        here(*WORDS, "model.name=resnet18", "data.image_size=32", "+model.drop_path_rat=0.2", "run.dir=other")


def test_a_key_of_a_configuration_of_transformers_that_it_only_keeps() -> None:
    transformers = pytest.importorskip("transformers")
    node = {"_target_": "transformers.T5Config", "d_model": 16, "decoder_start_token_id": 3}
    config = instantiate(OmegaConf.create(node), transformers.T5Config, "model", AllowedTargets())
    assert config.decoder_start_token_id == 3
    with pytest.raises(Refusal, match=r"model.d_modle: .* takes no such key; did you mean 'd_model'\?"):
        instantiate(OmegaConf.create(node | {"d_modle": 3}), transformers.T5Config, "model", AllowedTargets())


@pytest.mark.long
def test_an_optimizer_of_timm_trains_by_the_words_of_the_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("loop.global_batch=16", "loop.steps=2", "loop.eval_every=null", "run.dir=run")
    with pytest.raises(Refusal, match=r"; optimizer=torch optimizer\._target_=timm\.optim\.Lion works") as caught:
        here("optimizer=lion", *words)
    meant = re.findall(r"optimizer\S*=\S+", str(caught.value))[1:3]
    assert here(*meant, "optimizer.lr=0.001", *words) == 0
