"""A long run holds as much at its end as at its beginning: memory, files, threads, shared memory."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from scripts.faults import shm
from tests.run import SMALL, run, status

LAB = """
import json, os, threading
from pathlib import Path

import torch
from torch.utils.data import Dataset

from recipes.vision.classification import Classification
from trainer import Data


class Items(Dataset):
    \"\"\"Read one by one, by data workers.\"\"\"

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.full((1, 4, 4), index % 10 / 10), index % 10


class Counted(Data):
    def __init__(self, num_classes, channels, image_size):
        self.num_classes = num_classes

    def train(self):
        return Items(6_000)

    def evaluation(self):
        return Items(60)


class Watched(Classification):
    \"\"\"Notes on every rank what its process holds.\"\"\"

    def after_step(self, network, step):
        if step % 100:
            return
        words = Path("/proc/self/status").read_text().split()
        held = [int(words[words.index("VmRSS:") + 1]), len(os.listdir("/proc/self/fd")), threading.active_count()]
        with open(f"held-{os.environ['RANK']}", "a") as file:
            print(json.dumps([step, *held]), file=file)
"""
YAML = "_target_: lab.Counted\nnum_classes: 10\nchannels: 1\nimage_size: 4\n"
STEPS = 10_000
# each save is a thread, and glibc gives the first ones parts of the heap of their own: 8 for a core, 16 saves here
FILLED = 4_000


@pytest.mark.long
def test_ten_thousand_steps_leave_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "lab.py").write_text(LAB)
    (tmp_path / "conf" / "data").mkdir(parents=True)
    (tmp_path / "conf" / "data" / "counted.yaml").write_text(YAML)
    before = shm.names()
    words = ["--config-dir", "conf", "data=counted", "task._target_=lab.Watched", "trust=[lab]", *SMALL]
    words += ["device=cpu", "loop.global_batch=8", f"loop.steps={STEPS}", "loop.eval_every=1000"]
    # every file that a run has: lines, TensorBoard's points, checkpoints
    words += ["loop.log_every=10", "loop.save_every=200", "loader.workers=2", "log=[tensorboard]", "run.dir=run"]
    run(words, 2, "process", place=tmp_path)
    assert status(tmp_path / "run")["step"] == STEPS
    for rank in range(2):
        held = [json.loads(line) for line in (tmp_path / f"held-{rank}").read_text().splitlines()]
        steps, memory, files, threads = zip(*[each for each in held if each[0] >= FILLED], strict=True)
        third = len(steps) // 3  # a line through single points would follow the last save
        grown = (median(memory[-third:]) - median(memory[:third])) / (median(steps[-third:]) - median(steps[:third]))
        assert grown <= 0.5, (grown, list(pairwise(memory)))  # KiB a step
        assert median(files[-third:]) == median(files[:third])
        assert median(threads[-third:]) == median(threads[:third])
    assert shm.left(before) == []
