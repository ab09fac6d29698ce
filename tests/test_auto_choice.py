"""What `strategy=auto` and `loop.micro_batch=auto` come to, and what a run says of its plan afterwards."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import yaml

import trainer
from tests.run import ROOT, Command, curve, far, run
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


LARGE = ("processes=2", "device=cpu", "model=mlp", "model.width=4096", "model.depth=4", "loop.global_batch=8")
TIGHT, TIGHTER = 2_900 * MIB, 2_400 * MIB


def environment(place):
    """environment.json of the run."""
    return json.loads((place / "runs/large/environment.json").read_text())


@pytest.mark.long
def test_auto_takes_what_fits_into_a_limit_of_memory(capped, tmp_path):
    screen = capped(TIGHT, [*LARGE, "run.name=large", "loop.eval_every=null", "loop.save_every=null", "loop.steps=11"])
    facts = environment(tmp_path)
    assert f"auto        {facts['auto']['reason']}" in screen
    # copies of the whole network do not fit; what does depends on what gloo takes for itself
    assert facts["strategy"] != "ddp"
    assert facts["auto"]["overrides"][0] == f"strategy={facts['strategy']}"
    # a row of the table of errors: what was planned, and what the first steps took
    assert facts["planned"] == facts["auto"]["planned"]
    # of the main rank, where the plan is of the one that holds most: of a pipeline these are two
    assert 0.3 < facts["measured"]["peak"] / facts["planned"]["peak"] < 1.3
    assert facts["measured"]["step_s"] > 0
    assert "planned     " in screen
    config = yaml.safe_load((tmp_path / "runs/large/config.yaml").read_text())
    assert not config["strategy"]["_target_"].endswith("auto")


@pytest.mark.long
def test_a_resume_keeps_what_was_chosen_unless_it_no_longer_fits(capped, tmp_path):
    words = [*LARGE, "run.name=large", "loop.eval_every=null", "log=[]", "schedule=constant"]
    capped(2**34, [*words, "loop.steps=1"])
    assert environment(tmp_path)["strategy"] == "ddp"
    capped(2**33, [*words, "loop.steps=2"])
    assert environment(tmp_path)["auto"]["reason"] == "as this run began"
    capped(TIGHT, [*words, "loop.steps=3"])
    smaller = environment(tmp_path)["strategy"]
    assert smaller != "ddp"
    # with memory enough, as it is now
    capped(2**34, [*words, "loop.steps=4"])
    assert environment(tmp_path)["strategy"] == smaller
    words = [word for word in words if word != "processes=2"]
    run([*words, "loop.steps=5", "run.resume=fresh"], place=tmp_path)
    assert environment(tmp_path)["strategy"] == "single"


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


SMALLER_RANK = """
import os, resource
from recipes.vision.digits import Digits

class Crowded(Digits):
    def __init__(self, spare, **keys):
        super().__init__(**keys)
        if os.environ.get("RANK") == "1":  # another program has most of this rank's memory
            taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (taken + spare * 2**20, resource.RLIM_INFINITY))
"""


@pytest.mark.long
def test_the_rank_with_the_least_memory_decides_for_all_and_one_that_runs_out_ends_the_run(tmp_path):
    lab = tmp_path / "lab"
    (lab / "conf/data").mkdir(parents=True)
    (lab / "__init__.py").touch()
    (lab / "crowded.py").write_text(SMALLER_RANK)
    keys = (ROOT / "conf/data/digits.yaml").read_text().replace("recipes.vision.digits.Digits", "lab.crowded.Crowded")
    (lab / "conf/data/crowded.yaml").write_text(f"{keys}\nspare: 1800\n")
    words = [*SLICED, "--config-dir", "lab/conf", "data=crowded", "strategy=ddp", "loop.steps=2", "run.name=crowded"]
    run(words, 2, "process", place=tmp_path)
    config = yaml.safe_load((tmp_path / "runs/crowded/config.yaml").read_text())
    assert config["loop"]["micro_batch"] < 256
    # by a number that is too large this rank runs out in the middle of a step: nobody waits for it
    words = [word for word in words if not word.startswith(("loop.micro_batch=", "run.name="))]
    words += ["data.spare=300", "loop.micro_batch=256", "run.name=out"]
    screen = run(words, 2, "process", place=tmp_path, code=1).out
    assert "The device's memory ran out" in screen
    assert "Try loop." in screen
