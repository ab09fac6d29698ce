"""The run folder: names that stay inside, the same folder after a restart, what is gone on from, no foreign links."""

from __future__ import annotations

import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import yaml

from tests.run import SMALL, run, status
from trainer import Refusal
from trainer.launch.rendezvous import Launch
from trainer.records.run_folder import RunFolder, wait_until_visible


@dataclass(frozen=True)
class Stored(Launch):
    """A launch of torchrun with a store in this process."""

    run_id: str = "run"
    launcher_serves_store: bool = True
    kept: Any = None

    def store(self, timeout: Any = None) -> Any:
        return dist.PrefixStore(f"round-{self.attempt}", self.kept)

    def launcher_store(self) -> Any:
        return self.kept


def opened(root: Path, name: str | None = None, dir: Path | None = None, launch: Any = None, **more: Any) -> RunFolder:
    where = None if dir is None else str(dir)
    words = {"resume": "auto", "mirror": None, "label": "cnn_ddp", "check": lambda _: None} | more
    return RunFolder.open(str(root), name, where, launch=launch or Launch(), **words)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------ its name


def test_a_name_is_made_from_the_time_and_the_label(tmp_path: Path) -> None:
    first, second = opened(tmp_path), opened(tmp_path, label="a/b c")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_cnn_ddp", first.path.name)
    assert second.path.name.endswith("_a_b_c")
    assert opened(tmp_path, label="a/b c").path not in (first.path, second.path)


def test_all_ranks_and_all_restarts_agree_on_a_generated_name(tmp_path: Path) -> None:
    store = dist.HashStore()

    def both(attempt: int) -> list[RunFolder]:
        launches = [Stored(rank=rank, world_size=2, attempt=attempt, kept=store) for rank in range(2)]
        with ThreadPoolExecutor() as pool:  # they wait for each other
            return list(pool.map(lambda launch: opened(tmp_path, launch=launch), launches))

    main, other = both(0)
    other.write_start_files("a: 1\n", [], {})  # it writes nothing
    main.close()
    again, another = both(1)
    assert len({folder.path for folder in (main, other, again, another)}) == 1
    assert sorted(os.listdir(main.path)) == [".lock", "checkpoints", "logs"]


@pytest.mark.parametrize("name", ["../../x", "/etc/x", "a\0b", "~", "..", "", "n" * 300, "a b"])
def test_a_name_never_leads_out_of_the_root_and_a_refusal_is_everybodys(tmp_path: Path, name: str) -> None:
    store = dist.HashStore()
    for rank in range(2):
        with pytest.raises(Refusal, match=r"run\.name=.* a name has 1 to 128"):
            opened(tmp_path / "runs", name, launch=Stored(rank=rank, world_size=2, kept=store))
    assert list(tmp_path.iterdir()) == []


def test_a_launcher_that_remembers_nothing_needs_a_name(tmp_path: Path) -> None:
    """torchrun without a store of its own starts the processes again in the folder that the time would name then."""
    with pytest.raises(Refusal, match=r"^give run\.name: torchrun keeps no store here"):
        opened(tmp_path, launch=Stored(launcher_serves_store=False, kept=dist.HashStore()))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run.dir=/proc/none/x"], r"run\.dir=/proc/none/x: the run folder cannot be made in /proc"),
        (["run.root=file/x"], r"run\.root=.*: the run folder cannot be made in .*; give another run\.dir"),
        (["run.root=file", "run.name=x"], r"run\.root=.*: the run folder cannot be made in "),
    ],
)
def test_a_folder_that_cannot_be_is_refused_before_any_data_is_read(
    tmp_path: Path, words: list[str], said: str
) -> None:
    (tmp_path / "file").touch()
    # the data would be refused next
    refused = run(["data=imagefolder", "data.root=nowhere", "model=mlp", *words], place=tmp_path, code=2)
    assert re.search(said, refused.out), refused.out
    assert os.listdir(tmp_path) == ["file"]


def test_a_folder_that_another_machine_does_not_see_is_refused(tmp_path: Path) -> None:
    folder = opened(tmp_path, dir=tmp_path / "r e ü 目录=,").path
    holder = (folder / ".lock").read_text().strip()
    wait_until_visible(folder, holder, 0.1)
    for there in (folder, tmp_path / "b"):  # a folder of that name that another run has used; none
        with pytest.raises(Refusal, match="these machines share no such folder"):
            wait_until_visible(there, "host elsewhere, pid 7", 0.1)


# ------------------------------------------------------------------------------------------------------ again and anew


