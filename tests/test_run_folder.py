"""The run folder: names that stay inside, one run at a time, the same folder after a restart, a truthful status."""

import json
import logging
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist
import yaml

from tests.commands import SMALL
from tests.inside import here
from trainer.launch import run_status as status_module
from trainer.launch.polling import poll
from trainer.launch.rendezvous import Launch
from trainer.launch.run_status import mark_failed, read_status
from trainer.launch.safe_files import replace_file
from trainer.messages import Refusal
from trainer.records import folder_lock as lock_module
from trainer.records import run_folder as folder_module
from trainer.records.folder_lock import lock_holder
from trainer.records.resume_rules import (
    completed_message,
    find_changes,
    has_checkpoint,
    parse_config,
    refuse_changes,
    resolve_resume_path,
    select_learning_changes,
)
from trainer.records.run_folder import RunFolder, generate_name

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Stored(Launch):
    """A launch of torchrun with a store in this process."""

    run_id: str = "run"
    launcher_serves_store: bool = True
    kept: dist.Store = None

    def store(self, timeout=None):
        return dist.PrefixStore(f"round-{self.attempt}", self.kept)

    def launcher_store(self):
        return self.kept


def open_folder(root, name=None, dir=None, resume="auto", launch=None):
    return RunFolder.open(
        str(root), name, None if dir is None else str(dir), resume, None, launch or Launch(), "cnn_ddp", lambda _: None
    )


def open_on_both(root, **facts):
    """Two ranks, which wait for each other."""
    launches = [Stored(rank=rank, world_size=2, **facts) for rank in range(2)]
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda launch: open_folder(root, launch=launch), launches))


def commit(folder, step=1):
    path = folder / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / "manifest.json").write_text("{}")


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(lock_module, "WAIT_SECONDS", 0.1)
    monkeypatch.setattr(status_module, "REPORT_INTERVAL", 0.0)


# ------------------------------------------------------------------------------------------------------------ its name


def test_a_name_is_made_from_the_time_and_the_label(tmp_path):
    first, second = open_folder(tmp_path), open_folder(tmp_path)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_cnn_ddp", first.path.name)
    assert second.path != first.path
    assert generate_name("a/b c", 0.0).endswith("_a_b_c")


def test_all_ranks_and_all_restarts_agree_on_a_generated_name(tmp_path):
    store = dist.HashStore()
    main, other = open_on_both(tmp_path, kept=store)
    assert other.path == main.path
    main.close()
    again, other = open_on_both(tmp_path, kept=store, attempt=1)
    assert again.path == other.path == main.path


def test_a_refusal_of_the_main_rank_is_everybodys(tmp_path):
    store = dist.HashStore()
    for rank in (0, 1):
        with pytest.raises(Refusal, match="a name has 1 to 128"):
            open_folder(tmp_path, "../x", launch=Stored(rank=rank, world_size=2, kept=store))


@pytest.mark.parametrize("name", ["../../x", "/etc/x", "a/../../b", "a\0b", "~", "..", ".", "", "n" * 300, "a b"])
def test_a_name_never_leads_out_of_the_root(tmp_path, name):
    with pytest.raises(Refusal, match=r"run\.name"):
        open_folder(tmp_path / "runs", name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dir", ["r e ü 目录=,", "deep/er"])
def test_run_dir_may_be_any_path(tmp_path, dir):
    folder = open_folder(tmp_path / "unused", dir=tmp_path / dir)
    folder.write_start_files("a: 1\n", [], {})
    assert (tmp_path / dir / "config.yaml").is_file()
    assert not (tmp_path / "unused").exists()


@pytest.mark.parametrize("dir", ["file/x", "n" * 300, "a\0b", "full"])
def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path, dir, monkeypatch):
    (tmp_path / "file").write_text("")
    if dir == "full":  # as on a disk without space: folders can be made, bytes cannot be written
        monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(Refusal, match=r"cannot be( written to|: File name too long)") as caught:
        open_folder(tmp_path, dir=tmp_path / dir)
    assert str(tmp_path / dir)[:150] in str(caught.value)
    assert not list(tmp_path.rglob(".probe-*"))


# ------------------------------------------------------------------------------------------------------- one at a time

HOLDING = """
import sys
from trainer.records import run_folder as folder_module
from trainer.records.run_folder import RunFolder
from trainer.launch.rendezvous import Launch
folder = RunFolder.open(sys.argv[1], "a", None, "auto", None, Launch(), "", lambda _: None)
print("locked", "torch" in sys.modules, flush=True)
sys.stdin.read()
"""


