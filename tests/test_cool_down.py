"""Cool-downs: runs that branch off from a checkpoint of one that goes on at the stable rate."""

from __future__ import annotations

from pathlib import Path

from tests.run import SMALL, run

STABLE = [*SMALL, "loop.global_batch=120", "loop.save_every=4", "schedule=wsd", "schedule.warmup=2"]
SHORT = ["schedule.decay_steps=3", "loop.steps=7"]
START = "run.resume=long/checkpoints/step-00000004"


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_branches_are_to_the_bit_what_runs_of_their_length_are_and_the_long_run_goes_on(tmp_path: Path) -> None:
    long = run([*STABLE, "run.dir=long", "schedule.decay=0", "loop.steps=9"], place=tmp_path)
    untouched = contents(long.folder)
    branch = run([*STABLE, "run.dir=branch", START, *SHORT], place=tmp_path)
    said = (branch.folder / "logs/rank-0.log").read_text()
    assert "changed     schedule.decay: 0 → 0.2" in said
    assert "changed     schedule.decay_steps: null → 3" in said
    whole = run([*STABLE, "run.dir=scratch", *SHORT], place=tmp_path)
    # the branch is the end of a run of its own length, and the beginning of that one is the long run's
    for key in ("loss_hex", "lr", "sample_digest"):
        assert [line[key] for line in branch.lines("train")] == whole.curve(key)[4:], key
        assert long.curve(key)[:4] == whole.curve(key)[:4], key
    rates = whole.curve("lr")
    assert [round(rate / rates[2], 6) for rate in rates] == [0.5, 1, 1, 1, 1, 0.666667, 0.333333]
    # the long run is as it was, and a larger length alone extends it: no step of it would have had another rate
    assert contents(long.folder) == untouched
    run([*STABLE, "run.dir=long", "schedule.decay=0", "loop.steps=11"], place=tmp_path)
    assert len(long.curve()) == 11
    # where the decay has begun, the rates of the steps so far would be others
    refused = run([*STABLE, "run.dir=branch", START, SHORT[0], "loop.steps=9"], place=tmp_path, code=2).out
    assert "the schedule's horizon in steps: 7 → 9" in refused
    refused = run([*STABLE, "run.dir=none", "schedule.decay_steps=8", "loop.steps=9"], place=tmp_path, code=2).out
    assert "warmup 2 + schedule.decay_steps 8 is more than the 9 " in refused
    assert "decay_steps=7 fits" in refused
    assert not (tmp_path / "none").exists()


def test_a_branch_with_another_optimizer_begins_without_the_state_of_the_old_one(tmp_path: Path) -> None:
    run([*STABLE, "run.dir=long", "schedule.decay=0", "loop.steps=4", "optimizer=muon"], place=tmp_path)
    words = [*STABLE, "schedule.decay_steps=3", "optimizer.lr=0.001", "run.dir=adamw"]
    done = run([*words, "run.resume=long", "loop.steps=7", "optimizer=adamw"], place=tmp_path)
    said = (done.folder / "logs/rank-0.log").read_text()
    assert "note        the checkpoint is of another optimizer: this one begins without state" in said
    assert [line["step"] for line in done.lines("train")] == [5, 6, 7]
    # and back: what AdamW has kept is nothing for Muon
    run([*words, "loop.steps=9", "run.accept_changes=true", "optimizer=muon"], place=tmp_path)
