"""What is no classification: the labs in tests/labs, each a folder to copy, trained as their users would."""

from __future__ import annotations

import re
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout, relu, softplus

from recipes.vision.augment import Augment
from tests.commands import curve, far, lines
from tests.inside import product
from tests.processes import Processes
from tests.quick import quickly
from tests.strategies.counting import collectives_of_a_step
from tests.strategies.toys import NETWORKS, Case, Net
from trainer.data.dataset_reader import LoaderOptions
from trainer.data.loader import TrainLoader
from trainer.data.rng import seed_all
from trainer.data.sampler import RankSampler
from trainer.launch.rendezvous import Launch
from trainer.messages import Refusal

pytestmark = pytest.mark.slow

HOME = Path(__file__).parent / "labs"
BRIEF = ("precision=fp64", "loop.steps=6", "loop.log_every=1", "loader.workers=0")


def train(launch: Launch, lab: str, folder: Path, *words: str) -> Any:
    """`python -m trainer --config-dir LAB/conf experiment=LAB …` where the labs lie; the exit code, or a refusal."""
    sys.path.insert(0, str(HOME))  # as the interpreter does with the present folder
    try:
        return product(launch, HOME, ["--config-dir", f"{lab}/conf", f"experiment={lab}", f"run.dir={folder}", *words])
    except Refusal as refusal:
        return str(refusal)
    finally:
        sys.path.remove(str(HOME))


def train_without_dropout(*words: Any) -> Any:
    """The same, of a network whose dropout no key reaches."""
    with patch.object(nn.Dropout, "forward", lambda self, x: x):
        return train(*words)


def same_curves(processes: Processes, lab: str, place: Path, *words: str, divided: str = "", how: Any = train) -> None:
    """Train a lab under three strategies: in double precision they learn the same and find the same."""
    for size, word in ((1, "single"), (2, "ddp"), (2, "fsdp")):
        own = ["strategy.sync_bn=true", f"strategy={word}", *([divided] if divided and size > 1 else [])]
        assert processes.run(size, how, lab, place / word, *BRIEF, *words, *own) == [0] * size
        shutil.rmtree(place / word / "checkpoints")  # of a large network a lot
    alone = place / "single"
    for spread in (place / "ddp", place / "fsdp"):
        assert far(curve(spread), curve(alone)) < 1e-9
        assert curve(spread, "sample_digest") == curve(alone, "sample_digest")
        for one, other in zip(lines(spread, "eval"), lines(alone, "eval"), strict=True):
            assert (one.pop("kind"), other.pop("kind")) == ("eval", "eval")
            assert one == pytest.approx(other, abs=1e-9)


@pytest.mark.parametrize(
    ("lab", "figures", "divided"),
    [
        pytest.param("segmentation", {"mean_iou"}, "", marks=pytest.mark.long),
        ("masked", {"accuracy"}, "loop.micro_batches=2"),  # of unequal weight
        pytest.param("distillation", {"accuracy"}, "loop.micro_batches=2", marks=pytest.mark.long),
        # with others a picture would have fewer to be found among
        pytest.param("contrast", {"found"}, "", marks=pytest.mark.long),
        pytest.param("gan", {"real_believed", "drawn_believed"}, "loop.micro_batches=2", marks=pytest.mark.long),
        pytest.param("recurrent", {"loss"}, "loop.micro_batches=2", marks=pytest.mark.long),
        # each micro-batch is collated by itself: lists of images, and graphs whose nodes stand one after the other
        pytest.param("detection", {"map50"}, "loop.micro_batches=2", marks=pytest.mark.long),
        pytest.param("graphs", {"accuracy"}, "loop.micro_batches=5", marks=pytest.mark.long),
    ],
)
def test_a_lab_has_one_curve(processes: Processes, tmp_path: Path, lab: str, figures: set[str], divided: str) -> None:
    same_curves(processes, lab, tmp_path, divided=divided)
    assert figures < set(lines(tmp_path / "fsdp", "eval")[-1])


# eight streams of seven windows: an epoch has seven steps, and the evaluation three batches
STREAMS = ["data.numbers=300", "loop.global_batch=8", "loop.eval_batch=2", "loop.max_norm=null", "loop.log_every=1"]
STREAMS += ["schedule=constant", "optimizer=adam", "optimizer.lr=3e-3", "loop.epochs=null", "loop.eval_every=7"]


