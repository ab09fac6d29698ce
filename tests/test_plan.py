"""The job `plan`: memory and bytes on the wire of every strategy, without the devices."""

import json
from collections.abc import Sequence
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from torch import nn

from tests.commands import TRANSFORMER, finish, single
from tests.inside import here
from trainer.jobs.plan.devices import DEVICES, find_device
from trainer.jobs.plan.fake_mode import FakeRunMode, is_counted, make_network
from trainer.jobs.plan.forks import run_forked
from trainer.jobs.plan.ledger import Ledger
from trainer.jobs.plan.roofline import Roofline
from trainer.jobs.plan.traffic import Traffic
from trainer.launch.devices import accelerator_type
from trainer.messages import Refusal

CHECKOUT = Path(__file__).resolve().parent.parent
FOREIGN = ("--config-dir", "foreign/conf")
PLAN = ("job=plan", "run.dir=run", "log=[]", "device=cpu", "job.seconds=500")  # in time on a busy machine, too


def plan(place: Path, *arguments: str, network: Sequence[str] = TRANSFORMER) -> tuple[dict[str, Any], str]:
    """What plan.json says after this command, and what stood on the screen."""
    screen = finish(single(*network, *PLAN, *arguments), place)
    return json.loads((place / "run/plan/plan.json").read_text()), screen


def collective(row: dict[str, Any], op: str) -> int:
    """The bytes of all calls of a collective in a step."""
    return sum(each["bytes"] for each in row["collectives"] if each["op"] == op)


@pytest.mark.long
def test_memory_and_bytes_of_every_strategy(tmp_path: Path) -> None:
    facts, screen = plan(tmp_path, "loop.global_batch=8", "loop.max_norm=1", "job.processes=[1,2]")
    rows = {(row["words"], row["processes"]): row for row in facts["rows"]}
    alone = rows["strategy=single", 1]
    weights = alone["by_kind"]["weights"]
    assert all(sum(row["by_kind"].values()) == row["peak"] for row in facts["rows"])
    assert all(row["fits"] and row["step_s"] is None for row in facts["rows"])  # a CPU has no data sheet
    assert " ms" not in screen
    assert alone["by_kind"]["optimizer"] >= 2 * weights  # Adam's two moments, and its steps
    assert alone["wire"] == {"inside": 0, "between": 0}
    # every gradient once, all-reduced over two ranks: each sends as much as there is of it
    ddp = rows["strategy=ddp", 2]
    assert ddp["by_kind"]["weights"] == weights == collective(ddp, "all-reduce")
    assert ddp["wire"] == {"inside": weights, "between": 0}
    # to the owners, and back from them; the norm's square of each rank, and a byte for each of 31 parameters
    zero1 = rows["strategy=zero1", 2]
    assert collective(zero1, "reduce") == collective(zero1, "broadcast") == weights
    assert collective(zero1, "all-reduce") == 8 + 31
    assert weights < zero1["by_kind"]["optimizer"] < 1.1 * weights
    fsdp = rows["strategy=fsdp", 2]
    assert weights / 2 <= fsdp["by_kind"]["weights"] < 0.6 * weights
    assert weights <= fsdp["by_kind"]["optimizer"] < 1.2 * weights
    tp = rows["strategy=tp", 2]
    assert weights / 2 < tp["by_kind"]["weights"] < weights
    # two stages: each micro-batch's activations one way, their gradients back
    pp = rows["strategy=pp loop.micro_batches=2", 2]
    assert collective(pp, "send") == collective(pp, "receive") > 0
    assert facts["chosen"] in [row["words"] for row in facts["rows"]]
    assert "not planned cp: VisionTransformer cannot be trained on stretches" in screen


DECODER = ("model=gpt_nano", "model.width=32", "model.depth=2", "data=synthetic_tokens", "data.length=64")


