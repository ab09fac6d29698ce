"""Adapters on a decoder: one curve under every strategy, alone in the checkpoint, merged where it is exported."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from recipes.language.decoder import Decoder
from tests.ranks import Processes
from tests.run import curve, far, lines, quickly, run
from trainer import Refusal
from trainer.parallel.ranks import Ranks
from trainer.records.checkpoint.manager import CheckpointManager

COMMON = (
    *("data=text", "data.length=16", "data.held=0.0001", "model=llama", "model.settings=base", "init_from=base"),
    *("model.lora=2", "loop.global_batch=8", "loop.steps=4", "loop.log_every=1", "loop.eval_every=null"),
    *("loop.max_norm=1", "precision=fp64", "optimizer.lr=0.01"),
)
SPREAD: dict[str, tuple[int, tuple[str, ...]]] = {
    "ddp": (2, ("loop.micro_batches=2",)),
    "zero1": (2, ()),
    "fsdp": (2, ("loop.micro_batches=2",)),
    "hsdp": (4, ("strategy.replicate=2",)),
    "tp": (2, ()),
    "fsdp_tp": (4, ("strategy.tensor=2", "model.sequence=true", "strategy.activation_checkpointing=units")),
    "pp": (2, ("loop.micro_batches=2",)),
    "cp": (2, ()),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the network that adapters are to change, of 100 KB."""
    place = tmp_path_factory.mktemp("lora")
    torch.manual_seed(0)
    llama: dict[str, Any] = {"norm": "rms", "mlp": "swiglu", "rotary": 1e4, "bias": False, "groups": 2, "inner": 48}
    base = Decoder(256, 64, width=32, depth=2, heads=4, tied=False, **llama)
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    base.save_pretrained(place / "base")
    return place


@pytest.fixture(scope="module")
def alone(place: Path) -> Path:
    """What one process learns."""
    return run([*COMMON, "strategy=single", "run.dir=alone"], place=place).folder


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """All that the newest checkpoint of a run holds, by itself."""
    store = CheckpointManager(folder / "checkpoints", Ranks())
    found = store.newest()
    assert found is not None
    own = {name: torch.empty_like(one, device="cpu") for name, one in found.tensors.items()}
    store.read(found, own)
    return own


@pytest.mark.parametrize("strategy", quickly(SPREAD, "fsdp"))
def test_one_curve_and_adapters_alone_in_the_checkpoint(
    place: Path, processes: Processes, alone: Path, strategy: str
) -> None:
    size, more = SPREAD[strategy]
    spread = run([*COMMON, *more, f"strategy={strategy}", f"run.dir={strategy}"], size, "group", place=place)
    assert far(spread.curve(), curve(alone)) < 1e-10
    ours, theirs = stored(spread.folder), stored(alone)
    assert ours.keys() == theirs.keys()
    # 5 layers in each of 2 blocks, 2 matrices each, and what Adam remembers of them
    adapters = {name for name in ours if "/" not in name}
    assert len(adapters) == 2 * 5 * 2
    assert all(name.endswith(("lora_a", "lora_b")) for name in adapters)
    assert all("lora_" in name for name in ours)
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-9
    tensors = sum(
        file.stat().st_size for file in (spread.folder / "checkpoints" / "step-00000004").glob("*.safetensors")
    )
    assert tensors < 3 * 8 * sum(ours[name].numel() for name in adapters) + 40_000  # and headers


@pytest.mark.long
def test_a_run_goes_on_to_the_bit_and_under_any_other_strategy(place: Path, processes: Processes, alone: Path) -> None:
    for name in ("fsdp", "tp"):
        words = [*COMMON, f"strategy={name}", f"run.dir={name}-later", "schedule=constant"]
        run([*words, "loop.steps=2"], 2, "group", place=place)
        shutil.copytree(place / f"{name}-later", place / f"{name}-other")
        run([*words, "run.accept_changes=true"], 2, "group", place=place)
    words = [*COMMON, "schedule=constant"]
    whole = run([*words, "strategy=tp", "run.dir=tp-whole"], 2, "group", place=place)
    assert whole.curve("loss_hex") == curve(place / "tp-later", "loss_hex")
    assert all(torch.equal(one, stored(whole.folder)[name]) for name, one in stored(place / "tp-later").items())
    # written by one, read by the other, and by a single process
    for name, size, strategy in (("fsdp-other", 2, "tp"), ("tp-other", 1, "single")):
        more = [f"strategy={strategy}", f"run.dir={name}", "run.accept_changes=true"]
        assert far(run([*words, *more], size, "group", place=place).curve(), whole.curve()) < 1e-10