def losses_of_a_loop_over_streams(steps: int) -> tuple[list[float], list[float]]:
    """Truncated backpropagation as people write it: the memory is detached, and zeros where an epoch begins."""
    lab = import_module("tests.labs.recurrent.lab")
    data = lab.Counted(300, 16, 8, 2)
    seed_all(0)
    reader = lab.Reader(32, 2, 8, 2).double()
    optimizer = torch.optim.Adam(reader.parameters(), lr=3e-3)
    losses, evaluations = [], []

    def loss_of(windows: Any, at: slice, memory: Any) -> tuple[torch.Tensor, Any]:
        text, following = windows.text[at], windows.following[at]
        zeros = torch.zeros(len(text), 2, 2, 32, dtype=torch.float64)
        scores, memory = reader(text, zeros if memory is None else memory)
        return cross_entropy(scores.flatten(0, 1), following.flatten()), memory.detach()

    memory: Any = None
    for step in range(steps):
        at = slice(step % 7 * 8, step % 7 * 8 + 8)
        loss, memory = loss_of(data.windows, at, memory if step % 7 else None)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 7 == 6 or step + 1 == steps:
            own, found = None, []
            for batch in range(3):
                loss, own = loss_of(data.rest, slice(batch * 2, batch * 2 + 2), own)
                found.append(loss.item())
            evaluations.append(sum(found) / 3)
    return losses, evaluations


@pytest.mark.parametrize(
    ("size", "words"),
    [(1, ["single"]), pytest.param(2, ["ddp", "loop.micro_batches=2"], marks=pytest.mark.long)],
)
def test_a_memory_passes_from_batch_to_batch_as_in_a_loop_that_detaches_it(
    processes: Processes, tmp_path: Path, size: int, words: list[str]
) -> None:
    for steps in (5, 12):  # the second one goes on in the middle of an epoch
        how = [*STREAMS, f"loop.steps={steps}", "precision=fp64", f"strategy={words[0]}", *words[1:]]
        assert processes.run(size, train, "recurrent", tmp_path / "run", *how) == [0] * size
    losses, evaluations = losses_of_a_loop_over_streams(12)
    assert far(curve(tmp_path / "run"), losses) < 1e-9
    found = {line["step"]: line["loss"] for line in lines(tmp_path / "run", "eval")}
    assert far([found[7], found[12]], evaluations) < 1e-9


def test_dropout_on_the_nodes_of_graphs_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with patch.object(torch.Tensor, "relu", lambda x: dropout(relu(x), 0.5)):
        assert train(Launch(), "graphs", tmp_path, "strategy=single", *BRIEF, "log=[console]") == 0
    (note,) = [line for line in capsys.readouterr().out.splitlines() if "random numbers of shape" in line]
    assert re.search(r"in or after layers\.0 .*parts of samples of different size \(and at \d+ more places\)", note)


LOSSES = [
    ("loss", "TypeError", lambda task, output, target: cross_entropy(output, target)),
    ("loss", "AttributeError", lambda task, output, target: sum(output.values())),
    ("loss", "TypeError: it returned that list", lambda task, output, target: output),
    ("metrics", "AttributeError", lambda task, output, target: {"right": output.argmax(1).sum()}),
]


@pytest.mark.parametrize(("method", "error", "wrong"), quickly(LOSSES, LOSSES[0]))
def test_what_meets_lists_in_an_evaluation_is_told_what_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, error: str, wrong: Any
) -> None:
    monkeypatch.syspath_prepend(str(HOME))
    monkeypatch.setattr(import_module("detection.lab").Detection, method, wrong)
    said = train(Launch(), "detection", tmp_path, "strategy=single", *BRIEF, "data.size=8", "loop.eval_batch=4")
    assert str(said).startswith(f"Detection.{method} fails in an evaluation ({error}")
    assert "a list with a dict for each sample (boxes, scores, labels)" in said
    assert 'return output if isinstance(output, dict) else output[0]["boxes"].new_zeros(())' in said


@pytest.mark.long
def test_a_network_that_draws_its_anchors_trains_and_finds_boxes(processes: Processes, tmp_path: Path) -> None:
    words = ["model=fasterrcnn", "strategy=ddp", "loop.micro_batches=2", "loop.steps=2"]
    assert processes.run(2, train, "detection", tmp_path, *BRIEF, *words) == [0, 0]
    assert {"loss_classifier", "loss_box_reg", "loss_objectness"} < set(lines(tmp_path, "train")[-1])


