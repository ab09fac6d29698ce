"""What a run goes on from: a checkpoint that does not fit is refused before anything is made or written."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.commands import SMALL, files_below, lines, status
from tests.inside import here
from trainer.messages import Refusal

WORDS = (*SMALL, "strategy=single", "schedule=constant", "loop.global_batch=120")


def words(folder: Path, *others: str, steps: int = 4) -> list[str]:
    return [*WORDS, f"run.dir={folder}", f"loop.steps={steps}", *others]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps."""
    folder = tmp_path_factory.mktemp("start") / "trained"
    assert here(*words(folder)) == 0
    return folder


@pytest.mark.parametrize("steps", [pytest.param(3, marks=pytest.mark.long), 4])
def test_a_start_that_leaves_nothing_to_train_is_refused_and_makes_nothing(trained, tmp_path, steps):
    for start in (trained, trained / "checkpoints" / "step-00000004"):
        with pytest.raises(Refusal, match=rf"of step 4 and this run ends at step {steps}.* loop\.steps={4 + steps} "):
            here(*words(tmp_path / "new", f"run.resume={start}", steps=steps))
    assert files_below(tmp_path) == set()
    with pytest.raises(Refusal, match=rf"; loop\.steps={4 + steps} loop\.epochs=1 trains"):  # both bound this run
        here(*words(tmp_path / "new", f"run.resume={trained}", "loop.epochs=9", steps=steps))


def test_what_the_refusal_names_works(trained, tmp_path):
    assert here(*words(tmp_path, f"run.resume={trained}", steps=7)) == 0
    assert [line["step"] for line in lines(tmp_path, "train")] == [5, 6, 7]


def test_a_start_of_another_network_is_refused_with_what_differs(trained, tmp_path):
    with pytest.raises(Refusal) as caught:
        here(*words(tmp_path / "new", f"run.resume={trained}", "model.width=48", steps=9))
    said = str(caught.value)
    assert "is (32, 64) in the checkpoint, (48, 64) here" in said
    assert "model.width: 32 → 48" in said
    assert f"leave run.resume={trained} out" in said
    assert "accept_changes" not in said
    assert files_below(tmp_path) == set()


@pytest.mark.parametrize("accepted", ["true", pytest.param("false", marks=pytest.mark.long)])
def test_another_network_spoils_no_folder(trained, tmp_path, accepted):
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}
    for other in ("model.width=48", "model.depth=3"):
        with pytest.raises(Refusal) as caught:
            here(*words(folder, other, f"run.accept_changes={accepted}", steps=6))
        assert "accept_changes" not in str(caught.value)
        assert other.replace("=", ": 32 → " if "width" in other else ": 2 → ") in str(caught.value)
        assert "in the checkpoint" in str(caught.value)
    assert {path: path.read_bytes() for path in before} == before
    assert here(*words(folder, steps=6)) == 0  # the original command goes on
    assert (status(folder)["state"], status(folder)["resume_step"]) == ("completed", 4)


def test_keys_that_a_later_version_brings_change_nothing_where_they_say_what_was_so(trained, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    (config := folder / "config.yaml").write_text(older(config.read_text(), "erase", "freeze", "groups", "decay"))
    # nor does what the task is told of the data
    config.write_text(config.read_text().replace("label_smoothing: 0.0\n  num_classes: 10\n", "label_smoothing: 0.0\n"))
    assert here(*words(folder, steps=5)) == 0
    # the rest of them is a change, for what was so before is not what the key says
    config.write_text(older(config.read_text(), "erase", "freeze", "groups", "decay"))
    with pytest.raises(Refusal, match=r"data\.augment\.erase: absent → 0\.5\n  optimizer\.decay: absent → \"all\""):
        here(*words(folder, "data.augment.erase=0.5", "optimizer.decay=all", steps=6))


def older(text: str, *keys: str) -> str:
    """A configuration of before there were these keys."""
    return "\n".join(line for line in text.splitlines() if line.strip().split(":")[0] not in keys)
