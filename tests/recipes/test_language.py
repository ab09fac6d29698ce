"""Decoders: their scores are those of transformers; every plan of theirs, under every strategy, gives one curve."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from recipes.language.decoder import Decoder
from recipes.language.text import Text
from recipes.language.tokens import Tokens
from tests.commands import ROOT, lines
from tests.inside import product
from tests.processes import Processes
from tests.quick import quickly
from tests.recipes.nano import GPT, train
from trainer.api import build_run
from trainer.data.sampler import EpochOrder
from trainer.jobs.generate import Generate
from trainer.jobs.trained_run import load_network, select_checkpoint
from trainer.launch.rendezvous import Launch
from trainer.messages import Refusal

SIZES: dict[str, Any] = {"vocab_size": 256, "context": 16, "width": 32, "depth": 2, "heads": 4}
LLAMA: dict[str, Any] = {"norm": "rms", "mlp": "swiglu", "rotary": 10000.0, "bias": False, "groups": 2, "inner": 48}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"mlp": "gelu_tanh"},
    "llama": {**LLAMA, "tied": False},
    "llama, tied": LLAMA,
    "qwen2": {**LLAMA, "qkv_bias": True},
    "qwen2, windows": {**LLAMA, "qkv_bias": True, "window": 5, "window_from": 1},
    "mistral": {**LLAMA, "tied": False, "window": 5},
}


def filled(network: Decoder) -> Decoder:
    """With values everywhere: zeros would hide what is mixed up."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return network.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra bench brings it")
    own = filled(Decoder(**SIZES, **FAMILIES[family]))
    own.save_pretrained(tmp_path)
    theirs, lost = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(lost.values()), lost
    tokens = torch.randint(256, (3, 16))
    torch.testing.assert_close(own(tokens), theirs.eval()(tokens).logits, rtol=1e-4, atol=1e-4)

    # and back, from the files that transformers itself writes
    theirs.save_pretrained(tmp_path / "theirs")
    fresh = filled(Decoder(**SIZES, **FAMILIES[family]))
    fresh.load_state_dict(fresh.translated(load_file(tmp_path / "theirs" / "model.safetensors"), {}), strict=False)
    torch.testing.assert_close(fresh(tokens), own(tokens), rtol=0, atol=0)


@pytest.mark.parametrize("family", ["gpt2", "qwen2", "qwen2, windows"])
def test_what_is_kept_of_tokens_that_went_by_changes_no_score(family: str) -> None:
    own = filled(Decoder(**SIZES, **FAMILIES[family]))
    prompt = torch.randint(256, (2, 5))
    text = own.generate(prompt, max_new_tokens=30, do_sample=False)  # twice as long as the context
    for length in range(6, 17):
        likeliest = own(text[:, : length - 1])[:, -1].argmax(-1)
        assert torch.equal(text[:, length - 1], likeliest)
    assert text.shape == (2, 35)
    torch.manual_seed(1)
    assert len(own.generate(prompt, max_new_tokens=3, top_k=1)[0]) == 8


BOOK = ("data=text", "model=gpt_nano", "task=language", "model.width=16", "model.depth=2", "data.length=8")
SHORT = ("data.held=0.0001", "loop.steps=3", "loop.global_batch=8", "loop.log_every=1", "loop.max_norm=1")
MODERN = ("model.rotary=10000", "model.mlp=swiglu", "model.norm=rms", "model.groups=2", "model.bias=false")
NETWORKS = {
    "gpt": (),
    "gpt, tied": ("model.tied=true",),
    "llama": (
        *MODERN,
        "model.rotary_scaling={rope_type:llama3,factor:4,low_freq_factor:1,high_freq_factor:4,original_max_position_embeddings:2}",
    ),
    "llama, tied": (*MODERN, "model.tied=true"),
}
PLACES: dict[str, tuple[int, tuple[str, ...]]] = {
    "tp": (2, ("strategy=tp",)),
    "tp, sequence": (2, ("strategy=tp", "model.sequence=true")),
    "tp, loss_parallel": (2, ("strategy=tp", "model.loss_parallel=true")),
    "fsdp_tp, sequence, loss_parallel, recomputing": (
        4,
        (
            "strategy=fsdp_tp",
            "strategy.tensor=2",
            "model.sequence=true",
            "model.loss_parallel=true",
            "strategy.activation_checkpointing=units",
        ),
    ),
    "fsdp": (2, ("strategy=fsdp", "loop.micro_batches=2")),
    "hsdp": (4, ("strategy=hsdp", "strategy.replicate=2")),
    "zero1": (2, ("strategy=zero1",)),
    "ddp": (3, ("strategy=ddp", "loop.global_batch=9")),
    "pp": (2, ("strategy=pp", "loop.micro_batches=2")),
    "cp": (2, ("strategy=cp",)),
    "ddp_cp": (4, ("strategy=ddp_cp", "loop.micro_batches=2")),
    "fsdp_cp, recomputing": (4, ("strategy=fsdp_cp", "strategy.activation_checkpointing=units")),
    "mesh of context and tensor, sequence": (
        4,
        ("strategy=mesh", "strategy.context=2", "strategy.tensor=2", "model.sequence=true"),
    ),
    "ddp_tp, sequence": (4, ("strategy=ddp_tp", "strategy.tensor=2", "model.sequence=true")),
}
# nanoGPT's published sizes for a CPU
NANO = (
    "data=text",
    "data.length=64",
    "data.stride=1",
    "model=gpt_nano",
    "task=language",
    "optimizer=adamw",
    "optimizer.weight_decay=0.1",
    "schedule=cosine",
    "model.tied=true",
    "loop.global_batch=12",
    "loop.max_norm=1",
    "optimizer.lr=1e-3",
    "optimizer.betas=[0.9,0.99]",
    "schedule.final=0.1",
    "data.held=0.1",
    "loop.eval_every=null",
)
CASES = [(network, place) for network in NETWORKS for place in PLACES]
UNTIED = ("tp, loss_parallel", "fsdp_tp, sequence, loss_parallel, recomputing", "pp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("language")


@pytest.mark.long
@pytest.mark.parametrize(
    ("network", "place"),
    quickly(
        [(network, place) for network, place in CASES if "tied" not in network or place not in UNTIED],
        ("gpt", "fsdp_tp, sequence, loss_parallel, recomputing"),
        ("llama, tied", "tp, sequence"),
        ("llama", "ddp_cp"),
    ),
)
def test_every_plan_gives_one_curve(processes: Processes, folder: Path, network: str, place: str) -> None:
    size, words = PLACES[place]
    batch = [word for word in words if word.startswith("loop.global_batch")]
    common = [*BOOK, *SHORT, *NETWORKS[network], *batch, "precision=fp64"]
    losses = []
    for name, ranks, more in (("alone", 1, ("strategy=single",)), (place, size, words)):
        run = folder / f"{network}-{place}-{name}".replace(" ", "").replace(",", "-")
        assert processes.run(ranks, product, folder, [*common, *more, f"run.dir={run}"]) == [0] * ranks
        losses.append([line["loss"] for line in lines(run) if line["kind"] == "train"])
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)


