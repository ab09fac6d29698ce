"""What `strategy=auto` and `loop.micro_batch=auto` come to, and what a run says of its plan afterwards."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import yaml

import trainer
from tests.run import Command, curve, far
from trainer.jobs.plan.choice import LATE, choose_row

MIB = 2**20


def test_the_simplest_that_leaves_memory_is_chosen_and_what_was_not_tried_is_not_said_to_be_too_large():
    def row(name, peak):
        words, fits = f"strategy={name}", peak <= 1000
        return {"words": words, "strategy": name, "processes": 4, "when": "backward", "peak": peak * MIB, "fits": fits}

    def chosen(*rows, **refused):
        choice = choose_row([{**one, "step_s": None, "advice": ""} for one in rows], refused, 1000 * MIB, 0.2)
        return choice.row["strategy"], choice.reason

    found, reason = chosen(row("ddp", 900), row("fsdp", 300), row("zero1", 700))
    assert (found, "second: zero1 (700 MiB)" in reason) == ("fsdp", True)
    assert chosen(row("ddp", 700), row("fsdp", 300))[0] == "ddp"  # copies of all need the least talking
    assert "less than 20 % of it is left" in chosen(row("ddp", 900))[1]
    with pytest.raises(trainer.Refusal, match=r"nothing fits into 1,000 MiB a process; nearest: fsdp \(1,200"):
        chosen(row("ddp", 4000), row("fsdp", 1200))
    with pytest.raises(trainer.Refusal, match=r"no time to try fsdp, which may fit"):
        chosen(row("ddp", 4000), **{"strategy=fsdp": LATE})


@pytest.fixture
def capped(tmp_path):
    """Runs a command in a control group that may use so much memory, as a container or a job of Slurm may."""
    root = Path("/sys/fs/cgroup")
    kinds = {root / "memory": "memory.limit_in_bytes", root: "memory.max"}  # of version 1, and of 2
    place = next((folder for folder in kinds if (folder / "cgroup.procs").exists()), root)
    group = place / f"trainer-{os.getpid()}"
    try:
        group.mkdir()
        (group / kinds[place]).write_text(str(2**34))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")

    def run_capped(limit: int, words: list[str]) -> str:
        (group / kinds[place]).write_text(str(limit))
        script = f'echo $$ > {group}/cgroup.procs; exec "$0" "$@"'
        ended = Command(["sh", "-c", script, sys.executable, "-m", "trainer", *words], tmp_path).end()
        assert (ended.code, ended.left) == (0, []), ended.out
        return ended.out

    yield run_capped
    group.rmdir()


SLICED = ("device=cpu", "model=vit_tiny", "model.depth=4", "loop.global_batch=512", "loop.micro_batch=auto", "log=[]")


@pytest.mark.long
def test_the_largest_micro_batch_that_fits_is_chosen_and_the_curve_stays(capped, tmp_path):
    words = [*SLICED, "processes=2", "strategy=fsdp", "loop.steps=4", "loop.log_every=1", "loop.eval_every=null"]
    curves, slices = [], []
    for name, limit in (("wide", 2**34), ("narrow", 1_900 * MIB)):
        capped(limit, [*words, f"run.name={name}"])
        config = yaml.safe_load((tmp_path / f"runs/{name}/config.yaml").read_text())
        slices.append(config["loop"]["micro_batch"])
        curves.append(curve(tmp_path / f"runs/{name}"))
    assert slices[0] == 256  # all that a rank has of a step
    assert slices[1] < 256
    assert far(*curves) < 1e-6
