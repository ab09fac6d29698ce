"""A network of transformers as a classifier: frozen, with adapters or whole, one curve under every strategy."""

from __future__ import annotations

import csv
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from recipes.text.labelled import LabelledText
from recipes.text.table import table
from recipes.text.unlabelled import new_texts
from tests.ranks import Processes
from tests.recipes.test_lora import stored
from tests.run import curve, far, lines, quickly, run

transformers = pytest.importorskip("transformers", reason="the package transformers is not installed: '.[hf]'")

WORDS = 40  # of the language of these texts
SIZES = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24}
FAMILIES: dict[str, Any] = {
    "bert": lambda: transformers.BertConfig(**SIZES, num_hidden_layers=2, num_attention_heads=2),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=WORDS, n_embd=16, n_layer=2, n_head=2, n_positions=64, pad_token_id=0
    ),
    "qwen2": lambda: transformers.Qwen2Config(
        **dict.fromkeys(("num_hidden_layers", "num_key_value_heads"), 2),
        **SIZES | {"num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0},
    ),
}
# what people have: BERT without a head, decoders with one for words
HEADS = {"bert": "AutoModel", "gpt2": "AutoModelForCausalLM", "qwen2": "AutoModelForCausalLM"}
COMMON = (
    *("data=labelled_text", "data.file=texts.csv", "data.length=24", "data.tokenizer=words"),
    *("model=hf_classifier", "init_from=pretrained", "checkpoint.whole=true"),
    *("loop.global_batch=8", "loop.steps=4", "loop.log_every=1", "precision=fp64", "optimizer.lr=0.01"),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a network of each family, the tokenizer of its language beside it, and a table of texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    place = tmp_path_factory.mktemp("classifier")
    words = Tokenizer(models.WordLevel({"?": 0, **{f"w{at}": at for at in range(1, WORDS)}}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    own = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", eos_token="?")
    for at, (name, configuration) in enumerate(FAMILIES.items()):
        torch.manual_seed(at)
        network = getattr(transformers, HEADS[name]).from_config(configuration())
        with torch.no_grad():
            for parameter in network.parameters():  # zeros and ones would hide what is mixed up
                parameter.add_(torch.randn_like(parameter) * 0.1)
        network.save_pretrained(place / name)
    for name in ("words", "bert"):  # beside others transformers would take it for one of their own kinds
        own.save_pretrained(place / name)
    draw = random.Random(0)
    with (place / "texts.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("who", "text", "label"))
        for at in range(90):
            kind = at % 3
            said = [f"w{draw.choice((kind + 1, draw.randrange(4, WORDS)))}" for _ in range(draw.randrange(1, 30))]
            rows.writerow((f"speaker {at // 6}", " ".join(said), ("glad", "sad", "torn")[kind]))
    (place / "unlabelled.csv").write_text("text,label\nw1,glad\nw2,\n")
    return place


def test_a_table_may_begin_with_a_byte_order_mark_and_have_long_cells(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("\ufefftext,label\n" + "w" * 200_000 + ",glad\n")
    assert table(path, "data.file") == [{"text": "w" * 200_000, "label": "glad"}]
    (new,) = new_texts(str(path), ["text"])
    assert new.columns == ["w" * 200_000]


ADAPTED = ("model.lora=2", "model.lora_alpha=4")
KINDS = {"frozen": (), "adapted": ADAPTED, "whole": ("model.freeze=[]",)}
SPREAD: dict[str, tuple[int, tuple[str, ...]]] = {
    "ddp": (2, ("loop.micro_batches=2",)),
    "zero1": (2, ()),
    "dp": (1, ()),
    "fsdp": (2, ("loop.micro_batches=2",)),
    "hsdp": (4, ("strategy.replicate=2",)),
    "pp": (2, ("loop.micro_batches=2",)),
}
# each pair of a family, a kind and a strategy that can differ, once
CASES = [
    *(("bert", "frozen", "ddp"), ("bert", "adapted", "pp"), ("bert", "whole", "fsdp"), ("gpt2", "frozen", "hsdp")),
    *(("gpt2", "adapted", "zero1"), ("gpt2", "whole", "ddp"), ("qwen2", "frozen", "fsdp"), ("qwen2", "whole", "pp")),
    *(("qwen2", "adapted", "dp"), ("qwen2", "adapted", "fsdp")),
]


@pytest.fixture(scope="module")
def alone(place: Path) -> Any:
    """What one process learns, for a family and a kind; trained once."""
    known: dict[tuple[str, str], Path] = {}

    def trained(family: str, kind: str) -> Path:
        if (family, kind) not in known:
            words = [*COMMON, *KINDS[kind], f"model.path={family}", "strategy=single", f"run.dir={family}-{kind}"]
            known[family, kind] = run(words, place=place).folder
        return known[family, kind]

    return trained


@pytest.mark.parametrize(("family", "kind", "strategy"), quickly(CASES))
def test_one_curve(place: Path, processes: Processes, alone: Any, family: str, kind: str, strategy: str) -> None:
    size, more = SPREAD[strategy]
    words = [*COMMON, *KINDS[kind], *more, f"model.path={family}", f"strategy={strategy}"]
    spread = run([*words, f"run.dir={family}-{kind}-{strategy}"], size, "group", place=place)
    reference = alone(family, kind)
    assert far(spread.curve(), curve(reference)) < 1e-10
    assert spread.curve("sample_digest") == curve(reference, "sample_digest")
    assert spread.lines("eval")[-1]["accuracy"] == lines(reference, "eval")[-1]["accuracy"]
    ours, theirs = weights(spread.folder), weights(reference)
    assert ours.keys() == theirs.keys()
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-9
    # where ranks hold shards, one of them builds the network, and the others never hold all of it
    assert "builds the whole network" not in (spread.folder / "logs" / "rank-0.log").read_text()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for name, value in stored(folder).items() if "/" not in name}


@pytest.mark.long
def test_new_texts_get_their_class(place: Path, alone: Any) -> None:
    folder = alone("bert", "frozen")
    kept = place / "kept.csv"
    (place / "texts.csv").rename(kept)  # what it was trained on need not be there
    try:
        (place / "new.txt").write_text("w1 w1\n\nw2 w5 w6 w7\n")
        (place / "new.jsonl").write_bytes(b'{"text": "w1 w1"}\n{"other": 1}\nnone\n{"text": "w2 \xff"}\n')
        (place / "new.csv").write_text('who,text\nme,"w2 w5\nw6 w7"\n')
        (place / "wrong.csv").write_text("who,txt\nme,w2\n")
        found, words = {}, ["job=predict", f"run.dir={folder.name}"]
        for name in ("new.txt", "new.jsonl", "new.csv"):
            run([*words, f"job.inputs={name}"], place=place)
            said = (folder / "predict/predictions.jsonl").read_text()
            found[name] = [json.loads(line) for line in said.splitlines()]
        wrong = run([*words, "job.inputs=wrong.csv"], place=place, code=2).out
        assert "wrong.csv has no column text; it has who, txt; did you mean" in wrong
    finally:
        kept.rename(place / "texts.csv")
    plain, rows, (table,) = found.values()
    assert [line["file"] for line in plain] == ["new.txt:1", "new.txt:3"]
    assert {line["class"] for line in plain} <= {"glad", "sad", "torn"}
    assert rows[0] == {**plain[0], "file": "new.jsonl:1"}
    assert [row["error"] and row["error"].split(":")[0] for row in rows] == [
        *(None, "has no text in text", "is no JSON", "is no UTF-8 text")
    ]
    assert table["probabilities"] == plain[1]["probabilities"]


@pytest.mark.long
@pytest.mark.parametrize(("family", "pool"), [("bert", "cls"), ("gpt2", "last"), ("qwen2", "last")])
def test_adapters_are_merged_and_it_scores_as_transformers_does(place: Path, family: str, pool: str) -> None:
    data = ("data.length=16", "loop.eval_batch=4", f"model.path={family}", f"model.pool={pool}")
    ended = run([*COMMON, *ADAPTED, *data, f"run.dir={family}-exported"], place=place)
    folder = ended.folder
    for job in (("job=predict",), ("job=export",), ("job=export", "job.format=pt2")):
        run([f"run.dir={folder.name}", "job.checkpoint=last", *job], place=place)
    assert float(stored(folder)["body." + NAMES[family] + ".lora_b"].abs().max()) > 0
    said = load_file(folder / "predict" / "predictions.safetensors")["output"].float()
    # the same classifier as transformers has it, with the weights that were exported
    config = transformers.AutoConfig.from_pretrained(place / family, num_labels=3, pad_token_id=0)
    theirs = transformers.AutoModelForSequenceClassification.from_config(config)
    kept = load_file(folder / "export" / "model.safetensors")
    head = "classifier" if family == "bert" else "score"
    prefixes = {"body": theirs.base_model_prefix, "head": head}
    theirs.load_state_dict({f"{prefixes[(own := name.partition('.'))[0]]}.{own[2]}": x for name, x in kept.items()})
    texts = transformers.AutoTokenizer.from_pretrained(place / "words", pad_token="?")(
        evaluated(place), padding=True, truncation=True, max_length=16, return_tensors="pt"
    )
    inputs = {name: texts[name] for name in ("input_ids", "attention_mask")}
    theirs = theirs.eval().float()
    torch.testing.assert_close(theirs(**inputs).logits, said, rtol=1e-4, atol=1e-4)
    # and without any of this: other numbers of texts and of tokens than it was traced with
    alone = torch.export.load(folder / "export" / "model.pt2").module()
    torch.testing.assert_close(
        alone({name: x[:5, :9] for name, x in inputs.items()}).float()[0],
        theirs(**{name: x[:1, :9] for name, x in inputs.items()}).logits[0],
        rtol=1e-4,
        atol=1e-4,
    )
    # a run begins with such a folder as it was left
    theirs.save_pretrained(place / f"{family}-theirs")
    again = run([*COMMON, *data, f"init_from={family}-theirs", "optimizer.lr=0", f"run.dir={family}-on"], place=place)
    assert again.lines("eval")[-1]["loss"] == pytest.approx(ended.lines("eval")[-1]["loss"], abs=1e-5)


NAMES = {
    "bert": "encoder.layer.1.attention.self.query",
    "gpt2": "h.1.attn.c_attn",
    "qwen2": "layers.1.self_attn.q_proj",
}


def evaluated(place: Path) -> list[str]:
    """The texts that are held back: every tenth row."""
    with (place / "texts.csv").open(newline="") as file:
        return [row["text"] for row in csv.DictReader(file)][9::10]


def test_what_is_frozen_is_the_same_in_every_step_and_costs_no_memory_of_an_optimizer(place: Path, alone: Any) -> None:
    folder = alone("bert", "adapted")
    everything, state = stored(folder), weights(folder)
    begun = load_file(place / "bert" / "model.safetensors")
    for name, value in begun.items():
        if not name.startswith("pooler"):
            assert torch.equal(state[f"body.{name}"], value.double()), name
    remembered = {name.split("/")[1] for name in everything if name.startswith("optimizer/")}
    assert remembered == {name for name in state if "lora_" in name or name.startswith("head.")}
    # dropout of 0.1 in its configuration, and none here
    assert "dropout" not in (folder / "logs" / "rank-0.log").read_text()
    words = [f"run.dir={folder.name}", "job=export", "job.format=huggingface", "job.checkpoint=last"]
    said = run(words, place=place, code=2).out
    assert "HFClassifier has no method save_pretrained(self, folder), as decoders" in said


def test_batches_hold_texts_of_similar_length(place: Path) -> None:
    data = LabelledText(str(place / "bert"), batch=8, file=str(place / "texts.csv"), length=24, group="who")
    lengths = data.train().lengths

    def order(seed: int) -> torch.Tensor:
        return data.order(seed, torch.Generator().manual_seed(seed))

    first, second = order(0), order(1)
    assert sorted(first.tolist()) == list(range(len(lengths)))
    assert torch.equal(first, order(0))
    assert not torch.equal(first, second)

    def padded(indices: torch.Tensor) -> int:
        return sum(int(data.train().batch(own)[0]["attention_mask"].eq(0).sum()) for own in indices[:80].view(-1, 8))

    assert 4 * padded(first) < padded(torch.randperm(len(lengths)))
    widths = [int(lengths[own].max()) for own in first[:80].view(-1, 8)]
    assert widths != sorted(widths)  # short and long batches in turn
    # whole speakers are held back, and labels are numbered in both parts alike
    with (place / "texts.csv").open(newline="") as file:
        speakers = [row["who"] for row in csv.DictReader(file)]
    assert len(data.evaluation()) == 6
    assert len(lengths) == len(speakers) - 6
    assert data.class_names == ["glad", "sad", "torn"]


REFUSED = {
    ("model.path=/nowhere",): r"model\.path=/nowhere: there is no folder",
    ("data.length=65",): r"data\.length is 65 tokens, the network of model\.path takes 64: data\.length=64",
    ("model.lora=0",): r"model\.lora is 0; it is the rank of the adapters, 1 or more",
    ("model.pool=max",): r"model\.pool=max: there are last, mean, cls",
    ("model.lora=2", "model.lora_layers=[q_prj]"): r"'q_prj' means no linear layer .*; there are q_proj, k_",
    ("data.label=mood",): r"data\.label=mood: row 1 of texts\.csv has no such column; it has who, text, label",
    ("data.evaluation=unlabelled.csv",): r"data\.label=label: row 2 of unlabelled\.csv has nothing in this column",
    ("data.file=texts.txt",): r"data\.file=texts\.txt: a file of rows ends in \.csv, \.tsv or \.jsonl",
    ("data.tokenizer=both",): r"both makes no token of any text in texts\.csv: transformers loads it as a Qwen2",
}


@pytest.mark.long
@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_work_is_refused(place: Path, words: tuple[str, ...]) -> None:
    if words == ("data.tokenizer=both",):
        shutil.copytree(place / "words", place / "both")
        shutil.copy(place / "qwen2" / "config.json", place / "both")
    said = run([*COMMON, "model.path=qwen2", "run.dir=refused", *words], place=place, code=2).out
    assert re.search(REFUSED[words], said), said
    assert not (place / "refused").exists()
