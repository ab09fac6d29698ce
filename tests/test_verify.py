"""`job=verify`: does a strategy train as one process does? What does not is found, and the first thing named."""

from __future__ import annotations

import re
from pathlib import Path
from pkgutil import resolve_name
from xml.etree import ElementTree

import pytest
import torch

from tests.commands import TRANSFORMER, finish, single
from tests.planted import PLANTS
from tests.planted.plant import NET, write_lab
from tests.planted.proofs import said_of, verdict, verified
from tests.processes import Processes
from tests.quick import quickly
from trainer.verify.comparison import TOLERANCES, compare
from trainer.verify.job import is_on_purpose
from trainer.verify.loss_plot import plot_curves
from trainer.verify.training_record import Key, Phase, TrainingRecord, sketch_rows
from trainer.verify.verdict import (
    DIVIDED,
    PROCESSES_VISIBLE,
    RECREATED,
    REPEATED,
    ExperimentResults,
    FirstDifference,
    RunFacts,
    explain_cause,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the yaml files of the planted mistakes lie, and the references."""
    place = tmp_path_factory.mktemp("planted")
    write_lab(place)
    return place


def test_every_phase_has_words_for_every_cause() -> None:
    phases = {value for name, value in vars(Phase).items() if name.isupper() and isinstance(value, str)}
    assert len(phases) == 12
    here = RunFacts(2, 2, planned=True, native=False, kinds={})
    for phase in phases:
        first = FirstDifference(1, phase, "name", 1.0, 2.0, (0,), 1, True)
        for name in (RECREATED, REPEATED, PROCESSES_VISIBLE, DIVIDED):
            assert explain_cause(first, here, ExperimentResults({name: True})).startswith("the ")
        assert explain_cause(first, here, ExperimentResults({DIVIDED: False})).startswith("the strategy, or the plan")


@pytest.mark.parametrize("losses", [[2.0], [float("nan"), 1.0], [-3e7, 2e9], [0.0, 0.0], [2.3, float("inf"), 1e-9]])
def test_any_curve_can_be_drawn(losses: list[float]) -> None:
    drawn = plot_curves(
        "<loss>", "a & b" * 50, {"one": losses, "<two>": [loss + 1e-8 for loss in losses]}, 1, floor=1e-7
    )
    assert len(drawn) < 10_000
    ElementTree.fromstring(drawn)


def test_no_floor_excuses_a_mistake() -> None:
    one, other = TrainingRecord(), TrainingRecord()
    for record, loss in ((one, 1.0), (other, 1.00001)):
        record.add(Key(1, Phase.LOSS, "loss"), [0], sketch_rows(torch.tensor([[loss]])))
        record.floors[Key(1, Phase.LOSS, "loss")] = float("inf")
    assert compare(one, other, TOLERANCES["fp64"]).differences
    assert not compare(one, one, TOLERANCES["fp64"]).differences


def test_what_is_infinite_is_equal_where_it_is_and_hides_no_other_number() -> None:
    inf, nan = float("inf"), float("nan")
    held = [0.0, -inf, -inf, 1.0, nan, inf]
    for numbers in (held, [0.0, -inf, inf, 1.0, nan, inf], [-inf, 0.0, -inf, 1.0, nan, inf], [nan, 0, 0, 0, 0, 0]):
        records = TrainingRecord(), TrainingRecord()
        for record, values in zip(records, (held, numbers), strict=True):
            record.add(Key(0, Phase.INITIAL, "mask"), [0], sketch_rows(torch.tensor([values])))
        assert bool(compare(*records, TOLERANCES["fp64"]).differences) == (numbers is not held)
    one, other = TrainingRecord(), TrainingRecord()
    for record, last in ((one, 1.0), (other, 1.0001)):
        record.add(Key(0, Phase.INITIAL, "mask"), [0], sketch_rows(torch.tensor([[-inf, -inf, last]])))
    (difference,) = compare(one, other, TOLERANCES["fp64"]).differences
    assert 0.9e-4 < difference.gap < 1.1e-4


def test_what_a_planted_mistake_changes_is_there() -> None:
    """A name that has become another one would be noticed in a long test alone."""
    for plant in PLANTS.values():
        for name in plant.changes:
            resolve_name(name)


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


def test_a_difference_before_the_first_gradient_is_on_nobodys_purpose() -> None:
    def first(step: int, phase: str) -> FirstDifference:
        return FirstDifference(step, phase, "name", 1.0, 2.0, (0,), 1, False)

    assert not any(is_on_purpose(first(1, phase), True) for phase in (Phase.INITIAL, Phase.DATA, Phase.FORWARD))
    assert is_on_purpose(first(1, Phase.GRADIENT), True)
    assert is_on_purpose(first(2, Phase.FORWARD), True)
    assert not is_on_purpose(first(1, Phase.GRADIENT), False)
    assert not is_on_purpose(None, True)


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


LISTS = ["model=of_rows", "task=of_dicts"]


QUICK = ("counts", "summed_at_owner", "own_rank_in_turn")


@pytest.mark.parametrize("mistake", quickly(PLANTS, *QUICK))
def test_a_planted_mistake_is_found_where_it_is_and_no_cause_is_false(
    processes: Processes, home: Path, mistake: str
) -> None:
    plant, said = PLANTS[mistake], said_of(processes, home, mistake)
    assert said.startswith(tuple(f"DIFFERS {where}" for where in plant.found)), said
    cause = said.partition("\n")[0].partition("cause: ")[2]
    # in the precision of the run alone nothing is tried, and none is named
    assert not cause or cause.startswith((*plant.true, "not known")), said
    assert plant.why in cause, said


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


@pytest.mark.parametrize(("steps", "counted"), quickly([(1, "1 step"), (2, "2 steps")], (2, "2 steps")))
def test_without_a_mistake_nothing_is_found(processes: Processes, home: Path, steps: int, counted: str) -> None:
    words = [*NET, "loop.epochs=null", f"loop.steps={steps}"]  # of three that are asked for
    assert verdict(processes, home, 2, words, ["strategy=fsdp"]).startswith(f"SAME: fsdp on 2, {counted}, ")


def test_the_command_makes_its_own_reference(tmp_path: Path) -> None:
    words = ["model=mlp", "model.width=16", "model.depth=1", "loop.global_batch=16", "device=cpu", "run.dir=run"]
    launch = ["processes=2", "job=verify", "strategy=fsdp", *words]
    said = finish(single(*launch), tmp_path)
    assert "SAME: fsdp on 2, 3 steps, fp64 gap" in said
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"verify"}