def test_a_run_exports_to_transformers_and_begins_with_their_weights(folder: Path, capsys: Any) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra bench brings it")
    common = [*BOOK, *SHORT, "model.tied=true", "strategy=single"]
    run = folder / "exported"
    assert product(Launch(), folder, [*common, f"run.dir={run}"]) == 0
    assert (
        product(Launch(), folder, [f"run.dir={run}", "job=export", "job.format=huggingface", "job.checkpoint=last"])
        == 0
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(run / "export" / "model")

    # the same words from both, token by token
    capsys.readouterr()
    greedy = ["job=generate", "job.prompt=Call me", "job.tokens=1", "job.temperature=0", "job.checkpoint=last"]
    assert product(Launch(), folder, [f"run.dir={run}", *greedy]) == 0
    prompt = torch.tensor(list(b"Call me"))[None]
    drawn = theirs.generate(prompt, max_new_tokens=1, do_sample=False, pad_token_id=0)
    said = json.loads((run / "generate" / "samples.jsonl").read_text())["text"]
    assert said == bytes(drawn[0].tolist()).decode(errors="replace")
    assert said in capsys.readouterr().out

    # a run that begins with their folder begins with the very same loss as one that begins with the run
    firsts = []
    for name, source in (("theirs", run / "export" / "model"), ("ours", run)):
        again = folder / f"from-{name}"
        assert product(Launch(), folder, [*common, f"init_from={source}", f"run.dir={again}", "seed=3"]) == 0
        firsts.append([line["loss_hex"] for line in lines(again) if line["kind"] == "train"])
    assert firsts[0] == firsts[1]
    assert "not there" not in capsys.readouterr().out


@pytest.mark.parametrize("model", ["gpt_nano", pytest.param("llama", marks=pytest.mark.long)])
def test_an_exported_program_takes_other_batches_and_lengths(model: str, tmp_path: Path) -> None:
    small = ["model.width=32", "model.depth=2", "data.length=16", "loop.global_batch=8"]
    small += ["model.heads=4", "model.groups=2", "model.inner=48"] if model == "llama" else []
    words = [f"model={model}", "data=synthetic_tokens", *small, "loop.steps=2", "run.dir=run"]
    assert product(Launch(), tmp_path, words) == 0
    assert product(Launch(), tmp_path, ["run.dir=run", "job=export", "job.format=pt2"]) == 0
    program = torch.export.load(tmp_path / "run" / "export" / "model.pt2").module()
    run = build_run(["job=export", f"run.dir={tmp_path}/run", "device=cpu"], Launch())
    own = load_network(run, select_checkpoint(run, "best").path, average=False)
    for batch, length in ((2, 16), (1, 16), (5, 7), (3, 1)):
        tokens = torch.randint(256, (batch, length))
        torch.testing.assert_close(program(tokens), own(tokens), rtol=0, atol=1e-5)


def prepared(place: Path, *words: str) -> str:
    """What scripts/prepare_tokens.py says."""
    command = [sys.executable, str(ROOT / "scripts" / "prepare_tokens.py"), *words]
    return subprocess.run(command, cwd=place, check=True, capture_output=True, text=True).stdout


def test_texts_become_shards_that_are_read_by_window(tmp_path: Path) -> None:
    documents = [f"document {number}: " + "ab" * number for number in range(20)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in documents))
    said = prepared(tmp_path, "out", "texts.jsonl", "--held", "0.1", "--shard", "100")
    assert "20 documents" in said
    kept = [each for number, each in enumerate(documents) if number % 10 != 9]

    # every document whole, with its end, no window in two shards; each token once a target but those that begin a shard
    packed = Tokens(str(tmp_path / "out"), length=8)
    read = [packed.train()[index] for index in range(len(packed.train()))]
    text = "".join(packed.decode(inputs) for inputs, _ in read)
    assert text.startswith("document 0: document 1: ab")
    for inputs, targets in read:
        assert torch.equal(inputs[1:], targets[:-1])
    assert packed.ignored is None
    assert packed.vocab_size == 257

    apart = Tokens(str(tmp_path / "out"), length=8, boundaries=True)
    batch = apart.train().batch(torch.arange(len(apart.train())))
    counted = batch[1] != -100
    # of each document all tokens but the first are targets, its end too
    assert int(counted.sum()) == sum(len(each.encode()) for each in kept)
    assert apart.ignored == -100
    assert len(apart.evaluation() or ()) > 0
    firsts = [row for row in batch[0] if row[0] == ord("d") and bytes(row.tolist()).startswith(b"document")]
    assert len(firsts) == len(kept)


