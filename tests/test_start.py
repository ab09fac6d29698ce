"""What a run goes on from: a checkpoint that does not fit is refused before anything is made or written."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.run import SMALL, files_below, lines, run, status

WORDS = (*SMALL, "strategy=single", "schedule=constant", "loop.global_batch=120")


def words(folder: Path, *others: str, steps: int = 4) -> list[str]:
    return [*WORDS, f"run.dir={folder}", f"loop.steps={steps}", *others]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps."""
    folder = tmp_path_factory.mktemp("start") / "trained"
    run(words(folder))
    return folder


def test_a_start_that_leaves_nothing_to_train_is_refused_and_makes_nothing(trained: Path, tmp_path: Path) -> None:
    for start, steps in ((trained, 4), (trained / "checkpoints" / "step-00000004", 3)):
        said = run(words(tmp_path / "new", f"run.resume={start}", steps=steps), code=2).out
        assert f"of step 4 and this run ends at step {steps}" in said
        assert f" loop.steps={4 + steps} " in said
    assert files_below(tmp_path) == set()
    both = words(tmp_path / "new", f"run.resume={trained}", "loop.epochs=9")  # both bound this run
    assert "; loop.steps=8 loop.epochs=1 trains" in run(both, code=2).out
    # what the refusal names works
    run(words(tmp_path, f"run.resume={trained}", steps=7))
    assert [line["step"] for line in lines(tmp_path, "train")] == [5, 6, 7]


def test_another_network_spoils_no_folder(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}
    for other, accepted in (("model.width=48", "true"), ("model.depth=3", "true"), ("model.width=48", "false")):
        said = run(words(folder, other, f"run.accept_changes={accepted}", steps=6), code=2).out
        assert "accept_changes" not in said
        assert other.replace("=", ": 32 → " if "width" in other else ": 2 → ") in said
        assert "in the checkpoint" in said
    assert {path: path.read_bytes() for path in before} == before
    run(words(folder, steps=6))  # the original command goes on
    assert (status(folder)["state"], status(folder)["resume_step"]) == ("completed", 4)


def test_keys_that_a_later_version_brings_change_nothing_where_they_say_what_was_so(
    trained: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    (config := folder / "config.yaml").write_text(older(config.read_text(), "erase", "freeze", "groups", "decay"))
    # nor does what the task is told of the data
    config.write_text(config.read_text().replace("label_smoothing: 0.0\n  num_classes: 10\n", "label_smoothing: 0.0\n"))
    run(words(folder, steps=5))
    # the rest of them is a change, for what was so before is not what the key says
    config.write_text(older(config.read_text(), "erase", "freeze", "groups", "decay"))
    said = run(words(folder, "data.augment.erase=0.5", "optimizer.decay=all", steps=6), code=2).out
    assert 'data.augment.erase: absent → 0.5\n  optimizer.decay: absent → "all"' in said


def older(text: str, *keys: str) -> str:
    """A configuration of before there were these keys."""
    return "\n".join(line for line in text.splitlines() if line.strip().split(":")[0] not in keys)
