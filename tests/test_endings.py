"""How a run ended, and what must be equal when the same command has gone on to the end: everything.

Whatever happens to a run (it is asked to stop, a rank is killed or hangs, the disk is full, the user's own code fails),
its exit code and status.json say so, the screen says why, once, and the next start shows no trace of it.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from recipes.vision.classification import Classification
from tests.ranks import Processes
from tests.run import SMALL, How, quickly, run
from trainer import BadData

STEPS = 10
WORDS = (
    *(*SMALL, "model.width=128", "ema.decay=0.9", "trust=[tests]"),  # files of 32 KiB; those of the log are smaller
    *(f"loop.steps={STEPS}", "loop.global_batch=120", "loop.eval_every=5", "loop.eval_batch=60", "loop.save_every=2"),
    *("checkpoint.keep=9", "checkpoint.asynchronous=false", "task._target_=tests.test_endings.Acting", "run.dir=run"),
)
FULL = 20_000  # bytes that a file may have on a disk that is full: EFBIG, for root as well


class Acting(Classification):
    """Something happens to a rank as steps end, or in batches of evaluations; only where there is no file `acted`."""

    def __init__(self, act: str = "", at: Sequence[int] = (), rank: int = 0, batches: bool = False, **words: Any):
        super().__init__(**words)
        self.act, self.at, self.rank, self.batches, self.seen = act, at, rank, batches, 0

    def after_step(self, network: nn.Module, step: int) -> None:
        if self.act == "SIGTERM":
            time.sleep(0.06)  # a step that takes longer than the time between two votes of the ranks
        if not self.batches:
            self.reach(step)

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        self.seen += 1  # from the rehearsal on
        if self.batches:
            self.reach(self.seen)
        return super().metrics(output, target)

    def reach(self, place: int) -> None:
        mine = not Path("acted").exists() and self.rank == (dist.get_rank() if dist.is_initialized() else 0)
        if self.act == "full":
            most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (FULL if mine and place in self.at else most, most))
        elif mine and place in self.at:
            if place == self.at[-1]:
                Path("acted").touch()
            if self.act in ("SIGTERM", "SIGKILL", "SIGSTOP"):
                os.kill(os.getpid(), signal.Signals[self.act])
            elif self.act == "bad data":
                raise BadData("3.jpg cannot be read")
            elif self.act:
                raise {"reset": ConnectionResetError}.get(self.act, ValueError)("no such sample: 7")


@pytest.fixture(autouse=True)
def unlimited() -> Iterator[None]:
    """A run that ended on its full disk leaves the limit behind."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def saved(folder: Path) -> list[int]:
    """The steps of the checkpoints of a run; nothing else lies among them."""
    return sorted(
        json.loads((path / "manifest.json").read_text())["step"] for path in (folder / "checkpoints").iterdir()
    )


def kept(folder: Path) -> dict[str, Any]:
    """What is left of a run that can be compared to the bit."""
    from tests.run import curve, lines, status

    last = folder / "checkpoints" / f"step-{STEPS:08d}"
    state = json.loads((last / "state.json").read_text())
    return {
        "ended": [status(folder)[key] for key in ("state", "reason", "root_rank", "step")],
        "losses": curve(folder, "loss_hex"),
        "samples": curve(folder, "sample_digest") if "sample_digest" in lines(folder, "train")[0] else None,
        "evaluations": lines(folder, "eval"),
        "tensors": {
            f"{file.name}/{name}": tensor.numpy().tobytes()
            for file in sorted(last.glob("*.safetensors"))
            for name, tensor in load_file(file).items()
        },
        "progress": state["progress"],
        "figures": json.loads((last / "manifest.json").read_text())["figures"],
    }