@pytest.mark.long
def test_jobs_read_the_rest_where_it_lies_and_refuse_where_it_is_other(
    place: Path, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra bench brings it")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(place / "base", "base")
    shutil.copytree(alone, "run")
    state = tmp_path / "run" / "checkpoints" / "step-00000004" / "state.json"
    assert str(place / "base") in state.read_text()  # as it began; the folder is still there
    last = ["run.dir=run", "job.checkpoint=last"]
    for job in (("job=evaluate",), ("job=export", "job.format=huggingface"), ("job=export",)):
        run([*last, *job])
    tokens = torch.randint(256, (2, 16))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export" / "model").eval().float()
    own = Decoder(**Decoder.settings_of(tmp_path / "base", 256) | {"context": 64, "lora": 2}).eval()
    values = load_file(tmp_path / "base" / "model.safetensors")
    own.load_state_dict({**own.state_dict(), **own.translated(values, {}), **adapters_of(alone)})
    torch.testing.assert_close(theirs(tokens).logits, own(tokens), rtol=1e-4, atol=1e-4)
    merged = load_file(tmp_path / "run" / "export" / "model.safetensors")
    assert merged.keys() == own.merged().state_dict().keys()
    assert lines(tmp_path / "run" / "evaluate", "eval")

    # another run begins with the adapters and what lies under them
    words = [word for word in COMMON if not word.startswith("init_from")]
    run([*words, "strategy=single", "init_from=run", "run.dir=next", "optimizer.lr=0", "loop.steps=1"])
    assert "base" in json.loads((tmp_path / "next/checkpoints/step-00000001/state.json").read_text())

    (place / "base").rename(place / "moved")
    try:
        # the same in another place
        run([*last, "job=evaluate", f"init_from={tmp_path / 'base'}"])
        changed = {name: tensor + 1e-3 for name, tensor in values.items()}
        save_file(changed, tmp_path / "base" / "model.safetensors")
        for words in ([*last, "job=evaluate"], [*last, "job=export"], [*COMMON, "run.dir=run", "loop.steps=9"]):
            more = [f"init_from={tmp_path / 'base'}", "strategy=single", "run.accept_changes=true"]
            said = run([*words, *more], code=2).out
            assert re.search(r"no frozen weights.*model\.safetensors has another SHA-256", said)
        shutil.rmtree(tmp_path / "base")
        said = run([*last, "job=export"], code=2).out
        assert re.search(r"no frozen weights, .* does not exist.*init_from=PATH says where", said)
    finally:
        (place / "moved").rename(place / "base")


def adapters_of(run: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.float() for name, tensor in stored(run).items() if "/" not in name}


OTHERS = (
    *("data=text", "data.length=16", "data.held=0.0001", "model=hf_decoder", "init_from=pretrained"),
    *COMMON[6:],
)


@pytest.mark.long
@pytest.mark.parametrize(("family", "strategy"), [("llama", "tp"), ("llama", "fsdp"), ("gpt2", "fsdp")])
def test_any_decoder_of_transformers_learns_by_adapters(
    place: Path, processes: Processes, alone: Path, family: str, strategy: str
) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra bench brings it")
    path = place / ("base" if family == "llama" else family)
    if family == "gpt2":
        config = transformers.GPT2Config(vocab_size=256, n_embd=16, n_layer=2, n_head=2, n_positions=64)
        transformers.GPT2LMHeadModel(config).save_pretrained(path)
    single, spread = (
        run(
            [*OTHERS, f"model.path={path}", f"strategy={name}", f"run.dir=theirs-{family}-{strategy}-{name}"],
            *(size, "group"),
            place=place,
        )
        for name, size in (("single", 1), (strategy, 2))
    )
    assert far(single.curve(), spread.curve()) < 1e-10
    if family == "llama":  # the same network as ours, and at first an adapter changes nothing
        assert single.curve()[0] == pytest.approx(curve(alone)[0], rel=1e-6)
    assert all("lora_" in name for name in stored(spread.folder))
    last = [f"run.dir={spread.folder}", "job.checkpoint=last"]
    run([*last, "job=export", "job.format=huggingface"], place=place)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(spread.folder / "export" / "model").eval()
    run([*last, "job=generate", "job.prompt=Call", "job.tokens=3", "job.temperature=0"], place=place)
    drawn = theirs.generate(torch.tensor([list(b"Call")]), max_new_tokens=3, do_sample=False, pad_token_id=0)
    continued = json.loads((spread.folder / "generate" / "samples.jsonl").read_text())["text"]
    assert continued == bytes(drawn[0].tolist()).decode(errors="replace")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"lora": 0}, r"model\.lora is 0; it is the rank"),
        ({"lora": 2, "lora_alpha": 0.0}, r"model\.lora_alpha is 0\.0; it is above 0"),
        ({"lora_layers": ["qkv"]}, r"model\.lora_layers=\[qkv\] and model\.lora=null: no layer gets an adapter"),
    ],
)
def test_numbers_with_which_nothing_would_learn_as_asked_are_refused(words: dict[str, Any], said: str) -> None:
    with pytest.raises(Refusal, match=said):
        Decoder(vocab_size=8, context=4, width=8, depth=1, heads=2, **words)
