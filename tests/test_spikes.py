"""Going back after a loss that jumps: to before it, on all ranks alike, and in a run that was killed as well."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.commands import curve, lines
from tests.processes import Processes
from tests.quick import quickly
from tests.test_nonfinite_check import ended
from trainer.launch.rendezvous import Launch

# Samples are read in their order, 8 a step; the targets of the wrong ones are far away. `without`: steps whose samples
# are not there at all.
LAB = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from trainer import Data, Task

STEPS = 240


class Numbered(Data):
    def __init__(self, wrong: list[int] = [], without: list[int] = []):
        self.wrong, self.without = wrong, without

    def train(self):
        inputs = torch.rand(8 * STEPS, 4, generator=torch.Generator().manual_seed(0))
        targets = inputs.sum(1, keepdim=True)
        targets[self.wrong] = 1000.0
        return TensorDataset(inputs, targets)

    def order(self, epoch, generator):
        steps = torch.arange(8 * STEPS).view(STEPS, 8)
        return steps[[step for step in range(STEPS) if step + 1 not in self.without]].flatten()

    def evaluation(self):
        return None


class Squares(Task):
    def loss(self, output, target):
        return (output - target).square().mean()
"""
NET = """
_target_: torch.nn.Sequential
_args_:
  - {_target_: torch.nn.Linear, in_features: 4, out_features: 8}
  - {_target_: torch.nn.Linear, in_features: 8, out_features: 1}
"""
WORDS = ["--config-dir", "jumpy/conf", "model=net", "data=numbered", "task=squares", "loop.global_batch=8"]
WORDS += ["loop.eval_every=null", "schedule=constant", "optimizer=adamw", "loop.save_every=7", "checkpoint.keep=99"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the lab in it."""
    place = tmp_path_factory.mktemp("jumps")
    (place / "jumpy" / "conf").mkdir(parents=True)
    (place / "jumpy" / "lab.py").write_text(LAB)
    yamls = {
        "data/numbered": "_target_: jumpy.lab.Numbered\nwrong: []\nwithout: []\n",
        "model/net": NET,
        "task/squares": "_target_: jumpy.lab.Squares\n",
    }
    for name, text in yamls.items():
        path = place / "jumpy" / "conf" / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return place


CASES: list[Any] = [(1, "single"), (2, "ddp"), (2, "fsdp")]


@pytest.mark.parametrize(("ranks", "strategy"), quickly(CASES, CASES[0]))
def test_a_run_that_goes_back_is_one_whose_data_has_no_such_samples(
    processes: Processes, place: Path, tmp_path: Path, ranks: int, strategy: str
) -> None:
    words = [*WORDS, f"strategy={strategy}", "loop.log_every=1", "loop.steps=70"]
    run, hand = tmp_path / "run", tmp_path / "hand"
    back = [*words, "data.wrong=[476]", "loop.on_spike=rollback", f"run.dir={run}"]
    assert processes.run(ranks, ended, place, back) == ["0"] * ranks
    # the loss of step 60 jumps; that of step 57 shows that the state after step 56 was good
    by_hand = [*words, "data.without=[57,58,59,60]", f"run.dir={hand}"]
    assert processes.run(ranks, ended, place, by_hand) == ["0"] * ranks
    assert curve(run, "loss_hex") == curve(hand, "loss_hex")
    said = (run / "logs" / "rank-0.log").read_text()
    assert "at step 60, " in said
    assert "(median of the 51 lines before: " in said
    assert "; back to step 56, and on with what follows:" in said
    assert f"step 60, rank 0: samples {'472, 473, 474' if ranks == 1 else '472, 474, 476'}" in said
    assert "went back   1 time to a checkpoint, and left out 32 samples" in said


@pytest.mark.long
def test_a_run_that_was_killed_finds_the_same_jump_also_between_two_lines(place: Path, tmp_path: Path) -> None:
    words = [*WORDS, "loop.log_every=4", "loop.steps=236", "data.wrong=[1770]", "loop.on_spike=rollback"]
    run, again = tmp_path / "run", tmp_path / "again"
    # step 222 is wrong, and the line of step 224 tells; the one of step 220 was usual, so step 217 is good
    assert ended(Launch(), place, [*words, f"run.dir={run}"]) == "0"
    assert "at step 224, " in (run / "logs" / "rank-0.log").read_text()
    assert "; back to step 217, and on" in (run / "logs" / "rank-0.log").read_text()
    whole = lines(run, "train")
    assert [line["step"] for line in whole] == list(range(4, 240, 4))
    # killed after the save of step 210, which has two steps of the line of step 212
    shutil.copytree(run, again)
    for path in (again / "checkpoints").iterdir():
        if int(path.name[-3:]) > 210:
            shutil.rmtree(path)
    status = json.loads((again / "status.json").read_text())
    (again / "status.json").write_text(json.dumps({**status, "state": "running"}))
    assert ended(Launch(), place, [*words, f"run.dir={again}"]) == "0"
    for key in ("step", "loss_hex", "loss_mean", "sample_digest"):
        assert [line[key] for line in lines(again, "train")] == [line[key] for line in whole], key


@pytest.mark.long
def test_not_for_ever_and_only_where_it_is_asked_for(place: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [*WORDS, "loop.log_every=1", "loop.steps=70", f"run.dir={run}", f"data.wrong={[*range(472, 600)]}"]
    said = ended(Launch(), place, [*words, "loop.on_spike=rollback"])
    assert said.startswith("the loss jumps from "), said
    assert "The run has gone back 3 times to step 56, and no save has followed. " in said
    # the same command goes on from a good checkpoint, and may only tell
    assert max(int(path.name[-3:]) for path in (run / "checkpoints").iterdir()) == 56
    assert ended(Launch(), place, words) == "0"
    log = (run / "logs" / "rank-0.log").read_text()
    assert "wrong samples, or too high a learning rate" in log
    said = ended(Launch(), place, [*words, "loop.on_spike=rollback", "run.resume=fresh", "loop.save_every=100"])
    assert "There is no checkpoint of before step 59. " in said