def test_one_text_has_its_end_held_back_and_a_run_reads_it_in_the_same_order_under_every_strategy(
    processes: Processes, folder: Path
) -> None:
    (folder / "book.txt").write_text("Call me Ishmael. " * 400)
    prepared(folder, "shards", "book.txt", "--held", "0.25")
    # its end is held back, and nothing else is cut
    sizes = {
        name: split["tokens"]
        for name, split in json.loads((folder / "shards" / "tokens.json").read_text())["splits"].items()
    }
    assert sizes == {"train": 5100 + 1, "evaluation": 1700 + 1}
    words = ["data=tokens", "data.folder=shards", "data.length=16", "data.boundaries=true", *BOOK[1:5], *SHORT[1:]]
    words += ["precision=fp64"]
    losses = []
    for ranks, strategy in ((1, "single"), (2, "fsdp")):
        run = folder / f"tokens-{strategy}"
        assert processes.run(ranks, product, folder, [*words, f"strategy={strategy}", f"run.dir={run}"]) == [0] * ranks
        losses.append([line["loss"] for line in lines(run) if line["kind"] == "train"])
        assert "bits_per_byte" in lines(run, "eval")[-1]
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)


@pytest.mark.long
def test_the_curve_is_that_of_a_loop_by_hand(folder: Path) -> None:
    from safetensors.torch import save_file

    torch.manual_seed(5)
    by_hand = GPT()
    save_file(by_hand.published(), folder / "gpt.safetensors")
    run, steps = folder / "nano", 20
    words = [*NANO, "init_from=gpt.safetensors", f"loop.steps={steps}", "schedule.warmup=10"]
    assert product(Launch(), folder, [*words, "strategy=single", "loop.log_every=1", f"run.dir={run}"]) == 0
    text = Text(length=64, stride=1)
    windows = text.train()
    order = EpochOrder(text, windows, seed=0)(0)[:]
    book = torch.cat([windows.batch(torch.arange(0, len(windows), 64))[0].flatten()]).to(torch.uint8)
    losses, _ = train(by_hand, book, order, steps, horizon=steps, warmup=10)
    assert [line["loss"] for line in lines(run) if line["kind"] == "train"] == pytest.approx(losses, abs=2e-5)


def test_what_a_key_cannot_do_is_refused() -> None:
    with pytest.raises(Refusal, match=r"model\.loss_parallel=true splits the head, .*: model\.tied=false"):
        Decoder(**SIZES, loss_parallel=True)
    with pytest.raises(Refusal, match=r"groups that work: 1, 2, 4"):
        Decoder(**SIZES, groups=3)
    with pytest.raises(Refusal, match=r"neither GPT-2 .* nor Llama"):
        Decoder(**SIZES, **LLAMA | {"norm": "layer"}).save_pretrained(Path("nowhere"))
    with pytest.raises(Refusal, match=r"a mixture of experts is none of the networks of transformers"):
        Decoder(**SIZES, **LLAMA, experts=4).save_pretrained(Path("nowhere"))
    with pytest.raises(Refusal, match=r"model\.rotary is 0\.0; it is the base of rotary positions"):
        Decoder(**SIZES, rotary=0.0)
    for temperature in (-1.0, float("nan"), float("inf")):
        with pytest.raises(Refusal, match=rf"job\.temperature={temperature}, .* temperature is 0 or more"):
            Generate(temperature=temperature)
    with pytest.raises(Refusal, match=r"model\.width ÷ model\.heads is 1: .* must be even"):
        Decoder(**SIZES | {"heads": 32}, rotary=1e4)