def test_a_folder_in_use_is_refused_and_a_dead_runs_lock_is_gone(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDING, str(tmp_path)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout.readline() == "locked False\n"  # and torch was not imported for it
    with pytest.raises(Refusal, match=rf"in use by another run \(host {os.uname().nodename}, pid {other.pid}\)"):
        open_folder(tmp_path, "a")
    other.kill()
    other.communicate()
    open_folder(tmp_path, "a").close()


def test_the_lock_of_another_machine_is_waited_for_and_the_wait_is_said(tmp_path, monkeypatch, caplog):
    kept = open_folder(tmp_path, "a")
    (kept.path / ".lock").write_text("host elsewhere, pid 7\n")
    monkeypatch.setattr(lock_module, "LEASE_SECONDS", 0.1)
    monkeypatch.setattr(lock_module, "WAIT_SECONDS", 600.0)  # of this machine's own: not what is waited for here
    with pytest.raises(Refusal, match=r"in use by another run \(host elsewhere, pid 7\)"):
        open_folder(tmp_path, "a")
    assert caplog.text.count("in use on another machine (host elsewhere, pid 7); waiting up to 0.1 s") == 1
    monkeypatch.setattr(lock_module, "LEASE_SECONDS", 600.0)
    said = threading.Event()
    monkeypatch.setattr(logging.getLogger(lock_module.__name__), "warning", lambda *_: said.set())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(open_folder, tmp_path, "a")
        assert said.wait(60)
        kept.close()  # as the file server does, when the dead machine's time is over
        waiting.result().close()


def outcomes(root, monkeypatch, *ways):
    """Starts that wait for the folder `a` until who has it lets go: a folder of each that got in, else the refusal."""
    monkeypatch.setattr(lock_module, "WAIT_SECONDS", 1.0)
    kept, waiting = open_folder(root, "a"), set()
    kept.write_start_files("n: 1\n", [], {})
    asked = lock_module.lock_holder

    def noted(path):
        waiting.add(threading.get_ident())
        return asked(path)

    monkeypatch.setattr(lock_module, "lock_holder", noted)

    def enter(resume):
        try:
            return open_folder(root, "a", resume=resume)
        except Refusal as error:
            return str(error)

    with ThreadPoolExecutor(len(ways)) as pool:
        pending = [pool.submit(enter, way) for way in ways]
        assert poll(lambda: len(waiting) == len(ways) or None, 60)
        kept.close()
        return [one.result() for one in pending]


@pytest.mark.parametrize("ways", [("fresh", "fresh"), ("fresh", "auto", "auto")])
def test_of_those_that_wait_for_a_folder_one_enters_also_where_it_is_moved_aside(tmp_path, monkeypatch, ways):
    found = outcomes(tmp_path, monkeypatch, *ways)
    (inside,) = [one for one in found if isinstance(one, RunFolder)]
    assert all("a is in use by another run (host " in one for one in found if one is not inside)
    assert inside.path == tmp_path / "a"
    assert len(list(tmp_path.iterdir())) <= 2  # the folder, and the one that was moved aside


def test_who_waits_for_a_folder_that_is_taken_back_makes_it_again(tmp_path, monkeypatch):
    monkeypatch.setattr(lock_module, "WAIT_SECONDS", 60.0)
    first, waiting = open_folder(tmp_path, "a"), threading.Event()
    asked = lock_module.lock_holder

    def noted(path):
        waiting.set()
        return asked(path)

    monkeypatch.setattr(lock_module, "lock_holder", noted)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(open_folder, tmp_path, "a")
        assert waiting.wait(60)
        first.undo_start(0, "refused")
        assert (second.result().path / "checkpoints").is_dir()
    monkeypatch.setattr(lock_module, "WAIT_SECONDS", 0.1)
    with pytest.raises(Refusal, match="in use"):
        open_folder(tmp_path, "a")


def test_a_folder_that_is_emptied_is_taken_first(tmp_path):
    kept = RunFolder.open_empty(tmp_path / "a", Launch(), lambda _: None)
    (kept.path / "mine").touch()
    (kept.path / "elsewhere").symlink_to(tmp_path)
    with pytest.raises(Refusal, match="in use"):
        RunFolder.open_empty(tmp_path / "a", Launch(), lambda _: None)
    assert (kept.path / "mine").exists()
    kept.close()
    again = RunFolder.open_empty(tmp_path / "a", Launch(), lambda _: None)
    assert sorted(path.name for path in again.path.iterdir()) == [".lock", "checkpoints", "logs"]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_does_not_keep_the_lock(tmp_path):
    folder = open_folder(tmp_path, "a")
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    os.close(reader)
    folder.close()
    open_folder(tmp_path, "a").close()
    os.close(writer)
    os.waitpid(child, 0)


# ----------------------------------------------------------------------------------------------------- what it contains


def test_earlier_configurations_stay_one_an_attempt(tmp_path):
    for number in (1, 2, 3):
        folder = open_folder(tmp_path, "a")
        assert folder.read_previous("config.yaml") == ({"n": number - 1} if number > 1 else None)
        assert folder.read_previous("environment.json") == ({"attempt": number - 1} if number > 1 else None)
        folder.write_start_files(f"n: {number}\n", ["a=1", 'b="x: y"'], {"attempt": number})
        folder.close()
    texts = {path.name: path.read_text() for path in (tmp_path / "a").glob("config*.yaml")}
    assert texts == {"config.1.yaml": "n: 1\n", "config.2.yaml": "n: 2\n", "config.yaml": "n: 3\n"}
    assert yaml.safe_load((tmp_path / "a" / "overrides.yaml").read_text()) == ["a=1", 'b="x: y"']


def test_fresh_moves_the_old_folder_aside_but_not_on_a_restart(tmp_path):
    for number in (1, 2, 3):
        store = dist.HashStore()
        folder = open_folder(tmp_path, "a", resume="fresh", launch=Stored(kept=store))
        folder.write_start_files(f"n: {number}\n", [], {})
        folder.close()
        again = open_folder(tmp_path, "a", resume="fresh", launch=Stored(attempt=1, kept=store))
        assert (again.path / "config.yaml").read_text() == f"n: {number}\n"
        again.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a.1", "a.2"]
    assert (tmp_path / "a.1" / "config.yaml").read_text() == "n: 1\n"


def test_a_requeued_job_goes_on_where_it_was_told_to_start_fresh(tmp_path):
    for attempt in (0, 1, 2):
        folder = open_folder(tmp_path, "a", resume="fresh", launch=Launch(attempt=attempt))
        folder.close()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_launcher_that_remembers_nothing_needs_a_name(tmp_path):
    """torchrun without a store of its own starts the processes again in the folder that the time would name then."""
    launch = Stored(launcher_serves_store=False, kept=dist.HashStore())
    with pytest.raises(Refusal, match=r"^give run\.name: torchrun keeps no store here"):
        open_folder(tmp_path, launch=launch)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_another_machine_does_not_see_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module, "_VISIBLE_AFTER", 0.1)
    folder = open_folder(tmp_path, "a")
    folder_module._wait_until_visible(folder.path, lock_holder(folder.path))
    for there in ("a", "b"):  # a folder of that name that another run has used; none
        with pytest.raises(Refusal, match="these machines share no such folder"):
            folder_module._wait_until_visible(tmp_path / there, "host elsewhere, pid 7")


