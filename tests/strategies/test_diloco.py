"""DiLoCo: what its mathematics is, what it sends and when, and what a checkpoint between two outer steps gives back."""

from __future__ import annotations

import copy
import re
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.commands import SMALL, TRANSFORMER, curve, far, lines
from tests.inside import product
from tests.processes import Processes
from tests.quick import quickly
from tests.strategies.toys import BATCH, Case, Net, ToyData, run
from tests.test_plan import collective, plan
from tests.test_wire import SMALL as FEW_BYTES
from tests.test_wire import sent, sizes_of
from trainer import Refusal
from trainer.api import build_run
from trainer.data.dataset_reader import LoaderOptions
from trainer.data.loader import TrainLoader
from trainer.data.sampler import RankSampler
from trainer.launch.rendezvous import Launch
from trainer.learning.freezing import freeze
from trainer.parallel.module_units import divide_into_fragments

EXACT = Case("diloco", precision="fp64", average=None, steps=14)
MEAN = {"every": 1, "outer_lr": 1.0, "outer_momentum": 0.0}


def largest(one: dict[str, Any], other: dict[str, Any]) -> float:
    """How far the weights of two runs are apart."""
    assert one.keys() == other.keys()
    return max(float((torch.tensor(one[name]) - torch.tensor(other[name])).abs().max()) for name in one)


@pytest.mark.parametrize("size", quickly([1, 2, 3], 2))
def test_a_meeting_after_each_step_of_sgd_is_ddp(processes: Processes, size: int) -> None:
    # of different numbers of samples, with momentum and weights that do not count: all of that is linear
    case = EXACT.but(fields=MEAN, optimizer="sgd", max_norm=inf, task="weighted", micro_batches=2)
    (one,) = processes.run(1, run, case.but(strategy="single", fields={}))
    for rank in processes.run(size, run, case):
        assert far(rank["losses"], one["losses"]) < 1e-10
        assert largest(rank["weights"], one["weights"]) < 1e-10
        assert rank["digests"] == one["digests"]


SCHEDULES = [
    {"every": 4},
    {"every": 4, "outer_lr": 1.0, "outer_momentum": 0.0},
    {"every": 4, "fragments": 3, "overlap": 2},
    {"every": 5, "fragments": 2, "overlap": 3, "mixing": 0.25},
]