def test_the_roofline_counts_groups_and_bytes() -> None:
    seconds = {}
    for name, groups in (("one", 1), ("depthwise", 64)):
        mode, roofline = FakeRunMode(), Roofline(DEVICES["h100"], "bf16")
        with mode, Ledger(mode, Traffic(1), roofline):
            layer = nn.Conv2d(64, 64, 3, bias=False, groups=groups)
            images = torch.empty(64, 64, 32, 32)
            roofline.take()
            layer(images).sum().backward()
        seconds[name] = roofline.take()
    # torch's own formula has as many products in a backward as if there was one group; here bytes alone count
    assert seconds["depthwise"] is not None
    assert seconds["one"] is not None
    read_and_written = 64 * 64 * 32 * 32 * 4 * 2 / 3350e9
    assert read_and_written < seconds["depthwise"] <= seconds["one"] < 5 * read_and_written
    assert Roofline(DEVICES["cpu"], "fp32").take() is None


@pytest.mark.long
def test_tokens_travel_to_experts_in_even_shares(tmp_path: Path) -> None:
    words = ["model=moe_nano", "model.width=32", "model.depth=2", "data=synthetic_tokens", "data.length=64"]
    words += ["strategy=fsdp", "strategy.expert=2", "job.processes=[2]", "job.strategies=[own]", "loop.global_batch=8"]
    facts, _ = plan(tmp_path, network=words)
    (row,) = facts["rows"]
    # one block has experts; each of 4 samples × 64 tokens goes to two of 8: there and back, and so do the gradients;
    # before them how many rows each expert gets
    assert collective(row, "all-to-all") == 4 * (4 * 64 * 2) * 32 * 4 + 8 * 8


@pytest.mark.long
def test_a_thousand_ranks_of_which_none_is_there(tmp_path: Path) -> None:
    wide = ("model.width=1024", "model.depth=1", "loop.global_batch=128")
    facts, screen = plan(tmp_path, *wide, "job.processes=[1024]", "job.device=h100", "job.strategies=[ddp,fsdp,hsdp]")
    rows = {row["words"]: row for row in facts["rows"]}
    ddp, fsdp = rows["strategy=ddp loop.global_batch=1024"], rows["strategy=fsdp loop.global_batch=1024"]
    assert fsdp["by_kind"]["optimizer"] < ddp["by_kind"]["optimizer"] / 10
    # no parameter is padded to many times its size: what is gathered is never more than there is
    assert fsdp["by_kind"]["weights"] + fsdp["by_kind"]["gathered"] < 2 * ddp["by_kind"]["weights"]
    assert ddp["wire"] == {"inside": 0, "between": round(2 * 1023 / 1024 * ddp["by_kind"]["weights"])}
    # gathered inside a machine of eight, averaged between 128 of them
    hsdp = rows["strategy=hsdp strategy.replicate=128 loop.global_batch=1024"]
    assert hsdp["wire"]["between"] < hsdp["wire"]["inside"]
    assert "1,024 processes on H100" in screen
    assert "about ms" in screen
    assert 0 < fsdp["step_s"] < 1


class ReadsValues(nn.Module):
    """A network whose constructor reads a tensor that it makes, as those with stochastic depth do."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = torch.linspace(0, 0.5, 3).tolist()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in self.rates)


def test_a_constructor_may_read_values() -> None:
    mode = FakeRunMode()
    with mode:
        network = make_network(ReadsValues, mode)
    assert network.rates == [0, 0.25, 0.5]
    assert all(is_counted(parameter, mode) for parameter in network.parameters())  # also the small ones: biases


def computes_a_weight() -> nn.Module:
    """As torch's old weight_norm: a parameter is the `data` of what was computed, and a weight stays on the module."""
    layer = nn.Linear(4, 4)
    layer.scale = nn.Parameter(layer.weight.norm().data)
    layer.computed = layer.weight * layer.scale
    return layer