def test_fresh_in_a_folder_in_use_moves_nothing(tmp_path):
    folder = open_folder(tmp_path, "a")
    lines = (folder.path / ".lock").read_text()
    with pytest.raises(Refusal, match="in use"):
        open_folder(tmp_path, "a", resume="fresh")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (folder.path / ".lock").read_text() == lines


def test_what_resume_may_name(tmp_path):
    assert resolve_resume_path("auto") is None
    assert resolve_resume_path("fresh") is None
    commit(tmp_path / "old")
    assert resolve_resume_path(str(tmp_path / "old")) == tmp_path / "old"
    assert resolve_resume_path(str(tmp_path / "old/checkpoints/step-00000001")).name == "step-00000001"
    for path in ("none", "old/checkpoints"):
        with pytest.raises(Refusal, match=r"run\.resume"):
            open_folder(tmp_path, "a", resume=str(tmp_path / path))
    # files: of another program's weights, and of a checkpoint
    (weights := tmp_path / "weights.pt").touch()
    with pytest.raises(Refusal, match=rf"is a file; .* the weights in it: init_from={weights};"):
        open_folder(tmp_path, "a", resume=str(weights))
    step = tmp_path / "old/checkpoints/step-00000001"
    with pytest.raises(Refusal, match=rf"is a file of the checkpoint {step}: name that folder"):
        open_folder(tmp_path, "a", resume=str(step / "manifest.json"))
    assert not (tmp_path / "a").exists()