@pytest.mark.long
@pytest.mark.parametrize("model", ["fcn", "deeplab"])
def test_the_large_networks_of_the_tutorials_have_one_curve(processes: Processes, tmp_path: Path, model: str) -> None:
    words = [f"model={model}", "optimizer=sgd", "loop.steps=3", "loop.global_batch=4", "loop.eval_every=null"]
    same_curves(processes, "segmentation", tmp_path, *words, how=train_without_dropout)


def test_a_lab_is_no_longer_than_a_page() -> None:
    lengths = {lab.parent.name: len(lab.read_text().splitlines()) for lab in HOME.glob("*/lab.py")}
    assert len(lengths) == 8
    assert max(lengths.values()) <= 90


MODELS = {
    "bert": """
_target_: transformers.BertForSequenceClassification
config:
  _target_: transformers.BertConfig
  vocab_size: 32
  num_labels: 32
  hidden_size: 16
  num_hidden_layers: 2
  num_attention_heads: 2
  intermediate_size: 32
  hidden_dropout_prob: 0.0
  attention_probs_dropout_prob: 0.0
""",
    "hf_gpt2": """
_target_: transformers.GPT2LMHeadModel
config:
  _target_: transformers.GPT2Config
  vocab_size: 32
  bos_token_id: 0
  eos_token_id: 0
  n_positions: 8
  n_embd: 16
  n_layer: 3
  n_head: 2
  resid_pdrop: 0.0
  embd_pdrop: 0.0
  attn_pdrop: 0.0
  tie_word_embeddings: false
""",
    "own": "_target_: wordlab.lab.Reader\n",
}
WORDS = """
from dataclasses import dataclass
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from trainer import Data, Task


@dataclass
class Answer:
    logits: Tensor


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.places = nn.Embedding(32, 16), nn.Parameter(torch.zeros(8, 16))
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 32)

    def forward(self, src):
        mask = nn.Transformer.generate_square_subsequent_mask(len(src[0]))
        hidden = self.embed(src) + self.places[: len(src[0])]
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask)
        return Answer(self.head(self.norm(hidden)))


class Words(Data):
    def train(self):
        words = torch.randint(0, 32, (96, 7), generator=torch.Generator().manual_seed(0))
        return torch.utils.data.TensorDataset(words, words.sum(1) % 32)

    def evaluation(self):
        return self.train()


class Sums(Task):
    def forward(self, network, inputs, targets):
        logits = network(inputs).logits
        return logits if logits.dim() == 2 else logits[:, -1]

    def loss(self, output, target):
        return cross_entropy(output, target)

    def metrics(self, output, target):
        return {"accuracy": (output.argmax(1) == target).sum()}
"""


def train_words(launch: Launch, home: Path, *words: str) -> Any:
    with patch.object(sys, "path", [str(home), *sys.path]):
        chosen = [
            "data=words",
            "task=sums",
            "schedule=constant",
            "loop.global_batch=16",
            "loop.micro_batches=2",
            *BRIEF,
        ]
        try:
            return product(launch, home, ["--config-dir", "wordlab/conf", *chosen, *words])
        except Refusal as refusal:
            return str(refusal)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a lab with networks of others lies: yaml, and a task."""
    files = {"lab.py": WORDS, **{f"conf/model/{name}.yaml": text for name, text in MODELS.items()}}
    files |= {"conf/data/words.yaml": "_target_: wordlab.lab.Words\n"}
    files |= {"conf/task/sums.yaml": "_target_: wordlab.lab.Sums\n"}
    place = tmp_path_factory.mktemp("home")
    for name, text in files.items():
        (place / "wordlab" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "wordlab" / name).write_text(text)
    return place


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "spread"),
    quickly(
        [("own", ["pp", "ddp_pp"]), ("bert", ["ddp", "fsdp", "pp", "ddp_pp"]), ("hf_gpt2", ["pp", "ddp_pp"])],
        ("own", ["pp", "ddp_pp"]),
    ),
)
def test_a_network_of_others_is_yaml_and_a_task(
    processes: Processes, home: Path, model: str, spread: list[str]
) -> None:
    if model != "own":
        pytest.importorskip("transformers", reason="the extra bench brings it")

    def trained(size: int, word: str, place: Path, *words: str) -> Path:
        chosen = [f"model={model}", f"strategy={word}", f"run.dir={place}", *words]
        assert processes.run(size, train_words, home, *chosen) == [0] * size
        return place

    alone = trained(1, "single", home / model / "single")
    for word in spread:
        spread_run = trained(4 if word == "ddp_pp" else 2, word, home / model / word)
        assert far(curve(spread_run), curve(alone)) < 1e-9
        assert lines(spread_run, "eval")[-1]["accuracy"] == lines(alone, "eval")[-1]["accuracy"]
    # a checkpoint serves all strategies: a pipeline's goes on in one process, and the other way round
    for size, word, before in ((1, "single", "pp"), (2, "pp", "single")):
        trained(size, word, home / model / before, "loop.steps=9")
    assert far(curve(home / model / "pp"), curve(alone)) < 1e-9
    assert len(curve(alone)) == 9


@pytest.mark.long
def test_tied_embeddings_are_refused_with_the_key_that_unties_them(processes: Processes, home: Path) -> None:
    pytest.importorskip("transformers", reason="the extra bench brings it")
    words = ["model=hf_gpt2", "model.config.tie_word_embeddings=true", "strategy=pp", f"run.dir={home / 'tied'}"]
    for said in processes.run(2, train_words, home, *words):
        assert "transformer.wte.weight and lm_head.weight are one parameter" in said
        assert "tie_word_embeddings: false" in said
    assert not (home / "tied").exists()  # before there was a group


class Taught(Net):
    """A network with a frozen one beside it that takes part in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = Net().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.teacher(x)


