"""Rows of a data set and parts of a text as packed documents; decoders of transformers that keep them apart."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.language.hf_decoder import KEEP_APART, HFDecoder
from recipes.language.next_token import NextToken
from recipes.language.synthetic import SyntheticTokens
from recipes.language.text import Text
from tests.ranks import Processes
from tests.recipes.test_packing import PREPARE, SMALL, documents
from tests.run import curve, quickly, run
from trainer import Refusal

COUNT = 60
TEXTS = [" ".join(f"w{1 + at * place % 29}" for place in range(1, 2 + at * at % 23)) for at in range(COUNT)]
READ = ["data.pack=true", "data.length=16", *SMALL, "loop.global_batch=4", "loop.log_every=1"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of JSONL files, a tokenizer, and the same rows as lists of numbers."""
    datasets = pytest.importorskip("datasets", reason="the package datasets is not installed: pip install '.[hf]'")
    transformers = pytest.importorskip("transformers", reason="the extra bench brings it")
    from tokenizers import Tokenizer, models, pre_tokenizers

    place = tmp_path_factory.mktemp("documents")
    words = {"?": 0, **{f"w{at}": at for at in range(1, 30)}, "end": 30}
    own = Tokenizer(models.WordLevel(words, unk_token="?"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=own, unk_token="?", eos_token="end").save_pretrained(
        place / "tokenizer"
    )
    (place / "rows").mkdir()
    parts = {"train": TEXTS[:-5], "test": TEXTS[-5:]}
    lists = {}
    for name, texts in parts.items():
        (place / "rows" / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        ids = [[words[word] for word in text.split()] + [30] for text in texts]
        lists[name] = datasets.Dataset.from_dict({"ids": [*ids, []]})  # a row without tokens changes nothing
    datasets.DatasetDict(lists).save_to_disk(str(place / "lists"))
    return place


@pytest.mark.long
def test_rows_learn_as_their_tokens_in_shards_on_any_number_of_ranks_and_resumed(
    place: Path, processes: Processes
) -> None:
    train = place / "rows" / "train.jsonl"
    words = [*PREPARE, "corpus", str(train), "--held", "0", "--tokenizer", str(place / "tokenizer")]
    subprocess.run(words, cwd=place, check=True, capture_output=True)
    rows = ["data=huggingface_documents", f"data.path={place / 'rows'}", f"data.tokenizer={place / 'tokenizer'}"]
    lists = ["data=huggingface_documents", f"data.path={place / 'lists'}", "data.column=ids", "data.vocab_size=31"]
    shards = ["data=tokens", f"data.folder={place / 'corpus'}"]
    learned = {}
    for name, data in (("rows", rows), ("lists", lists), ("shards", shards)):
        words = [*data, *READ, "strategy=single", "loop.steps=6", f"run.dir=run-{name}"]
        learned[name] = run(words, place=place)
    assert learned["rows"].curve("loss_hex") == learned["shards"].curve("loss_hex")
    assert learned["lists"].curve("loss_hex") == learned["shards"].curve("loss_hex")

    for name, ends in (("through", (6,)), ("again", (3, 6))):
        for steps in ends:
            run([*rows, *READ, "strategy=fsdp", f"loop.steps={steps}", f"run.dir={name}"], 2, "group", place=place)
    assert curve(place / "again", "loss_hex") == curve(place / "through", "loss_hex")
    assert curve(place / "through") == pytest.approx(learned["rows"].curve(), rel=1e-10)
    run(["run.dir=through", "job=generate", "job.prompt=w1 w2", "job.tokens=3"], place=place)


@pytest.mark.long
def test_what_rows_cannot_be_is_refused_in_words(place: Path) -> None:
    start = ["data=huggingface_documents", f"data.path={place / 'rows'}", *READ, "run.dir=none"]
    for words, said in (
        ([], r"data\.column=text: this column of .* holds string, not lists .* data\.tokenizer=NAME"),
        (["data.column=tex"], r"data\.column=tex: .* has no such column; .*did you mean 'text'"),
        (["data.boundaries=true", f"data.tokenizer={place / 'tokenizer'}"], r"data\.boundaries=false"),
        ([f"data.tokenizer={place / 'tokenizer'}", "data.pack=false", "data.length=99999"], r"data\.length=\d+ would"),
    ):
        assert re.search(said, run([*start, *words], place=place, code=2).out)
    said = run(["data=huggingface_text", f"data.path={place}", "data.pack=true", *SMALL], place=place, code=2).out
    assert re.search(r"data\.pack: there is no such key .* data=huggingface_documents", said)


def test_a_text_is_cut_into_documents_at_its_separators(tmp_path: Path) -> None:
    (tmp_path / "stories.txt").write_text("one<|end|>" + "two words<|end|>" + "3<|end|>" * 4 + "the last one is longer")
    file = str(tmp_path / "stories.txt")
    data = Text(file, length=20, held=0, pack=True, separator="<|end|>")
    (tokens, begins), targets = data.train().batch(torch.arange(len(data.train())))
    seen = [data.decode(tokens[row, a:b]) for row, a, b in documents(begins)]
    assert seen[:3] == ["one<|end|>"[:10], "two words<", "|end|>"]
    assert "".join(seen).rstrip("\0") == (tmp_path / "stories.txt").read_text()[:-1]
    assert all(targets[row, a:b][:-1].equal(tokens[row, a:b][1:]) for row, a, b in documents(begins) if b < 20)
    for changes, said in (
        ({"stride": 1}, r"data\.stride=1: .*data\.stride=null"),
        ({"separator": "\n\n"}, r"data\.separator='\\n\\n' is not in .*stories\.txt, so that it would be one document"),
    ):
        with pytest.raises(Refusal, match=said):
            Text(file, length=20, held=0, pack=True, **changes)


# of settings that many take; some need others
SIZES = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 8}
SIZES |= {"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64, "sliding_window": 4}
SIZES |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
OLD = {"vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4}
OLD |= dict.fromkeys(("bos_token_id", "eos_token_id"))
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
OTHERS: dict[str, dict[str, Any]] = dict.fromkeys(("gpt2", "gptj", "codegen", "gpt_bigcode"), OLD) | {
    "gpt_neo": {"vocab_size": 100, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64}
    | {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "opt": SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    **dict.fromkeys(
        ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "gpt_oss", "glm4_moe"), SIZES | EXPERTS
    ),
}


def network(kind: str, folder: Path) -> Any:
    """A decoder of transformers with weights large enough that what it sees shows."""
    transformers = pytest.importorskip("transformers", reason="the extra bench brings it")
    transformers.AutoConfig.for_model(kind, **OTHERS.get(kind, SIZES)).save_pretrained(folder)
    torch.manual_seed(0)
    own = HFDecoder(str(folder)).eval()
    for parameter in own.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return own


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", quickly(sorted({*KEEP_APART, "gpt_oss", "opt", "jamba"}), "mistral"))  # a window
def test_a_decoder_of_transformers_keeps_documents_apart_or_is_refused(kind: str, tmp_path: Path) -> None:
    own, task = network(kind, tmp_path), NextToken(ignored=-100, pack=True)
    inputs, targets = SyntheticTokens(6, 0, 16, 100, pack=True).train().batch(torch.arange(6))
    with torch.no_grad():
        said = task.examine(own, inputs, targets)
    if not own.mixes_documents:
        assert not said
        task.check(own)
        return
    assert said
    refused = re.escape("data.pack=true: HFDecoder would let tokens see other documents of their sample: the code of")
    with pytest.raises(Refusal, match=refused):
        task.check(own)
