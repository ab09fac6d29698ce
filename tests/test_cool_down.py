"""Cool-downs: runs that branch off from a checkpoint of one that goes on at the stable rate."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import SMALL, curve, lines
from tests.inside import here, product
from tests.processes import Processes
from trainer.messages import Refusal

STABLE = (
    *SMALL,
    "loop.global_batch=120",
    "loop.save_every=4",
    "schedule=wsd",
    "schedule.warmup=2",
)
SHORT = ("schedule.decay_steps=3", "loop.steps=7")


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_branches_are_to_the_bit_what_runs_of_their_length_are_and_the_long_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    long = (*STABLE, "run.dir=long", "schedule.decay=0")
    assert here(*long, "loop.steps=9") == 0
    untouched = contents(Path("long"))
    branch = (*STABLE, "run.dir=branch", "run.resume=long/checkpoints/step-00000004", *SHORT)
    assert here(*branch) == 0
    said = Path("branch/logs/rank-0.log").read_text()
    assert "changed     schedule.decay: 0 → 0.2" in said
    assert "changed     schedule.decay_steps: null → 3" in said
    assert here(*STABLE, "run.dir=scratch", *SHORT) == 0
    whole = lines(Path("scratch"), "train")
    # the branch is the end of a run of its own length, and the beginning of that one is the long run's
    for key in ("loss_hex", "lr", "sample_digest"):
        assert [line[key] for line in lines(Path("branch"), "train")] == [line[key] for line in whole[4:]], key
        assert curve(Path("long"), key)[:4] == [line[key] for line in whole[:4]], key
    assert [round(line["lr"] / whole[2]["lr"], 6) for line in whole] == [0.5, 1, 1, 1, 1, 0.666667, 0.333333]
    # the long run is as it was, and a larger length alone extends it: no step of it would have had another rate
    assert contents(Path("long")) == untouched
    assert here(*long, "loop.steps=11") == 0
    assert len(curve(Path("long"))) == 11
    # where the decay has begun, the rates of the steps so far would be others
    with pytest.raises(Refusal, match=r"the schedule's horizon in steps: 7 → 9"):
        here(*branch[:-1], "loop.steps=9")
    with pytest.raises(Refusal, match=r"warmup 2 \+ schedule\.decay_steps 8 is more than the 9 .*decay_steps=7 fits"):
        here(*STABLE, "run.dir=none", "schedule.decay_steps=8", "loop.steps=9")
    assert not Path("none").exists()


@pytest.mark.long
def test_one_process_branches_off_from_what_two_have_written(processes: Processes, tmp_path: Path) -> None:
    long = [*STABLE, "run.dir=long", "schedule.decay=0", "loop.steps=9", "strategy=ddp", "precision=fp64"]
    assert processes.run(2, product, tmp_path, long) == [0, 0]
    branch = [*STABLE, *SHORT, "precision=fp64", "strategy=single"]
    assert processes.run(1, product, tmp_path, [*branch, "run.dir=scratch"]) == [0]
    start = "run.resume=long/checkpoints/step-00000004"
    assert processes.run(1, product, tmp_path, [*branch, "run.dir=branch", start]) == [0]
    ends = [line["loss"] for line in lines(tmp_path / "branch", "train")]
    assert ends == pytest.approx(curve(tmp_path / "scratch")[4:], rel=1e-10)


@pytest.mark.long
def test_a_branch_with_another_optimizer_begins_without_the_state_of_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert here(*STABLE, "run.dir=long", "schedule.decay=0", "loop.steps=4", "optimizer=muon") == 0
    words = (*STABLE, "run.resume=long", *SHORT, "optimizer.lr=0.001")
    for name, other in (("adamw", ["optimizer=adamw"]), ("fewer", ["optimizer=muon", "optimizer.adamw=['5']"])):
        assert here(*words, f"run.dir={name}", *other) == 0
        said = Path(f"{name}/logs/rank-0.log").read_text()
        assert "note        the checkpoint is of another optimizer: this one begins without state" in said
        assert [line["step"] for line in lines(Path(name), "train")] == [5, 6, 7]
    # and back: what AdamW has kept is nothing for Muon
    back = ("loop.steps=9", "run.accept_changes=true", "optimizer=muon", "run.dir=adamw")
    assert here(*STABLE, "optimizer.lr=0.001", "schedule.decay_steps=3", *back) == 0