def test_earlier_configurations_stay_and_fresh_moves_the_folder_aside_but_not_on_a_restart(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        folder = opened(tmp_path, "a")
        assert folder.read_previous("config.yaml") == ({"n": number - 1} if number > 1 else None)
        assert folder.read_previous("environment.json") == ({"attempt": number - 1} if number > 1 else None)
        folder.write_start_files(f"n: {number}\n", ["a=1", 'b="x: y"'], {"attempt": number})
        folder.close()
    texts = {path.name: path.read_text() for path in (tmp_path / "a").glob("config*.yaml")}
    assert texts == {"config.1.yaml": "n: 1\n", "config.2.yaml": "n: 2\n", "config.yaml": "n: 3\n"}
    assert yaml.safe_load((tmp_path / "a" / "overrides.yaml").read_text()) == ["a=1", 'b="x: y"']
    for number in (4, 5):
        for launch in (stored := Stored(kept=dist.HashStore()), Stored(attempt=1, kept=stored.kept), Launch(attempt=1)):
            folder = opened(tmp_path, "a", resume="fresh", launch=launch)  # a start, a restart, a requeued job
            if launch.attempt == 0:
                folder.write_start_files(f"n: {number}\n", [], {})
            assert (folder.path / "config.yaml").read_text() == f"n: {number}\n"
            folder.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a.1", "a.2"]
    assert (tmp_path / "a.1" / "config.yaml").read_text() == "n: 3\n"


def test_a_folder_that_is_emptied_is_taken_first(tmp_path: Path) -> None:
    kept = RunFolder.open_empty(tmp_path / "a", Launch(), lambda _: None)
    (kept.path / "mine").touch()
    (kept.path / "elsewhere").symlink_to(tmp_path)
    with pytest.raises(Refusal, match="in use"):
        RunFolder.open_empty(tmp_path / "a", Launch(), lambda _: None)
    assert (kept.path / "mine").exists()
    kept.close()
    again = RunFolder.open_empty(tmp_path / "a", Launch(), lambda _: None)
    assert sorted(path.name for path in again.path.iterdir()) == [".lock", "checkpoints", "logs"]
    again.undo_start(0, "refused")  # of a folder that was there before something stays
    assert again.path.exists()


# ------------------------------------------------------------------------------------------------------------- resuming

RUN = (*SMALL, "loop.steps=4", "loop.global_batch=120", "loop.eval_every=null", "loop.save_every=2")


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps, as somebody hands it on."""
    return run([*RUN, "run.dir=run"], place=tmp_path_factory.mktemp("given")).folder


@pytest.fixture
def folder(given: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(given, tmp_path / "run"))


LEARNING = (
    *("seed=1", "optimizer.lr=0.5", "schedule.warmup=5", "loop.global_batch=60"),
    *("loop.max_norm=0.1", "loop.dropout=native", "precision=bf16", "task.label_smoothing=0.1"),
)


def test_what_changes_the_learning_is_refused_with_the_way_out_and_the_rest_is_free(given: Path) -> None:
    words = [*RUN, "run.dir=run"]
    for change in LEARNING:
        key, _, value = change.partition("=")
        refused = run([*words, change], place=given.parent, code=2)
        assert re.search(rf"{re.escape(key)}: .* → .*{value}", refused.out), refused.out
        assert "accept_changes=true" in refused.out
    assert "is of another network" in run([*words, "model.width=64"], place=given.parent, code=2).out
    for change in ("strategy=ddp", "loop.micro_batches=4", "loader.workers=1", "loop.log_every=7", "checkpoint.keep=9"):
        assert "this run is complete" in run([*words, change], place=given.parent).out
    assert status(given)["step"] == 4


def test_what_resume_may_name(given: Path, tmp_path: Path) -> None:
    old, new = given / "checkpoints" / "step-00000004", [*RUN, "loop.steps=6", "run.accept_changes=true"]
    (tmp_path / "weights.pt").touch()
    for name, said in {
        str(tmp_path / "none"): r"run\.resume",
        str(given / "checkpoints"): r"run\.resume",
        str(tmp_path / "weights.pt"): r"is a file; .* the weights in it: init_from=.*weights\.pt;",
        str(old / "manifest.json"): rf"is a file of the checkpoint {old}: name that folder",
    }.items():
        refused = run([*new, f"run.resume={name}", "run.dir=mine"], place=tmp_path, code=2)
        assert re.search(said, refused.out), refused.out
    assert not (tmp_path / "mine").exists()
    for number, path in enumerate((given, old)):
        mine = run([*new, f"run.resume={path}", f"run.dir=run-{number}"], place=tmp_path)
        assert [line["step"] for line in mine.lines("train")] == [5, 6]


# ----------------------------------------------------------------------------------------------- a stranger's folder


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml"])
def test_a_run_writes_through_no_link_of_its_folder(folder: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "mine").write_text("# the user's own\n")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "mine")
    assert "is a link to" in run([*RUN, "loop.steps=6", "run.dir=run"], place=tmp_path, code=2).out
    assert (tmp_path / "mine").read_text() == "# the user's own\n"


def test_the_user_s_own_links_lead_to_the_run_s_folder_and_its_folders_may_be_links(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "short").symlink_to(folder)
    shutil.move(folder / "checkpoints", tmp_path / "scratch")
    (folder / "checkpoints").symlink_to(tmp_path / "scratch")
    again = run([*RUN, "run.dir=short", "loop.steps=6", "run.accept_changes=true"], place=tmp_path)
    assert again.status["resume_step"] == 4
    assert (tmp_path / "scratch" / "step-00000006" / "manifest.json").is_file()
