"""The job `plan`: memory, bytes on the wire and time of every strategy, without the devices."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.commands import TRANSFORMER, finish, single
from tests.inside import here
from trainer.messages import Refusal

PLAN = (*TRANSFORMER, "job=plan", "run.dir=run", "log=[]", "device=cpu")


def plan(place: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """What plan.json says after this command, and what stood on the screen."""
    screen = finish(single(*PLAN, *arguments), place)
    return json.loads((place / "run/plan/plan.json").read_text()), screen


def collective(row: dict[str, Any], op: str) -> int:
    """The bytes of all calls of a collective in a step."""
    return sum(each["bytes"] for each in row["collectives"] if each["op"] == op)


def test_memory_and_bytes_of_every_strategy(tmp_path: Path) -> None:
    facts, screen = plan(tmp_path, "loop.global_batch=8", "loop.max_norm=1", "job.processes=[1,2]")
    rows = {(row["words"], row["processes"]): row for row in facts["rows"]}
    alone = rows["strategy=single", 1]
    weights = alone["by_kind"]["weights"]
    assert all(sum(row["by_kind"].values()) == row["peak"] for row in facts["rows"])
    assert all(row["how"] == "simulated" and row["fits"] and row["step_s"] > 0 for row in facts["rows"])
    assert alone["by_kind"]["optimizer"] >= 2 * weights  # Adam's two moments, and its steps
    assert alone["wire"] == {"inside": 0, "between": 0}
    # every gradient once, all-reduced over two ranks: each sends as much as there is of it
    ddp = rows["strategy=ddp", 2]
    assert ddp["by_kind"]["weights"] == weights == collective(ddp, "all-reduce")
    assert ddp["wire"] == {"inside": weights, "between": 0}
    # to the owners, and back from them; the norm's square of each rank
    zero1 = rows["strategy=zero1", 2]
    assert collective(zero1, "reduce") == collective(zero1, "broadcast") == weights
    assert collective(zero1, "all-reduce") == 8
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
    assert "strategy=cp: VisionTransformer cannot be trained on stretches" in screen


def test_a_thousand_ranks_of_which_none_is_there(tmp_path: Path) -> None:
    wide = ("model.width=1024", "model.depth=1", "loop.global_batch=128")
    facts, screen = plan(tmp_path, *wide, "job.processes=[1024]", "job.device=h100", "job.strategies=[ddp,fsdp,hsdp]")
    rows = {row["words"]: row for row in facts["rows"]}
    ddp, fsdp = rows["strategy=ddp loop.global_batch=1024"], rows["strategy=fsdp loop.global_batch=1024"]
    assert fsdp["by_kind"]["optimizer"] < ddp["by_kind"]["optimizer"] / 10
    # no parameter is padded to many times its size: what is gathered is never more than there is
    assert fsdp["by_kind"]["weights"] + fsdp["by_kind"]["gathered"] < 2 * ddp["by_kind"]["weights"]
    assert ddp["wire"]["inside"] == 0 < ddp["wire"]["between"]
    # gathered inside a machine of eight, averaged between 128 of them
    hsdp = rows["strategy=hsdp strategy.replicate=128 loop.global_batch=1024"]
    assert hsdp["wire"]["between"] < hsdp["wire"]["inside"]
    assert "1,024 processes on H100" in screen


def test_what_does_not_fit_says_by_how_much(tmp_path: Path) -> None:
    facts, screen = plan(tmp_path, "job.processes=[1]", "job.memory=0.501")
    assert not facts["rows"][0]["fits"]
    assert facts["chosen"] is None
    assert "MiB too many" in screen


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["job.device=h1000"], "job.device=h1000: no such device is known; did you mean 'h100'"),
        (["job.processes=[0]"], "job.processes: numbers of processes, 1 or more"),
        (["job.memory=-1"], "job.memory=-1.0: it must be more than 0"),
    ],
)
def test_refusals(arguments: list[str], message: str) -> None:
    with pytest.raises(Refusal, match="job") as refused:
        here("job=plan", *arguments)
    assert message in str(refused.value)


def test_several_processes_do_not_plan(tmp_path: Path) -> None:
    screen = finish(single(*PLAN, "processes=2"), tmp_path, code=2)
    assert "job=plan: one process plans for all; leave out processes and torchrun" in screen