def traffic(launch: Launch, strategy: str, frozen: bool) -> list[tuple[str, int]]:
    NETWORKS["taught"] = Taught
    return collectives_of_a_step(launch, Case(strategy, network="taught" if frozen else "net"))


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("zero1", marks=pytest.mark.long)])
def test_nothing_travels_for_what_is_frozen(processes: Processes, strategy: str) -> None:
    alone, beside = (processes.run(2, traffic, strategy, frozen) for frozen in (False, True))
    assert beside == alone


def losses_of_a_loop(width: int, steps: int) -> list[tuple[float, float]]:
    """The GAN as people write it: two optimizers, two backwards, both networks move at once."""
    lab = import_module("tests.labs.gan.lab")
    data = lab.Drawings(Augment(mean=(0.5,), std=(0.5,), full_scale=16.0))
    seed_all(0)
    rivals = lab.Rivals(width).double()
    generator, discriminator = rivals.generator, rivals.discriminator
    of_generator, of_discriminator = (
        torch.optim.Adam(network.parameters(), lr=rate, betas=(0.5, 0.999))
        for network, rate in ((generator, 2e-4), (discriminator, 4e-4))
    )
    stream = TrainLoader(data, data.train(), RankSampler(0, 1, torch.device("cpu"), 0), 128, 1, LoaderOptions())
    losses = []
    for (batch,), _ in zip(stream.epoch(0), range(steps), strict=False):
        image, noise = batch.inputs["image"].double(), batch.inputs["noise"].double()
        drawn = generator(noise)

        of_discriminator.zero_grad()
        unmasked = softplus(-discriminator(image)).mean() + softplus(discriminator(drawn.detach())).mean()
        unmasked.backward()
        gradients = [parameter.grad.clone() for parameter in discriminator.parameters()]

        of_generator.zero_grad()
        fooled = softplus(-discriminator(drawn)).mean()
        fooled.backward()

        of_generator.step()
        for parameter, gradient in zip(discriminator.parameters(), gradients, strict=True):
            parameter.grad = gradient  # without what the generator's loss has added
        of_discriminator.step()
        losses.append((fooled.item(), unmasked.item()))
    return losses


def test_a_gan_learns_what_a_loop_with_two_backwards_does(tmp_path: Path) -> None:
    assert train(Launch(), "gan", tmp_path / "run", "strategy=single", *BRIEF) == 0
    ours = zip(curve(tmp_path / "run", "generator"), curve(tmp_path / "run", "discriminator"), strict=True)
    theirs = losses_of_a_loop(width=16, steps=6)
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, abs=1e-9)


def test_a_pipeline_trains_a_gan_as_one_process_does(processes: Processes, tmp_path: Path) -> None:
    """Its cut lies in the generator: the discriminator is called several times."""
    assert train(Launch(), "gan", tmp_path / "alone", "strategy=single", *BRIEF) == 0
    words = ["strategy=pp", "loop.micro_batches=2", *BRIEF]
    assert processes.run(2, train, "gan", tmp_path / "stages", *words) == [0, 0]
    for loss in ("generator", "discriminator"):
        assert far(curve(tmp_path / "alone", loss), curve(tmp_path / "stages", loss)) < 1e-12