def by_hand(size: int, fields: dict[str, Any], steps: int) -> tuple[list[float], dict[str, Any]]:
    """The same training of so many copies in one process, as the papers have it: losses, and the shared weights."""
    torch.manual_seed(EXACT.seed)
    shared = Net().double()
    every, overlap, count = fields["every"], fields.get("overlap", 0), fields.get("fragments", 1)
    kept = fields.get("mixing", 0.5 if overlap else 0.0)
    fragments = divide_into_fragments(shared, shared.plan(), count)
    parameters = dict(shared.named_parameters())
    rate, decay = fields.get("outer_lr", 0.7), fields.get("outer_momentum", 0.9)
    outer = [torch.optim.SGD([parameters[n] for n in f], rate, decay, nesterov=decay > 0) for f in fragments]
    networks = [copy.deepcopy(shared) for _ in range(size)]
    inner = [torch.optim.AdamW(network.parameters(), lr=0.01) for network in networks]
    data = ToyData()
    samplers = [RankSampler(rank, size, torch.device("cpu"), EXACT.seed) for rank in range(size)]
    loaders = [TrainLoader(data, data.train(), sampler, BATCH, 1, LoaderOptions()) for sampler in samplers]
    losses: list[float] = []
    travelling: dict[int, Any] = {}
    for step in range(1, steps + 1):
        epoch, position = divmod(step - 1, loaders[0].steps_per_epoch)
        parts = []
        for network, optimizer, loader in zip(networks, inner, loaders, strict=True):
            ((batch,),) = [next(loader.epoch(epoch, position * BATCH))]
            loss = F.cross_entropy(network(batch.inputs.double()), batch.targets[0])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            parts.append(loss.item())
        losses.append(sum(parts) / size)
        own = [dict(network.named_parameters()) for network in networks]
        for index, names in enumerate(fragments):
            if step % every == every * index // count:
                travelling[index] = [sum(parameters[n].data - o[n].data for o in own) / size for n in names]
            if index in travelling and (step - every * index // count) % every == overlap:
                for name, gradient in zip(names, travelling.pop(index), strict=True):
                    parameters[name].grad = gradient
                outer[index].step()
                for name in names:
                    for mine in own:
                        mine[name].data = kept * mine[name].data + (1 - kept) * parameters[name].data
    return losses, {name: tensor.tolist() for name, tensor in shared.state_dict().items()}


@pytest.mark.parametrize(
    ("size", "fields"),
    [(2, SCHEDULES[2]), *(pytest.param(n, each, marks=pytest.mark.long) for n in (2, 3) for each in SCHEDULES)],
)
def test_it_trains_as_a_plain_loop_over_its_copies(processes: Processes, size: int, fields: dict[str, Any]) -> None:
    losses, weights = by_hand(size, fields, EXACT.steps)
    ranks = processes.run(size, run, EXACT.but(fields=fields))
    for rank in ranks:
        assert far(rank["losses"], losses) < 1e-10
        assert largest(rank["weights"], weights) < 1e-10
        assert rank["figures"] == ranks[0]["figures"]
        assert rank["back"]


@pytest.mark.parametrize(
    "fields", [SCHEDULES[3], pytest.param({"every": 4, "compress": "bf16"}, marks=pytest.mark.long)]
)
def test_a_resume_at_any_step_has_the_same_bits(processes: Processes, tmp_path: Path, fields: dict[str, Any]) -> None:
    case = Case("diloco", fields, average=None, steps=11)
    whole = processes.run(2, run, case)
    for stop in (3, 5, 7):  # a fragment is under way, has just left, is under way while another one was merged
        folder = str(tmp_path / f"{stop}")
        processes.run(2, run, case.but(steps=stop, save=stop, folder=folder))
        for rank, unbroken in zip(processes.run(2, run, case.but(start=stop, folder=folder)), whole, strict=True):
            assert rank["losses"] == unbroken["losses"][stop:]
            assert rank["weights"] == unbroken["weights"]


def test_fragments_are_whole_units_of_about_the_same_size() -> None:
    network: Any = build_run([*TRANSFORMER, "model.depth=4", "device=cpu"], Launch()).make_network()
    freeze(network, ["head"])
    fragments = divide_into_fragments(network, network.plan(), 2)
    trained = [name for name, parameter in network.named_parameters() if parameter.requires_grad]
    assert sorted(name for names in fragments for name in names) == sorted(trained)
    blocks = [{name.split(".")[1] for name in names if name.startswith("blocks.")} for names in fragments]
    assert [len(each) for each in blocks] == [2, 2]
    assert not blocks[0] & blocks[1]
    assert divide_into_fragments(network, network.plan(), 1) == [trained]


def stored(folder: Path) -> list[str]:
    """The names in the newest checkpoint."""
    newest = max((folder / "checkpoints").glob("step-*"))
    return [name for file in newest.glob("*.safetensors") for name in load_file(file)]


@pytest.mark.long
def test_other_numbers_of_ranks_begin_at_the_shared_weights(processes: Processes, tmp_path: Path) -> None:
    case = EXACT.but(fields={"every": 4, "fragments": 2, "overlap": 1}, folder=str(tmp_path))
    (one, _) = processes.run(2, run, case.but(steps=5, save=5))
    for rank in processes.run(3, run, case.but(start=5, steps=5)):  # nothing is trained
        assert rank["weights"] == one["weights"]
        moments = [name for name in rank["state"] if name.endswith("/exp_avg")]
        assert moments
        assert all("of3/" in name for name in moments)


COMMON = (*SMALL, "optimizer=adamw", "schedule=constant", "loop.epochs=null", "log=[]")
STREAMED = ("strategy=diloco", "strategy.every=4", "strategy.fragments=2", "strategy.overlap=1")


@pytest.mark.long
@pytest.mark.slow
def test_stopped_between_outer_steps_a_run_goes_on_and_others_read_it(
    processes: Processes, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def two(name: str, *words: str) -> None:
        assert processes.run(2, product, tmp_path, [*COMMON, f"run.dir={name}", *words]) == [0, 0]

    two("whole", *STREAMED, "loop.steps=12", "loop.eval_every=null", "loop.save_every=null")
    for steps in (6, 12):
        two("parts", *STREAMED, f"loop.steps={steps}", "loop.eval_every=3", "loop.save_every=5")
        said = [line for line in lines(tmp_path / "parts", "eval") if line["step"] == 6][-1]
        if steps == 12:
            break
        # those that do not learn find the same figures: they have read the shared weights
        still = ["run.resume=parts", "optimizer.lr=0", "run.accept_changes=true", *COMMON, "loop.steps=7"]
        for name, words in (("single", ["strategy=single"]), ("alone", ["strategy=diloco", "strategy.outer_lr=0.1"])):
            capfd.readouterr()
            assert product(Launch(), tmp_path, [*still, f"run.dir={name}", *words]) == 0
            found = lines(tmp_path / name, "eval")[-1]
            assert (found["step"], found["loss"]) == (7, pytest.approx(said["loss"], rel=1e-5))
            assert found["accuracy"] == said["accuracy"]
        kept = [name for name in stored(tmp_path / "alone") if name.startswith("strategy/")]
        assert {name.split("/")[2] for name in kept} == {"all", "0of1"}
        assert any(name.endswith("/exp_avg") for name in kept)
        assert not any(name.startswith("strategy/") for name in stored(tmp_path / "single"))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert curve(parts, "loss_hex") == curve(whole, "loss_hex")
    assert lines(parts, "eval")[-1]["loss"] == lines(whole, "eval")[-1]["loss"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("strategy.every=4", 0.0),
        pytest.param("strategy.every=3", 1.0, marks=pytest.mark.long),
        pytest.param("strategy.every=3 strategy.compress=bf16", 0.5, marks=pytest.mark.long),
    ],
)
def test_inner_steps_send_nothing_and_an_outer_step_all_weights_once(
    processes: Processes, tmp_path: Path, words: str, part: float
) -> None:
    common = [*TRANSFORMER, "loop.global_batch=8", "run.dir=run"]
    weights = sizes_of(build_run([*common, "device=cpu"], Launch()).make_network(), 2).P
    for seen in processes.run(2, sent, tmp_path, [*common, "strategy=diloco", *words.split()]):  # the third step
        assert 0 <= seen.get("all-reduce", 0) - part * weights < FEW_BYTES
        assert seen.keys() <= {"all-reduce"}


@pytest.mark.long
@pytest.mark.slow
def test_a_plan_says_the_bytes_of_a_mean_step_and_what_is_kept_beside_the_network(tmp_path: Path) -> None:
    words = ["loop.global_batch=8", "job.processes=[2]", "job.strategies=[own]", "job.seconds=600", "strategy=diloco"]
    facts, _ = plan(tmp_path, *words, "strategy.every=4", "strategy.fragments=2")
    (row,) = facts["rows"]
    weights = row["by_kind"]["weights"]
    assert collective(row, "all-reduce") == pytest.approx(weights / 4, rel=1e-3)
    # Adam's two moments, the shared weights and the outer momentum
    assert 4 * weights <= row["by_kind"]["optimizer"] < 4.2 * weights


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("strategy.every=0", "the first two are 1 or more"),
        ("strategy.every=4 strategy.fragments=5", "use strategy.fragments=4"),
        ("strategy.every=4 strategy.overlap=4", "use strategy.overlap=3"),
        ("strategy.outer_momentum=1", "below 1"),
        ("strategy.mixing=0.5", "without strategy.overlap"),
        ("strategy.fragments=40", "units to divide"),
        ("precision=fp16", "a loss scale of its own"),
        ("strategy.every=4 ema.decay=0.9 ema.every=6", "use ema.every=4"),
        ("strategy.overlap=1 ema.decay=0.9 ema.every=50", "no step at which a rank has all"),
        ("loop.on_nonfinite=skip", "use stop"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(tmp_path: Path, words: str, said: str) -> None:
    with pytest.raises(Refusal, match=re.escape(said)):
        product(Launch(), tmp_path, [*SMALL, "run.dir=none", "strategy=diloco", *words.split()])
    assert not (tmp_path / "none").exists()


@pytest.mark.long
def test_an_average_that_follows_outer_steps_is_one_of_the_shared_weights(processes: Processes) -> None:
    case = EXACT.but(fields={"every": 2}, average=0.9)
    one, other = processes.run(2, run, case)
    assert one["averages"] == other["averages"] != {}