def test_only_a_finished_checkpoint_counts_as_one(tmp_path):
    folder = open_folder(tmp_path, "a")
    (folder.path / "checkpoints" / "step-00000001").mkdir()
    (folder.path / "checkpoints" / ".tmp-step-2").mkdir()
    (folder.path / "checkpoints" / ".tmp-step-2" / "manifest.json").touch()
    assert not has_checkpoint(folder.path)
    commit(folder.path, 2)
    assert has_checkpoint(folder.path)


# --------------------------------------------------------------------------------------------------------------- status


def write(folder, state, step, reason=None):
    folder.report(state, step, reason)
    return read_status(folder.path)


def begun(root, resume_step=0):
    folder = open_folder(root, "a")
    folder.begin(resume_step, 2, "ddp")
    return folder


def test_status_counts_attempts_and_the_steps_of_all_of_them(tmp_path):
    folder = begun(tmp_path)
    assert read_status(folder.path)["goodput"] == 1.0
    said = write(folder, "running", 40)
    wanted = {"attempt": 1, "step": 40, "state": "running", "reason": None, "root_rank": None, "goodput": 1.0}
    wanted |= {"resume_step": 0, "world_size": 2, "strategy": "ddp"}
    assert wanted.items() <= said.items()
    folder.close()  # killed after step 40, its last checkpoint is that of step 30

    folder = begun(tmp_path, 30)
    said = write(folder, "preempted", 60, "SIGTERM")
    assert (said["attempt"], said["resume_step"], said["goodput"]) == (2, 30, round(60 / 70, 4))
    folder.close()

    folder = begun(tmp_path, 60)
    said = write(folder, "completed", 100)
    assert (said["attempt"], said["goodput"], said["reason"]) == (3, round(100 / 110, 4), None)


def test_a_running_attempt_is_not_reported_at_each_step(tmp_path, monkeypatch):
    monkeypatch.setattr(status_module, "REPORT_INTERVAL", 600.0)
    folder = begun(tmp_path)
    assert write(folder, "running", 1)["step"] == 0
    assert write(folder, "preempted", 2)["step"] == 2


def test_a_kill_long_after_the_last_line_is_counted_too(tmp_path, monkeypatch):
    monkeypatch.setattr(status_module, "REPORT_INTERVAL", 0.0)  # as if each step took a second
    words = [*SMALL, "loop.global_batch=120", "loop.steps=9", "loop.log_every=1000", "loop.save_every=2"]
    words += ["loop.eval_every=null", "strategy=single", f"run.dir={tmp_path}"]
    reported = []
    monkeypatch.setattr(status_module, "_replace_status", lambda path, said, lasting: reported.append(said["step"]))
    assert here(*words) == 0
    assert set(reported) == set(range(10))


def test_steps_that_a_killed_attempt_had_saved_count_though_it_had_not_reported_them(tmp_path):
    folder = begun(tmp_path)
    write(folder, "running", 7)
    folder.close()  # killed after step 14, with a checkpoint of step 10
    said = write(begun(tmp_path, 10), "completed", 20)
    assert (said["executed"], said["goodput"]) == (20, 1.0)


def test_a_run_that_began_from_another_ones_checkpoint_counts_its_own_steps(tmp_path):
    folder = begun(tmp_path, 500)
    assert write(folder, "running", 510)["goodput"] == 1.0
    folder.close()
    assert write(begun(tmp_path, 500), "completed", 520)["goodput"] == round(20 / 30, 4)


def test_another_rank_may_say_that_the_run_failed(tmp_path):
    folder = begun(tmp_path)
    write(folder, "running", 7)
    mark_failed(folder.path, "ValueError: no", 1)
    said = read_status(folder.path)
    assert (said["state"], said["reason"], said["root_rank"], said["step"]) == ("failed", "ValueError: no", 1, 7)
    mark_failed(tmp_path, "before anything was written", 0)
    said = read_status(tmp_path)
    assert (said["state"], said["step"], said["attempt"]) == ("failed", 0, 1)