def test_a_constructor_may_compute_with_its_parameters() -> None:
    mode = FakeRunMode()
    with mode:
        network = make_network(computes_a_weight, mode)
    assert {name for name, each in network.named_parameters() if is_counted(each, mode)} == {"weight", "bias", "scale"}


@pytest.mark.long
def test_what_does_not_fit_says_by_how_much(tmp_path: Path) -> None:
    facts, screen = plan(tmp_path, "job.processes=[1]", "job.memory=0.501")
    assert not facts["rows"][0]["fits"]
    assert facts["chosen"] is None
    assert "MiB too many; most of it is activations: loop.micro_batches=" in screen
    assert facts["rows"][0]["advice"].startswith("most of it is activations: ")
    assert "fits        nothing fits into 1 MiB a process; nearest: single" in screen


def test_without_time_nothing_is_said_of_what_fits(tmp_path: Path) -> None:
    facts, screen = plan(tmp_path, "job.processes=[1]", "job.seconds=0.001")
    assert "fits        is not known, as nothing was tried in time; try job.seconds=0.004" in screen
    assert facts["rows"] == []
    assert "not known" in facts["why"]


@pytest.mark.long
def test_an_evaluation_may_take_most(tmp_path: Path) -> None:
    # an output of 64 samples × 64 tokens × 4,096 numbers, of 16 in a step
    words = ["data.vocab_size=4096", "loop.global_batch=16", "job.processes=[1]", "job.memory=0.6", "task=language"]
    facts, screen = plan(tmp_path, *words, network=DECODER)
    (row,) = facts["rows"]
    assert row["when"].startswith("evaluation")
    assert row["peak"] > 64 * 64 * 4096 * 4
    # which costs nothing to change
    assert "MiB too many; most is needed in evaluations: loop.eval_batch=16, or less" in screen


@pytest.mark.long
def test_a_gpus_softmax_takes_no_copy_of_the_scores(tmp_path: Path) -> None:
    """On an H200 they were a tenth of the memory of a GPT-2: its kernels convert while they compute."""
    words = ["data.vocab_size=4096", "loop.global_batch=16", "job.processes=[1]", "task=language", "precision=bf16"]
    (on_cpu, on_gpu) = (
        plan(tmp_path, *words, "data.evaluation_size=0", f"job.device={device}", network=DECODER)[0]["rows"][0]["peak"]
        for device in ("cpu", "h200")
    )
    scores = 16 * 64 * 4096
    assert on_cpu - on_gpu == pytest.approx(2 * scores, rel=0.02)  # the gradient in bf16 instead of fp32


@pytest.mark.long
def test_recomputed_units_are_planned_by_their_steps_and_not_by_the_search_for_what_is_used(tmp_path: Path) -> None:
    # a sample a rank, as long sequences have it: without recomputing a search would need more than a step
    words = ("model.rotary=1e4", "model.depth=8", "strategy.activation_checkpointing=units", "loop.global_batch=2")
    facts, _ = plan(tmp_path, *words, "job.processes=[2]", "job.strategies=[fsdp]", network=DECODER)
    assert not facts["refused"]  # tables of rotary positions are compared, and have no values
    assert facts["rows"][0]["when"] != "build"


def test_a_network_that_reads_values_is_named_with_the_line(tmp_path: Path) -> None:
    words = [*FOREIGN, "experiment=experts", "job=plan", "job.processes=[1]", "device=cpu", "run.dir=run"]
    copytree(CHECKOUT / "tests/foreign", tmp_path / "foreign")
    finish(single(*words), tmp_path)
    facts = json.loads((tmp_path / "run/plan/plan.json").read_text())
    assert facts["rows"] == []
    reason = facts["refused"]["strategy=single"]
    assert reason.startswith("it reads values of tensors (aten.nonzero.default), which a plan does not have, in ")
    assert "foreign/experts.py:" in reason