def same(folder: Path, whole: dict[str, Any]) -> None:
    """The two runs cannot be told apart."""
    for name, found in kept(folder).items():
        assert found == whole[name], name


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of one process that nothing happened to."""
    found = kept(run(WORDS, place=tmp_path_factory.mktemp("whole")).folder)
    assert (found["ended"], len(found["evaluations"])) == (["completed", None, None, STEPS], 2)
    return found


class Ending(NamedTuple):
    """How the first start ends."""

    act: str
    at: list[int]
    code: int
    state: str
    saved: list[int]  # the checkpoints then; of a run that stopped as it was asked, the last step is another one
    screen: str = ""  # something of its last lines
    words: tuple[str, ...] = ()
    batches: bool = False


ENDINGS = {
    "asked in a step": Ending("SIGTERM", [6], 75, "preempted", [2, 4, 5, 6], "to go on:"),
    "asked in a step that saves": Ending("SIGTERM", [4], 75, "preempted", [2, 4]),
    # an evaluation has 6 batches, for the weights and for their average
    "asked in an evaluation": Ending("SIGTERM", [8], 75, "preempted", [2, 4, 5], batches=True),
    "asked in the last step": Ending("SIGTERM", [10], 75, "preempted", [2, 4, 5, 6, 8, 10]),
    "asked in the last evaluation": Ending("SIGTERM", [20], 75, "preempted", [2, 4, 5, 6, 8, 10], batches=True),
    "time over": Ending("", [], 75, "preempted", [], words=("run.stop_after=0.001",)),
    "an error": Ending("error", [7], 1, "failed", [2, 4, 5, 6], "ValueError: no such sample: 7"),
    "bad data": Ending("bad data", [7], 1, "failed", [2, 4, 5, 6], "3.jpg cannot be read"),
    "an error in an evaluation": Ending("error", [8], 1, "failed", [2, 4], "ValueError", batches=True),
    "two saves that fail": Ending("full", [4, 8], 0, "completed", [2, 5, 6, 10], "1 of at most 2"),
    "three in a row": Ending("full", [4, 5, 6], 1, "failed", [2], "It is failed save number 3 in a row"),
    "the last save": Ending("full", [10], 1, "failed", [2, 4, 5, 6, 8], "No save follows"),
    "a save, at once": Ending("full", [4], 1, "failed", [2], "are intact", ("checkpoint.on_error=stop",)),
    "a save as it stops": Ending(
        *("full", [1], 1, "failed", [], "No save follows", ("run.stop_after=0.001", "loop.save_every=null"))
    ),
}


MORE = ("asked in a step that saves", "asked in the last step", "an error in an evaluation")


@pytest.mark.parametrize("name", quickly(ENDINGS, *(name for name in ENDINGS if name not in MORE)))
def test_however_one_process_ended_the_next_start_shows_no_trace_of_it(
    whole: dict[str, Any], tmp_path: Path, name: str
) -> None:
    ending = ENDINGS[name]
    words = [*WORDS, f"+task.act='{ending.act}'", f"+task.at={ending.at}", f"+task.batches={ending.batches}"]
    first = run([*words, *ending.words, "log=[console]"], place=tmp_path, code=ending.code)
    said = first.status
    assert said["state"] == ending.state
    stopped = {said["step"]} if ending.code == 75 else set()
    assert saved(first.folder) == sorted({*ending.saved} | stopped)
    assert all(step - max([1, *ending.saved]) in (0, 1) for step in stopped)  # it is heard in the step, or in the next
    assert ending.screen in first.out
    if ending.code == 1:
        told = first.out.splitlines()[-1]
        assert ending.screen in told
        assert ("Traceback" in first.out) == (ending.act == "error")
        assert said["reason"] in told or told in said["reason"]
    if ending.act == "full":
        for words_ in (f"could not be written to {first.folder / 'checkpoints'}", "File too large", "needs about 1,"):
            assert words_ in first.out
    if ending.code:
        if ending.batches and stopped:  # as of another start, which died between this line and its save
            with (first.folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"kind": "eval", "step": said["step"], "loss": -1.0}) + "\n")
        (tmp_path / "acted").touch()
        second = run(words, place=tmp_path)
        newest = max({*ending.saved} | stopped, default=0)
        assert (second.status["resume_step"], second.status["attempt"]) == (newest, 2)
        again = max(0, said["step"] - newest)  # as far as it had been reported
        assert second.status["goodput"] == round(STEPS / (STEPS + again), 4)
    same(first.folder, whole)


# ------------------------------------------------------------------------------------------------------- several ranks


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, processes: Processes) -> dict[str, Any]:
    """A run of two ranks that nothing happened to."""
    return kept(run([*WORDS, "strategy=fsdp"], 2, "group", place=tmp_path_factory.mktemp("two")).folder)


class Fault(NamedTuple):
    """What happens to a rank of two."""

    act: str
    at: list[int]
    how: How
    code: int
    state: str
    root_rank: int | None = None
    reason: str = ""
    rank: int = 1
    batches: bool = False


KILLED, HANGS = "Another process of the run ended without a message", "rank 1 of 2 does not answer"
FAULTS = {
    "asked": Fault("SIGTERM", [7], "group", 0, "preempted"),  # a launcher restarts what does not exit with 0
    "asked in an evaluation": Fault("SIGTERM", [8], "group", 0, "preempted", batches=True),
    "a full disk": Fault("full", [4, 8], "group", 0, "completed"),
    "killed": Fault("SIGKILL", [7], "process", 1, "failed", None, KILLED),
    "hangs": Fault("SIGSTOP", [7], "process", 1, "failed", 1, HANGS),
    "fails": Fault("error", [7], "process", 1, "failed", 1, "ValueError: no such sample: 7"),
    # a connection of its own that breaks is no other rank's end
    "is cut off": Fault("reset", [7], "process", 1, "failed", 1, "ConnectionResetError: no such sample: 7"),
    "killed in an evaluation": Fault("SIGKILL", [8], "process", 1, "failed", None, KILLED, batches=True),
    "the first is killed": Fault("SIGKILL", [7], "process", 1, "failed", None, KILLED, rank=0),
    "the first hangs": Fault("SIGSTOP", [7], "process", 1, "failed", 0, "rank 0 of 2 does not answer", rank=0),
    "bad data": Fault("bad data", [7], "process", 1, "failed", 1, "3.jpg cannot be read"),
}
QUICK = ("asked", "a full disk", "killed")


@pytest.mark.parametrize("name", quickly(FAULTS, *QUICK))
def test_whatever_happens_to_a_rank_all_end_soon_and_the_next_start_shows_no_trace_of_it(
    two: dict[str, Any], processes: Processes, tmp_path: Path, name: str
) -> None:
    fault = FAULTS[name]
    words = [*WORDS, "strategy=fsdp", f"+task.act='{fault.act}'", f"+task.at={fault.at}"]
    words += [f"+task.rank={fault.rank}", f"+task.batches={fault.batches}"]
    # long enough for a process to know that it was stopped and is not only slow
    patience = ["distributed.step_timeout=3"] if fault.act == "SIGSTOP" else []
    real = ["device=cpu", "log=[]"] if fault.how == "process" else []
    first = run([*words, *real, *patience], 2, fault.how, place=tmp_path, code=fault.code)
    said, logs = first.status, [(first.folder / "logs" / f"rank-{rank}.log").read_text() for rank in range(2)]
    assert (said["state"], said["root_rank"]) == (fault.state, fault.root_rank)
    assert (said["reason"] or "").startswith(fault.reason)
    # one account on the screen, by the rank whose error it is, or by one that still runs
    assert first.out.count(fault.reason or "failed at step") == bool(fault.reason)
    assert first.out.count("Traceback") == (fault.act in ("error", "reset", "SIGKILL"))
    if fault.act in ("error", "reset", "bad data"):
        assert first.out.startswith("rank 1 of 2 failed at step 7:\n")
        assert f"rank 1 failed first: {fault.reason}" in logs[0]
        assert first.out.rstrip().endswith(fault.reason)
    if fault.act == "SIGKILL":
        assert f"rank {fault.rank} was ended by SIGKILL; perhaps memory ran out" in first.out
    if fault.act == "SIGSTOP":
        assert f"  rank {fault.rank}: no answer\n  rank {1 - fault.rank}: step " in first.out
        # every rank's stacks; the stopped one was made to run again, to say where it was
        assert all("thread MainThread:\n" in log for log in logs)
        # torch's record of the last collectives: the one that the other waits in stands last, and has no end
        collectives = json.loads((first.folder / "logs" / f"collectives-{1 - fault.rank}.json").read_text())
        assert collectives["gloo"]["entries"][-1]["profiling_name"].startswith("gloo:")
    if fault.act == "full":
        assert saved(first.folder) == [2, 5, 6, 10]
    if said["state"] != "completed":
        (tmp_path / "acted").touch()
        before = saved(first.folder)
        second = run(words, 2, "group", place=tmp_path)
        assert second.status["resume_step"] == before[-1] >= (4 if fault.batches else 6)
    same(first.folder, two)
