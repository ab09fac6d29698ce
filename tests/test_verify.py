"""`job=verify`: does a strategy train as one process does? What does not is found, and the first thing named."""

from __future__ import annotations

import io
import json
import re
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch
from xml.etree import ElementTree

import pytest
import torch

from tests.commands import TRANSFORMER, finish, single
from tests.inside import product
from tests.processes import Processes
from tests.quick import quickly
from trainer.launch.launch import Launch
from trainer.parallel.clip import global_norm
from trainer.proof.comparison import EXACTNESS, compared
from trainer.proof.picture import picture
from trainer.proof.record import INITIAL, LOSS, Key, Record
from trainer.proof.signature import signatures
from trainer.refusal import Refusal, Told

pytestmark = pytest.mark.slow

NET = (
    "--config-dir",
    "conf",
    "trust=[tests]",
    "model=net",
    "data=numbers",
    "task=classes",
    "loop.global_batch=24",
    "loader.workers=0",
)
NODES = {
    "data": {
        "numbers": "Numbers",
        "counted": "Counted",
        "scaled": "Scaled",
        "listed": "Listed",
        "in_dict": "InDict",
        "read": "Read",
        "triples": "Triples",
        "recalling": "Recalling",
        "same_order": "SameOrder",
    },
    "task": {
        "classes": "Classes",
        "summed": "Summed",
        "meaned": "Meaned",
        "own_decay": "OwnDecay",
        "of_dicts": "OfDicts",
        "counts": "Counts",
        "last_decay": "LastDecay",
        "late_metric": "LateMetric",
    },
    "schedule": {"remembering": "Remembering"},
    "optimizer": {"scaled_rate": "ScaledRate\nlr: 0.1"},
    "model": {"net": "net", "of_rows": "OfRows", "of_nodes": "OfNodes"},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the yaml files of the planted mistakes lie, and the references."""
    place = tmp_path_factory.mktemp("planted")
    for group, nodes in NODES.items():
        (place / "conf" / group).mkdir(parents=True)
        for name, target in nodes.items():
            (place / "conf" / group / f"{name}.yaml").write_text(f"_target_: tests.planted.{target}\n")
    return place


def verified(launch: Launch, place: Path, words: list[str]) -> tuple[Any, str]:
    """The exit code of `job=verify` with these words, or the refusal; and what it says."""
    with redirect_stdout(io.StringIO()) as said:
        try:
            code: Any = product(launch, place, ["job=verify", *words])
        except (Refusal, Told) as ended:
            return str(ended), ""
    return code, said.getvalue()


def verdict(processes: Processes, place: Path, size: int, words: list[str], own: list[str], how: Any = verified) -> str:
    """What the ranks say of these words with their own ones (strategy, micro-batches), after the reference was made."""
    file = place / f"{abs(hash(tuple(words)))}.safetensors"
    if not file.exists():  # without a process of its own: that would cost its imports each time
        assert processes.run(1, verified, place, [*words, f"run.dir={file}.run", f"job.record={file}"]) == [(0, "")]
    run = f"run.dir={place / f'{file.stem}-run'}"
    (code, said), *others = processes.run(size, how, place, [*words, *own, run, f"job.reference={file}"])
    assert others == [(code, "")] * (size - 1)  # one rank speaks
    assert code == (0 if said.startswith("SAME") else 1)
    out = place / f"{file.stem}-run/verify"
    assert json.loads((out / "verify.json").read_text())["same"] == (not code)
    ElementTree.parse(out / "curves.svg")
    assert not (place / f"{file.stem}-run/verify/trial").exists()
    return said


@pytest.mark.parametrize("losses", [[2.0], [float("nan"), 1.0], [-3e7, 2e9], [0.0, 0.0], [2.3, float("inf"), 1e-9]])
def test_any_curve_can_be_drawn(losses: list[float]) -> None:
    drawn = picture("<loss>", "a & b" * 50, {"one": losses, "<two>": [loss + 1e-8 for loss in losses]}, 1, floor=1e-7)
    assert len(drawn) < 10_000
    ElementTree.fromstring(drawn)


def test_no_floor_excuses_a_mistake() -> None:
    one, other = Record(), Record()
    for record, loss in ((one, 1.0), (other, 1.00001)):
        record.add(Key(1, LOSS, "loss"), [0], signatures(torch.tensor([[loss]])))
    assert compared(one, other, EXACTNESS["fp64"], {LOSS: float("inf")}).differences
    assert not compared(one, one, EXACTNESS["fp64"], {LOSS: float("inf")}).differences


def test_what_is_infinite_is_equal_where_it_is_and_hides_no_other_number() -> None:
    inf, nan = float("inf"), float("nan")
    held = [0.0, -inf, -inf, 1.0, nan, inf]
    for numbers in (held, [0.0, -inf, inf, 1.0, nan, inf], [-inf, 0.0, -inf, 1.0, nan, inf], [nan, 0, 0, 0, 0, 0]):
        records = Record(), Record()
        for record, values in zip(records, (held, numbers), strict=True):
            record.add(Key(0, INITIAL, "mask"), [0], signatures(torch.tensor([values])))
        assert bool(compared(*records, EXACTNESS["fp64"]).differences) == (numbers is not held)
    one, other = Record(), Record()
    for record, last in ((one, 1.0), (other, 1.0001)):
        record.add(Key(0, INITIAL, "mask"), [0], signatures(torch.tensor([[-inf, -inf, last]])))
    (difference,) = compared(one, other, EXACTNESS["fp64"]).differences
    assert 0.9e-4 < difference.gap < 1.1e-4


SPREAD = [
    (1, "single", ["loop.micro_batches=3"]),
    (2, "ddp", ["loop.micro_batches=2", "loop.max_norm=0.1"]),
    (2, "zero1", []),
    (2, "fsdp", ["strategy.activation_checkpointing=units"]),
    (2, "tp", []),
    (2, "pp", ["loop.micro_batches=2"]),
    (4, "fsdp_tp", []),
    (4, "ddp_pp", ["loop.micro_batches=2"]),
]


@pytest.mark.long
@pytest.mark.parametrize(("size", "strategy", "own"), SPREAD)
def test_a_transformer_trains_the_same_everywhere(
    processes: Processes, home: Path, size: int, strategy: str, own: list[str]
) -> None:
    words = [*TRANSFORMER, "loop.global_batch=24"]
    words += [word for word in own if "max_norm" in word]
    said = verdict(processes, home, size, words, [f"strategy={strategy}", *own])
    assert said.startswith(f"SAME: {strategy} on {size}, 3 steps, fp64 gap ")
    assert float(said.split("gap ")[1].split(";")[0]) < 1e-10


IMAGES = [
    "data=synthetic_images",
    "data.size=48",
    "data.image_size=32",
    "loop.global_batch=8",
    "strategy.sync_bn=true",
]
ZOO = ("resnet18", "mobilenet_v3_small", "shufflenet_v2_x0_5", "squeezenet1_1", "efficientnet_b0")
PEOPLES = {
    "mlp": ["model=mlp", "model.width=32", "loop.global_batch=24"],
    "cnn": ["model=cnn", "loop.global_batch=24"],
    "vit_tiny": [*TRANSFORMER, "model.dropout=0.1", "loop.global_batch=24"],
    "gpt_nano": ["data=synthetic_tokens", "data.length=16", "task=language", "model=gpt_nano", "loop.global_batch=8"],
    **{name: ["model=torchvision", f"model.name={name}", *IMAGES] for name in ZOO},
}
EVERYWHERE = [(1, "single"), (2, "ddp"), (2, "zero1"), (2, "fsdp"), (4, "hsdp")]
PLANNED = [(2, "tp"), (4, "ddp_tp"), (4, "fsdp_tp"), (2, "pp"), (4, "ddp_pp"), (4, "fsdp_pp")]


@pytest.mark.long(one_in=30)  # up to eleven proofs each
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("network", PEOPLES)
def test_there_is_no_false_alarm(processes: Processes, home: Path, network: str, precision: str) -> None:
    words = [*PEOPLES[network], f"precision={precision}"]
    planned = network in ("vit_tiny", "gpt_nano")
    for size, strategy in [*EVERYWHERE, *(PLANNED if planned else ())]:
        own = [f"strategy={strategy}", *(["loop.micro_batches=2"] if "pp" in strategy else [])]
        said = verdict(processes, home, size, words, own)
        assert said.startswith(f"SAME: {strategy} on {size}"), said


def of_network(kind: str, where: str, why: str, *words: str) -> tuple[list[str], str, str]:
    return [f"+model.kind={kind}", *words], f"step 1, forward, middle,{where}", why


SEEN = "is another one when other processes are in sight"
LISTS = ["model=of_rows", "task=of_dicts"]
# words → where it is found, and which cause is named
PLANTED = {
    "own_rank": of_network(
        "own_rank",
        " samples of rank 1,",
        "the network: what this module computes is another one when other processes are in sight",
    ),
    "own_rank in turn": of_network("own_rank", " samples of rank 1,", SEEN, "loop.micro_batches=2"),
    "own_eps": of_network("own_eps", " samples of rank 1,", SEEN),
    "python_random": of_network("python_random", "", "the forward draws from Python's random"),
    "centred": of_network("centred", "", "depends on the other samples"),
    "centred in turn": of_network("centred", "", "depends on the other samples", "loop.micro_batches=2"),
    "chosen": of_network("chosen", "", "chooses"),
    "batch_norm": of_network("batch_norm", "", "strategy.sync_bn=true"),
    "native_drop": of_network("native_drop", "", "random numbers: torch's own", "loop.dropout=native"),
    "own_buffer": (
        ["+model.kind=own_buffer"],
        "step 1, update, middle.mean",
        "a buffer that is updated from",
    ),
    "own_backward": (["+model.kind=own_backward"], "step 1, gradient, middle.bias,", "a backward of its own"),
    "own_hook": (
        ["+model.kind=own_hook"],
        "step 1, gradient, middle.weight,",
        SEEN,
    ),
    "own_seed": (["+model.kind=own_seed"], "initial values, middle.weight,", "no seed reaches"),
    "unsaved": (["+model.kind=unsaved"], "step 2, forward, middle,", "the resume"),
    "counts": (["task=counts"], "step 2, loss, loss", "the resume: something that Task keeps"),
    "remembering": (["schedule=remembering"], "step 2, learning rate, ", "the resume: something that Schedule"),
    "recalling": (["data=recalling"], "step 2, data, inputs", "the resume: something that Data"),
    "same_order": (["data=same_order"], "step 3, data, inputs, rank 1", SEEN),
    "counted": (["data=counted"], "step 1, data, inputs", "repeated in the same process"),
    "scaled": (["data=scaled"], "step 1, data, inputs", "the data: an item depends on the other"),
    "read": ([*LISTS, "data=read"], "step 1, data, inputs.*", "the data"),
    "summed": (["task=summed"], "step 1, loss, loss", "It is 1/2 times that of one process"),
    "meaned": (["task=meaned"], "step 3, evaluation, accuracy", "no sum over samples"),
    "own_decay": (["task=own_decay"], "step 1, update, middle.weight", "the task: after_step"),
    "low_rank": (
        ["+model.kind=low_rank", "task=last_decay", "+task.name=middle.down.weight"],
        "step 3, update, middle.down.weight",
        "the task: after_step",
    ),
    "places": (["+model.kind=places", "task=last_decay"], "step 3, update, middle.weight", "the task: after_step"),
    "late_metric": (
        ["task=late_metric", "loop.eval_batch=24"],
        "step 3, evaluation, accuracy",
        SEEN,
    ),
    "scaled_rate": (["optimizer=scaled_rate"], "step 1, optimizer step, head.bias", "the optimizer"),
}


@pytest.mark.parametrize("mistake", quickly(PLANTED, "own_rank in turn", "read", "counts", "same_order", "summed"))
def test_a_planted_mistake_is_found_where_it_is(processes: Processes, home: Path, mistake: str) -> None:
    words, where, why = PLANTED[mistake]
    said = verdict(processes, home, 2, [*NET, *words], ["strategy=ddp"])
    assert said.startswith(f"DIFFERS at {where}"), said
    assert why in said.split("cause: ")[1].splitlines()[0], said


@pytest.mark.long
@pytest.mark.parametrize("own", [[], ["strategy.activation_checkpointing=units", "loop.micro_batches=2"]])
def test_ranks_that_gather_different_layers_are_told_so_before_they_do(
    processes: Processes, home: Path, own: list[str]
) -> None:
    words, file = [*NET, "+model.kind=chosen_layer"], home / "chosen_layer.safetensors"
    if not file.exists():
        assert processes.run(1, verified, home, [*words, f"run.dir={file}.run", f"job.record={file}"]) == [(0, "")]
    words += ["strategy=fsdp", *own, f"run.dir={home / 'chosen_layer'}", f"job.reference={file}"]
    (said, _), other = processes.run(2, verified, home, words)
    assert other == (said, "")
    assert re.search(r"DIFFERS at step 1, forward, (middle\.layers\.\d): what is called is \1 on rank 0", said), said
    assert "a choice of layers by a rank's own samples" in said


def broken(launch: Launch, place: Path, words: list[str], target: str, change: str) -> tuple[Any, str]:
    """The same where a strategy has a mistake: this function of it is another one."""
    changes = {"one": lambda x, _: x, "twice": lambda gradients: 2 * global_norm(gradients), "nothing": lambda *_: None}
    changes["itself"] = lambda _, tensors: {name: one.detach() for name, one in tensors.items()}
    with patch(target, changes[change]):
        return verified(launch, place, words)


@pytest.mark.long
@pytest.mark.parametrize(
    ("target", "change", "where", "why"),
    [
        (
            "trainer.strategies.placed.times",
            "one",
            "step 1, gradient, head.bias",
            "the strategy: how it adds up",
        ),
        ("trainer.strategies.placed.global_norm", "twice", "step 1, norm, norm", "the strategy: the norm"),
        (
            "trainer.strategies.placed.restore_optimizer",
            "nothing",
            "step 1, resume, optimizer/",
            "the strategy: saving",
        ),
        ("trainer.records.saver.Beside.copied", "itself", "step 1, resume, ", "the strategy: saving"),
    ],
)
def test_a_mistake_of_a_strategy_is_found(
    processes: Processes, home: Path, target: str, change: str, where: str, why: str
) -> None:
    words = [*NET, "loop.max_norm=0.1"]
    how = partial(broken, target=target, change=change)
    said = verdict(processes, home, 2, words, ["strategy=ddp", "loop.micro_batches=2"], how)
    assert said.startswith(f"DIFFERS at {where}"), said
    assert why in said.split("cause: ")[1].splitlines()[0], said


def test_without_a_mistake_nothing_is_found(processes: Processes, home: Path) -> None:
    words = [*NET, "loop.epochs=null", "loop.steps=2"]  # of three that are asked for
    assert verdict(processes, home, 2, words, ["strategy=fsdp"]).startswith("SAME: fsdp on 2, 2 steps, ")


def test_the_command_makes_its_own_reference(tmp_path: Path) -> None:
    words = ["model=mlp", "model.width=16", "model.depth=1", "loop.global_batch=16", "device=cpu", "run.dir=run"]
    launch = ["processes=2", "job=verify", "strategy=fsdp", *words]
    said = finish(single(*launch), tmp_path)
    assert "SAME: fsdp on 2, 3 steps, fp64 gap" in said
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"verify"}