@pytest.mark.long
def test_weights_that_a_module_keeps_weak_references_to_are_planned(tmp_path: Path) -> None:
    words = ["--config-dir", "recurrent/conf", "experiment=recurrent", "job=plan", "job.processes=[2]", "device=cpu"]
    words += ["run.dir=run"]
    copytree(CHECKOUT / "tests/labs/recurrent", tmp_path / "recurrent")
    finish(single(*words, "job.strategies=[ddp,fsdp]"), tmp_path)
    rows = json.loads((tmp_path / "run/plan/plan.json").read_text())["rows"]
    assert {row["strategy"] for row in rows} == {"ddp", "fsdp"}


def test_a_device_of_ones_own_has_a_memory_and_no_time() -> None:
    mine = find_device("own", 48, 4)
    assert (mine.memory, mine.per_machine) == (48, 4)
    assert Roofline(mine, "bf16").take() is None
    for name, device in DEVICES.items():  # every data sheet is known to flops.py in what runs there
        if name not in ("cpu", "own"):
            assert Roofline(device, "bf16" if device.bf16 else "fp32").take() == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["job.device=own"], "job.device=own has no data sheet: give job.memory=… too"),
        (["job.device=h1000"], "job.device=h1000: no such device is known; did you mean 'h100'"),
        (["job.processes=[0]"], "job.processes: numbers of processes, 1 or more"),
        (["job.memory=-1"], "job.memory=-1.0: it must be more than 0"),
    ],
)
def test_refusals(arguments: list[str], message: str) -> None:
    with pytest.raises(Refusal, match="job") as refused:
        here("job=plan", *arguments)
    assert message in str(refused.value)


def test_a_set_with_fewer_samples_than_one_rank_has_in_a_step_is_named(tmp_path: Path) -> None:
    finish(single(*PLAN, "loop.global_batch=1438", "job.processes=[1]"), tmp_path)
    reason = json.loads((tmp_path / "run/plan/plan.json").read_text())["refused"]["strategy=single"]
    assert reason.startswith("one rank has 1,438 samples in a step, and the training set only 1,437; ")


def test_several_processes_do_not_plan(tmp_path: Path) -> None:
    screen = finish(single(*TRANSFORMER, *PLAN, "processes=2"), tmp_path, code=2)
    assert "job=plan: one process plans for all; leave out processes and torchrun" in screen


# ---- on a machine with a GPU


def test_a_trial_finds_no_gpu_that_this_process_has_asked_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def step() -> tuple[bool, Any]:
        weight = nn.Parameter(torch.ones(2))
        weight.grad = torch.ones(2)
        torch.optim.AdamW([weight]).step()  # asks the GPU whether it records a graph
        return torch.cuda.is_available(), accelerator_type()

    assert list(run_forked({"step": step}, at_once=1)) == [("step", (False, None))]


def test_a_run_for_gpus_is_planned_where_there_is_none(tmp_path: Path) -> None:
    words = ("precision=bf16", "float8=tensorwise", "job=plan", "job.device=h100", "job.processes=[1]")
    finish(single(*TRANSFORMER, "run.dir=run", "log=[]", "device=cuda", *words), tmp_path)
    assert json.loads((tmp_path / "run/plan/plan.json").read_text())["chosen"] == "strategy=single"


@pytest.mark.gpu
def test_where_there_is_a_gpu_adam_is_planned_and_auto_decides(tmp_path: Path) -> None:
    words = (*TRANSFORMER, "log=[]", "device=cuda", "optimizer=adamw")
    finish(single(*words, "run.dir=run", "job=plan", "job.device=h100", "job.processes=[1]"), tmp_path)
    assert json.loads((tmp_path / "run/plan/plan.json").read_text())["chosen"] == "strategy=single"
    finish(single(*words, "run.dir=auto", "loop.micro_batch=auto"), tmp_path)
    assert "MiB" in json.loads((tmp_path / "auto/environment.json").read_text())["auto"]["reason"]