def test_other_ranks_write_nothing(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_start_files("a: 1\n", [], {})
    folder.begin(0, 2, "ddp")
    folder.close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_replaced_whole(tmp_path):
    replace_file(tmp_path / "a", "old")
    with pytest.raises(TypeError):
        replace_file(tmp_path / "a", 5)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    replace_file(tmp_path / "a", b"new", lasting=False)
    assert (tmp_path / "a").read_text() == "new"


# ------------------------------------------------------------------------------------------------------------- resuming


def test_a_completed_run_says_what_extends_it():
    done = {"state": "completed", "step": 100}
    assert "loop.epochs" in completed_message(done, 100)
    assert "loop.steps" in completed_message(done, 50)
    assert "accept_changes" in completed_message(done, 50, needs_horizon=True)
    assert completed_message(done, 101) is None
    assert completed_message({"state": "preempted", "step": 100}, 100) is None
    assert completed_message(None, 100) is None


CONFIG = {
    "model": {"_target_": "a.Net", "width": 8},
    "data": {"_target_": "a.Data", "root": "/data"},
    "optimizer": {"lr": 1.0, "betas": [0.9, 0.99]},
    "schedule": {"warmup": 0},
    "strategy": {"bucket_mb": 25},
    "loop": {"global_batch": 128, "micro_batches": 1, "epochs": 3},
    "loader": {"workers": 0},
    "run": {"name": "a", "resume": "auto"},
    "precision": "auto",
    "seed": 0,
}


def altered(**keys):
    config = json.loads(json.dumps(CONFIG))
    for key, value in keys.items():
        group, _, name = key.partition("__")
        if name:
            config[group][name] = value
        else:
            config[group] = value
    return config


def test_what_differs_is_listed_by_key():
    new = altered(optimizer__lr=0.5, optimizer__betas=[0.9, 0.999], model__depth=2, run__name="b", seed=0.0)
    assert [str(one) for one in find_changes(CONFIG, new)] == [
        "model.depth: absent → 2",
        "optimizer.betas: [0.9, 0.99] → [0.9, 0.999]",
        "optimizer.lr: 1 → 0.5",
    ]
    assert find_changes(CONFIG, altered()) == []
    moved = [{"schedule": {"_target_": f"trainer.{place}.Cosine"}} for place in ("schedule", "learning.schedule")]
    assert find_changes(*moved) == []  # the framework's own files move between versions


def test_another_strategy_is_one_change():
    old = altered(strategy={"_target_": "a.DDP", "bucket_mb": 25})
    new = altered(strategy={"_target_": "a.FSDP", "shard": 2, "bucket_mb": 30})
    assert [str(one) for one in find_changes(old, new)] == ['strategy: "a.DDP" → "a.FSDP"']


@pytest.mark.parametrize(
    "new",
    [
        {"model__width": 9},
        {"task": {"_target_": "b"}},
        {"data__root": "/other"},
        {"seed": 1},
        {"optimizer__lr": 0.5},
        {"schedule__warmup": 5},
        {"loop__global_batch": 64},
        {"loop__max_norm": 0.1},
        {"loop__dropout": "native"},
        {"precision": "bf16"},
    ],
)
def test_what_changes_the_learning_is_refused_with_the_way_out(tmp_path, new):
    found = select_learning_changes(find_changes(CONFIG, altered(**new)))
    assert len(found) == 1
    with pytest.raises(Refusal, match="accept_changes=true") as caught:
        refuse_changes(found, tmp_path)
    assert str(found[0]) in str(caught.value)


@pytest.mark.parametrize(
    "new",
    [
        {"strategy": {"tensor": 2}},
        {"device": "cpu"},
        {"loop__micro_batches": 4},
        {"loader__workers": 2},
        {"loop__epochs": 5},
    ],
)
def test_what_does_not_is_free(tmp_path, new):
    refuse_changes(select_learning_changes(find_changes(CONFIG, altered(**new))), tmp_path)


def test_resolved_precision_and_horizon_decide_not_the_words():
    words = find_changes(CONFIG, altered(precision="fp32"))
    assert select_learning_changes(words, precision=("fp32", "fp32")) == []
    assert [str(one) for one in select_learning_changes([], precision=("bf16", "fp32"))] == ["precision: bf16 → fp32"]
    assert len(select_learning_changes([], horizon=(100, 200), needs_horizon=True)) == 1
    assert select_learning_changes([], horizon=(100, 200), needs_horizon=False) == []
    assert select_learning_changes([], horizon=(200, 100), needs_horizon=True) == []


def test_config_yaml_is_data():
    assert parse_config("a: {b: [1, x]}\n") == {"a": {"b": [1, "x"]}}
    with pytest.raises(yaml.YAMLError):
        parse_config("a: !!python/object/apply:os.system [true]")


@pytest.mark.parametrize("words", [("run.dir=/proc/none/x",), ("run.root=file/x",), ("run.root=file", "run.name=x")])
def test_a_folder_that_cannot_be_is_refused_before_any_data_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    word = words[0].replace("=", "=.*")
    with pytest.raises(Refusal, match=rf"{word}: the run folder cannot be made in .*; give another run\.dir"):
        here("data=imagefolder", "data.root=nowhere", "model=mlp", *words)  # the data would be refused next
    assert os.listdir() == ["file"]
