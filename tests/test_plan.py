"""The job `plan`: memory and bytes on the wire of every strategy, without the devices."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.run import TRANSFORMER, run

PLAN = ("job=plan", "run.dir=run", "job.seconds=500")  # in time on a busy machine, too


def plan(place: Path, *words: str, network: Sequence[str] = TRANSFORMER) -> tuple[dict[str, Any], str]:
    """What plan.json says after this command, and what stood on the screen. In a process of its own: a plan forks."""
    ended = run([*network, "device=cpu", "log=[]", *PLAN, *words], how="process", place=place)
    return json.loads((ended.folder / "plan/plan.json").read_text()), ended.out


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["job.device=own"], "job.device=own has no data sheet: give job.memory=… too"),
        (["job.device=h1000"], "job.device=h1000: no such device is known; did you mean 'h100'"),
        (["job.processes=[0]"], "job.processes: numbers of processes, 1 or more"),
        (["job.memory=-1"], "job.memory=-1.0: it must be more than 0"),
    ],
)
def test_refusals(arguments: list[str], message: str, tmp_path: Path) -> None:
    assert message in run(["job=plan", *arguments], place=tmp_path, code=2).out


@pytest.mark.long
def test_several_processes_do_not_plan(tmp_path: Path) -> None:
    screen = run([*TRANSFORMER, *PLAN], 2, "process", place=tmp_path, code=2).out
    assert "job=plan: one process plans for all; leave out processes and torchrun" in screen


def test_a_run_for_gpus_is_planned_where_there_is_none_and_names_a_set_that_is_too_small(tmp_path: Path) -> None:
    words = ["precision=bf16", "float8=tensorwise", "job.device=h100", "job.processes=[1]", "device=cuda"]
    assert plan(tmp_path, *words)[0]["chosen"] == "strategy=single"
    facts, _ = plan(tmp_path, "loop.global_batch=1438", "job.processes=[1]")
    reason = facts["refused"]["strategy=single"]
    assert reason.startswith("one rank has 1,438 samples in a step, and the training set only 1,437; ")


@pytest.mark.gpu
def test_where_there_is_a_gpu_adam_is_planned_and_auto_decides(tmp_path: Path) -> None:
    words = ("log=[]", "device=cuda", "optimizer=adamw")
    facts, _ = plan(tmp_path, *words, "job.device=h100", "job.processes=[1]")
    assert facts["chosen"] == "strategy=single"
    ended = run([*TRANSFORMER, *words, "run.dir=auto", "loop.micro_batch=auto"], how="process", place=tmp_path)
    assert "MiB" in json.loads((ended.folder / "environment.json").read_text())["auto"]["reason"]
