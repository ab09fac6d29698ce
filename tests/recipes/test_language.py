"""Decoders: their scores are those of transformers; every plan of theirs, under every strategy, gives one curve."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from recipes.language.decoder import Decoder
from recipes.language.tokens import Tokens
from tests.ranks import Processes
from tests.run import ROOT, quickly, run
from trainer import Refusal

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


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra bench brings it")
    own = filled(Decoder(**SIZES, **FAMILIES[family]))
    own.save_pretrained(tmp_path)
    theirs, lost = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(lost.values()), lost
    tokens = torch.randint(256, (3, 16))
    torch.testing.assert_close(own(tokens), theirs.eval()(tokens).logits, rtol=1e-4, atol=1e-4)
    assert (theirs.config.bos_token_id, theirs.config.eos_token_id) == (None, None)  # none ends a text

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
    "llama": (*MODERN, "model.rotary_scaling={rope_type:linear,factor:4}"),
    "llama, tied": (*MODERN, "model.tied=true"),
}
PLACES: dict[str, tuple[int, tuple[str, ...]]] = {
    "tp": (2, ("strategy=tp",)),
    "tp, sequence": (2, ("strategy=tp", "model.sequence=true")),
    "tp, loss_parallel": (2, ("strategy=tp", "model.loss_parallel=true")),
    "fsdp_tp": (
        4,
        (
            *("strategy=fsdp_tp", "strategy.tensor=2", "model.sequence=true", "model.loss_parallel=true"),
            "strategy.activation_checkpointing=units",
        ),
    ),
    "fsdp": (2, ("strategy=fsdp", "loop.micro_batches=2")),
    "hsdp": (4, ("strategy=hsdp", "strategy.replicate=2")),
    "zero1": (2, ("strategy=zero1",)),
    "ddp": (3, ("strategy=ddp", "loop.uneven=true")),
    "pp": (2, ("strategy=pp", "loop.micro_batches=2")),
    "cp": (2, ("strategy=cp",)),
    "ddp_cp": (4, ("strategy=ddp_cp", "loop.micro_batches=2")),
    "fsdp_cp": (4, ("strategy=fsdp_cp", "strategy.activation_checkpointing=units")),
    "mesh": (4, ("strategy=mesh", "strategy.context=2", "strategy.tensor=2", "model.sequence=true")),
    "ddp_tp": (4, ("strategy=ddp_tp", "strategy.tensor=2", "model.sequence=true")),
}
# each place once, each network in several of them; a tied head is not split, and no stage has both
CASES = [
    *(("llama, tied", "tp"), ("gpt", "tp, sequence"), ("llama", "tp, loss_parallel"), ("gpt", "fsdp_tp")),
    *(("gpt, tied", "fsdp"), ("llama", "hsdp"), ("llama, tied", "zero1"), ("gpt", "ddp"), ("llama", "pp")),
    *(("gpt, tied", "cp"), ("llama", "ddp_cp"), ("llama, tied", "fsdp_cp"), ("gpt, tied", "mesh")),
    *(("llama, tied", "ddp_tp"), ("llama, tied", "tp, sequence"), ("llama", "fsdp_tp")),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("language")


@pytest.fixture(scope="module")
def alone(folder: Path) -> Any:
    """The curve of each network in one process."""
    known: dict[str, list[float]] = {}

    def learned(network: str) -> list[float]:
        if network not in known:
            words = [*BOOK, *SHORT, *NETWORKS[network], "precision=fp64", "strategy=single"]
            name = network.replace(", ", "-")
            known[network] = run([*words, f"run.dir={name}"], place=folder).curve()
        return known[network]

    return learned


@pytest.mark.parametrize(("network", "place"), quickly(CASES, ("gpt, tied", "fsdp")))
def test_every_plan_gives_one_curve(processes: Processes, folder: Path, alone: Any, network: str, place: str) -> None:
    size, words = PLACES[place]
    name = f"{network}-{place}".replace(", ", "-")
    words = (*BOOK, *SHORT, *NETWORKS[network], "precision=fp64", *words, f"run.dir={name}")
    spread = run(words, size, "group", place=folder).curve()
    assert len(spread) == 3
    assert spread == pytest.approx(alone(network), rel=1e-10)


def test_a_run_exports_to_transformers_and_begins_with_their_weights(folder: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra bench brings it")
    common = [*BOOK, *SHORT, "model.tied=true", "strategy=single"]
    exported = run([*common, "run.dir=exported"], place=folder).folder
    run(["run.dir=exported", "job=export", "job.format=huggingface", "job.checkpoint=last"], place=folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported / "export" / "model")

    # the same words from both, token by token
    greedy = ["job=generate", "job.prompt=Call me", "job.tokens=1", "job.temperature=0", "job.checkpoint=last"]
    shown = run(["run.dir=exported", *greedy], place=folder).out
    prompt = torch.tensor(list(b"Call me"))[None]
    drawn = theirs.generate(prompt, max_new_tokens=1, do_sample=False, pad_token_id=0)
    said = json.loads((exported / "generate" / "samples.jsonl").read_text())["text"]
    assert said == bytes(drawn[0].tolist()).decode(errors="replace")
    assert said in shown

    # a run that begins with their folder begins with the very same loss as one that begins with the run
    begun = [
        run([*common, f"init_from={source}", f"run.dir=from-{name}", "seed=3"], place=folder)
        for name, source in (("theirs", exported / "export" / "model"), ("ours", exported))
    ]
    assert begun[0].curve("loss_hex") == begun[1].curve("loss_hex")
    assert not any("not there" in ended.out for ended in begun)


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


@pytest.mark.long
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
    ended = [
        run([*words, "precision=fp64", f"strategy={strategy}", f"run.dir=tokens-{strategy}"], *how, place=folder)
        for strategy, how in (("single", (1,)), ("fsdp", (2, "group")))
    ]
    assert ended[1].curve() == pytest.approx(ended[0].curve(), rel=1e-10)
    assert all("bits_per_byte" in each.lines("eval")[-1] for each in ended)


def test_what_a_key_cannot_do_is_refused(tmp_path: Path) -> None:
    words: dict[str, Any]
    other: dict[str, Any]
    for words, said in (
        ({"loss_parallel": True}, r"model\.loss_parallel=true splits the head, .*: model\.tied=false"),
        ({"groups": 3}, r"groups that work: 1, 2, 4"),
        ({"heads": 32, "rotary": 1e4}, r"model\.width ÷ model\.heads is 1: .* must be even"),
    ):
        with pytest.raises(Refusal, match=said):
            Decoder(**SIZES | words)
    for other, said in (
        ({"norm": "layer"}, r"neither GPT-2 .* nor Llama"),
        ({"experts": 4}, r"a mixture of experts is none of the networks of transformers"),
    ):
        with pytest.raises(Refusal, match=said):
            Decoder(**SIZES, **LLAMA | other).save_pretrained(tmp_path / "nowhere")
    run([*BOOK, *SHORT, "loop.steps=1", "run.dir=run"], place=tmp_path)
    for temperature in ("-1", "nan", "inf"):
        drawn = ["job=generate", "run.dir=run", "job.prompt=a", f"job.temperature={temperature}"]
        assert re.search(r"job\.temperature=.*0 or more", run(drawn, place=tmp_path, code=2).out)
